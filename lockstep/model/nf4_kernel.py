"""NF4 weights dequantised by a Triton kernel: each byte is read once, each weight written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.model.codebooks import NF4_BLOCK, SCALE_BLOCK, Nf4, dynamic_table, nf4_table
from lockstep.model.grouped_product import Nf4Stack

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


def dequantise_stack(stack: Nf4Stack, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """[experts, rows, columns] on CUDA. Matrices of experts without a row, by `ends` [experts], are left unwritten:
    nobody reads them, and the host need not know which they are."""
    num_experts, rows, _ = stack.codes.shape
    matrices = torch.empty(num_experts, rows, stack.num_columns, dtype=dtype, device=stack.codes.device)
    scales = stack.scales.contiguous().view(torch.float32)
    num_bytes = stack.codes[0].numel()
    _dequantise_used[(triton.cdiv(num_bytes, _BYTES), num_experts)](
        stack.codes.contiguous(),
        stack.block_codes.contiguous(),
        scales,
        ends,
        nf4_table(matrices.device),
        dynamic_table(matrices.device),
        matrices,
        num_bytes,
        stack.block_codes.shape[1],
        scales.shape[1],
        block_bytes=NF4_BLOCK // 2,
        scale_block=SCALE_BLOCK,
        num_bytes_here=_BYTES,
    )
    return matrices


@triton.jit
def _dequantise_used(  # type: ignore[no-untyped-def]
    codes,
    block_codes,
    scales,
    ends,
    nf4_values,
    scale_values,
    matrices,
    num_bytes,
    num_blocks,
    num_scales,
    block_bytes: tl.constexpr,
    scale_block: tl.constexpr,
    num_bytes_here: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if start < stop:
        first_byte = tl.program_id(0).to(tl.int64) * num_bytes_here
        byte = first_byte + tl.arange(0, num_bytes_here)
        inside = byte < num_bytes
        pair = tl.load(codes + expert * num_bytes + byte, mask=inside, other=0).to(tl.int32)
        block = byte // block_bytes
        code = tl.load(block_codes + expert * num_blocks + block, mask=inside, other=0).to(tl.int32)
        own = scales + expert * num_scales
        scale = tl.load(own + block // scale_block, mask=inside, other=0.0)
        largest = tl.load(scale_values + code) * scale + tl.load(own + num_scales - 1)
        first = tl.load(nf4_values + (pair >> 4)) * largest
        second = tl.load(nf4_values + (pair & 15)) * largest
        place = 2 * first_byte + tl.arange(0, 2 * num_bytes_here)
        values = tl.interleave(first, second).to(matrices.dtype.element_ty)
        tl.store(matrices + expert * 2 * num_bytes + place, values, mask=place < 2 * num_bytes)
