"""Checkpoints of versions up to 0.1, whose index is a pickle: converted on request, and read nowhere else.

Even then nothing of a pickle is called but the few classes that torch's index is made of.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

from lockstep.config import ConfigError
from lockstep.model.checkpoint_storage import (
    INDEX,
    PICKLED_INDEX,
    FilePiece,
    StoredPiece,
    StoredTensor,
    check_pieces,
    write_file,
    write_index,
)
from lockstep.rundir import MANIFEST, Checkpoint, RunDir, damage

_CLASSES: dict[tuple[str, str], object] = {
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
}
for _class in (
    dcp_metadata.Metadata,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.TensorProperties,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata._MEM_FORMAT_ENCODING,
):
    _CLASSES[dcp_metadata.__name__, _class.__name__] = _class
_MAX_INDEX_BYTES = 1 << 30


def convert_pickled(run: RunDir) -> list[int]:
    """Rewrite every sound checkpoint that has a pickle for its index; returns their steps.

    The caller owns the run directory, and its user has said that whoever wrote it is trusted.
    """
    assert run.owner
    run.sweep()
    found = [c for c in run.list_checkpoints() if is_pickled(c.path) and damage(c.path) is None]
    for checkpoint in found:
        _convert(run, checkpoint)
        run.log_event("checkpoint_converted", step=checkpoint.step)
    return [checkpoint.step for checkpoint in found]


def is_pickled(checkpoint: Path) -> bool:
    return (checkpoint / PICKLED_INDEX).is_file() and not (checkpoint / INDEX).exists()


def _convert(run: RunDir, checkpoint: Checkpoint) -> None:
    index = read_pickled_index(checkpoint.path / PICKLED_INDEX)
    writing = run.begin_checkpoint(checkpoint.step)
    files: dict[str, list[FilePiece]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, stored in _stored_tensors(checkpoint.path / PICKLED_INDEX, index):
        pieces = []
        for piece in stored.pieces:
            place = index.storage_data[dcp_metadata.MetadataIndex(name, piece.offsets)]
            load = partial(_read_piece, checkpoint.path / piece.file, int(place.offset), int(place.length))
            new = f"{Path(piece.file).stem}.safetensors"
            files.setdefault(new, []).append(FilePiece(name, piece.offsets, piece.sizes, stored.dtype, load))
            pieces.append(StoredPiece(new, piece.offsets, piece.sizes))
        tensors[name] = StoredTensor(stored.dtype, stored.shape, tuple(pieces))
    for new, parts in files.items():
        write_file(writing / new, parts)
    write_index(writing, tensors)
    _copy_others(checkpoint.path, writing)
    run.commit_checkpoint(checkpoint.step, checkpoint.extra, checkpoint.validation_loss)


def _copy_others(old: Path, new: Path) -> None:
    """What the loop wrote beside the tensors."""
    for file in old.iterdir():
        if file.is_file() and file.suffix != ".distcp" and file.name not in (PICKLED_INDEX, MANIFEST):
            shutil.copyfile(file, new / file.name)


def read_pickled_index(path: Path) -> Any:
    """A `Metadata` of torch's distributed checkpoint."""
    with path.open("rb") as file:
        content = file.read(_MAX_INDEX_BYTES)
    try:
        found = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(found, dcp_metadata.Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
    except ConfigError:
        raise
    except Exception as error:  # whatever a broken pickle makes Python do
        raise ConfigError(f"{path} is not the index of a checkpoint: {error!r:.200}") from error
    return found


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        known = _CLASSES.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise ConfigError(
                f"the index of this checkpoint names {module}.{name}, which no checkpoint of Lockstep needs: "
                "it was made to run code, so nothing of it was read"
            )
        return known


def _stored_tensors(path: Path, index: Any) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in _items(path, index):
        pieces = []
        for chunk in entry.chunks:
            place = index.storage_data.get(dcp_metadata.MetadataIndex(name, chunk.offsets))
            if not isinstance(place, filesystem._StorageInfo):
                raise ConfigError(f"{path}: a piece of {name!r} is in no file")
            pieces.append(StoredPiece(str(place.relative_path), tuple(chunk.offsets), tuple(chunk.sizes)))
        stored = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(pieces))
        check_pieces(path, name, stored)
        yield name, stored


def _items(path: Path, index: Any) -> Iterable[tuple[str, Any]]:
    for name, entry in dict(index.state_dict_metadata).items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise ConfigError(f"{path}: {name!r} is not a tensor")
        yield name, entry


def _read_piece(file: Path, offset: int, length: int) -> Tensor:
    """A piece as torch.save wrote it, which torch reads without running any code."""
    with closing(file.open("rb")) as stream:
        stream.seek(offset)
        piece = io.BytesIO(stream.read(length))
    values = torch.load(piece, map_location="cpu", weights_only=True)
    if not isinstance(values, Tensor):
        raise ConfigError(f"{file}: a piece is {type(values).__name__} instead of a tensor")
    return values
