"""Prompts for reinforcement learning: their tokens, and all fields of the row for the reward. Kept in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.chat_template import Template, load_template
from lockstep.data.formats.conversation import (
    Conversation,
    Message,
    TurnNames,
    describe_keys,
    read_tools,
    read_turns,
    rename_keys,
)
from lockstep.data.formats.image_parts import refuse_images
from lockstep.data.formats.reader import convert
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, Row
from lockstep.types import Tokenizer

_TURNS = ("messages", "conversations")
_PROMPTS = ("prompt", "question", "instruction", "input")
_ANSWERS = ("answer", "completion", "response", "output")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """`fields` are those of the row, with `prompt` as text and, where the row has one, `answer`."""

    origin: str
    tokens: tuple[int, ...]
    fields: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Prompts(Sequence[PromptRow]):
    """`num_dropped` prompts were too long."""

    def __init__(self, rows: Sequence[PromptRow], num_dropped: int = 0) -> None:
        self._rows, self.num_dropped = rows, num_dropped

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, i: int) -> PromptRow: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, i: int | slice) -> PromptRow | Sequence[PromptRow]:
        return self._rows[i]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(row.tokens) for row in self._rows], dtype=np.int64)

    @property
    def digest(self) -> str:
        """Of everything that sampling and scoring can see."""
        digest = hashlib.sha256()
        for row in self._rows:
            line = [row.tokens, sorted(row.fields.items())]
            digest.update(json.dumps(line, default=repr, ensure_ascii=False).encode() + b"\n")
        return digest.hexdigest()


class PromptReader:
    """Reads prompts as the data section says. One longer than `max_tokens` leaves no room for an answer."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self._config, self._tokenizer, self._max_tokens = config, tokenizer, max_tokens
        self._template = load_template(tokenizer, config.chat_template, config.template_options)

    def read(self, split: str, make_rows: Callable[[SourceConfig], Iterable[Row] | None]) -> Prompts:
        """All rows of data.train or data.validation. `make_rows` returns the rows of a source that is not a file."""
        prompts, num_dropped = [], 0
        for source in self._config.sources(split):
            made = make_rows(source)
            for row in _rows_of(source) if made is None else made:
                prompt = self._read_row(row, source)
                if prompt is None:
                    continue
                if len(prompt.tokens) > self._max_tokens:
                    num_dropped += 1
                    self._refuse_if_strict(prompt)
                    continue
                prompts.append(prompt)
        if not prompts and self._config.sources(split):
            raise DataError(f"data.{split}: no prompt is left ({num_dropped} are too long): check data.max_length")
        return Prompts(prompts, num_dropped)

    def follow_up(self, message: str, last: int) -> list[int]:
        """Tokens of what an environment says after an answer, up to where the next answer starts.

        `last` is the answer's last token: it may be the end of turn that the template would write as well.
        """
        if self._template is None:
            return self._encode(message, is_start=False)
        # The template gives the text between two turns; the answer itself is already in tokens.
        mark = "\u2042answer\u2042"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        turns.append({"role": "user", "content": message})
        text = self._write("environment", turns, None, self._template)
        rest = text[text.rindex(mark) + len(mark) :]
        end = self._tokenizer.decode([last], skip_special_tokens=False)
        return self._encode(rest.removeprefix(end) if last in self._tokenizer.all_special_ids else rest)

    def _refuse_if_strict(self, prompt: PromptRow) -> None:
        if self._config.truncate == "error":
            raise DataError(
                f"{prompt.origin}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer (at most "
                f"{self._max_tokens}): raise data.max_length, or set data.truncate to drop"
            )

    def _read_row(self, row: Row, source: SourceConfig) -> PromptRow | None:
        if source.converter:
            converted = convert(row, source.converter)
            if converted is None:
                return None
            row = converted
        columns = dict(source.columns or {})
        row = Row(row.origin, rename_keys(row.fields, columns))
        refuse_images(row)
        names = TurnNames(source.roles or {}, columns)
        messages, answer = _split_row(row, names)
        text = self._as_text(row, messages)
        fields = {key: value for key, value in row.fields.items() if key not in _TURNS}
        fields["prompt"] = str(messages[-1].get("content") or "")
        if answer is not None:
            fields["answer"] = answer
        return PromptRow(row.origin, tuple(self._encode(text)), fields)

    def _as_text(self, row: Row, messages: Sequence[Message]) -> str:
        if self._template is None:
            if len(messages) > 1:
                raise DataError(f"{row.origin}: a conversation needs a chat template: set data.chat_template to one")
            return str(messages[-1]["content"])
        return self._write(row.origin, messages, read_tools(row), self._template)

    def _write(
        self, origin: str, messages: Sequence[Message], tools: list[dict[str, Any]] | None, template: Template
    ) -> str:
        conversation = Conversation(origin, tuple(messages), learned=(), tools=tools)
        return template.write(conversation, messages, for_generation=True)

    def _encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """A template writes its own special tokens; plain text gets the BOS that the tokenizer adds, and no EOS."""
        framed = self._template is None and is_start
        ids = list(self._tokenizer(text, add_special_tokens=framed, verbose=False)["input_ids"])
        return ids[:-1] if framed and ids and ids[-1] == self._tokenizer.eos_token_id else ids


def _rows_of(source: SourceConfig) -> Iterator[Row]:
    for file in find_files(source):
        for raw in read_raw(file):
            yield parse_raw(file, raw)


def _split_row(row: Row, names: TurnNames) -> tuple[list[Message], str | None]:
    """The conversation to be answered, and the row's own answer where it has one."""
    key = next((key for key in _TURNS if key in row.fields), None)
    prompt_key = next((key for key in _PROMPTS if key in row.fields), None)
    if key is None and prompt_key is not None and isinstance(row.fields[prompt_key], list):
        key = prompt_key
    if key is not None:
        messages = list(read_turns(row, key, names))
        answer = messages.pop().get("content") if messages[-1]["role"] == "assistant" else None
        if not messages:
            raise DataError(f"{row.origin}: {key!r} holds only an answer and no prompt: add the prompt")
        return messages, _find_answer(row) if answer is None else answer
    if prompt_key is None:
        raise DataError(
            f'{row.origin}: a row needs "prompt" or "messages", this one has {describe_keys(row.fields)}: '
            "map its keys with data.columns"
        )
    prompt = row.fields[prompt_key]
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{row.origin}: {prompt_key!r} must be a text that is not empty")
    messages = [{"role": "user", "content": prompt}]
    if isinstance(system := row.fields.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return messages, _find_answer(row)


def _find_answer(row: Row) -> Any:
    return next((row.fields[key] for key in _ANSWERS if row.fields.get(key) is not None), None)
