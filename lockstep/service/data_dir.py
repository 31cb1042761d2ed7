"""The data directory: where jobs, data sets and the database are, and the lock that keeps a second service out."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

from lockstep.rundir import write_atomically
from lockstep.service.errors import ServiceError


class DataDir:
    def __init__(self, path: Path) -> None:
        self.path = Path(path).expanduser().resolve()
        self._lock: int | None = None

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def datasets(self) -> Path:
        return self.path / "datasets"

    @property
    def models(self) -> Path:
        """Where an operator may put models that every user can name."""
        return self.path / "models"

    @property
    def uploads(self) -> Path:
        """What is still coming in."""
        return self.path / "uploads"

    @property
    def records(self) -> Path:
        """What was asked for, should the database be lost."""
        return self.path / "records"

    @property
    def trash(self) -> Path:
        return self.path / "trash"

    @property
    def empty(self) -> Path:
        """Jobs run in here: no relative path that a request names can lead to a file."""
        return self.path / "empty"

    @property
    def database(self) -> str:
        return f"sqlite:///{self.path / 'service.db'}"

    def open(self) -> str:
        """Make the folders, take the lock, remove what an earlier service left half done. Returns the identity."""
        try:
            for folder in (self.jobs, self.datasets, self.models, self.uploads, self.trash, self.empty):
                folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.path, 0o700)
        except OSError as error:
            raise ServiceError(f"cannot use the data directory {self.path}: {error.strerror or error}") from error
        self._take_lock()
        for folder in (self.uploads, self.trash):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        identity = self.path / "identity"
        if not identity.exists():
            write_atomically(identity, uuid.uuid4().hex)
        return identity.read_text()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self, path: Path) -> None:
        """Gone under its name at once, then from the disk."""
        if path.exists():
            doomed = self.trash / f"{path.name}-{uuid.uuid4().hex}"
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True) if doomed.is_dir() else doomed.unlink()

    def _take_lock(self) -> None:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ServiceError(
                f"another service already works on {self.path}: end it first, or choose another --data-dir"
            ) from None
        self._lock = descriptor
