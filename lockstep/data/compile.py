"""Compiles the files of one split into columns on disk, in chunks of rows that are spread over processes."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.chat_template import Template, load_template
from lockstep.data.columns import Column, Writer, pack_block
from lockstep.data.encoder import Encoded, Encoder
from lockstep.data.formats.conversation import Conversation
from lockstep.data.formats.reader import KINDS, Kind, RowReader, recognise_format
from lockstep.data.images import ImageReader
from lockstep.data.rendering import Rendered, render
from lockstep.data.report import FileReport
from lockstep.data.sources.files import find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, RawRow, SourceFile
from lockstep.processes.pool import PoolStartFailed, WorkerPool
from lockstep.processes.tree import num_cores
from lockstep.processes.worker import WorkerDied, WorkerError, WorkerFailed, WorkerTimedOut
from lockstep.types import Tokenizer

SKIPPED_FILE = "skipped.jsonl"
_SHOWN_CHARACTERS = 1000
CHUNK_ROWS = 512
CHUNK_BYTES = 2**20  # so that long rows do not fill the memory
_SMALL_BYTES = 8 * 2**20  # starting processes takes seconds, in which one process compiles this much
_BYTES_PER_PROCESS = 4 * 2**20
_BAD_ROWS_TO_RECOGNISE = 100


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one file. `index` is the file's number among all files of the split."""

    index: int
    file: SourceFile
    reader: RowReader
    rows: list[RawRow]

    @property
    def num_bytes(self) -> int:
        """Of rows that are still text; 0 where reading the file parses it."""
        return sum(len(row.payload) for row in self.rows if isinstance(row.payload, bytes))


@dataclass(slots=True)
class BadRow:
    origin: str
    reason: str
    row: str


@dataclass(slots=True)
class CompiledChunk:
    """A chunk's columns, its counts, and the rows that cannot be used; in file order."""

    index: int
    num_bytes: int
    block: dict[str, Column]
    counts: FileReport
    bad: list[BadRow]


@dataclass(frozen=True, slots=True)
class Compiling:
    """What each process needs once, to compile chunks."""

    tokenizer: Tokenizer
    chat_template: str
    template_options: dict[str, object]
    max_length: int
    truncate: Literal["prompt_left", "right", "drop", "error"]
    has_template: bool
    images: ImageReader | None = None

    def prepare(self) -> Callable[[Chunk], CompiledChunk]:
        sees = self.images is not None
        template = load_template(self.tokenizer, self.chat_template, self.template_options, sees=sees)
        token = self.images.processor.token_id if self.images is not None else None
        encoder = Encoder(self.tokenizer, max_length=self.max_length, truncate=self.truncate, image_token=token)
        return lambda chunk: compile_chunk(chunk, template, encoder, self.images)


def compile_chunk(
    chunk: Chunk, template: Template | None, encoder: Encoder, images: ImageReader | None = None
) -> CompiledChunk:
    counts = FileReport(chunk.file.name, "", chunk.reader.format)
    # By index in the chunk: two rows of a JSON array may begin in the same line.
    errors: dict[int, DataError] = {}
    usable: list[tuple[int, Rendered]] = []
    ignored_keys: set[str] = set()
    for i, raw in enumerate(chunk.rows):
        try:
            row = parse_raw(chunk.file, raw)
            content = chunk.reader.read(row)
            if content is None:
                counts.left_out += 1
                continue
            rendered = render(content, template)
            if isinstance(content, Conversation) and content.images:
                assert images is not None, "rows are read with images only where there is a processor for them"
                rendered = images.add(rendered, content.images, chunk.file)
            usable.append((i, rendered))
        except DataError as error:
            errors[i] = error
            continue
        ignored_keys |= chunk.reader.ignored_keys(row)
    kept: list[tuple[RawRow, Encoded]] = []
    for (i, _), encoded in zip(usable, encoder.encode([rendered for _, rendered in usable])):
        raw = chunk.rows[i]
        if isinstance(encoded, DataError):
            errors[i] = encoded
        elif _count(counts, encoded, chunk.file.origin(raw.number, raw.row)):
            kept.append((raw, encoded))
    counts.skipped = len(errors)
    counts.ignored_keys = sorted(ignored_keys)
    bad = [_describe_bad(chunk.rows[i], errors[i], chunk.file) for i in sorted(errors)]
    return CompiledChunk(chunk.index, chunk.num_bytes, _pack(kept), counts, bad)


def _count(counts: FileReport, encoded: Encoded, origin: str) -> bool:
    """Returns whether the row is kept."""
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
    counts.num_retokenised += encoded.retokenised
    counts.num_unclosed += encoded.num_unclosed
    counts.num_unprompted += encoded.num_unprompted
    counts.holds_special += encoded.holds_special
    counts.num_unwritten += encoded.unwritten
    counts.num_images += len(datum.images)
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
    """The row as written in the file, or as JSON where reading the file parses it; shortened."""
    if isinstance(raw.payload, bytes):
        text = raw.payload.decode("utf-8", errors="replace")
    elif isinstance(raw.payload, DataError):
        text = ""  # the reader skipped over it
    else:
        text = json.dumps(raw.payload, ensure_ascii=False, default=str)
    return BadRow(file.origin(raw.number, raw.row), str(error), text[:_SHOWN_CHARACTERS])


def cut_chunks(index: int, file: SourceFile, reader: RowReader) -> Iterator[Chunk]:
    """A file's rows in chunks. Rows before one that cannot be read are yielded before its error is raised."""
    rows: list[RawRow] = []
    num_bytes = 0
    try:
        for raw in read_raw(file):
            rows.append(raw)
            num_bytes += len(raw.payload) if isinstance(raw.payload, bytes) else CHUNK_BYTES // CHUNK_ROWS
            if len(rows) >= CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
                yield Chunk(index, file, reader, rows)
                rows, num_bytes = [], 0
    except DataError:
        if rows:
            yield Chunk(index, file, reader, rows)
        raise
    if rows:
        yield Chunk(index, file, reader, rows)


class FileState(NamedTuple):
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class SplitFile:
    """A file of train, validation or test, with its source. `state` is that at listing, before it is read."""

    source: SourceConfig
    source_number: int
    file: SourceFile
    state: FileState


@dataclass(frozen=True)
class Done:
    """How much of a split is compiled."""

    rows: int
    num_bytes: int


def list_files(sources: Sequence[SourceConfig]) -> list[SplitFile]:
    return [
        SplitFile(source, number, file, _read_state(file))
        for number, source in enumerate(sources)
        for file in find_files(source)
    ]


def compile_split(
    folder: Path,
    files: Sequence[SplitFile],
    config: DataConfig,
    compiling: Compiling,
    *,
    timeout_s: float,
    on_done: Callable[[Done], None],
) -> dict[str, object]:
    """Write the columns; returns the manifest: number and kind of rows, and a report for each file."""
    sizes = [file.state.num_bytes for file in files]
    opened = _Files(files, config, has_template=compiling.has_template, sees=compiling.images is not None)
    with ExitStack() as stack:
        writer = Writer(folder)
        stack.callback(writer.close)
        skipped = _SkippedRows(folder / SKIPPED_FILE, allowed=config.on_bad_row == "skip")
        stack.callback(skipped.close)
        compile_chunks = _choose_mapper(stack, compiling, config.procs, sum(sizes), timeout_s)
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


def _choose_mapper(
    stack: ExitStack, compiling: Compiling, setting: int | Literal["auto"], num_bytes: int, timeout_s: float
) -> Callable[[Iterator[Chunk]], Iterator[CompiledChunk]]:
    procs = choose_procs(setting, num_bytes)
    if procs > 1:
        try:
            pool = WorkerPool("data", compiling, procs, timeout_s=timeout_s, start_timeout_s=timeout_s)
            stack.callback(pool.close)
            return lambda chunks: compile_in_pool(pool, chunks)
        except (pickle.PicklingError, TypeError, AttributeError):
            pass  # a tokenizer that cannot be pickled
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
        return f"{waited}: check that your converter does not wait for anything; {alone}"
    if isinstance(error, WorkerFailed):
        return f"failed: {error.kind}: {error.reason}"
    code = error.exit_code if isinstance(error, WorkerDied) else None
    if code == -signal.SIGKILL:
        return "was killed, most likely because memory ran out: use fewer data.procs, or free some memory"
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}: {alone}"
    return f"ended with code {code}; what it wrote is above: {alone}"


class _Files:
    """Opens one file after another. `kind` is that of their rows, the same in all files."""

    def __init__(self, files: Sequence[SplitFile], config: DataConfig, *, has_template: bool, sees: bool) -> None:
        self.kind: Kind | None = None
        self._files = files
        self._config = config
        self._has_template = has_template
        self._sees = sees

    def chunks(self) -> Iterator[Chunk]:
        first = ""
        for index, split_file in enumerate(self._files):
            file = split_file.file
            reader = self._open(split_file.source, file)
            kind = KINDS[reader.format]
            if self.kind not in (None, kind):
                raise mixed_kinds(first, self.kind, file.name, kind)
            self.kind, first = kind, first or file.name
            yield from cut_chunks(index, file, reader)

    def _open(self, source: SourceConfig, file: SourceFile) -> RowReader:
        is_known = source.format not in (None, "auto")
        format = str(source.format) if is_known else self._recognise(source, file)
        return RowReader(
            source, format, train_on=self._config.train_on, has_template=self._has_template, sees=self._sees
        )

    def _recognise(self, source: SourceConfig, file: SourceFile) -> str:
        """The format of the first row that the converter keeps; where bad rows are skipped, of the first valid one."""
        failures: list[DataError] = []
        for raw in read_raw(file):
            try:
                format = recognise_format(parse_raw(file, raw), source)
            except DataError as error:
                failures.append(error)
                if self._config.on_bad_row == "error" or len(failures) == _BAD_ROWS_TO_RECOGNISE:
                    raise failures[0] from None
                continue
            if format is not None:
                return format
        if failures:
            raise failures[0]
        raise DataError(f"{file.name}: the converter drops every row: let it keep some, or remove the file")


def mixed_kinds(name: str, kind: str | None, other: str, other_kind: str) -> DataError:
    return DataError(
        f"{name} holds {kind}, {other} holds {other_kind}: a run learns from one kind of rows, so give all files the "
        "same kind"
    )


class _SkippedRows:
    """Rows that cannot be used: written to a file where `allowed`, otherwise the first of them is raised."""

    def __init__(self, path: Path, *, allowed: bool) -> None:
        self._path = path
        self._allowed = allowed
        self._file: IO[str] | None = None

    def write(self, rows: list[BadRow]) -> None:
        if rows and not self._allowed:
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
    causes = {name: sum(getattr(report, name) for report in reports) for name in ("dropped", "skipped", "left_out")}
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in causes.items() if count)
    names = ", ".join(report.path for report in reports)
    raise DataError(f"{names}: no row is left ({shown or 'none was found'}): check data.max_length and the rows")


def _read_state(file: SourceFile) -> FileState:
    stat = file.path.stat()
    return FileState(stat.st_size, stat.st_mtime_ns)


def _check_unchanged(files: Sequence[SplitFile]) -> None:
    """A cache entry must not be named by the digest of one content and hold another."""
    for file in files:
        if _read_state(file.file) != file.state:
            raise DataError(f"{file.file.name} changed while it was read: start again when it is complete")
