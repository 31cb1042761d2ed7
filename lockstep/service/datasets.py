"""Uploaded rows: one JSONL file for each data set, checked line by line on its way in, never changed afterwards.

A configuration names one as `dataset:NAME`.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.service.data_dir import DataDir
from lockstep.service.errors import Conflict, NotFound, ServiceError, TooLarge
from lockstep.service.schemas import ID_PATTERN, DatasetView
from lockstep.service.store import Dataset, Store

_MAX_ARRAY_BYTES = 64 << 20
_MAX_LINE_BYTES = 16 << 20


class DatasetStore:
    def __init__(self, data_dir: DataDir, store: Store, *, max_bytes: int = 1 << 30, max_datasets: int = 1000) -> None:
        self._data_dir = data_dir
        self._store = store
        self.max_bytes = max_bytes
        self.max_datasets = max_datasets
        for dataset in store.datasets():
            if not self._path(dataset.name).exists():  # killed between the entry and the file
                store.remove_dataset(dataset.name)

    def add_file(self, name: str, stream: BinaryIO, owner: str = "") -> DatasetView:
        """JSONL, or one JSON array of rows."""
        return self._add(name, _read_rows(stream), owner)

    def add_rows(self, name: str, rows: Iterable[Mapping[str, object]], owner: str = "") -> DatasetView:
        return self._add(name, (_line_of(row, number) for number, row in enumerate(rows, start=1)), owner)

    def get(self, name: str) -> DatasetView:
        return _view(self._find(name))

    def list(self, owner: str | None = None) -> builtins.list[DatasetView]:
        return [_view(dataset) for dataset in self._store.datasets(owner)]

    def path(self, name: str) -> Path:
        self._find(name)
        return self._path(name)

    def preview(self, name: str, limit: int = 10) -> builtins.list[dict[str, Any]]:
        """The first rows as they are."""
        rows: builtins.list[dict[str, Any]] = []
        with self.path(name).open("rb") as file:
            for line in file:
                if len(rows) == limit:
                    break
                rows.append(json.loads(line))
        return rows

    def delete(self, name: str) -> None:
        self._find(name)
        waiting = self._store.jobs_that_need(name)
        if waiting:
            raise Conflict(f"job {waiting[0]} still needs the data set {name}: cancel it first, or wait for its end")
        self._data_dir.discard(self._path(name))
        self._store.remove_dataset(name)

    def check_room(self, name: str) -> None:
        """Before the first byte is taken."""
        if not re.fullmatch(ID_PATTERN, name):
            raise ServiceError(f"{name!r} is no name for a data set: use up to 64 letters, digits, '.', '_' and '-'")
        if self._store.find_dataset(name) is None and len(self._store.datasets()) >= self.max_datasets:
            raise TooLarge(f"there are already {self.max_datasets} data sets: delete some first")

    def _add(self, name: str, lines: Iterator[bytes], owner: str) -> DatasetView:
        self.check_room(name)
        incoming = self._data_dir.uploads / uuid.uuid4().hex
        try:
            dataset = self._write(name, incoming, lines, owner)
            present = self._store.find_dataset(name)
            if present is not None:
                if (present.sha256, present.owner) == (dataset.sha256, owner):
                    return _view(present)
                raise Conflict(f"there is already a data set {name}: choose another name, or delete it")
            self._store.add_dataset(dataset)  # the name is ours from here on
            incoming.replace(self._path(name))
            return _view(dataset)
        finally:
            incoming.unlink(missing_ok=True)

    def _write(self, name: str, path: Path, lines: Iterator[bytes], owner: str) -> Dataset:
        digest, size, count = hashlib.sha256(), 0, 0
        with path.open("wb") as file:
            for line in lines:
                size, count = size + len(line), count + 1
                if size > self.max_bytes:
                    raise TooLarge(f"the data set is larger than the {self.max_bytes >> 20} MiB allowed")
                digest.update(line)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not count:
            raise ServiceError("the data set is empty: send one JSON object per line")
        return Dataset(name, owner, count, size, digest.hexdigest(), time.time())

    def _find(self, name: str) -> Dataset:
        dataset = self._store.find_dataset(name)
        if dataset is None:
            raise NotFound(f"there is no data set {name}")
        return dataset

    def _path(self, name: str) -> Path:
        return self._data_dir.datasets / f"{name}.jsonl"


def _view(dataset: Dataset) -> DatasetView:
    return DatasetView(**dataset.__dict__)


def _read_rows(stream: BinaryIO) -> Iterator[bytes]:
    first = _first_sign(stream)
    if first == b"[":
        yield from _read_array(stream)
        return
    for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > _MAX_LINE_BYTES:
            raise TooLarge(f"line {number} is longer than {_MAX_LINE_BYTES >> 20} MiB")
        if line.strip():
            yield _line_of(_parse(line, f"line {number}"), number)


def _first_sign(stream: BinaryIO) -> bytes:
    start = stream.read(4096)
    stream.seek(0)
    return start.lstrip()[:1]


def _read_array(stream: BinaryIO) -> Iterator[bytes]:
    text = stream.read(_MAX_ARRAY_BYTES + 1)
    if len(text) > _MAX_ARRAY_BYTES:
        raise TooLarge(f"an array of rows may have {_MAX_ARRAY_BYTES >> 20} MiB: send one row per line (JSONL) instead")
    rows = _parse(text, "the body")
    assert isinstance(rows, list)
    for number, row in enumerate(rows, start=1):
        yield _line_of(row, number)


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be read"
        raise ServiceError(f"{where} is not JSON: {problem}") from None


def _line_of(row: object, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise ServiceError(f'row {number} is not an object with columns, such as {{"prompt": ..., "completion": ...}}')
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
