"""Some rows of one file, from what was read to columns: the work that is spread over processes.

Must not know other chunks, nor where the columns go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.data.formats.reader import RowReader
from lockstep.data.report import FileReport
from lockstep.data.sources.files import DataError, RawRow, SourceFile, parse_raw, read_raw
from lockstep.data.store.columns import Column, pack_block
from lockstep.data.text.rendering import Rendered, Template, Tokenizer, load_template, render
from lockstep.data.tokens.encoder import Encoded, Encoder

_SHOWN_CHARACTERS = 1000
_MOST_ROWS = 512
_MOST_BYTES = 2**20  # in one chunk, so that long rows do not fill the memory


@dataclass(frozen=True, slots=True)
class Chunk:
    """`index` is the file's number among all files of the part."""

    index: int
    file: SourceFile
    reader: RowReader
    rows: list[RawRow]

    @property
    def num_bytes(self) -> int:
        """Of rows that are still text; 0 where the file was parsed as it was read."""
        return sum(len(row.payload) for row in self.rows if isinstance(row.payload, bytes))


@dataclass(slots=True)
class BadRow:
    origin: str
    reason: str
    row: str


@dataclass(slots=True)
class Compiled:
    """A chunk's columns, its counts, and the rows that cannot be used, in the order of the file."""

    index: int
    num_bytes: int
    block: dict[str, Column]
    counts: FileReport
    bad: list[BadRow]


@dataclass(frozen=True, slots=True)
class Compiling:
    """What every process needs, once, to compile chunks."""

    tokenizer: Tokenizer
    chat_template: str
    template_options: dict[str, Any]
    max_length: int
    truncate: Literal["prompt_left", "right", "drop", "error"]

    def prepare(self) -> Callable[[Chunk], Compiled]:
        template = load_template(self.tokenizer, self.chat_template, self.template_options)
        encoder = Encoder(self.tokenizer, max_length=self.max_length, truncate=self.truncate)
        return lambda chunk: compile_chunk(chunk, template, encoder)


def compile_chunk(chunk: Chunk, template: Template | None, encoder: Encoder) -> Compiled:
    counts = FileReport(chunk.file.name, "", chunk.reader.format)
    # By place in the chunk: two rows of a JSON array may begin in the same line.
    errors: dict[int, DataError] = {}
    usable: list[tuple[int, Rendered]] = []
    unread: set[str] = set()
    for place, raw in enumerate(chunk.rows):
        try:
            row = parse_raw(chunk.file, raw)
            content = chunk.reader.read(row)
            if content is None:
                counts.left_out += 1
                continue
            usable.append((place, render(content, template)))
        except DataError as error:
            errors[place] = error
            continue
        unread |= chunk.reader.ignored_keys(row)
    kept: list[tuple[RawRow, Encoded]] = []
    for (place, _), encoded in zip(usable, encoder.encode([rendered for _, rendered in usable])):
        raw = chunk.rows[place]
        if isinstance(encoded, DataError):
            errors[place] = encoded
        elif _count(counts, encoded, chunk.file.origin(raw.number, raw.row)):
            kept.append((raw, encoded))
    counts.skipped = len(errors)
    counts.ignored_keys = sorted(unread)
    bad = [_describe_bad(chunk.rows[place], errors[place], chunk.file) for place in sorted(errors)]
    return Compiled(chunk.index, chunk.num_bytes, _pack(kept), counts, bad)


def _count(counts: FileReport, encoded: Encoded, origin: str) -> bool:
    """Whether the row stays."""
    if encoded.num_uncut > counts.longest_row:
        counts.longest_row, counts.longest_origin = encoded.num_uncut, origin
    datum = encoded.datum
    if datum is None:
        counts.dropped += 1
        return False
    counts.num_rows += 1
    counts.num_tokens += datum.num_tokens
    counts.num_supervised += sum(int(np.count_nonzero(c.weights)) for c in datum.completions)
    counts.prompts_cut += encoded.prompt_cut
    counts.answers_cut += encoded.answer_cut
    counts.num_split += encoded.split
    counts.num_unclosed += encoded.num_unclosed
    counts.num_unprompted += encoded.num_unprompted
    counts.holds_special += encoded.holds_special
    return True


def _pack(kept: list[tuple[RawRow, Encoded]]) -> dict[str, Column]:
    return pack_block(
        [encoded.datum for _, encoded in kept if encoded.datum is not None],
        [raw.number for raw, _ in kept],
        [raw.row for raw, _ in kept],
        [encoded.prompt_key for _, encoded in kept],
        [encoded.row_key for _, encoded in kept],
    )


def _describe_bad(raw: RawRow, error: DataError, file: SourceFile) -> BadRow:
    """The row as it was written, or as JSON where it was parsed as it was read; shortened."""
    if isinstance(raw.payload, bytes):
        text = raw.payload.decode("utf-8", errors="replace")
    elif isinstance(raw.payload, DataError):
        text = ""  # the reader stepped over it
    else:
        text = json.dumps(raw.payload, ensure_ascii=False, default=str)
    return BadRow(file.origin(raw.number, raw.row), str(error), text[:_SHOWN_CHARACTERS])


def cut_chunks(index: int, file: SourceFile, reader: RowReader) -> Iterator[Chunk]:
    """A file's rows in chunks. Rows before one that cannot be read still come, and its error after them."""
    rows: list[RawRow] = []
    num_bytes = 0
    try:
        for raw in read_raw(file):
            rows.append(raw)
            num_bytes += len(raw.payload) if isinstance(raw.payload, bytes) else _MOST_BYTES // _MOST_ROWS
            if len(rows) >= _MOST_ROWS or num_bytes >= _MOST_BYTES:
                yield Chunk(index, file, reader, rows)
                rows, num_bytes = [], 0
    except DataError:
        if rows:
            yield Chunk(index, file, reader, rows)
        raise
    if rows:
        yield Chunk(index, file, reader, rows)
