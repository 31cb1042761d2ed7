"""The tensors of a checkpoint on disk: a safetensors file of each rank's pieces, and an index of them in JSON.

torch's distributed checkpoint decides who writes and reads which piece; nothing here is a pickle, neither the index nor
the pieces, so that a checkpoint from anywhere is data and never code.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lockstep.rundir import read_json_object, write_atomically

INDEX = "index.json"
PICKLED_INDEX = ".metadata"  # of checkpoints that versions up to 0.1 wrote
_FORMAT = "lockstep-checkpoint-1"
_SUFFIX = ".safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Place = tuple[int, ...]
# One thread digests about 1.3 GB/s, less than a disk takes: large states are written as several files at a time.
_FILE_BYTES = 1 << 30
_MAX_FILES = 4
_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: Place
    sizes: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: torch.dtype
    shape: Place
    pieces: tuple[StoredPiece, ...]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = True,
    one_file: bool = False,
) -> dict[str, str]:
    """Each rank its pieces; the index comes last, when every rank has written. On the CPU. All ranks of `group`.

    Several gigabytes go into several files, unless `one_file`. Returns the sha256 of all files on the first rank,
    nothing on the others.
    """
    writer = _Writer(path, max_files=1 if one_file else _MAX_FILES)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=no_dist)
    return writer.digests


def read_tensors(
    path: Path, into: dict[str, Tensor], *, group: dist.ProcessGroup | None = None, no_dist: bool = True
) -> None:
    """In place. All ranks of `group`."""
    reader = _Reader(path, read_index(path))  # read here: torch 2.11 would keep what is wrong with it to itself
    try:
        dcp.load(
            into,
            storage_reader=reader,
            planner=DefaultLoadPlanner(),
            process_group=group,
            no_dist=no_dist,
        )
    except CheckpointException as error:  # no Exception, and its message is a list of tracebacks
        cause = next((failure[0] for failure in error.failures.values()), error)
        raise ValueError(f"the checkpoint {path} cannot be read: {cause}") from error


def rank_file(rank: int) -> str:
    """Where `write_tensors` puts the pieces of a rank, if it has any and they go into one file."""
    return f"rank-{rank}{_SUFFIX}"


def read_index(path: Path) -> dict[str, StoredTensor]:
    """What a checkpoint holds, by name."""
    if not (path / INDEX).exists() and (path / PICKLED_INDEX).exists():
        raise ValueError(
            f"the checkpoint {path} was written by an earlier version of Lockstep, with a pickle for its index, and a "
            "pickle can run code: if you trust whoever made it, add --allow-pickle to 'lockstep train --resume RUN' or "
            "'lockstep export RUN', which converts the checkpoints of that run"
        )
    found = read_json_object(path / INDEX)
    try:
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}, and this version reads {_FORMAT!r}")
        tensors = {str(name): _parse_tensor(entry) for name, entry in found["tensors"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path / INDEX} is not the index of a checkpoint: {error!r:.200}") from error
    for name, tensor in tensors.items():
        check_pieces(path / INDEX, name, tensor)
    return tensors


def write_index(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    entries = {
        name: {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "pieces": [{"file": p.file, "offsets": p.offsets, "sizes": p.sizes} for p in tensor.pieces],
        }
        for name, tensor in tensors.items()
    }
    write_atomically(path / INDEX, json.dumps({"format": _FORMAT, "tensors": entries}))


def check_pieces(index: Path, name: str, tensor: StoredTensor) -> None:
    """They must lie in this folder and fill the tensor: a gap would be read as whatever was in memory."""
    for piece in tensor.pieces:
        if Path(piece.file).name != piece.file or not piece.file.endswith((_SUFFIX, ".distcp")):
            raise ValueError(f"{index}: {name!r} is said to be in {piece.file!r}, which is no file of a checkpoint")
        boxes = list(zip(piece.offsets, piece.sizes, tensor.shape))
        inside = all(offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in boxes)
        if not len(piece.offsets) == len(piece.sizes) == len(tensor.shape) or not inside:
            raise ValueError(f"{index}: a piece of {name!r} lies outside of the tensor")
    filled = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    if filled != math.prod(tensor.shape):
        raise ValueError(f"{index}: the pieces of {name!r} have {filled} of {math.prod(tensor.shape)} elements")


def _parse_tensor(entry: Mapping[str, Any]) -> StoredTensor:
    pieces = (StoredPiece(str(p["file"]), _place(p["offsets"]), _place(p["sizes"])) for p in entry["pieces"])
    return StoredTensor(_DTYPES[entry["dtype"]], _place(entry["shape"]), tuple(pieces))


def _place(values: Sequence[int]) -> Place:
    if not isinstance(values, (list, tuple)) or not all(type(value) is int for value in values):
        raise ValueError(f"{values!r:.60} is not a list of whole numbers")
    return tuple(values)


# --- one file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilePiece:
    """What a file will hold; `load` gives the values when their turn comes, so that only one piece is in memory."""

    name: str
    offsets: Place
    sizes: Place
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def key(self) -> str:
        return piece_key(self.name, self.offsets)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def piece_key(name: str, offsets: Place) -> str:
    """The name of a piece in its file: the tensor's own, unless it begins elsewhere than the tensor."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def write_file(path: Path, pieces: Iterable[FilePiece]) -> str:
    """As the safetensors library would, but from one tensor at a time and flushed to disk. Returns its sha256."""
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # so that each begins at a multiple of its size
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in ordered:
        start, end = end, end + piece.num_bytes
        header[piece.key] = {"dtype": _NAMES[piece.dtype], "shape": piece.sizes, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, _DigestedFile(file) as digested:
        digested.write(len(text).to_bytes(8, "little") + text)
        for piece in ordered:
            _write_values(digested, piece)
        file.flush()
        os.fsync(file.fileno())
        return digested.finish()


class _DigestedFile:
    """Digests in a thread what it writes: the two cost about the same, and reading the file again would cost more."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256 = file, hashlib.sha256()
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-digest")
        self._last: concurrent.futures.Future[None] | None = None
        self._flushed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._digester.shutdown()

    def write(self, data: bytes | memoryview) -> None:
        self._wait()  # at most two pieces are in memory
        self._last = self._digester.submit(self._sha256.update, data)
        view = memoryview(data)
        for start in range(0, len(view), _FLUSH_BYTES):
            self._file.write(view[start : start + _FLUSH_BYTES])
            self._begin_flush()

    def _begin_flush(self) -> None:
        """Otherwise the system keeps some gigabytes in memory, and the disk does nothing until they are waited for."""
        waiting = self._file.tell() - self._flushed
        if waiting < _FLUSH_BYTES or not hasattr(os, "posix_fadvise"):
            return
        self._file.flush()
        with contextlib.suppress(OSError):  # advice that not every file system takes
            os.posix_fadvise(self._file.fileno(), self._flushed, waiting, os.POSIX_FADV_DONTNEED)
        self._flushed += waiting

    def finish(self) -> str:
        self._wait()
        return self._sha256.hexdigest()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()


def _write_values(file: _DigestedFile, piece: FilePiece) -> None:
    values = piece.load().detach()
    assert (tuple(values.shape), values.dtype) == (piece.sizes, piece.dtype), f"{piece.name} is not as planned"
    if values.numel():
        file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_box(file: Any, piece: StoredPiece, stored: StoredTensor, item: ReadItem) -> Tensor:
    """The part of a piece that `item` asks for. `file` is an open safetensors file."""
    key = piece_key(item.storage_index.fqn, piece.offsets)
    part = file.get_slice(key)
    found = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
    if found != (piece.sizes, stored.dtype):
        raise ValueError(f"{piece.file}: {key!r} is {found[1]} {list(found[0])}, and {INDEX} says otherwise")
    if not piece.sizes or 0 in piece.sizes:
        return file.get_tensor(key)
    box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))
    return part[box]


# --- what torch's distributed checkpoint calls ------------------------------------------------------------------------


class _Writer(StorageWriter):
    def __init__(self, path: Path, max_files: int) -> None:
        self._path, self._max_files = path, max_files
        self.digests: dict[str, str] = {}
        """Of the files of all ranks, on the first one, when all is written."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pieces = [_as_piece(item, planner) for item in plan.items]
        files = _divide(plan.storage_data, pieces, self._max_files)
        with ThreadPoolExecutor(max(len(files), 1), thread_name_prefix="checkpoint-file") as pool:
            digests = dict(zip(files, pool.map(lambda name: write_file(self._path / name, files[name]), files)))
        stored = {piece.key: (name, digests[name]) for name, inside in files.items() for piece in inside}
        results = [
            WriteResult(item.index, piece.num_bytes, stored[piece.key]) for item, piece in zip(plan.items, pieces)
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index: result.storage_data[0] for part in results for result in part}
        self.digests = dict(result.storage_data for part in results for result in part)
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
            pieces = [
                StoredPiece(files[MetadataIndex(name, chunk.offsets)], tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in entry.chunks
            ]
            tensors[name] = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(pieces))
        write_index(self._path, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _divide(name: str, pieces: Sequence[FilePiece], max_files: int) -> dict[str, list[FilePiece]]:
    """By file: the largest first, each to the file that has the least."""
    total = sum(piece.num_bytes for piece in pieces)
    count = max(1, min(max_files, total // _FILE_BYTES))
    names = [name, *(f"{name.removesuffix(_SUFFIX)}-{number}{_SUFFIX}" for number in range(2, count + 1))]
    files: dict[str, list[FilePiece]] = {name: [] for name in names}
    sizes = dict.fromkeys(names, 0)
    for piece in pieces if count == 1 else sorted(pieces, key=lambda piece: -piece.num_bytes):
        least = min(names, key=lambda name: sizes[name])
        files[least].append(piece)
        sizes[least] += piece.num_bytes
    return {name: inside for name, inside in files.items() if inside}


def _as_piece(item: WriteItem, planner: SavePlanner) -> FilePiece:
    assert item.type is not WriteItemType.BYTE_IO, f"{item.index.fqn} is not a tensor"
    assert item.tensor_data is not None
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype

    def load() -> Tensor:
        values = planner.resolve_data(item)
        assert isinstance(values, Tensor)
        return values

    return FilePiece(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), dtype, load)


class _Reader(StorageReader):
    def __init__(self, path: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._path, self._stored = path, stored

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        entries: dict[str, Any] = {}
        for name, tensor in self._stored.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
            properties = TensorProperties(dtype=tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, StoredPiece, StoredTensor]]] = {}
        for item in plan.items:
            assert item.type is not LoadItemType.BYTE_IO, "only tensors are read: anything else would be unpickled"
            stored = self._stored[item.storage_index.fqn]
            piece = next(p for p in stored.pieces if p.offsets == tuple(item.storage_index.offset or ()))
            by_file.setdefault(piece.file, []).append((item, piece, stored))
        for name, items in by_file.items():
            if not (self._path / name).is_file():
                raise ValueError(f"{name} is missing")
            try:
                with safe_open(self._path / name, "pt") as file:
                    for item, piece, stored in items:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(_read_box(file, piece, stored, item))
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise ValueError(f"{name}: {error}") from error
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _done(value: Any) -> Future[Any]:
    future: Future[object] = Future()
    future.set_result(value)
    return future
