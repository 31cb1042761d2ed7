"""Attention over packed documents in Triton, forward and backward; answers may share one copy of their prompt.

Tiles are cut from the row of tokens, not from documents: a tile of queries may hold several short ones. Which keys a
query sees is read from `visible`, so that one compiled kernel serves every layout. Nothing is added up by several
programs: the same inputs give the same bits. Imported on CUDA only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of `visible`, int32 [2, T], or [4, T] where prompts are shared: query t sees the keys of [OWN, t], and of
# [PROMPT, PROMPT_END); no query from QUERY_END on sees key t.
_OWN, _QUERY_END, _PROMPT, _PROMPT_END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LOWEST = tl.constexpr(-1.0e30)  # not -inf: a row that sees nothing in a block must not become nan
_LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """`rows` of queries: tokens times the heads that one program takes together. `keys` of one block."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest on an H200 over documents of 20 to 700 tokens with heads of 128.
FORWARD, D_QUERY, D_KEY = Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1)


def forward(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[T, heads, D] and [T, kv_heads, D] -> (attended [T, heads, D], log2 of each row's sum of weights [heads, T])."""
    tokens, heads, size = query.shape
    query, key, value = map(_readable, (query, key, value))
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    norms = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    together = _heads_together(heads // key.shape[1], FORWARD.rows)
    grid = (triton.cdiv(tokens * together, FORWARD.rows), heads // together)
    _forward[grid](
        query, key, value, attended, norms, visible, tokens, scale * _LOG2_E, heads // key.shape[1],
        *_strides(query), *_strides(key), *_strides(value), *_strides(attended),
        TOGETHER=together, HAS_PROMPTS=len(visible) > 2, D=size, ROWS=FORWARD.rows, KEYS=FORWARD.keys,
        num_warps=FORWARD.warps, num_stages=FORWARD.stages,
    )  # fmt: skip
    return attended, norms


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    norms: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, laid out as [T, heads, D]."""
    tokens, heads, size = query.shape
    grad, query, key, value = map(_readable, (grad, query, key, value))
    num_keys, group = key.shape[1], heads // key.shape[1]
    d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    d_key, d_value = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (key, value))
    products = torch.empty_like(norms)  # of each row, the sum of grad * attended
    strides = (*_strides(query), *_strides(key), *_strides(value), *_strides(grad))
    together = _heads_together(group, D_QUERY.rows)
    _d_query[(triton.cdiv(tokens * together, D_QUERY.rows), heads // together)](
        query, key, value, attended, grad, norms, products, d_query, visible, tokens, scale * _LOG2_E, scale, group,
        *strides, *_strides(attended), *_strides(d_query),
        TOGETHER=together, HAS_PROMPTS=len(visible) > 2, D=size, ROWS=D_QUERY.rows, KEYS=D_QUERY.keys,
        num_warps=D_QUERY.warps, num_stages=D_QUERY.stages,
    )  # fmt: skip
    together = _heads_together(group, D_KEY.rows)
    _d_key[(triton.cdiv(tokens, D_KEY.keys), num_keys)](
        query, key, value, grad, norms, products, d_key, d_value, visible, tokens, scale * _LOG2_E, scale, group,
        *strides, *_strides(d_key),
        TOGETHER=together, HAS_PROMPTS=len(visible) > 2, D=size, ROWS=D_KEY.rows, KEYS=D_KEY.keys,
        num_warps=D_KEY.warps, num_stages=D_KEY.stages,
    )  # fmt: skip
    return d_query, d_key, d_value


def _heads_together(group: int, rows: int) -> int:
    """How many heads that read the same keys one program takes: fewer tokens in a tile see fewer keys in vain."""
    return min(group & -group, rows // 16)


def _readable(tensor: Tensor) -> Tensor:
    """Each head of a token in one piece, and heads no further apart than 32 bits count."""
    is_so = tensor.stride(2) == 1 and tensor.stride(1) * tensor.shape[1] < 2**31
    return tensor if is_so else tensor.contiguous()


def _strides(tensor: Tensor) -> tuple[int, int]:
    return tensor.stride(0), tensor.stride(1)


@triton.jit
def _sees(token, num_own, prompt, prompt_end, key, HAS_PROMPTS: tl.constexpr):
    """`num_own`: how many keys of its own segment a query sees. A difference below zero is a large number here."""
    seen = (token - key).to(tl.uint32) < num_own
    if HAS_PROMPTS:
        seen = seen | ((key >= prompt) & (key < prompt_end))
    return seen


@triton.jit
def _load_visible(visible, tokens, token, inside, HAS_PROMPTS: tl.constexpr):
    """(first key of its own segment, how many of these it sees, prompt, prompt_end) of each query; none outside."""
    first = tl.load(visible + _OWN * tokens + token, mask=inside, other=tokens)
    num_own = tl.where(inside, token - first + 1, 0).to(tl.uint32)
    prompt, prompt_end = first, first
    if HAS_PROMPTS:
        prompt = tl.load(visible + _PROMPT * tokens + token, mask=inside, other=tokens)
        prompt_end = tl.load(visible + _PROMPT_END * tokens + token, mask=inside, other=0)
    return first, num_own, prompt, prompt_end


@triton.jit
def _key_blocks(first, prompt, prompt_end, end, tokens, KEYS: tl.constexpr, HAS_PROMPTS: tl.constexpr):
    """Keys of a tile of queries: those of its own segments, from `lowest` on, behind those of a prompt before it, or of
    the hull of several. (lowest, before, before_end, number of blocks before, number of blocks)."""
    lowest = tl.min(first, axis=0)
    before, before_end, num_before = lowest, lowest, 0
    if HAS_PROMPTS:
        before = tl.min(tl.where(prompt < prompt_end, prompt, tokens), axis=0)
        before_end = tl.minimum(tl.max(prompt_end, axis=0), lowest)
        num_before = tl.maximum(before_end - before + KEYS - 1, 0) // KEYS
    return lowest, before, before_end, num_before, num_before + (end - lowest + KEYS - 1) // KEYS


@triton.jit
def _forward(
    query, key, value, attended, norms, visible, tokens, scale_log2, group,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    TOGETHER: tl.constexpr, HAS_PROMPTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, place = tl.arange(0, ROWS), tl.arange(0, D)
    token = tl.program_id(0) * (ROWS // TOGETHER) + row // TOGETHER
    head = tl.program_id(1) * TOGETHER + row % TOGETHER
    key_head = tl.program_id(1) * TOGETHER // group
    inside = token < tokens
    first, num_own, prompt, prompt_end = _load_visible(visible, tokens, token, inside, HAS_PROMPTS)
    end = tl.minimum((tl.program_id(0) + 1) * (ROWS // TOGETHER), tokens)
    lowest, before, before_end, num_before, num_blocks = _key_blocks(
        first, prompt, prompt_end, end, tokens, KEYS, HAS_PROMPTS
    )

    at = token.to(tl.int64) * q_token + head * q_head
    q = tl.load(query + at[:, None] + place[None, :], mask=inside[:, None], other=0.0)
    peak = tl.full((ROWS,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS, D), dtype=tl.float32)
    for block in range(num_blocks):
        start, stop = lowest + (block - num_before) * KEYS, end
        if HAS_PROMPTS:
            is_before = block < num_before
            start = tl.where(is_before, before + block * KEYS, start)
            stop = tl.where(is_before, before_end, stop)
        column = start + tl.arange(0, KEYS)
        there = column < stop
        far = column.to(tl.int64)
        k = tl.load(key + key_head * k_head + far[:, None] * k_token + place[None, :], mask=there[:, None], other=0.0)
        v = tl.load(value + key_head * v_head + far[:, None] * v_token + place[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        seen = _sees(
            token[:, None], num_own[:, None], prompt[:, None], prompt_end[:, None], column[None, :], HAS_PROMPTS
        )
        if HAS_PROMPTS:  # a block of the prompt may end among the tile's own keys, which come later
            seen = seen & there[None, :]
        scores = tl.where(seen, scores, _LOWEST)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
        peak = higher
    to = token.to(tl.int64) * o_token + head * o_head
    result = sums / total[:, None]
    tl.store(attended + to[:, None] + place[None, :], result.to(attended.dtype.element_ty), mask=inside[:, None])
    tl.store(norms + head.to(tl.int64) * tokens + token, peak + tl.log2(total), mask=inside)


@triton.jit
def _d_query(
    query, key, value, attended, grad, norms, products, d_query, visible, tokens, scale_log2, scale, group,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, o_token, o_head, d_token, d_head,
    TOGETHER: tl.constexpr, HAS_PROMPTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, place = tl.arange(0, ROWS), tl.arange(0, D)
    token = tl.program_id(0) * (ROWS // TOGETHER) + row // TOGETHER
    head = tl.program_id(1) * TOGETHER + row % TOGETHER
    key_head = tl.program_id(1) * TOGETHER // group
    inside = token < tokens
    first, num_own, prompt, prompt_end = _load_visible(visible, tokens, token, inside, HAS_PROMPTS)
    end = tl.minimum((tl.program_id(0) + 1) * (ROWS // TOGETHER), tokens)
    lowest, before, before_end, num_before, num_blocks = _key_blocks(
        first, prompt, prompt_end, end, tokens, KEYS, HAS_PROMPTS
    )

    wide, mask = token.to(tl.int64), inside[:, None]
    g = tl.load(grad + (wide * g_token + head * g_head)[:, None] + place[None, :], mask=mask, other=0.0)
    o = tl.load(attended + (wide * o_token + head * o_head)[:, None] + place[None, :], mask=mask, other=0.0)
    product = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    at = head.to(tl.int64) * tokens + token
    tl.store(products + at, product, mask=inside)
    norm = tl.load(norms + at, mask=inside, other=0.0)
    q = tl.load(query + (wide * q_token + head * q_head)[:, None] + place[None, :], mask=mask, other=0.0)
    sums = tl.zeros((ROWS, D), dtype=tl.float32)
    for block in range(num_blocks):
        start, stop = lowest + (block - num_before) * KEYS, end
        if HAS_PROMPTS:
            is_before = block < num_before
            start = tl.where(is_before, before + block * KEYS, start)
            stop = tl.where(is_before, before_end, stop)
        column = start + tl.arange(0, KEYS)
        there = column < stop
        far = column.to(tl.int64)
        k = tl.load(key + key_head * k_head + far[:, None] * k_token + place[None, :], mask=there[:, None], other=0.0)
        v = tl.load(value + key_head * v_head + far[:, None] * v_token + place[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        d_weights = tl.dot(g, tl.trans(v))
        seen = _sees(
            token[:, None], num_own[:, None], prompt[:, None], prompt_end[:, None], column[None, :], HAS_PROMPTS
        )
        if HAS_PROMPTS:  # a block of the prompt may end among the tile's own keys, which come later
            seen = seen & there[None, :]
        weights = tl.where(seen, tl.exp2(scores - norm[:, None]), 0.0)
        d_scores = weights * (d_weights - product[:, None])
        sums = tl.dot(d_scores.to(k.dtype), k, sums)
    to = (wide * d_token + head * d_head)[:, None] + place[None, :]
    tl.store(d_query + to, (sums * scale).to(d_query.dtype.element_ty), mask=mask)


@triton.jit
def _d_key(
    query, key, value, grad, norms, products, d_key, d_value, visible, tokens, scale_log2, scale, group,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, d_token, d_head,
    TOGETHER: tl.constexpr, HAS_PROMPTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, place = tl.arange(0, ROWS), tl.arange(0, D)
    begin, key_head = tl.program_id(0) * KEYS, tl.program_id(1)
    column = begin + tl.arange(0, KEYS)
    there, far = column < tokens, column.to(tl.int64)
    mask = there[:, None]
    k = tl.load(key + key_head * k_head + far[:, None] * k_token + place[None, :], mask=mask, other=0.0)
    v = tl.load(value + key_head * v_head + far[:, None] * v_token + place[None, :], mask=mask, other=0.0)
    end = tl.max(tl.load(visible + _QUERY_END * tokens + column, mask=there, other=0), axis=0)
    num_blocks = (end - begin + ROWS // TOGETHER - 1) // (ROWS // TOGETHER)
    d_k = tl.zeros((KEYS, D), dtype=tl.float32)
    d_v = tl.zeros((KEYS, D), dtype=tl.float32)
    for step in range(num_blocks * (group // TOGETHER)):
        token = begin + step % num_blocks * (ROWS // TOGETHER) + row // TOGETHER
        head = key_head * group + step // num_blocks * TOGETHER + row % TOGETHER
        inside, wide = token < end, token.to(tl.int64)
        _, num_own, prompt, prompt_end = _load_visible(visible, tokens, token, inside, HAS_PROMPTS)
        at = head.to(tl.int64) * tokens + token
        norm = tl.load(norms + at, mask=inside, other=0.0)
        product = tl.load(products + at, mask=inside, other=0.0)
        from_query, from_grad = wide * q_token + head * q_head, wide * g_token + head * g_head
        q = tl.load(query + from_query[:, None] + place[None, :], mask=inside[:, None], other=0.0)
        g = tl.load(grad + from_grad[:, None] + place[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(k, tl.trans(q)) * scale_log2
        seen = _sees(
            token[None, :], num_own[None, :], prompt[None, :], prompt_end[None, :], column[:, None], HAS_PROMPTS
        )
        weights = tl.where(seen, tl.exp2(scores - norm[None, :]), 0.0)
        d_v = tl.dot(weights.to(g.dtype), g, d_v)
        d_weights = tl.dot(v, tl.trans(g))
        d_scores = weights * (d_weights - product[None, :])
        d_k = tl.dot(d_scores.to(q.dtype), q, d_k)
    to = far[:, None] * d_token + key_head * d_head + place[None, :]
    tl.store(d_key + to, (d_k * scale).to(d_key.dtype.element_ty), mask=mask)
    tl.store(d_value + to, d_v.to(d_value.dtype.element_ty), mask=mask)
