"""The log-probs of a reference: a store on disk of those that are computed once.

An entry of the store is a folder that appears whole, by a rename, with manifest.json written last. It is verified when
it is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, overload

import numpy as np
import numpy.typing as npt

from lockstep.config import RunConfig
from lockstep.config.reference import ReferenceChoice, choose_reference
from lockstep.data.columns import Rows
from lockstep.data.order import Batches
from lockstep.train.preference_data import AsLabelled
from lockstep.train.schedule import num_steps
from lockstep.types import Completion, Datum, Logprobs

FORMAT = 1
REFERENCE = "reference_logprobs"  # the name of these values in a completion
_ABANDONED_S = 3600.0  # a writer adds to its file every few seconds
Identity = Mapping[str, object]


class DamagedEntry(Exception):
    """An entry of the store that must not be used; the message says why."""


class ReferenceLogprobs:
    """One value per completion token of each row, in the order of the rows."""

    def __init__(self, values: npt.NDArray[np.floating], starts: npt.NDArray[np.int64]) -> None:
        self._values, self._starts = values, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def of(self, row: int) -> npt.NDArray[np.floating]:
        return self._values[self._starts[row] : self._starts[row + 1]]


class ReferenceStore:
    """The entries under one folder. `identity` of an entry is everything that its values depend on, as plain JSON."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, identity: Identity, rows: Sequence[Datum]) -> ReferenceLogprobs | None:
        """None where there is no entry; raises DamagedEntry for one that does not verify."""
        path = self._path(identity)
        if not path.exists():
            return None
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            if manifest["identity"] != _plain(identity):
                raise DamagedEntry("it was made from something else")
            sizes = token_counts(rows)
            if (manifest["num_rows"], manifest["num_values"]) != (len(sizes), int(sizes.sum())):
                raise DamagedEntry("its rows are not these")
            values = path / "values.bin"
            with values.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != manifest["digest"]:
                    raise DamagedEntry("its bytes are not those that were written")
            mapped = np.memmap(values, dtype=str(identity["dtype"]), mode="r").view(np.ndarray)
            if len(mapped) != manifest["num_values"]:
                raise DamagedEntry("it has another number of values")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedEntry(str(error) or type(error).__name__) from error
        return ReferenceLogprobs(mapped, _starts(sizes))

    def write(self, identity: Identity, rows: Sequence[Datum], batches: Iterable[Sequence[Logprobs]]) -> None:
        """`batches`: the log-probs of all rows. Replaces a damaged entry."""
        try:
            self._write(identity, rows, batches)
        except OSError as error:
            raise ValueError(
                f"log-probs of the reference cannot be written to {self._folder} ({error.strerror or error}): free "
                "some space, set data.cache_dir to another folder, or algorithm.reference to copy"
            ) from error

    def _write(self, identity: Identity, rows: Sequence[Datum], batches: Iterable[Sequence[Logprobs]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        path = self._path(identity)
        made = Path(tempfile.mkdtemp(prefix=f"{path.name}.making-", dir=self._folder))
        lock = _lock_folder(made)  # whatever the clock says: who writes is alive
        try:
            manifest = _write_values(made / "values.bin", str(identity["dtype"]), batches)
            sizes = token_counts(rows)
            assert (manifest["num_rows"], manifest["num_values"]) == (len(sizes), int(sizes.sum()))
            with (made / "manifest.json").open("w", encoding="utf-8") as file:
                json.dump({**manifest, "identity": _plain(identity), "dtype": identity["dtype"]}, file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():  # damaged, or written meanwhile by another run: moved aside, never seen half written
                os.rename(path, made.with_name(f"{made.name}-old"))
            os.rename(made, path)
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(made, ignore_errors=True)
            shutil.rmtree(made.with_name(f"{made.name}-old"), ignore_errors=True)

    def _path(self, identity: Identity) -> Path:
        return self._folder / hashlib.sha256(json.dumps(_plain(identity), sort_keys=True).encode()).hexdigest()

    def _sweep(self) -> None:
        """Remove what killed writers left behind."""
        for made in self._folder.glob("*.making-*"):
            changed = max((file.stat().st_mtime for file in made.glob("*")), default=made.stat().st_mtime)
            lock = _lock_folder(made) if time.time() - changed > _ABANDONED_S else None
            if lock is not None:
                shutil.rmtree(made, ignore_errors=True)
                os.close(lock)


def _lock_folder(path: Path) -> int | None:
    """Until it is closed, or its process ends. None: another process has it."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:  # a file system without locks
        pass
    return lock


def describe_files(path: Path) -> dict[str, str]:
    """Names and digests of the files that determine a model's log-probs, independent of their location."""
    suffixes = (".safetensors", ".gguf", ".py")
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix in suffixes or f.name == "config.json"]
    digests = {}
    for file in sorted(files):
        with file.open("rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def token_counts(rows: Sequence[Datum]) -> npt.NDArray[np.int64]:
    """Completion tokens of each row; compiled rows have them as a column."""
    if hasattr(rows, "column"):
        return cast(npt.NDArray[np.int64], rows.column("pieces")[:, 1:].sum(axis=1, dtype=np.int64))
    return np.array([sum(len(c.tokens) for c in datum.completions) for datum in rows], dtype=np.int64)


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _plain(identity: Identity) -> object:
    return json.loads(json.dumps(dict(identity), sort_keys=True))


def _write_values(path: Path, dtype: str, batches: Iterable[Sequence[Logprobs]]) -> dict[str, int | str]:
    digest, num_rows, num_values = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for batch in batches:
            values = np.array([value for row in batch for completion in row for value in completion], dtype=dtype)
            if not np.isfinite(values).all():
                raise ValueError("the reference gives log-probs that are not finite: its weights hold nan or inf")
            raw = values.tobytes()
            file.write(raw)
            digest.update(raw)
            num_rows, num_values = num_rows + len(batch), num_values + len(values)
        file.flush()
        os.fsync(file.fileno())
    return {"num_rows": num_rows, "num_values": num_values, "digest": digest.hexdigest()}


class WithReference(Sequence[Datum]):
    """Rows whose completions carry the reference's log-probs."""

    def __init__(self, rows: Sequence[Datum], logprobs: ReferenceLogprobs) -> None:
        assert len(rows) == len(logprobs), "log-probs of other rows"
        self._rows, self._logprobs = rows, logprobs

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Datum: ...
    @overload
    def __getitem__(self, place: slice) -> list[Datum]: ...
    def __getitem__(self, place: int | slice) -> Datum | list[Datum]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        place = int(place) % len(self)
        datum: Datum = self._rows[place]
        values, begin = self._logprobs.of(place), 0
        completions: list[Completion] = []
        for completion in datum.completions:
            own = values[begin : begin + len(completion.tokens)]
            begin += len(completion.tokens)
            completions.append(replace(completion, values={**completion.values, REFERENCE: cast(Sequence[float], own)}))
        assert begin == len(values), f"{datum.origin}: log-probs of another row"
        return replace(datum, completions=completions)

    def __iter__(self) -> Iterator[Datum]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        own = getattr(self._rows, "lengths", None)
        return np.array([datum.num_tokens for datum in self._rows] if own is None else own, dtype=np.int64)


_ROWS_AT_ONCE = 256
CompiledRows = Rows | AsLabelled
Forward = Callable[[Sequence[Datum]], list[Logprobs]]


def plan_reference(config: RunConfig, train: Sequence[Datum]) -> ReferenceChoice:
    batches = Batches(train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    # In whole epochs, because a batch by tokens takes now more, now fewer rows.
    num_seen = round(num_steps(config, batches) / batches.num_steps(1.0) * len(train))
    return choose_reference(config, num_rows=len(train), num_seen=num_seen)


@dataclass(frozen=True)
class PrecomputeSettings:
    """`model` describes the reference's weights, as plain JSON. `writes`: whether this process writes to its machine's
    disk. `gather`: every rank's value, on all ranks. `report` and `warn` inform the user.
    """

    folder: Path
    model: Mapping[str, str | None]
    precision: str
    writes: bool
    gather: Callable[[bool], Sequence[bool]]
    report: Callable[[str], None]
    warn: Callable[[str], None]

    def identity(self, rows: CompiledRows) -> dict[str, object]:
        return {
            "format": FORMAT,
            "model": self.model,
            "precision": self.precision,
            "rows": rows.digest,
            "dtype": "<f8" if self.precision == "fp64" else "<f4",
        }

    def find(self, rows: CompiledRows) -> ReferenceLogprobs | None:
        try:
            return ReferenceStore(self.folder).open(self.identity(rows), rows)
        except DamagedEntry as error:
            self.warn(f"stored log-probs of the reference cannot be used ({error}): they are computed again")
            return None


def has_all(settings: PrecomputeSettings, splits: Sequence[CompiledRows]) -> bool:
    """Whether every rank finds all of them on its disk. All ranks."""
    return all(settings.gather(all(settings.find(rows) is not None for rows in splits if len(rows))))


def add_reference(
    rows: CompiledRows, name: str, forward: Forward | None, settings: PrecomputeSettings
) -> Sequence[Datum]:
    """The rows with their reference's log-probs: those on disk, or computed now by all ranks together. All ranks."""
    if len(rows) == 0:
        return rows
    stored = settings.find(rows)
    if not all(settings.gather(stored is not None)):
        assert forward is not None, "no model to compute what is not on disk"
        computed = _compute(rows, name, forward, settings.report)
        if settings.writes:
            ReferenceStore(settings.folder).write(settings.identity(rows), rows, computed)
        else:
            for _ in computed:
                pass  # all ranks compute together, one on each machine writes
        settings.gather(True)  # a barrier: entries can be opened from here on
        stored = settings.find(rows)
    if stored is None:
        raise ValueError(
            f"the log-probs of the reference cannot be read from {settings.folder}: set data.cache_dir to a folder "
            "that every process of this machine can read and write, or algorithm.reference to copy"
        )
    return WithReference(rows, stored)


def _compute(
    rows: Sequence[Datum], name: str, forward: Forward, report: Callable[[str], None]
) -> Iterator[list[Logprobs]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        report(f"reference of {name}: {start:,} of {len(rows):,} rows")
        yield forward(rows[start : start + _ROWS_AT_ONCE])
