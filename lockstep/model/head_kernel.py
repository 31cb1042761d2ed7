"""Triton kernels around the head's matrix products. Imported on CUDA only.

Log-probs, and the gradient written over the logits: two reads and one write of these, where composed operations need
several more. And the way back from the rows that predict something to all tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _transform(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    x = x * scale
    if HAS_SOFTCAP:
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    return x


@triton.jit
def _logprob_kernel(
    logits, targets, grad_logprobs, grad_entropies, logprobs, entropies, log_sum_sq_probs, vocabulary, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, WRITES_GRADIENT: tl.constexpr, WRITES_FACTS: tl.constexpr,
    HAS_GRAD_ENTROPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * vocabulary
    target = tl.load(targets + row)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0  # sum of exp(x - peak) * x
    squares = 0.0  # sum of exp(x - peak) ** 2
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        x = tl.load(first + places, mask=inside, other=-float("inf")).to(tl.float32)
        x = tl.where(inside, _transform(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
        higher = tl.maximum(peak, tl.max(x, axis=0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # nothing was possible up to here
        shrink = tl.exp(peak - finite)
        share = tl.exp(x - finite)
        total = total * shrink + tl.sum(share, axis=0)
        if WRITES_FACTS:
            weighted = weighted * shrink + tl.sum(tl.where(inside, share * x, 0.0), axis=0)
            squares = squares * shrink * shrink + tl.sum(share * share, axis=0)
        peak = higher
    normaliser = peak + tl.log(total)
    chosen = _transform(tl.load(first + target).to(tl.float32), scale, softcap, HAS_SOFTCAP)
    tl.store(logprobs + row, chosen - normaliser)
    if WRITES_FACTS:
        tl.store(entropies + row, normaliser - weighted / total)
        tl.store(log_sum_sq_probs + row, tl.log(squares) - 2.0 * tl.log(total))
    if WRITES_GRADIENT:
        grad_logprob = tl.load(grad_logprobs + row)
        for start in range(0, vocabulary, BLOCK):
            places = start + tl.arange(0, BLOCK)
            x = tl.load(first + places, mask=places < vocabulary, other=0.0).to(tl.float32)
            x = _transform(x, scale, softcap, HAS_SOFTCAP)
            probability = tl.exp(x - normaliser)
            gradient = grad_logprob * ((places == target).to(tl.float32) - probability)
            if HAS_GRAD_ENTROPIES:
                entropy = tl.load(entropies + row)
                gradient -= tl.load(grad_entropies + row) * probability * (x - normaliser + entropy)
            gradient = gradient * scale
            if HAS_SOFTCAP:
                gradient = gradient * (1.0 - (x / softcap) * (x / softcap))
            tl.store(first + places, gradient.to(logits.dtype.element_ty), mask=places < vocabulary)


def measure(logits: Tensor, targets: Tensor, scale: float, softcap: float | None, *, facts: bool) -> tuple[Tensor, ...]:
    """[C, V] logits -> ([C] float32 log-probs of the targets,), or with `facts` also entropies and log_sum_sq_probs."""
    results = tuple(_empty(logits) for _ in range(3 if facts else 1))
    _launch(logits, targets, results, scale, softcap)
    return results


def logprobs_and_gradient(
    logits: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    scale: float,
    softcap: float | None,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs, and `logits` overwritten with d(sum of grad_logprobs * log-probs) / d logits.

    `entropy`, (grad_entropies, entropies), adds the gradient of the entropies.
    """
    logprobs = _empty(logits)
    _launch(logits, targets, (logprobs,), scale, softcap, grad_logprobs.float().contiguous(), entropy)
    return logprobs, logits


def _empty(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def _launch(
    logits: Tensor,
    targets: Tensor,
    results: tuple[Tensor, ...],
    scale: float,
    softcap: float | None,
    grad_logprobs: Tensor | None = None,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:
    assert logits.is_contiguous()
    rows, vocabulary = logits.shape
    logprobs, entropies, log_sum_sq_probs = results if len(results) == 3 else (*results, *results, *results)
    grad_entropies = logprobs  # a placeholder: a kernel takes no None
    if entropy is not None:
        grad_entropies, entropies = (part.float().contiguous() for part in entropy)
    _logprob_kernel[(rows,)](
        logits,
        targets.contiguous(),
        logprobs if grad_logprobs is None else grad_logprobs,
        grad_entropies,
        logprobs,
        entropies,
        log_sum_sq_probs,
        vocabulary,
        scale,
        softcap or 1.0,
        HAS_SOFTCAP=softcap is not None,
        WRITES_GRADIENT=grad_logprobs is not None,
        WRITES_FACTS=len(results) == 3,
        HAS_GRAD_ENTROPIES=entropy is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _add_rows_kernel(rows, order, starts, sums, size, BLOCK: tl.constexpr):
    token, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(order + number)  # int64
        total += tl.load(rows + row * size + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + token.to(tl.int64) * size + place, total.to(sums.dtype.element_ty), mask=inside)


def add_rows(rows: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """[N, H] rows, [N] the token of each -> [num_tokens, H]: zero where a token has none.

    Rows of one token are added in their order, in float32: no two programs write to one place.
    """
    rows, (sorted_tokens, order) = rows.contiguous(), tokens.sort(stable=True)
    starts = torch.searchsorted(sorted_tokens, torch.arange(num_tokens + 1, device=tokens.device))
    size = rows.shape[1]
    sums = torch.empty(num_tokens, size, dtype=rows.dtype, device=rows.device)
    block = min(triton.next_power_of_2(size), _BLOCK)
    _add_rows_kernel[(num_tokens, triton.cdiv(size, block))](rows, order, starts, sums, size, BLOCK=block, num_warps=4)
    return sums
