"""NF4 weights dequantised by one Triton kernel: each byte is read once, each weight written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.model.codebooks import NF4_BLOCK, SCALE_BLOCK, Nf4, dynamic_table, nf4_table

_BYTES = 1024  # of codes, in one program


def dequantise(stored: Nf4, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns], on CUDA."""
    device = stored.codes.device
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    _dequantise[(triton.cdiv(len(stored.codes), _BYTES),)](
        *(part.contiguous() for part in stored),
        nf4_table(device),
        dynamic_table(device),
        weight,
        len(stored.codes),
        weight.numel(),
        block_bytes=NF4_BLOCK // 2,
        scale_block=SCALE_BLOCK,
        num_bytes_here=_BYTES,
    )
    return weight


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    block_codes,
    block_scales,
    block_mean,
    nf4_values,
    scale_values,
    weight,
    num_bytes,
    num_weights,
    block_bytes: tl.constexpr,
    scale_block: tl.constexpr,
    num_bytes_here: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * num_bytes_here
    byte = start + tl.arange(0, num_bytes_here)
    inside = byte < num_bytes
    pair = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    block = byte // block_bytes
    code = tl.load(block_codes + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(block_scales + block // scale_block, mask=inside, other=0.0)
    largest = tl.load(scale_values + code) * scale + tl.load(block_mean)
    first = tl.load(nf4_values + (pair >> 4)) * largest
    second = tl.load(nf4_values + (pair & 15)) * largest
    place = 2 * start + tl.arange(0, 2 * num_bytes_here)
    values = tl.interleave(first, second).to(weight.dtype.element_ty)
    tl.store(weight + place, values, mask=place < num_weights)
