"""Attention of one new token for each sequence, as Triton kernels: every row reads as many keys as it has.

The token's own key and value are written to the cache by the same kernel. Rows with one prompt read it together, from
one slot, several of them in one matrix product; what each has of its own is read by a program of its own at the same
time. A second kernel adds up the parts. Imported on CUDA only.
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
_MIN_TILE_TOKENS = 128  # of a prompt that several rows read together
_LOG2_E = 1.4426950408889634
_MIN_TILED = 1 << 16  # tokens of room in all rows: with fewer, adding up the parts costs what tiles save


@triton.jit
def _bound(scores, cap, HAS_CAP: tl.constexpr):
    """`cap` times the tanh of what part of it scores are, where there is one."""
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
    return scores


@triton.jit
def _attend_block(
    q, peak, total, result, keys, values, where, seen, in_dim, scale, cap, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """The next tokens' share in a running softmax. Scores are in powers of two."""
    inside = seen[:, None] & in_dim[None, :]
    k = tl.load(keys + where, mask=inside, other=0.0)
    scores = _bound(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, HAS_CAP)
    scores = tl.where(seen[None, :], scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shrink = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    v = tl.load(values + where, mask=inside, other=0.0)
    result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, result


@triton.jit
def _attend_prompt(
    tile, split, head, query, keys, values, tiles, parts, peaks, totals, scale, cap,
    q_row, q_head, cache_slot, num_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PROMPT_PARTS: tl.constexpr, HAS_CAP: tl.constexpr,
    TILE_ROWS: tl.constexpr, PADDED_TILE: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows and one head of keys; of the prompt that they have in common the part `split`."""
    entry = tiles + tile * (2 + TILE_ROWS)
    source, length = tl.load(entry), tl.load(entry + 1)
    share = tl.cdiv(tl.cdiv(length, PROMPT_PARTS), BLOCK) * BLOCK
    start = split * share
    if length > 0:
        members, dims = tl.arange(0, PADDED_TILE), tl.arange(0, PADDED_DIM)
        in_dim = dims < DIM
        rows = tl.load(entry + 2 + members // GROUP, mask=members < TILE_ROWS * GROUP, other=-1)
        heads = head * GROUP + members % GROUP
        mine = (rows >= 0)[:, None] & in_dim[None, :]
        q = tl.load(query + rows[:, None] * q_row + heads[:, None] * q_head + dims[None, :], mask=mine, other=0.0)
        # A finite peak: a part without tokens is then no nan, and counts nothing.
        peak = tl.full((PADDED_TILE,), -1e30, tl.float32)
        total = tl.zeros((PADDED_TILE,), tl.float32)
        result = tl.zeros((PADDED_TILE, PADDED_DIM), tl.float32)
        for begin in range(start, tl.minimum(start + share, length), BLOCK):
            tokens = begin + tl.arange(0, BLOCK)
            where = source * cache_slot + tokens[:, None] * DIM + dims[None, :]
            peak, total, result = _attend_block(
                q, peak, total, result, keys, values, where, tokens < length, in_dim, scale, cap, HAS_CAP
            )
        part = (rows * num_heads + heads) * PARTS + split
        tl.store(parts + part[:, None] * DIM + dims[None, :], result, mask=mine)
        tl.store(peaks + part, peak, mask=rows >= 0)
        tl.store(totals + part, total, mask=rows >= 0)


@triton.jit
def _attend_own(
    row, split, head, query, key, value, keys, values, positions, sources, shared, covered,
    sinks, output, peaks, totals, scale, cap, window, q_row, q_head, k_row, k_head, v_row, v_head, cache_slot,
    num_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PROMPT_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PADDED_GROUP: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one head of keys; of the tokens that no tile covers the part `split`."""
    SPLITS: tl.constexpr = PARTS - PROMPT_PARTS
    members, dims = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    in_group, in_dim = members < GROUP, dims < DIM
    position = tl.load(positions + row)
    first = tl.zeros_like(position)
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    if PROMPT_PARTS > 0:
        first = tl.load(covered + row)
    heads = head * GROUP + members
    mine = in_group[:, None] & in_dim[None, :]
    q = tl.load(query + row * q_row + heads[:, None] * q_head + dims[None, :], mask=mine, other=0.0)
    source, num_shared = tl.load(sources + row), tl.load(shared + row)

    peak = tl.full((PADDED_GROUP,), -1e30, tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    result = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    if split == 0:  # the new token, which need not be read back
        k = tl.load(key + row * k_row + head * k_head + dims, mask=in_dim, other=0.0)
        v = tl.load(value + row * v_row + head * v_head + dims, mask=in_dim, other=0.0)
        tl.store(keys + row * cache_slot + position * DIM + dims, k, mask=in_dim)
        tl.store(values + row * cache_slot + position * DIM + dims, v, mask=in_dim)
        peak = _bound(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale, cap, HAS_CAP)
        total += 1.0
        result += v.to(tl.float32)[None, :]
        if HAS_SINKS:  # each head's own score, of which nothing is read
            sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(peak, sink)
            shrink = tl.exp2(peak - higher)
            total = shrink + tl.exp2(sink - higher)
            result = result * shrink[:, None]
            peak = higher

    share = tl.cdiv(tl.cdiv(position - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    for begin in range(start, tl.minimum(start + share, position), BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        slots = tl.where(tokens < num_shared, source, row)
        where = slots[:, None] * cache_slot + tokens[:, None] * DIM + dims[None, :]
        peak, total, result = _attend_block(
            q, peak, total, result, keys, values, where, tokens < position, in_dim, scale, cap, HAS_CAP
        )

    if PARTS == 1:
        place = (row * num_heads + heads)[:, None] * DIM + dims[None, :]
        tl.store(output + place, (result / total[:, None]).to(output.dtype.element_ty), mask=mine)
    else:
        part = (row * num_heads + heads) * PARTS + PROMPT_PARTS + split
        tl.store(output + part[:, None] * DIM + dims[None, :], result, mask=mine)
        tl.store(peaks + part, peak, mask=in_group)
        tl.store(totals + part, total, mask=in_group)


@triton.jit
def _attend(
    query, key, value, keys, values, positions, sources, shared, covered, tiles, sinks, output, peaks, totals, scale,
    cap, window, q_row, q_head, k_row, k_head, v_row, v_head, cache_slot, cache_head, num_tiles,
    GROUP: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PROMPT_PARTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, TILE_ROWS: tl.constexpr, PADDED_TILE: tl.constexpr,
    PADDED_GROUP: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Prompts come first: they are the longest."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    keys, values = keys + head * cache_head, values + head * cache_head
    own = number
    if PROMPT_PARTS > 0:
        own = number - num_tiles * PROMPT_PARTS
        if own < 0:
            _attend_prompt(
                number // PROMPT_PARTS, number % PROMPT_PARTS, head, query, keys, values, tiles, output, peaks, totals,
                scale, cap, q_row, q_head, cache_slot, num_heads, GROUP, DIM, PARTS, PROMPT_PARTS, HAS_CAP, TILE_ROWS,
                PADDED_TILE, PADDED_DIM, BLOCK,
            )  # fmt: skip
    if own >= 0:
        _attend_own(
            own // (PARTS - PROMPT_PARTS), own % (PARTS - PROMPT_PARTS), head, query, key, value, keys, values,
            positions, sources, shared, covered, sinks, output, peaks, totals, scale, cap, window, q_row, q_head,
            k_row, k_head, v_row, v_head, cache_slot, num_heads, GROUP, DIM, PARTS, PROMPT_PARTS, HAS_WINDOW, HAS_CAP,
            HAS_SINKS, PADDED_GROUP, PADDED_DIM, BLOCK,
        )  # fmt: skip


@triton.jit
def _combine(
    parts, peaks, totals, covered, output, num_outputs, num_heads, DIM: tl.constexpr, PARTS: tl.constexpr,
    PROMPT_PARTS: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads: of rows that are in no tile the first parts hold nothing. The first own part is never empty."""
    outputs, dims = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_DIM)
    exists = outputs < num_outputs
    mine = exists[:, None] & (dims < DIM)[None, :]
    peak = tl.load(peaks + outputs * PARTS + PROMPT_PARTS, mask=exists, other=0.0)
    total = tl.load(totals + outputs * PARTS + PROMPT_PARTS, mask=exists, other=1.0)
    result = tl.load(parts + (outputs * PARTS + PROMPT_PARTS)[:, None] * DIM + dims[None, :], mask=mine, other=0.0)
    in_tile = exists
    if PROMPT_PARTS > 0:
        in_tile = exists & (tl.load(covered + outputs // num_heads, mask=exists, other=0) > 0)
    for part in range(PARTS):
        if part != PROMPT_PARTS:
            counts = exists & (in_tile | (part > PROMPT_PARTS))
            place = outputs * PARTS + part
            other_peak = tl.load(peaks + place, mask=counts, other=-1e30)
            other_total = tl.load(totals + place, mask=counts, other=0.0)
            other = tl.load(
                parts + place[:, None] * DIM + dims[None, :], mask=counts[:, None] & (dims < DIM)[None, :], other=0.0
            )
            higher = tl.maximum(peak, other_peak)
            shrink, other_shrink = tl.exp2(peak - higher), tl.exp2(other_peak - higher)
            total = total * shrink + other_total * other_shrink
            result = result * shrink[:, None] + other * other_shrink[:, None]
            peak = higher
    place = outputs[:, None] * DIM + dims[None, :]
    tl.store(output + place, (result / total[:, None]).to(output.dtype.element_ty), mask=mine)


def num_splits(num_programs: int, capacity: int, min_tokens: int = _MIN_SPLIT_TOKENS) -> int:
    """A power of two: of how many parts of a row's tokens are attended to at the same time."""
    wanted = min(-(-_MIN_PROGRAMS // num_programs), capacity // min_tokens, 64)
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
    covered: Tensor,  # [rows] how many tokens of a row a tile reads
    tiles: Tensor,  # [tiles, 2 + rows of a tile]: slot, tokens, and the rows that read them there; -1: none
    scale: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """[rows, heads, dim]. Row r is in slot r, but for the tokens that it shares with another. `window`: the last tokens
    that are seen, this one included; 0: all. Then rows read prompts one by one: each sees another part.
    `softcap`: what bounds the scores; 0: nothing. `sinks`: scores beside those of tokens."""
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    (num_rows, num_heads, dim), (_, kv_heads, capacity, _) = query.shape, keys.shape
    group, tile_rows = num_heads // kv_heads, tiles.shape[1] - 2
    tiled = not window and group < _MIN_GROUP and capacity > 2 * _MIN_TILE_TOKENS and num_rows * capacity >= _MIN_TILED
    num_tiles = min(len(tiles), num_rows // 2) if tiled else 0
    prompt_parts = num_splits(-(-num_rows // tile_rows) * kv_heads, capacity, _MIN_TILE_TOKENS) if num_tiles else 0
    splits = num_splits(num_rows * kv_heads, capacity)
    num_parts = prompt_parts + splits
    output = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=query.device)
    parts = peaks = totals = output
    if num_parts > 1:
        parts = torch.empty(num_rows, num_heads, num_parts, dim, dtype=torch.float32, device=query.device)
        peaks, totals = torch.empty(2, num_rows, num_heads, num_parts, dtype=torch.float32, device=query.device)
    padded_dim = max(triton.next_power_of_2(dim), 16)
    padded_tile = max(triton.next_power_of_2(group * tile_rows), _MIN_GROUP)
    _attend[(num_rows * splits + num_tiles * prompt_parts, kv_heads)](
        query, key, value, keys, values, positions, sources, shared, covered, tiles,
        query if sinks is None else sinks, parts, peaks, totals, scale * _LOG2_E, softcap * _LOG2_E, window,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2], num_tiles,
        GROUP=group, DIM=dim, PARTS=num_parts, PROMPT_PARTS=prompt_parts, HAS_WINDOW=window > 0,
        HAS_CAP=softcap > 0, HAS_SINKS=sinks is not None, TILE_ROWS=tile_rows, PADDED_TILE=padded_tile,
        PADDED_GROUP=max(triton.next_power_of_2(group), _MIN_GROUP), PADDED_DIM=padded_dim,
        BLOCK=_BLOCK_TOKENS, num_warps=2 if dim <= 128 and (padded_tile <= 32 or not num_tiles) else 4,
        num_stages=3 if query.element_size() == 2 else 1,
    )  # fmt: skip
    if num_parts > 1:
        heads_at_once = 4
        _combine[(-(-num_rows * num_heads // heads_at_once),)](
            parts, peaks, totals, covered, output, num_rows * num_heads, num_heads, DIM=dim, PARTS=num_parts,
            PROMPT_PARTS=prompt_parts, PADDED_DIM=padded_dim, BLOCK=heads_at_once, num_warps=1,
        )  # fmt: skip
    return output
