"""The next token of every row from its logits, as Triton kernels that read them once, and a part of them twice.

It draws as `token_sampling.sample_tokens` does without truncation: the inverse of the cumulative distribution at the
random number of (stream, position). Imported on CUDA only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


@triton.jit
def _sum_chunks(logits, peaks, sums, row_stride, num_tokens, num_chunks, scale, CHUNK: tl.constexpr):
    """Of one row and one chunk of the vocabulary: the highest logit, and the sum of exp over it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + tokens, mask=tokens < num_tokens, other=-float("inf")).to(tl.float32)
    x *= scale
    peak = tl.max(x, axis=0)
    finite = tl.where(peak == -float("inf"), 0.0, peak)  # a chunk in which nothing is possible
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(sums + row * num_chunks + chunk, tl.sum(tl.exp(x - finite), axis=0))


@triton.jit
def _first_beyond(reached, weights, threshold, places, SIZE: tl.constexpr):
    """See token_sampling."""
    possible = weights > 0
    first = tl.min(tl.where(possible & (reached > threshold), places, SIZE), axis=0)
    last = tl.max(tl.where(possible, places, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _mix(x):
    """splitmix64's finaliser, see token_sampling."""
    x = x - 7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _pick(
    logits, peaks, sums, streams, positions, tokens, logprobs, row_stride, num_tokens, num_chunks, scale,
    CHUNK: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row: first the chunk, then the token in it. Sums that decide are in float64."""
    row = tl.program_id(0).to(tl.int64)
    bits = _mix(tl.load(streams + row) ^ (tl.load(positions + row) + 1))
    uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2 to the power -53
    chunks = tl.arange(0, PADDED_CHUNKS)
    exists = chunks < num_chunks
    own_peaks = tl.load(peaks + row * num_chunks + chunks, mask=exists, other=-float("inf"))
    peak = tl.max(own_peaks, axis=0)
    own_sums = tl.load(sums + row * num_chunks + chunks, mask=exists, other=0.0)
    # Nan stays: it is the log-prob that reports it.
    weights = tl.where(own_sums == 0, 0.0, own_sums * tl.exp(own_peaks - peak)).to(tl.float64)
    reached, total = tl.cumsum(weights, axis=0), tl.sum(weights, axis=0)
    threshold = uniform * total
    chunk = _first_beyond(reached, weights, threshold, chunks, PADDED_CHUNKS)
    before = tl.sum(tl.where(chunks < chunk, weights, 0.0), axis=0)
    places = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + places < num_tokens
    x = tl.load(logits + row * row_stride + chunk * CHUNK + places, mask=inside, other=-float("inf")).to(tl.float32)
    x *= scale
    likely = tl.exp(x - peak).to(tl.float64)
    place = _first_beyond(tl.cumsum(likely, axis=0), likely, threshold - before, places, CHUNK)
    token = tl.minimum(chunk * CHUNK + place, num_tokens - 1)
    chosen = tl.load(logits + row * row_stride + token).to(tl.float32) * scale
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - peak - tl.log(total).to(tl.float32))


def draw(logits: Tensor, streams: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """([N] tokens, [N] float32 log-probs) of [N, V] logits times `scale`, each at its stream's number for the next
    position."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_tokens = logits.shape
    num_chunks = -(-num_tokens // _CHUNK)
    peaks, sums = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sizes = (logits.stride(0), num_tokens, num_chunks, scale)
    _sum_chunks[(num_rows, num_chunks)](logits, peaks, sums, *sizes, CHUNK=_CHUNK, num_warps=4)
    _pick[(num_rows,)](
        logits, peaks, sums, streams, positions, tokens, logprobs, *sizes,
        CHUNK=_CHUNK, PADDED_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
