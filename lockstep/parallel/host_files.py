"""Files of a run whose hosts share no file system: checkpoints go to rank 0's host when they are written, and from it
when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.group import ProcessGroup

CHUNK_BYTES = 32 << 20
_SEEN_WITHIN_S = 5.0  # network file systems show a new file to other hosts a little later


def find_remote_ranks(folder: Path, group: ProcessGroup) -> ProcessGroup:
    """The group that knows which ranks do not see rank 0's `folder`: each passes its own. All ranks."""
    if group.num_ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or group.num_ranks == 1:
        return group
    name = group.broadcast_object(f".seen-{uuid.uuid4().hex}" if group.rank == 0 else None)
    if group.rank == 0:
        (folder / name).touch()
    group.barrier()
    place = (_appears(folder / name), int(os.environ.get("LOCAL_RANK", "0")))
    places = group.gather_objects(place)
    if group.rank == 0:
        (folder / name).unlink(missing_ok=True)
    remote = tuple(rank for rank, (sees, _) in enumerate(places) if not sees)
    return replace(group, remote_ranks=remote, remote_leaders=tuple(rank for rank in remote if places[rank][1] == 0))


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def collect(folder: Path, name_of: Callable[[int], str], group: ProcessGroup) -> None:
    """Move what remote ranks have written to rank 0's folder, one file each. `folder` is each rank's own. All ranks."""
    for rank in group.remote_ranks:
        if group.rank == 0:
            _receive(folder / name_of(rank), rank, group)
        elif group.rank == rank:
            _send(folder / name_of(rank), 0, group)
            (folder / name_of(rank)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks of this host may still have to send theirs
                folder.rmdir()


@contextlib.contextmanager
def local_copy(folder: Path, group: ProcessGroup) -> Iterator[None]:
    """Rank 0's folder of files on every host, for as long as this lasts. `folder` is each rank's own. All ranks."""
    if not group.remote_ranks:
        yield
        return
    names = group.broadcast_object(sorted(p.name for p in folder.iterdir() if p.is_file()) if group.rank == 0 else None)
    for leader in group.remote_leaders:
        if group.rank == leader:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if group.rank == 0:
                _send(folder / name, leader, group)
            elif group.rank == leader:
                _receive(folder / name, 0, group)
    group.barrier()
    yield
    group.barrier()
    if group.rank in group.remote_leaders:
        shutil.rmtree(folder, ignore_errors=True)


def _send(path: Path, to: int, group: ProcessGroup) -> None:
    """A file that is not there is sent as one: a rank may have had nothing to write."""
    size = path.stat().st_size if path.exists() else -1
    _put(torch.tensor([size]), to, group)
    if size < 0:
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for length in _chunks(size):
            chunk = torch.empty(length, dtype=torch.uint8)
            if file.readinto(chunk.numpy().data) != length:
                raise OSError(f"{path} became shorter while it was sent to rank {to}")
            digest.update(chunk.numpy().data)
            _put(chunk, to, group)
    _put(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8), to, group)


def _receive(path: Path, source: int, group: ProcessGroup) -> None:
    size = int(_take(torch.empty(1, dtype=torch.int64), source, group))
    if size < 0:
        return
    digest, partial = hashlib.sha256(), path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for length in _chunks(size):
            chunk = _take(torch.empty(length, dtype=torch.uint8), source, group)
            digest.update(chunk.numpy().data)
            file.write(chunk.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    sent = _take(torch.empty(32, dtype=torch.uint8), source, group)
    if bytes(sent.tolist()) != digest.digest():
        raise OSError(f"{path} came from rank {source} with another digest than it was sent with")
    partial.replace(path)


def _chunks(size: int) -> Iterator[int]:
    for start in range(0, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - start)


def _put(values: Tensor, to: int, group: ProcessGroup) -> None:
    dist.send(values, group=group.background, group_dst=to)


def _take(values: Tensor, source: int, group: ProcessGroup) -> Tensor:
    dist.recv(values, group=group.background, group_src=source)
    return values
