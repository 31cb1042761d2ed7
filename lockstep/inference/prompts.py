"""Prompts from a file and their answers: what `lockstep generate` reads and writes.

A file is plain text with one prompt per line, or JSONL rows with `prompt` or `messages`. Must not know the engine.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from lockstep.types import SamplingParams, TextCompletion

Conversation = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What to answer: plain text or a conversation, with the tools a template may describe."""

    origin: str
    content: str | Conversation
    tools: list[Any] | None = None


class Engine(Protocol):
    """What is needed of a sampler: it can also turn text and conversations into tokens."""

    @property
    def has_template(self) -> bool: ...

    def encode(self, prompt: str | Sequence[Any], tools: list[Any] | None = None) -> list[int]: ...

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: Sequence[int] | None = None
    ) -> list[list[TextCompletion]]: ...


def read_prompts(path: Path) -> list[PromptRow]:
    """In file order; blank lines are passed over. Anything else that is not a prompt raises with its file:line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the prompts {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    is_jsonl = path.suffix == ".jsonl"
    prompts: list[PromptRow] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            origin, text = f"{path}:{number}", line.removesuffix("\r")
            prompts.append(_parse_row(text, origin) if is_jsonl else PromptRow(origin, text))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _parse_row(line: str, origin: str) -> PromptRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{origin}: not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{origin}: a row must be an object with prompt or messages")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{origin}: tools must be a list")
    if "messages" in row:
        return PromptRow(origin, _check_messages(row["messages"], origin), tools)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return PromptRow(origin, _check_messages(prompt, origin), tools)
    if not isinstance(prompt, str) or not prompt.strip():
        found = "an empty prompt" if "prompt" in row else f"only {', '.join(row) or 'nothing'}"
        raise ValueError(f"{origin}: a row needs prompt (text) or messages; this one has {found}")
    return PromptRow(origin, prompt, tools)


def _check_messages(messages: Any, origin: str) -> Conversation:
    """A final assistant turn is what the model is asked for, so rows of a training file can serve as prompts."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{origin}: messages must be a list of at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{origin}: messages[{position}] needs role and content")
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not asked:
        raise ValueError(f"{origin}: messages holds only an answer, and nothing to answer")
    return asked


def answer_prompts(
    engine: Engine, rows: Sequence[PromptRow], params: SamplingParams, batch_size: int, *, raw: bool = False
) -> Iterator[dict[str, Any]]:
    """One output row per prompt, in order. As in training, plain text is a user's turn where there is a template."""
    as_turns = engine.has_template and not raw
    prompts = [_encode(engine, row, as_turns) for row in rows]  # all of them first: a bad row shows before the work
    for start in range(0, len(rows), batch_size):
        batch = slice(start, start + batch_size)
        keys = range(start, start + len(prompts[batch]))  # of the file, so that no two prompts draw alike
        for row, (answer,) in zip(rows[batch], engine.sample(prompts[batch], params, keys)):
            yield {"prompt": row.content, "completion": answer.text, "finish_reason": answer.finish_reason}


def _encode(engine: Engine, row: PromptRow, as_turns: bool) -> list[int]:
    content = row.content
    if isinstance(content, str) and as_turns:
        content = [{"role": "user", "content": content}]
    try:
        return engine.encode(content, row.tools)
    except ValueError as error:
        raise ValueError(f"{row.origin}: {error}") from error


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        yield file
