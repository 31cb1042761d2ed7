"""What surrounds the products of experts, in Triton: rows laid out by expert, the narrow products of adapters added in
place, and rows summed up by token. The host need not know how many rows an expert has. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 2048  # of a row, in one program
_ROWS, _COLUMNS = 64, 128  # of a tile


def take_rows(x: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """[S, width]: row s is the one of `x` [T, width] that choice `order[s]` belongs to."""
    x = x.contiguous()
    rows = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(x.shape[1]), _WIDTH)
    _take[(len(order), triton.cdiv(x.shape[1], block))](x, order, rows, x.shape[1], num_chosen, BLOCK=block)
    return rows


@triton.jit
def _take(x, order, rows, width, num_chosen, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order + row) // num_chosen
    values = tl.load(x + token * width + column, mask=column < width)
    tl.store(rows + row * width + column, values, mask=column < width)


def sum_rows(rows: Tensor, places: Tensor, num_chosen: int) -> Tensor:
    """[T, width]: the sum of the rows at each token's `places` [T * num_chosen], in float32 and always in one order."""
    rows = rows.contiguous()
    num_tokens, width = len(places) // num_chosen, rows.shape[1]
    sums = torch.empty(num_tokens, width, dtype=rows.dtype, device=rows.device)
    block = min(triton.next_power_of_2(width), _WIDTH)
    _sum[(num_tokens, triton.cdiv(width, block))](rows, places, sums, width, CHOSEN=num_chosen, BLOCK=block)
    return sums


@triton.jit
def _sum(rows, places, sums, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(places + token * CHOSEN + choice)
        total += tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(sums + token * width + column, total.to(sums.dtype.element_ty), mask=column < width)


def add_narrow_product(total: Tensor, narrow: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """In place: to `total` [S, width], `narrow` [S, rank] times each expert's of `matrices` [experts, rank, width].

    One product and one addition in float32, rounded once.
    """
    assert total.is_contiguous()
    num_rows, width = total.shape
    num_experts, rank, _ = matrices.shape
    # As many tiles as there could be: all experts but one have a tile that is not full.
    grid = (triton.cdiv(num_rows, _ROWS) + num_experts, triton.cdiv(width, _COLUMNS))
    _add_narrow[grid](
        total, narrow.contiguous(), matrices, ends, width, rank, num_experts, *matrices.stride(),
        EXPERTS=triton.next_power_of_2(num_experts), RANK=max(triton.next_power_of_2(rank), 16),
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return total


@triton.jit
def _add_narrow(  # type: ignore[no-untyped-def]
    total, narrow, matrices, ends, width, rank, num_experts, expert_stride, rank_stride, column_stride,
    EXPERTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Which expert's rows are those of this tile, and where they are.
    every = tl.arange(0, EXPERTS)
    known = every < num_experts
    stop = tl.load(ends + every, mask=known, other=0)
    start = tl.load(ends + every - 1, mask=known & (every > 0), other=0)
    tiles = tl.where(known, (stop - start + ROWS - 1) // ROWS, 0)
    tiles_until = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum(((tiles_until <= tile) & known).to(tl.int32), 0)
    if expert < num_experts:
        is_mine = every == expert
        first = tl.sum(tl.where(is_mine, start, 0), 0) + ROWS * (
            tile - tl.sum(tl.where(is_mine, tiles_until - tiles, 0), 0)
        )
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < tl.sum(tl.where(is_mine, stop, 0), 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        narrow_column = tl.arange(0, RANK)
        left = tl.load(
            narrow + row[:, None] * rank + narrow_column[None, :],
            mask=inside[:, None] & (narrow_column < rank)[None, :],
            other=0.0,
        )
        right = tl.load(
            matrices
            + expert.to(tl.int64) * expert_stride
            + narrow_column[:, None] * rank_stride
            + column[None, :] * column_stride,
            mask=(narrow_column < rank)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        where = total + row[:, None] * width + column[None, :]
        mask = inside[:, None] & (column < width)[None, :]
        before = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        after = before + tl.dot(left, right, input_precision="ieee")
        tl.store(where, after.to(total.dtype.element_ty), mask=mask)
