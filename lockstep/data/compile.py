"""Some rows of one file, from what was read to columns: the work that is spread over processes.

Must not know other chunks, nor where the columns go.
"""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.chat_template import Template, Tokenizer, load_template
from lockstep.data.columns import Column, Writer, pack_block
from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.reader import KINDS, RowReader, recognise_format
from lockstep.data.rendering import Rendered, render
from lockstep.data.report import FileReport
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, RawRow, SourceFile
from lockstep.processes.pool import PoolStartFailed, WorkerPool
from lockstep.processes.tree import num_cores
from lockstep.processes.worker import WorkerDied, WorkerError, WorkerFailed, WorkerTimedOut

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
class CompiledChunk:
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

    def prepare(self) -> Callable[[Chunk], CompiledChunk]:
        template = load_template(self.tokenizer, self.chat_template, self.template_options)
        encoder = Encoder(self.tokenizer, max_length=self.max_length, truncate=self.truncate)
        return lambda chunk: compile_chunk(chunk, template, encoder)


def compile_chunk(chunk: Chunk, template: Template | None, encoder: Encoder) -> CompiledChunk:
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
    return CompiledChunk(chunk.index, chunk.num_bytes, _pack(kept), counts, bad)


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


SKIPPED_FILE = "skipped.jsonl"
_SMALL_BYTES = 8 * 2**20  # starting processes takes seconds, in which one process compiles this much
_BYTES_PER_PROCESS = 4 * 2**20
_BAD_ROWS_TO_RECOGNISE = 100

Kind = Literal["answers", "pairs", "labelled"]


@dataclass(frozen=True)
class PartFile:
    """A file of a part, with the source that named it. `state` is its size and time when it was found."""

    source: SourceConfig
    source_number: int
    file: SourceFile
    state: tuple[int, int]


@dataclass(frozen=True)
class Done:
    """How far a part is, for whoever watches."""

    rows: int
    num_bytes: int


def list_files(sources: Sequence[SourceConfig]) -> list[PartFile]:
    found = [(number, source, file) for number, source in enumerate(sources) for file in find_files(source)]
    return [PartFile(source, number, file, _state(file)) for number, source, file in found]


def compile_part(
    folder: Path,
    files: Sequence[PartFile],
    config: DataConfig,
    compiling: Compiling,
    *,
    has_template: bool,
    timeout_s: float,
    on_done: Callable[[Done], None],
) -> dict[str, Any]:
    """Write the columns; returns what the manifest must say: rows, kind and what each file gave."""
    sizes = [file.state[0] for file in files]
    opened = _Files(files, config, has_template=has_template)
    with ExitStack() as stack:
        writer = Writer(folder)
        stack.callback(writer.close)
        skipped = _Skipped(folder / SKIPPED_FILE, wanted=config.on_bad_row == "skip")
        stack.callback(skipped.close)
        compile_chunks = _choose_way(stack, compiling, config.procs, sum(sizes), timeout_s)
        reports = [FileReport(file.file.name, "", "") for file in files]
        at_file, num_bytes = 0, 0
        for chunk in compile_chunks(opened.chunks()):
            skipped.write(chunk.bad)
            writer.append(chunk.block, chunk.index)
            reports[chunk.index].format = chunk.counts.format
            reports[chunk.index].add(chunk.counts)
            num_bytes, at_file = chunk.num_bytes + (num_bytes if chunk.index == at_file else 0), chunk.index
            on_done(Done(writer.num_rows, sum(sizes[:at_file]) + num_bytes))
        _check_rows(writer.num_rows, reports)
        _check_unchanged(files)
        return {
            **writer.finish(),
            "kind": opened.kind,
            "reports": [asdict(report) for report in reports],
            "skipped": skipped.finish(),
        }


def choose_procs(setting: int | Literal["auto"], num_bytes: int) -> int:
    if setting != "auto":
        return setting
    if num_bytes < _SMALL_BYTES:
        return 1
    return min(num_cores(), ceil(num_bytes / _BYTES_PER_PROCESS))


def _choose_way(
    stack: ExitStack, compiling: Compiling, setting: int | Literal["auto"], num_bytes: int, timeout_s: float
) -> Callable[[Iterator[Chunk]], Iterator[CompiledChunk]]:
    procs = choose_procs(setting, num_bytes)
    if procs > 1:
        try:
            pool = WorkerPool("data", compiling, procs, timeout_s=timeout_s, start_timeout_s=timeout_s)
            stack.callback(pool.close)
            return lambda chunks: compile_in_pool(pool, chunks)
        except (pickle.PicklingError, TypeError, AttributeError):
            pass  # a tokenizer that only this process has
    compile_one = compiling.prepare()
    return lambda chunks: map(compile_one, chunks)


def compile_in_pool(pool: WorkerPool, chunks: Iterable[Chunk]) -> Iterator[CompiledChunk]:
    """In order of the chunks. A WorkerError says what to do."""
    try:
        yield from pool.map(chunks)
    except WorkerError as error:
        raise WorkerError(error.worker, f"a process that compiles rows {_describe_failure(error, pool)}") from error


def _describe_failure(error: WorkerError, pool: WorkerPool) -> str:
    if isinstance(error, PoolStartFailed):
        error = error.cause
    alone = "data.procs 1 compiles without processes"
    if isinstance(error, WorkerTimedOut):
        waited = f"has given no answer for {pool.timeout_s:g} s"
        return f"{waited}: if a converter of yours waits for something, let it not; {alone}"
    if isinstance(error, WorkerFailed):
        return f"failed: {error.kind}: {error.reason}"
    code = error.exit_code if isinstance(error, WorkerDied) else None
    if code == -signal.SIGKILL:
        return "was killed, most likely for want of memory: use fewer data.procs, or free some memory"
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}: {alone}"
    return f"ended with code {code}; what it wrote is above: {alone}"


class _Files:
    """Opens one file after another. `kind` is what their rows give, the same in all of them."""

    def __init__(self, files: Sequence[PartFile], config: DataConfig, *, has_template: bool) -> None:
        self.kind: Kind | None = None
        self._files = files
        self._config = config
        self._has_template = has_template

    def chunks(self) -> Iterator[Chunk]:
        first = ""
        for index, part_file in enumerate(self._files):
            file = part_file.file
            reader = self._open(part_file.source, file)
            kind = KINDS[reader.format]
            if self.kind not in (None, kind):
                raise mixed_kinds(first, self.kind, file.name, kind)
            self.kind, first = kind, first or file.name
            yield from cut_chunks(index, file, reader)

    def _open(self, source: SourceConfig, file: SourceFile) -> RowReader:
        named = source.format
        found = named if named not in (None, "auto") else self._recognise(source, file)
        return RowReader(source, found, train_on=self._config.train_on, has_template=self._has_template)

    def _recognise(self, source: SourceConfig, file: SourceFile) -> str:
        """From the first row that a converter does not leave out; where bad rows are skipped, from a good one."""
        failures: list[DataError] = []
        for raw in read_raw(file):
            try:
                found = recognise_format(parse_raw(file, raw), source)
            except DataError as error:
                failures.append(error)
                if self._config.on_bad_row == "error" or len(failures) == _BAD_ROWS_TO_RECOGNISE:
                    raise failures[0] from None
                continue
            if found is not None:
                return found
        if failures:
            raise failures[0]
        raise DataError(f"{file.name}: the converter leaves every row out: let it keep some, or remove the file")


def mixed_kinds(name: str, kind: str | None, other: str, other_kind: str) -> DataError:
    return DataError(
        f"{name} holds {kind}, {other} holds {other_kind}: one run learns from one of them, "
        "so give all files rows of the same sort"
    )


class _Skipped:
    """Rows that cannot be used: written down where that is wanted, otherwise the first of them is the error."""

    def __init__(self, path: Path, *, wanted: bool) -> None:
        self._path = path
        self._wanted = wanted
        self._file: IO[str] | None = None

    def write(self, rows: list[BadRow]) -> None:
        if rows and not self._wanted:
            raise DataError(rows[0].reason)
        for row in rows:
            self._file = self._file or self._path.open("w", encoding="utf-8", errors="backslashreplace")
            self._file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")

    def finish(self) -> bool:
        """Whether there were any."""
        self.close()
        return self._file is not None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _check_rows(num_rows: int, reports: Sequence[FileReport]) -> None:
    if num_rows:
        return
    lost = ("dropped", "skipped", "left_out")
    causes = {name: sum(getattr(report, name) for report in reports) for name in lost}
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in causes.items() if count)
    names = ", ".join(report.path for report in reports)
    raise DataError(f"{names}: no row is left ({shown or 'none was found'}): check data.max_length and the rows")


def _state(file: SourceFile) -> tuple[int, int]:
    found = file.path.stat()
    return found.st_size, found.st_mtime_ns


def _check_unchanged(files: Sequence[PartFile]) -> None:
    """An entry must not be named by the digest of one content and hold another."""
    for file in files:
        if _state(file.file) != file.state:
            raise DataError(f"{file.file.name} changed while it was read: start again when it is complete")
