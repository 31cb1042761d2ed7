"""One Triton kernel between the head's matrix products: log-probs, and the gradient written over the logits.

Two reads and one write of the logits, where composed operations need several more. Imported on CUDA only.
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
    logits, targets, slopes, logprobs, vocabulary, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, WRITES_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * vocabulary
    target = tl.load(targets + row)
    peak = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(first + places, mask=places < vocabulary, other=-float("inf")).to(tl.float32)
        x = tl.where(places < vocabulary, _transform(x, scale, softcap, HAS_SOFTCAP), -float("inf"))
        higher = tl.maximum(peak, tl.max(x, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
        peak = higher
    normaliser = peak + tl.log(total)
    chosen = _transform(tl.load(first + target).to(tl.float32), scale, softcap, HAS_SOFTCAP)
    tl.store(logprobs + row, chosen - normaliser)
    if WRITES_GRADIENT:
        slope = tl.load(slopes + row)
        for start in range(0, vocabulary, BLOCK):
            places = start + tl.arange(0, BLOCK)
            x = tl.load(first + places, mask=places < vocabulary, other=0.0).to(tl.float32)
            x = _transform(x, scale, softcap, HAS_SOFTCAP)
            gradient = slope * ((places == target).to(tl.float32) - tl.exp(x - normaliser)) * scale
            if HAS_SOFTCAP:
                gradient = gradient * (1.0 - (x / softcap) * (x / softcap))
            tl.store(first + places, gradient.to(logits.dtype.element_ty), mask=places < vocabulary)


def logprobs_of(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[C, V] logits -> [C] float32 log-probs of the targets."""
    return _launch(logits, targets, None, scale, softcap)


def logprobs_and_gradient(
    logits: Tensor, targets: Tensor, slopes: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Log-probs, and `logits` overwritten with d(sum of slopes * log-probs) / d logits."""
    return _launch(logits, targets, slopes, scale, softcap), logits


def _launch(logits: Tensor, targets: Tensor, slopes: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    assert logits.is_contiguous()
    rows, vocabulary = logits.shape
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _logprob_kernel[(rows,)](
        logits,
        targets,
        logprobs if slopes is None else slopes.float(),
        logprobs,
        vocabulary,
        scale,
        softcap or 1.0,
        HAS_SOFTCAP=softcap is not None,
        WRITES_GRADIENT=slopes is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return logprobs
