"""Uploaded rows: one JSONL file for each data set, checked line by line on its way in, never changed afterwards.

A configuration names one as `dataset:NAME`.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lockstep.service.data_dir import DataDir
from lockstep.service.errors import Busy, Conflict, NotFound, ServiceError, TooLarge, TooMany
from lockstep.service.records import Records
from lockstep.service.rows import Written, check_elsewhere, line_of, read_rows, write_rows
from lockstep.service.schemas import ID_PATTERN, DatasetView
from lockstep.service.store import Dataset, Store

_SMALL_BYTES = 1 << 20  # checked here; larger ones in a process of their own
_MAX_CHECKS = 2
_CHECK_PATIENCE_S = 300.0
_PREVIEW_BYTES = 1 << 20


class DatasetStore:
    def __init__(
        self,
        data_dir: DataDir,
        store: Store,
        records: Records,
        *,
        max_bytes: int = 1 << 30,
        max_datasets: int = 1000,
        max_user_bytes: int | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._store = store
        self._records = records
        self._checks = threading.BoundedSemaphore(_MAX_CHECKS)
        self.max_bytes = max_bytes
        self.max_user_bytes = max_user_bytes
        self.max_datasets = max_datasets
        for dataset in store.datasets():
            if not self._path(dataset.name).exists():  # killed between the entry and the file
                self._forget(dataset.name)

    def add_file(self, name: str, stream: BinaryIO, owner: str = "", *, limited: bool = True) -> DatasetView:
        """JSONL, or one JSON array of rows. `limited`: what the owner may have in all counts."""
        return self._add(name, owner, partial(self._write_file, stream), limited=limited)

    def add_rows(self, name: str, rows: Iterable[Mapping[str, object]], owner: str = "") -> DatasetView:
        lines = (line_of(row, number) for number, row in enumerate(rows, start=1))
        return self._add(name, owner, partial(write_rows, lines), limited=True)

    def get(self, name: str) -> DatasetView:
        return _view(self._find(name))

    def list(self, owner: str | None = None) -> builtins.list[DatasetView]:
        return [_view(dataset) for dataset in self._store.datasets(owner)]

    def path(self, name: str) -> Path:
        self._find(name)
        return self._path(name)

    def preview(self, name: str, limit: int = 10) -> builtins.list[dict[str, object]]:
        """The first rows as they are, no more than a megabyte of them."""
        rows: builtins.list[dict[str, object]] = []
        left = _PREVIEW_BYTES
        with self.path(name).open("rb") as file:
            while len(rows) < limit and (line := file.readline(left + 1)):
                left -= len(line)
                if left < 0:
                    break
                rows.append(json.loads(line))
        if not rows:
            raise TooLarge(f"the first row has more than {_PREVIEW_BYTES:,} bytes: too much to show")
        return rows

    def delete(self, name: str) -> None:
        self._find(name)
        waiting = self._store.jobs_that_need(name)
        if waiting:
            raise Conflict(f"job {waiting[0]} still needs the data set {name}: cancel it first, or wait for its end")
        self._data_dir.discard(self._path(name))
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._records.drop_dataset(name)
        self._store.remove_dataset(name)

    def check_room(self, name: str) -> None:
        """Before the first byte is taken."""
        if not re.fullmatch(ID_PATTERN, name):
            raise ServiceError(f"{name!r} is no name for a data set: use up to 64 letters, digits, '.', '_' and '-'")
        if self._store.find_dataset(name) is None and len(self._store.datasets()) >= self.max_datasets:
            raise TooLarge(f"there are already {self.max_datasets} data sets: delete some first")

    def _add(self, name: str, owner: str, write: Callable[[Path, int], Written], *, limited: bool) -> DatasetView:
        self.check_room(name)
        room = self._room(owner) if limited else self.max_bytes
        incoming = self._data_dir.uploads / uuid.uuid4().hex
        try:
            dataset = Dataset(name, owner, created_at=time.time(), **asdict(write(incoming, room)))
            present = self._store.find_dataset(name)
            if present is not None:
                if (present.sha256, present.owner) == (dataset.sha256, owner):
                    return _view(present)
                raise Conflict(f"there is already a data set {name}: choose another name, or delete it")
            self._store.add_dataset(dataset)  # the name is ours from here on
            self._records.keep_dataset(dataset)
            incoming.replace(self._path(name))
            return _view(dataset)
        finally:
            incoming.unlink(missing_ok=True)

    def _room(self, owner: str) -> int:
        """Bytes that this user may still bring."""
        if not owner or self.max_user_bytes is None:
            return self.max_bytes
        left = self.max_user_bytes - sum(dataset.bytes for dataset in self._store.datasets(owner))
        if left <= 0:
            raise TooMany(f"your data sets have the {self.max_user_bytes >> 20} MiB that a user may have: delete some")
        return min(left, self.max_bytes)

    def _write_file(self, stream: BinaryIO, path: Path, max_bytes: int) -> Written:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if size <= _SMALL_BYTES or isinstance(stream, io.BytesIO):
            return write_rows(read_rows(stream), path, max_bytes)
        if not self._checks.acquire(timeout=_CHECK_PATIENCE_S):
            raise Busy("too many uploads are being checked: try again later")
        try:
            return check_elsewhere(stream, path, max_bytes, self._data_dir.empty)
        finally:
            self._checks.release()

    def _find(self, name: str) -> Dataset:
        dataset = self._store.find_dataset(name)
        if dataset is None:
            raise NotFound(f"there is no data set {name}")
        return dataset

    def _path(self, name: str) -> Path:
        return self._data_dir.datasets / f"{name}.jsonl"


def _view(dataset: Dataset) -> DatasetView:
    return DatasetView(**dataset.__dict__)
