"""Prompts and conversations as text: `lockstep chat` on a terminal or a pipe, `lockstep generate` on files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from lockstep.config.text import write_out
from lockstep.types import Prompt, SamplingParams, TextCompletion

Message = dict[str, Any]
Conversation = list[Message]
_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


class StreamingEngine(Protocol):
    def encode(self, prompt: str | Sequence[Message]) -> list[int]: ...

    def stream(self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> TextCompletion: ...


def converse(engine: StreamingEngine, params: SamplingParams, system: str | None = None) -> None:
    """Until the input ends. On a terminal an impossible turn is explained and dropped; in a pipe it raises."""
    interactive = sys.stdin.isatty()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if interactive:
        _say(_HELP + "\n")
    for line in _read_turns(interactive):
        if interactive and line == "/exit":
            return
        if interactive and line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer_turn(engine, messages, params)})
        except ValueError as error:
            if not interactive:
                raise
            messages.pop()
            _say(f"error: {error} (/reset starts over)\n")


def _answer_turn(engine: StreamingEngine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Ctrl-C ends the turn and keeps its text so far."""
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        _write(text)

    tokens = engine.encode(messages)
    note = ""
    try:
        if engine.stream(tokens, params, write).finish_reason == "length":
            note = " [truncated: --max-tokens or the model's length is reached]"
    except KeyboardInterrupt:
        note = " [stopped]"
    _write("\n")
    if note:
        _say(note.strip() + "\n")
    return "".join(pieces)


def _read_turns(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it gives input() a history and line editing
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            _write("\n")
            return
        except KeyboardInterrupt:
            _write("\n")
            continue
        if line:
            yield line


def _write(text: str) -> None:
    """What a model says is no command to the terminal; a pipe gets it as it is."""
    sys.stdout.write(write_out(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """To stderr, so that a pipe carries only the model's text."""
    sys.stderr.write(text)
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text or a conversation, with tools for the chat template. `origin` is for error messages."""

    origin: str
    content: str | Conversation
    tools: list[Any] | None = None


class TextEngine(Protocol):
    """A sampler that also turns text and conversations into tokens."""

    @property
    def has_template(self) -> bool: ...

    def encode(self, prompt: str | Sequence[Message], tools: list[Any] | None = None) -> list[int]: ...

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, keys: Sequence[int] | None = None
    ) -> list[list[TextCompletion]]: ...


def read_prompts(path: Path) -> list[TextPrompt]:
    """Plain text with one prompt a line, or JSONL rows with `prompt` or `messages`. Errors name file:line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the prompts {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    is_jsonl = path.suffix == ".jsonl"
    prompts: list[TextPrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            origin, text = f"{path}:{number}", line.removesuffix("\r")
            prompts.append(_parse_row(text, origin) if is_jsonl else TextPrompt(origin, text))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _parse_row(line: str, origin: str) -> TextPrompt:
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
        return TextPrompt(origin, _check_messages(row["messages"], origin), tools)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return TextPrompt(origin, _check_messages(prompt, origin), tools)
    if not isinstance(prompt, str) or not prompt.strip():
        problem = "an empty prompt" if "prompt" in row else f"only {', '.join(row) or 'nothing'}"
        raise ValueError(f"{origin}: a row needs prompt (text) or messages; this one has {problem}")
    return TextPrompt(origin, prompt, tools)


def _check_messages(messages: Any, origin: str) -> Conversation:
    """Without a final assistant turn, so that rows of a training file can serve as prompts."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{origin}: messages must be a list of at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{origin}: messages[{position}] needs role and content")
    turns = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not turns:
        raise ValueError(f"{origin}: messages holds only an answer, and nothing to answer")
    return turns


def answer_prompts(
    engine: TextEngine, rows: Sequence[TextPrompt], params: SamplingParams, batch_size: int, *, raw: bool = False
) -> Iterator[dict[str, object]]:
    """One output row per prompt, in order. As in training, plain text is a user's turn where there is a template."""
    as_turns = engine.has_template and not raw
    prompts = [_encode(engine, row, as_turns) for row in rows]  # all first: a bad row shows before the work
    for start in range(0, len(rows), batch_size):
        batch = slice(start, start + batch_size)
        keys = range(start, start + len(prompts[batch]))  # places in the file, so that equal prompts are two draws
        for row, (completion,) in zip(rows[batch], engine.sample(prompts[batch], params, keys)):
            yield {"prompt": row.content, "completion": completion.text, "finish_reason": completion.finish_reason}


def _encode(engine: TextEngine, row: TextPrompt, as_turns: bool) -> list[int]:
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
