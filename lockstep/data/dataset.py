"""From sources to compiled data, the entry of the room: compiles each split or opens it from the cache, splits, mixes.

Every rank calls it alike, and one of them does the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.config.data import PARTS, DataConfig
from lockstep.data.blocks import DamagedCache
from lockstep.data.cache import (
    Entry,
    Manifest,
    Patience,
    cache_folder,
    digest_tokenizer,
    discard,
    fingerprint,
    obtain,
)
from lockstep.data.chat_template import load_template
from lockstep.data.columns import Columns, Rows
from lockstep.data.compile import SKIPPED_FILE, Compiling, Done, Kind, SplitFile, compile_split, list_files, mixed_kinds
from lockstep.data.images import ImageReader
from lockstep.data.lock import Holder
from lockstep.data.order import Indices, hashed_order
from lockstep.data.report import DataReport, FileReport, count_duplicates, find_leaks, from_manifest
from lockstep.data.sources.rows import DataError
from lockstep.types import ImageProcessor, Tokenizer

# Keys of hashed_order, so that what is held out and what a weight chooses are independent of every epoch's order.
_SPLIT_STREAM = 0x53504C4954  # "SPLIT"
_MIX_STREAM = 0x4D4958  # "MIX"


@dataclass(frozen=True)
class CompileProgress:
    """How far one split is. `done_bytes` is an estimate; `phase` says what is done, or which process is waited for."""

    split: str
    rows: int
    done_bytes: int
    total_bytes: int
    phase: str


@dataclass(frozen=True)
class CompiledData:
    """Data ready to train on. `digest` names train and validation: a resumed run must find the same."""

    train: Rows
    validation: Rows
    test: Rows
    report: DataReport
    digest: str
    kind: Kind

    @property
    def has_images(self) -> bool:
        return any(rows.has_images for rows in (self.train, self.validation, self.test))


@dataclass(frozen=True)
class _CompiledSplit:
    """All rows of the sources of train, validation or test, before splitting and mixing."""

    name: str
    rows: Rows
    kind: Kind
    files: tuple[FileReport, ...]
    source_of_file: Indices
    skipped_file: str | None
    note: str | None


def compile_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    timeout_s: float = 600.0,
    on_progress: Callable[[CompileProgress], None] | None = None,
    images: ImageProcessor | None = None,
) -> CompiledData:
    """Read, tokenise and split, or open what an earlier run compiled. Every error names the file and line.

    `timeout_s` bounds the wait for another process that compiles the same data and makes no progress. `images`: the
    model's own processor, for rows that have some.
    """
    notes: list[str] = []
    while True:
        try:
            return _compile(config, tokenizer, seed, timeout_s, on_progress, notes, images)
        except DamagedCache as error:  # removed meanwhile, so that it is compiled again
            if len(notes) == len(PARTS):
                raise
            notes.append(f"{error.what}: it was compiled again")


def _compile(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    timeout_s: float,
    on_progress: Callable[[CompileProgress], None] | None,
    notes: Sequence[str],
    images: ImageProcessor | None,
) -> CompiledData:
    template = load_template(tokenizer, config.chat_template, config.template_options, sees=images is not None)
    reader = None if images is None else ImageReader(images, config.image_folder, config.image_urls)
    tokenizer_digest = digest_tokenizer(tokenizer)
    compiling = Compiling(
        tokenizer,
        config.chat_template,
        config.template_options,
        config.max_length,
        config.truncate,
        has_template=template is not None,
        images=reader,
    )
    splits: dict[str, _CompiledSplit] = {}
    for name in PARTS:
        if files := list_files(config.sources(name)):
            described = [(file.source, file.file) for file in files]
            key = fingerprint(config, described, tokenizer_digest, template, images)
            progress = _ProgressReporter(name, files, on_progress)
            entry = _obtain(key, files, config, compiling, timeout_s, progress)
            splits[name] = _open_split(name, files, entry, config.image_folder)
    for split in splits.values():
        if split.kind != splits["train"].kind:
            raise mixed_kinds("data.train", splits["train"].kind, f"data.{split.name}", split.kind)
    return _arrange(config, splits, seed, notes)


class _ProgressReporter:
    """Reports how far one split is."""

    def __init__(
        self, split: str, files: Sequence[SplitFile], on_progress: Callable[[CompileProgress], None] | None
    ) -> None:
        self._split = split
        self._on_progress = on_progress
        self._total_bytes = sum(file.state.num_bytes for file in files)
        self._done = Done(0, 0)
        self._report("reading")

    def advance(self, done: Done) -> None:
        self._done = done
        self._report("tokenising")

    def wait(self, holder: Holder) -> None:
        self._done = Done(holder.rows, 0)
        self._report(f"waiting for {holder.host} (process {holder.pid}) to prepare")

    def _report(self, phase: str) -> None:
        if self._on_progress is not None:
            num_bytes = min(self._done.num_bytes, self._total_bytes)
            self._on_progress(CompileProgress(self._split, self._done.rows, num_bytes, self._total_bytes, phase))


def _obtain(
    key: str,
    files: Sequence[SplitFile],
    config: DataConfig,
    compiling: Compiling,
    timeout_s: float,
    progress: _ProgressReporter,
) -> Entry:
    def build(folder: Path, on_rows: Callable[[int], None]) -> Manifest:
        def on_done(done: Done) -> None:
            on_rows(done.rows)
            progress.advance(done)

        return compile_split(folder, files, config, compiling, timeout_s=timeout_s, on_done=on_done)

    patience = Patience(stuck_s=timeout_s)
    return obtain(cache_folder(config.cache_dir), key, build, patience=patience, on_wait=progress.wait)


def _open_split(name: str, files: Sequence[SplitFile], entry: Entry, image_folder: str | None) -> _CompiledSplit:
    manifest = entry.manifest
    # The files of this run: the same bytes under the same name may have been compiled from another folder.
    source_files = [file.file for file in files]
    columns = Columns(entry.path, manifest, source_files, partial(discard, entry), image_folder)
    columns.check_images()
    reports = tuple(
        from_manifest(values, split=name, weight=file.source.weight)
        for values, file in zip(manifest["reports"], files, strict=True)
    )
    return _CompiledSplit(
        name,
        Rows(columns),
        manifest["kind"],
        reports,
        np.array([file.source_number for file in files], dtype=np.int64),
        str(entry.path / SKIPPED_FILE) if manifest["skipped"] else None,
        entry.warning,
    )


def _arrange(config: DataConfig, splits: dict[str, _CompiledSplit], seed: int, notes: Sequence[str]) -> CompiledData:
    train = splits["train"].rows
    no_rows = train.select(np.empty(0, dtype=np.int64))
    validation, test = (splits[name].rows if name in splits else no_rows for name in ("validation", "test"))
    if config.validation_fraction or config.test_fraction:
        fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
        kept, for_validation, for_test = split_rows(len(train), fractions, seed=seed)
        validation = train.select(for_validation) if config.validation_fraction else validation
        test = train.select(for_test) if config.test_fraction else test
        train = train.select(kept)
    weights = [source.weight for source in config.train]
    mixed = mix_rows(splits["train"].source_of_file[train.column("files")], weights, seed=seed)
    report = DataReport(
        files=tuple(file for split in splits.values() for file in split.files),
        num_train=len(train) if mixed is None else len(mixed),
        num_validation=len(validation),
        num_test=len(test),
        max_length=config.max_length,
        duplicates=count_duplicates(train),
        leaked=find_leaks(train, {"validation": validation, "test": test}),
        skipped_files=tuple(split.skipped_file for split in splits.values() if split.skipped_file),
        notes=tuple(dict.fromkeys([*notes, *(split.note for split in splits.values() if split.note)])),
    )
    train = train if mixed is None else train.select(mixed)
    digest = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()
    return CompiledData(train, validation, test, report, digest, splits["train"].kind)


def split_rows(num_rows: int, fractions: dict[str, float], *, seed: int) -> tuple[Indices, Indices, Indices]:
    """(training, validation, test) row numbers, each ascending: a pure function of its arguments.

    Each fraction that is not zero gets at least one row, and so does training. What is held out for validation does
    not depend on the test fraction, as long as there are enough rows.
    """
    wanted = {name: fraction for name, fraction in fractions.items() if fraction}
    if num_rows <= len(wanted):
        settings = " and ".join(f"data.{name}_fraction {fraction}" for name, fraction in wanted.items())
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        raise DataError(f"{settings} cannot split {rows}: add rows or set it to 0")
    left, counts = num_rows - len(wanted), {}
    for name, fraction in wanted.items():
        counts[name] = min(max(round(num_rows * fraction), 1), left)
        left -= counts[name] - 1
    order = hashed_order(num_rows, seed, _SPLIT_STREAM)
    edges = np.cumsum([counts.get("validation", 0), counts.get("test", 0)])
    validation, test, train = np.split(order, edges)
    return np.sort(train), np.sort(validation), np.sort(test)


def mix_rows(sources: Indices, weights: Sequence[float], *, seed: int) -> Indices | None:
    """Row numbers of an epoch, source by source: whole copies, then some rows chosen by seed. None: every row once.

    `sources` holds the source of each row. A source with rows keeps at least one.
    """
    if all(weight == 1 for weight in weights):
        return None
    mixed: list[Indices] = []
    for source, weight in enumerate(weights):
        rows = np.flatnonzero(sources == source)
        copies, num_chosen = divmod(round(weight * len(rows)), max(len(rows), 1))
        if not copies and len(rows):
            num_chosen = max(num_chosen, 1)
        order = hashed_order(len(rows), seed, _MIX_STREAM, source)
        mixed += [rows] * copies + [rows[np.sort(order[:num_chosen])]]
    return np.concatenate(mixed)
