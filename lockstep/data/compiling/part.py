"""All files of one part, compiled into a folder of columns: in this process, or in several for much data.

Results are the same either way, and errors come in the order of the files.
Must not know splits, mixing or the cache.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import IO, Any, Literal

from lockstep.config.data import DataConfig, SourceConfig
from lockstep.data.compiling.chunk import BadRow, Chunk, Compiled, Compiling, cut_chunks
from lockstep.data.compiling.pool import Pool
from lockstep.data.formats.reader import KINDS, RowReader, recognise_format
from lockstep.data.report import FileReport
from lockstep.data.sources.files import DataError, SourceFile, find_files, parse_raw, read_raw
from lockstep.data.store.columns import Writer

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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, ceil(num_bytes / _BYTES_PER_PROCESS))


def _choose_way(
    stack: ExitStack, compiling: Compiling, setting: int | Literal["auto"], num_bytes: int, timeout_s: float
) -> Callable[[Iterator[Chunk]], Iterator[Compiled]]:
    procs = choose_procs(setting, num_bytes)
    if procs > 1:
        try:
            return stack.enter_context(Pool(compiling, procs, timeout_s=timeout_s)).map
        except (pickle.PicklingError, TypeError, AttributeError):
            pass  # a tokenizer that only this process has
    compile_one = compiling.prepare()
    return lambda chunks: map(compile_one, chunks)


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
