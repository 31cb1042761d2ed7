"""Two small Triton kernels around FP8 products: rows rounded in one launch, and a matrix of bytes turned around."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
_TILE = 64


def quantise_rows(matrix: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(e4m3 [rows, columns], float32 scales [rows]) of the matrix with its columns times `factors`, on CUDA.

    The scale of a row that holds nan is nan."""
    rows, columns = matrix.shape
    matrix = matrix.contiguous()
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(rows, device=matrix.device)
    _quantise[(rows,)](
        matrix,
        matrix if factors is None else factors.contiguous(),
        codes,
        scales,
        columns,
        largest_code=torch.finfo(torch.float8_e4m3fn).max,
        has_factors=factors is not None,
        columns_here=min(_COLUMNS, triton.next_power_of_2(columns)),
    )
    return codes, scales


def turn(matrix: Tensor) -> Tensor:
    """uint8 [rows, columns] to [columns, rows], on CUDA."""
    rows, columns = matrix.shape
    turned = torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _turn[grid](matrix.contiguous(), turned, rows, columns, tile=_TILE)
    return turned


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    matrix,
    factors,
    codes,
    scales,
    columns: tl.constexpr,
    largest_code: tl.constexpr,
    has_factors: tl.constexpr,
    columns_here: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((columns_here,), dtype=tl.float32)
    broken = tl.zeros((columns_here,), dtype=tl.int32)  # a maximum passes over nan, and so does what bounds the codes
    for start in range(0, columns, columns_here):
        place = start + tl.arange(0, columns_here)
        inside = place < columns
        x = tl.load(matrix + row * columns + place, mask=inside, other=0.0).to(tl.float32)
        if has_factors:
            x *= tl.load(factors + place, mask=inside, other=0.0)
        top = tl.maximum(top, tl.abs(x))
        broken = broken | (x != x).to(tl.int32)
    largest = tl.max(top, axis=0)
    scale = tl.where(largest > 0, largest, 1.0) / largest_code
    scale = tl.where(tl.max(broken, axis=0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    for start in range(0, columns, columns_here):
        place = start + tl.arange(0, columns_here)
        inside = place < columns
        x = tl.load(matrix + row * columns + place, mask=inside, other=0.0).to(tl.float32)
        if has_factors:
            x *= tl.load(factors + place, mask=inside, other=0.0)
        scaled = tl.minimum(tl.maximum(x / scale, -largest_code), largest_code)
        tl.store(codes + row * columns + place, scaled.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _turn(matrix, turned, rows, columns, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(matrix + row[:, None] * columns + column[None, :], mask=inside, other=0)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(values), mask=tl.trans(inside))
