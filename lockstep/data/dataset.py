"""Sources to compiled data: what a run trains on, validates on and is tested on, and a report of it all.

The one entry of the package: compiles each part or opens what was compiled before, splits, mixes.
Must not know the order of training, nor ranks: every rank calls it alike, and one of them does the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config.data import PARTS, DataConfig
from lockstep.data.cache import Entry, Patience, cache_folder, digest_tokenizer, fingerprint, obtain
from lockstep.data.chat_template import Template, Tokenizer, load_template
from lockstep.data.columns import Columns, Rows
from lockstep.data.compile import SKIPPED_FILE, Compiling, Done, Kind, PartFile, compile_part, list_files, mixed_kinds
from lockstep.data.lock import Holder
from lockstep.data.order import Indices, hashed_order
from lockstep.data.report import DataReport, FileReport, count_duplicates, find_leaks, from_manifest
from lockstep.data.sources.rows import DataError

# They keep what is held out, and what a weight chooses, independent of every epoch's order.
_SPLIT_STREAM = 0x53504C4954  # "SPLIT"
_MIX_STREAM = 0x4D4958  # "MIX"


@dataclass(frozen=True)
class CompileProgress:
    """How far a part is. `done_bytes` is an estimate; `phase` says what happens, also whom it waits for."""

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


@dataclass(frozen=True)
class _Part:
    """All rows of the sources of one part, before splitting and mixing."""

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
) -> CompiledData:
    """Read, tokenise and split, or open what an earlier run compiled. Every error names the file and line.

    `timeout_s` bounds the wait for another process that compiles the same and gets nowhere.
    """
    template = load_template(tokenizer, config.chat_template, config.template_options)
    tokenizer_digest = digest_tokenizer(tokenizer)
    parts: dict[str, _Part] = {}
    for name in PARTS:
        if files := list_files(config.sources(name)):
            teller = _Teller(name, files, on_progress)
            key = fingerprint(config, [(file.source, file.file) for file in files], tokenizer_digest, template)
            entry = _obtain(key, files, config, tokenizer, template, timeout_s, teller)
            parts[name] = _open_part(name, files, entry)
    for part in parts.values():
        if part.kind != parts["train"].kind:
            raise mixed_kinds("data.train", parts["train"].kind, f"data.{part.name}", part.kind)
    return _arrange(config, parts, seed)


class _Teller:
    """Passes on how far one part is."""

    def __init__(
        self, part: str, files: Sequence[PartFile], on_progress: Callable[[CompileProgress], None] | None
    ) -> None:
        self._part = part
        self._on_progress = on_progress
        self._total_bytes = sum(file.state[0] for file in files)
        self._done = Done(0, 0)
        self.say("reading")

    def say(self, phase: str) -> None:
        if self._on_progress is not None:
            num_bytes = min(self._done.num_bytes, self._total_bytes)
            self._on_progress(CompileProgress(self._part, self._done.rows, num_bytes, self._total_bytes, phase))

    def advance(self, done: Done) -> None:
        self._done = done
        self.say("tokenising")

    def wait(self, holder: Holder) -> None:
        self._done = Done(holder.rows, 0)
        self.say(f"waiting for {holder.host} (process {holder.pid}) to prepare")


def _obtain(
    key: str,
    files: Sequence[PartFile],
    config: DataConfig,
    tokenizer: Tokenizer,
    template: Template | None,
    timeout_s: float,
    teller: _Teller,
) -> Entry:
    def build(folder: Path, tell: Callable[[int], None]) -> dict[str, object]:
        def on_done(done: Done) -> None:
            tell(done.rows)
            teller.advance(done)

        compiling = Compiling(
            tokenizer, config.chat_template, config.template_options, config.max_length, config.truncate
        )
        return compile_part(
            folder,
            files,
            config,
            compiling,
            has_template=template is not None,
            timeout_s=timeout_s,
            on_done=on_done,
        )

    patience = Patience(stuck_s=timeout_s)
    return obtain(cache_folder(config.cache_dir), key, build, patience=patience, on_wait=teller.wait)


def _open_part(name: str, files: Sequence[PartFile], entry: Entry) -> _Part:
    manifest = entry.manifest
    # Files as they were found now: the same bytes under the same name may have been compiled from elsewhere.
    named = [file.file for file in files]
    columns = Columns(entry.path, manifest["num_rows"], manifest["width"], manifest["digest"], named)
    reports = tuple(
        from_manifest(values, split=name, weight=file.source.weight)
        for values, file in zip(manifest["reports"], files, strict=True)
    )
    return _Part(
        name,
        Rows(columns),
        manifest["kind"],
        reports,
        np.array([file.source_number for file in files], dtype=np.int64),
        str(entry.path / SKIPPED_FILE) if manifest["skipped"] else None,
        entry.warning,
    )


def _arrange(config: DataConfig, parts: dict[str, _Part], seed: int) -> CompiledData:
    train = parts["train"].rows
    nothing = train.select(np.empty(0, dtype=np.int64))
    validation, test = (parts[name].rows if name in parts else nothing for name in ("validation", "test"))
    if config.validation_fraction or config.test_fraction:
        fractions = {"validation": config.validation_fraction, "test": config.test_fraction}
        kept, for_validation, for_test = split_rows(len(train), fractions, seed=seed)
        validation = train.select(for_validation) if config.validation_fraction else validation
        test = train.select(for_test) if config.test_fraction else test
        train = train.select(kept)
    weights = [source.weight for source in config.train]
    mixed = mix_rows(parts["train"].source_of_file[train.column("files")], weights, seed=seed)
    report = DataReport(
        files=tuple(file for part in parts.values() for file in part.files),
        num_train=len(train) if mixed is None else len(mixed),
        num_validation=len(validation),
        num_test=len(test),
        max_length=config.max_length,
        duplicates=count_duplicates(train),
        leaked=find_leaks(train, [("validation", validation), ("test", test)]),
        skipped_files=tuple(part.skipped_file for part in parts.values() if part.skipped_file),
        notes=tuple(dict.fromkeys(part.note for part in parts.values() if part.note)),
    )
    train = train if mixed is None else train.select(mixed)
    digest = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()
    return CompiledData(train, validation, test, report, digest, parts["train"].kind)


def split_rows(num_rows: int, fractions: dict[str, float], *, seed: int) -> tuple[Indices, Indices, Indices]:
    """(training, validation, test) row numbers, each ascending: a pure function of its arguments.

    Each fraction that is not zero gets at least a row, and so does training. What is held out for validation does
    not depend on the test fraction, as long as there are rows enough.
    """
    asked = {name: fraction for name, fraction in fractions.items() if fraction}
    if num_rows <= len(asked):
        settings = " and ".join(f"data.{name}_fraction {fraction}" for name, fraction in asked.items())
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        raise DataError(f"{settings} cannot split {rows}: add rows or set it to 0")
    left, counts = num_rows - len(asked), {}
    for name, fraction in asked.items():
        counts[name] = min(max(round(num_rows * fraction), 1), left)
        left -= counts[name] - 1
    order = hashed_order(num_rows, seed, _SPLIT_STREAM)
    edges = np.cumsum([counts.get("validation", 0), counts.get("test", 0)])
    validation, test, train = np.split(order, edges)
    return np.sort(train), np.sort(validation), np.sort(test)


def mix_rows(sources: Indices, weights: Sequence[float], *, seed: int) -> Indices | None:
    """Places of an epoch's rows, source by source: whole copies, then a part chosen by seed; None for all as they are.

    `sources` holds the source of each row. A source with rows keeps at least one.
    """
    if all(weight == 1 for weight in weights):
        return None
    mixed: list[Indices] = []
    for source, weight in enumerate(weights):
        places = np.flatnonzero(sources == source)
        copies, num_chosen = divmod(round(weight * len(places)), max(len(places), 1))
        if not copies and len(places):
            num_chosen = max(num_chosen, 1)
        order = hashed_order(len(places), seed, _MIX_STREAM, source)
        mixed += [places] * copies + [places[np.sort(order[:num_chosen])]]
    return np.concatenate(mixed)
