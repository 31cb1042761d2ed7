"""Float32 numbers to bf16, up or down at random, so that on average nothing is lost.

The random bits of a number depend on its place in the whole tensor, the tensor's name and the step: they are the same
however the tensor is split over ranks, and in a run that is resumed.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_CHUNK = 2**24  # numbers at once: their places are int64


def salt_of(name: str, step: int) -> int:
    return zlib.crc32(f"{step} {name}".encode())


def first_place(parameter: Tensor) -> int:
    """Of this rank's part in the whole tensor, where that is some of its rows."""
    if not isinstance(parameter, DTensor):
        return 0
    # Parts that another axis cut before are not one run of rows.
    if not all(place.is_replicate() or place == Shard(0) for place in parameter.placements):
        raise ValueError("optim.stochastic_rounding needs whole rows on each rank: set parallel.tensor and expert to 1")
    row = 0
    size = parameter.shape[0]
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, place in enumerate(parameter.placements):
        if place.is_shard():
            part = -(-size // parameter.device_mesh.size(axis))
            start = min(part * coordinate[axis], size)
            row, size = row + start, max(min(part, size - start), 0)
    assert size == parameter.to_local().shape[0], "rows are divided in another way than here"
    return row * (parameter.numel() // max(parameter.shape[0], 1))


@torch.no_grad()
def round_into(target: Tensor, wide: Tensor, salt: int, first: int = 0) -> None:
    """`target` (bf16) becomes `wide` (float32), rounded. `first`: the place of its first number in the whole tensor."""
    for start in range(0, wide.numel(), _CHUNK):
        part = wide.reshape(-1)[start : start + _CHUNK]
        bits = _random_bits(len(part), first + start, salt, part.device)
        rounded = ((part.contiguous().view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)
        target.view(-1)[start : start + _CHUNK] = torch.where(part.isfinite(), rounded, part)


def _random_bits(count: int, first: int, salt: int, device: torch.device) -> Tensor:
    """int32 [count] from 0 to 65535: a finalizer of splitmix64 over places."""
    x = torch.arange(first, first + count, device=device) * -7046029254386353131 + salt * 0x9E3779B1
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return (x >> 24 & 0xFFFF).int()
