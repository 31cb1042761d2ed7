"""Training runs and their checkpoints on disk: DATA_DIR/tinker/runs/RUN/{run.json, weights/NAME, sampler_weights/NAME}.

A run is what remains of a model: it is listed, loaded and sampled from after the model has left memory.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.rundir import write_atomically
from lockstep.service.errors import NotFound, ServiceError

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_SCHEME = "tinker://"
# A checkpoint is written into .new-NAME/complete, which appears when it is complete, and then moved into its place.
_UNFINISHED, _COMPLETE = ".new-", "complete"
_RUN_FILE = "run.json"
log = logging.getLogger(__name__)


@dataclass
class SavedWeights:
    """A checkpoint. Times are seconds since 1970."""

    kind: Kind
    name: str
    created_at: float
    size_bytes: int
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


@dataclass
class TrainingRun:
    id: str
    session_id: str
    owner: str
    base_model: str
    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    created_at: float
    last_request_at: float
    user_metadata: dict[str, Any] | None = None
    checkpoints: dict[str, SavedWeights] = field(default_factory=dict)

    def saved(self) -> list[SavedWeights]:
        return [each for each in list(self.checkpoints.values()) if not each.is_expired()]

    def newest(self, kind: Kind | None = None) -> SavedWeights | None:
        found = [each for each in self.saved() if kind in (None, each.kind)]
        return max(found, key=lambda each: each.created_at, default=None)

    def path_of(self, checkpoint: SavedWeights) -> str:
        return f"{_SCHEME}{self.id}/{checkpoint.id}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ServiceError(
            f"{name[:150]!r} is no name for a checkpoint: use up to 128 letters, digits, '.', '_' and '-', "
            "and not '.' first"
        )
    return name


class Runs:
    """All runs, in memory and on disk. From any thread."""

    def __init__(self, folder: Path, discard: Callable[[Path], None]) -> None:
        self._folder = folder / "runs"
        self._discard = discard
        self._runs: dict[str, TrainingRun] = {}
        self._lock = threading.Lock()  # for changes of a run

    def load(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob(f"*/{_RUN_FILE}")):
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                saved = {key: SavedWeights(**each) for key, each in fields.pop("checkpoints").items()}
                run = TrainingRun(**fields, checkpoints=saved)
            except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
                log.error("%s cannot be read, and its run is not listed: %s", path, error)
                continue
            self._runs[run.id] = run
            if self._match_disk(run):
                self._write(run)

    def all(self) -> list[TrainingRun]:
        """The newest first."""
        return sorted(self._runs.values(), key=lambda run: run.created_at, reverse=True)

    def find(self, run_id: str) -> TrainingRun | None:
        return self._runs.get(run_id)

    def add(self, run: TrainingRun) -> None:
        self._folder_of(run).mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._write(run)
            self._runs[run.id] = run

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def resolve(self, path: str) -> tuple[TrainingRun, SavedWeights]:
        """What tinker://RUN/KIND/NAME names."""
        run_id, _, key = path.removeprefix(_SCHEME).partition("/")
        if not path.startswith(_SCHEME) or key.partition("/")[0] not in KINDS or key.count("/") != 1:
            raise ServiceError(f"{path[:300]!r} is no path of a checkpoint: one is tinker://RUN/weights/NAME")
        run = self._runs.get(run_id)
        checkpoint = None if run is None else run.checkpoints.get(key)
        if run is None or checkpoint is None or checkpoint.is_expired():
            raise NotFound(f"there is no checkpoint {path[:300]}")
        return run, checkpoint

    def folder_of(self, run: TrainingRun, checkpoint: SavedWeights) -> Path:
        return self._folder_of(run) / checkpoint.kind / checkpoint.name

    def prepare(self, run: TrainingRun, kind: Kind, name: str, *, overwrite: bool) -> Path:
        """The folder to write a new checkpoint into; `commit` puts it into its place."""
        existing = run.checkpoints.get(f"{kind}/{check_name(name)}")
        if existing is not None and not existing.is_expired() and not overwrite:
            hint = ", or set overwrite" if kind == "weights" else ""
            raise ServiceError(f"there is already a checkpoint {run.path_of(existing)}: choose another name{hint}")
        parent = self._folder_of(run) / kind / f"{_UNFINISHED}{name}"
        if parent.exists():
            shutil.rmtree(parent)
        parent.mkdir(parents=True)
        return parent / _COMPLETE

    def commit(self, run: TrainingRun, checkpoint: SavedWeights, folder: Path) -> None:
        final = self.folder_of(run, checkpoint)
        with self._lock:
            self._discard(final)
            folder.rename(final)
            run.checkpoints[checkpoint.id] = checkpoint
            self._write(run)
        shutil.rmtree(folder.parent, ignore_errors=True)

    def delete(self, run: TrainingRun, checkpoint: SavedWeights) -> None:
        with self._lock:
            if run.checkpoints.get(checkpoint.id) is checkpoint:
                del run.checkpoints[checkpoint.id]
                self._write(run)
                self._discard(self.folder_of(run, checkpoint))

    def set_expiry(self, run: TrainingRun, checkpoint: SavedWeights, expires_at: float | None) -> None:
        with self._lock:
            checkpoint.expires_at = expires_at
            self._write(run)

    def expired(self) -> list[tuple[TrainingRun, SavedWeights]]:
        return [(run, each) for run in self.all() for each in list(run.checkpoints.values()) if each.is_expired()]

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _folder_of(self, run: TrainingRun) -> Path:
        return self._folder / run.id.replace(":", "-")

    def _write(self, run: TrainingRun) -> None:
        write_atomically(self._folder_of(run) / _RUN_FILE, json.dumps(asdict(run), indent=1))

    def _match_disk(self, run: TrainingRun) -> bool:
        """After a kill at any moment: a complete folder is a checkpoint, a record without one is none. Whether the
        record changed."""
        before = set(run.checkpoints)
        for kind in KINDS:
            found = {folder.name: folder for folder in self._checkpoint_folders(run, kind)}
            for name in found.keys() - {each.name for each in run.checkpoints.values() if each.kind == kind}:
                size = sum(file.stat().st_size for file in found[name].rglob("*") if file.is_file())
                saved = SavedWeights(kind, name, found[name].stat().st_mtime, size)
                run.checkpoints[saved.id] = saved
            for lost in [each for each in run.checkpoints.values() if each.kind == kind and each.name not in found]:
                del run.checkpoints[lost.id]
        return set(run.checkpoints) != before

    def _checkpoint_folders(self, run: TrainingRun, kind: Kind) -> Iterator[Path]:
        parent = self._folder_of(run) / kind
        for folder in sorted(parent.glob(".*")):
            final = parent / folder.name.removeprefix(_UNFINISHED)
            if (folder / _COMPLETE).is_dir() and _NAME.fullmatch(final.name) and not final.exists():
                (folder / _COMPLETE).rename(final)
            shutil.rmtree(folder, ignore_errors=True)
        yield from (folder for folder in parent.glob("*") if folder.is_dir() and _NAME.fullmatch(folder.name))
