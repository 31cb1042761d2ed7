"""Files to compiled data: what a run trains on, what it validates on, and a report of both.

The one entry of the package: reads, recognises, renders, tokenises, splits.
Must not know the order of training, nor ranks: every rank compiles the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np

from lockstep.config import DataConfig
from lockstep.data.conversation import ignored_keys, read_row, recognise_format
from lockstep.data.order import Indices, hashed_order
from lockstep.data.rendering import Template, Tokenizer, load_template, render
from lockstep.data.source import DataError, Row, read_rows
from lockstep.data.tokens import Encoded, Encoder
from lockstep.types import Datum

_ROWS_AT_ONCE = 1000
_SPLIT_STREAM = 0x53504C4954  # "SPLIT": keeps the held-out rows independent of every epoch's order


@dataclass
class FileReport:
    """What one file gave. `num_split` rows had to be tokenised in pieces at an answer's start.

    `num_unclosed` answers end without an end-of-turn token; `ignored_keys` are fields nothing reads.
    """

    path: str
    part: Literal["train", "validation"]
    format: str
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    num_split: int = 0
    num_unclosed: int = 0
    longest_row: int = 0
    longest_origin: str = ""
    ignored_keys: list[str] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        datum = encoded.datum
        self.num_rows += 1
        self.num_tokens += datum.num_tokens
        self.num_supervised += sum(int(np.count_nonzero(c.weights)) for c in datum.completions)
        self.prompts_cut += encoded.prompt_cut
        self.answers_cut += encoded.answer_cut
        self.num_split += encoded.split
        self.num_unclosed += encoded.num_unclosed
        if encoded.num_uncut > self.longest_row:
            self.longest_row, self.longest_origin = encoded.num_uncut, datum.origin


@dataclass(frozen=True)
class DataReport:
    """What was compiled, for people and events: `dataclasses.asdict` of it is JSON.

    Numbers of tokens are as trained, after cutting; a `longest_row` is as found, before it.
    """

    files: tuple[FileReport, ...]
    num_train: int
    num_validation: int
    max_length: int

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    @property
    def num_supervised(self) -> int:
        return sum(file.num_supervised for file in self.files)

    @property
    def prompts_cut(self) -> int:
        return sum(file.prompts_cut for file in self.files)

    @property
    def answers_cut(self) -> int:
        return sum(file.answers_cut for file in self.files)

    @property
    def longest_row(self) -> int:
        return max(file.longest_row for file in self.files)

    def warnings(self) -> list[str]:
        """A sentence for each thing that a user should know before the first step."""
        found = []
        for file in self.files:
            raise_length = f"raise data.max_length (the longest row has {file.longest_row} tokens)"
            if file.answers_cut:
                found.append(f"{file.path}: {file.answers_cut} answers do not fit and lose their end: {raise_length}")
            if file.prompts_cut:
                found.append(f"{file.path}: {file.prompts_cut} prompts were cut from the left: {raise_length}")
            if file.num_unclosed:
                found.append(
                    f"{file.path}: {file.num_unclosed} answers end without a special token, so the model does not "
                    "learn to stop there: end assistant turns with the EOS token in the chat template"
                )
            if file.ignored_keys:
                found.append(f"{file.path}: rows of format {file.format} do not use {', '.join(file.ignored_keys)}")
        return found


@dataclass(frozen=True)
class Compiled:
    """Data ready to train on. `digest` names both parts: a resumed run must find the same."""

    train: Sequence[Datum]
    validation: Sequence[Datum]
    report: DataReport
    digest: str


def compile_data(config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> Compiled:
    """Read, tokenise and split. Every error names the file and line."""
    encoder = Encoder(tokenizer, max_length=config.max_length)
    template = load_template(tokenizer, config.chat_template)
    files: list[FileReport] = []
    train: list[Datum] = []
    validation: list[Datum] = []
    parts: tuple[tuple[Literal["train", "validation"], tuple[str, ...], list[Datum]], ...] = (
        ("train", config.train, train),
        ("validation", config.validation, validation),
    )
    for part, paths, data in parts:
        for path in paths:
            rows = read_rows(path)
            first = next(rows)  # read_rows raises where a file has none
            report = FileReport(path, part, recognise_format(first) if config.format == "auto" else config.format)
            data.extend(_compile_rows(first, rows, template, encoder, report))
            files.append(report)
    if config.validation_fraction:
        kept, held_out = split_rows(len(train), config.validation_fraction, seed=seed)
        train, validation = [train[i] for i in kept], [train[i] for i in held_out]
    report_all = DataReport(tuple(files), len(train), len(validation), config.max_length)
    return Compiled(train, validation, report_all, digest_data(train, validation))


def split_rows(num_rows: int, fraction: float, *, seed: int) -> tuple[Indices, Indices]:
    """(training, validation) row numbers, both ascending: a pure function of its arguments."""
    if num_rows < 2:
        raise DataError(f"data.validation_fraction {fraction} cannot split {num_rows} row: add rows or set it to 0")
    num_held_out = min(max(round(num_rows * fraction), 1), num_rows - 1)
    order = hashed_order(num_rows, seed, _SPLIT_STREAM)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def digest_data(*parts: Sequence[Datum]) -> str:
    """sha256 over tokens and weights; where the rows came from is no part of it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"part {len(part)};".encode())
        for datum in part:
            _digest_numbers(digest, datum.prompt, "<i4")
            for completion in datum.completions:
                _digest_numbers(digest, completion.tokens, "<i4")
                _digest_numbers(digest, completion.weights, "<f4")
            digest.update(b";")
    return digest.hexdigest()


def _compile_rows(
    first: Row, rest: Iterator[Row], template: Template | None, encoder: Encoder, report: FileReport
) -> list[Datum]:
    data: list[Datum] = []
    unread: set[str] = set()
    chunk = [first, *islice(rest, _ROWS_AT_ONCE - 1)]
    while chunk:
        contents = [read_row(row, report.format, has_template=template is not None) for row in chunk]
        unread.update(*(ignored_keys(row, report.format) for row in chunk))
        for encoded in encoder.encode([render(content, template) for content in contents]):
            report.add(encoded)
            data.append(encoded.datum)
        chunk = list(islice(rest, _ROWS_AT_ONCE))
    report.ignored_keys = sorted(unread)
    return data


def _digest_numbers(digest: hashlib._Hash, numbers: Sequence[float], dtype: str) -> None:
    array = np.asarray(numbers, dtype=dtype)
    digest.update(len(array).to_bytes(8, "little"))
    digest.update(array.tobytes())
