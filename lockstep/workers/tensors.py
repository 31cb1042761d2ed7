"""Tensors as the raw parts of a frame, and back: dtype and shape in the header, the numbers as they lie in memory.

The only part of this package that knows torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.workers.frames import FrameError

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """(what the header says of each, their bytes). On a CPU, and contiguous, nothing is copied."""
    described, parts = [], []
    for name, tensor in tensors.items():
        _check(name, tensor)
        described.append({"name": name, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)})
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b""))
    return described, parts


def restore(described: Sequence[Mapping[str, Any]], parts: Sequence[memoryview]) -> dict[str, Tensor]:
    """The tensors share the frame's memory: no copy, and nobody else has it."""
    if len(described) != len(parts):
        raise FrameError(f"{len(described)} tensors in {len(parts)} parts")
    tensors = {}
    for entry, part in zip(described, parts, strict=True):
        try:
            name, dtype, shape = entry["name"], DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
        except (LookupError, TypeError, ValueError) as error:
            raise FrameError(f"a tensor that is described as {entry!r}: {error!r}") from None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != part.nbytes:
            raise FrameError(f"{name} is {entry['dtype']} {shape} and comes in {part.nbytes:,} bytes")
        whole = torch.frombuffer(part, dtype=dtype) if part.nbytes else torch.empty(0, dtype=dtype)
        tensors[name] = whole.reshape(shape)
    return tensors


def _check(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, DTensor):
        raise ValueError(f"{name} is spread over several processes: gather it first")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name} has no numbers in a row to send: it is {tensor.layout} on {tensor.device}")
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{name} is {tensor.dtype}, which cannot be sent: convert it to one of {', '.join(DTYPES)}")
