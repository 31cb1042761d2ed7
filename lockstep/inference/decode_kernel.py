"""Attention of one new token for each sequence, as Triton kernels: every row reads as many keys as it has.

The token's own key and value are written to the cache by the same kernel. Rows with one prompt read it in one slot: it
then stays in the GPU's second-level cache for all of them. Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_TOKENS = 32  # and two warps: the fastest of 16 ways on an H200, with 64 and with 256 rows
_MIN_GROUP = 16  # rows of a matrix product on tensor cores: query heads that share keys are padded to it
_MIN_PROGRAMS = 264  # two for each multiprocessor of a large GPU; with fewer rows a row is split
_MIN_SPLIT_TOKENS = 256


@triton.jit
def _attend(
    query, key, value, keys, values, positions, sources, shared, output, peaks, totals, scale, window,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_slot, cache_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PADDED_GROUP: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one head of keys; of its tokens the part `split`. Scores are in powers of two."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    members, dims = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    in_group, in_dim = members < GROUP, dims < DIM
    position = tl.load(positions + row)
    first = tl.zeros_like(position)
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    heads = head * GROUP + members
    mine = in_group[:, None] & in_dim[None, :]
    q = tl.load(query + row * q_row + heads[:, None] * q_head + dims[None, :], mask=mine, other=0.0)
    source, num_shared = tl.load(sources + row), tl.load(shared + row)
    cached_keys, cached_values = keys + head * cache_head, values + head * cache_head

    peak = tl.full((PADDED_GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    result = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    if split == 0:  # the new token, which need not be read back
        k = tl.load(key + row * k_row + head * k_head + dims, mask=in_dim, other=0.0)
        v = tl.load(value + row * v_row + head * v_head + dims, mask=in_dim, other=0.0)
        tl.store(cached_keys + row * cache_slot + position * DIM + dims, k, mask=in_dim)
        tl.store(cached_values + row * cache_slot + position * DIM + dims, v, mask=in_dim)
        peak = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
        total += 1.0
        result += v.to(tl.float32)[None, :]

    share = tl.cdiv(tl.cdiv(position - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    for begin in range(start, tl.minimum(start + share, position), BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        seen = tokens < position
        slots = tl.where(tokens < num_shared, source, row)
        where = slots[:, None] * cache_slot + tokens[:, None] * DIM + dims[None, :]
        inside = seen[:, None] & in_dim[None, :]
        k = tl.load(cached_keys + where, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(cached_values + where, mask=inside, other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher

    num_heads = tl.num_programs(1) * GROUP
    if SPLITS == 1:
        place = (row * num_heads + heads)[:, None] * DIM + dims[None, :]
        tl.store(output + place, (result / total[:, None]).to(output.dtype.element_ty), mask=mine)
    else:
        part = (row * num_heads + heads) * SPLITS + split
        tl.store(output + part[:, None] * DIM + dims[None, :], result, mask=mine)
        tl.store(peaks + part, peak, mask=in_group)
        tl.store(totals + part, total, mask=in_group)


@triton.jit
def _combine(
    parts, peaks, totals, output, DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED_DIM: tl.constexpr
):  # fmt: skip
    """One row and one head: a part without tokens has the peak -inf, and the first part always has one."""
    head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    peak = tl.load(peaks + head * SPLITS + splits)
    shrink = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(tl.load(totals + head * SPLITS + splits) * shrink, axis=0)
    place = (head * SPLITS + splits)[:, None] * DIM + dims[None, :]
    part = tl.load(parts + place, mask=(dims < DIM)[None, :], other=0.0)
    result = tl.sum(part * shrink[:, None], axis=0) / total
    tl.store(output + head * DIM + dims, result.to(output.dtype.element_ty), mask=dims < DIM)


def num_splits(num_programs: int, capacity: int) -> int:
    """A power of two: of how many parts of a row's tokens are attended to at the same time."""
    wanted = min(-(-_MIN_PROGRAMS // num_programs), capacity // _MIN_SPLIT_TOKENS, 64)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def attend(
    query: Tensor,  # [rows, heads, dim]
    key: Tensor,  # [rows, kv_heads, dim]
    value: Tensor,
    keys: Tensor,  # [slots, kv_heads, capacity, dim], contiguous
    values: Tensor,
    positions: Tensor,  # [rows] of the new tokens
    sources: Tensor,  # [rows] slots that hold the first tokens of each row
    shared: Tensor,  # [rows] how many of them; at most the position
    scale: float,
    window: int,
) -> Tensor:
    """[rows, heads, dim]. Row r is in slot r, but for the tokens that it shares with another. `window`: the last tokens
    that are seen, this one included; 0: all."""
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    (num_rows, num_heads, dim), (_, kv_heads, capacity, _) = query.shape, keys.shape
    splits, group = num_splits(num_rows * kv_heads, capacity), num_heads // kv_heads
    output = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=query.device)
    parts = peaks = totals = output
    if splits > 1:
        parts = torch.empty(num_rows, num_heads, splits, dim, dtype=torch.float32, device=query.device)
        peaks, totals = torch.empty(2, num_rows, num_heads, splits, dtype=torch.float32, device=query.device)
    padded_dim = max(triton.next_power_of_2(dim), 16)
    _attend[(num_rows, kv_heads, splits)](
        query, key, value, keys, values, positions, sources, shared,
        parts, peaks, totals, scale * 1.4426950408889634, window,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2],
        GROUP=group, DIM=dim, SPLITS=splits, HAS_WINDOW=window > 0,
        PADDED_GROUP=max(triton.next_power_of_2(group), _MIN_GROUP), PADDED_DIM=padded_dim,
        BLOCK=_BLOCK_TOKENS, num_warps=2 if dim <= 128 else 4,
        num_stages=3 if query.element_size() == 2 else 1,
    )  # fmt: skip
    if splits > 1:
        _combine[(num_rows * num_heads,)](parts, peaks, totals, output, DIM=dim, SPLITS=splits, PADDED_DIM=padded_dim)
    return output
