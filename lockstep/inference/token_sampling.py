"""The next token of every sequence in a batch, from logits and one random number each.

There is no generator state: the random number is a pure function of (seed, key, sample, position), the same on every
device and in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.types import SamplingParams

# Legend for names below: N sequences, V vocabulary, B blocks of the vocabulary, K tokens of a block.
_BLOCK = 128


@dataclass(frozen=True)
class Truncation:
    """How a distribution is shaped before a token is drawn; `temperature` 0 takes the likeliest token."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> Truncation:
        return cls(params.temperature, params.top_k, params.top_p, params.min_p)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The model's own log-prob of a token, at temperature 1 and before any truncation; the likeliest tokens there."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-prob), the likeliest first

    def first(self, num_top: int) -> TokenScores:
        return self if num_top >= len(self.top) else TokenScores(self.logprob, self.top[:num_top])

    @classmethod
    def read(cls, scores: Sequence[Tensor]) -> list[TokenScores]:
        """Of what `score_tokens` returned."""
        logprobs, top_logprobs, top_tokens = (values.tolist() for values in scores)
        pairs = zip(logprobs, top_tokens, top_logprobs, strict=True)
        return [cls(logprob, tuple(zip(ids, values, strict=True))) for logprob, ids, values in pairs]


RowTruncations = tuple[tuple[Truncation, tuple[int, ...]], ...]
"""Slots that draw in the same way, for each way."""


@dataclass(frozen=True)
class LaunchedSteps:
    num_steps: int
    read: Callable[[], tuple[list[list[int]], list[list[float]]]]
    """[step][slot] tokens and log-probs, waited for."""
    scores: Callable[[], list[list[TokenScores]]] | None = None
    """[step][slot], where they were asked for."""
    routing: Callable[[], list[np.ndarray]] | None = None
    """[step][slot] bytes, where they are recorded."""


def copy_to_host(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Begins at once, behind what computes them. The result waits for these copies alone: a plain read would be queued
    behind whatever was launched in between, and the device would then be idle while the host works on it."""
    if not tensors or not tensors[0].is_cuda:
        return lambda: tensors
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Sequence[Tensor]:
        done.synchronize()
        return copies

    return wait


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt of which every token but the first is to be scored. `last`: the one that its prefill leaves out."""

    last: int
    num_top: int


def score_tokens(logits_nv: Tensor, tokens_n: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """([N] log-probs of the tokens, [N, num_top] log-probs of the likeliest, and which these are)."""
    normaliser_n1 = torch.logsumexp(logits_nv, dim=1, keepdim=True)
    values_nk, top_nk = logits_nv.topk(min(num_top, logits_nv.shape[1]), dim=1)
    return (logits_nv.gather(1, tokens_n[:, None]) - normaliser_n1)[:, 0], values_nk - normaliser_n1, top_nk


def sample_tokens(logits_nv: Tensor, truncation: Truncation, uniform_n: Tensor) -> tuple[Tensor, Tensor]:
    """([N] tokens, [N] log-probs at the temperature, before truncation). Logits are float32 or wider."""
    scaled = logits_nv if truncation.temperature in (0, 1) else logits_nv / truncation.temperature
    normaliser_n = torch.logsumexp(scaled, dim=1)
    if truncation.temperature == 0:
        tokens_n = scaled.argmax(dim=1)
    else:
        probabilities_nv = _truncate((scaled - normaliser_n[:, None]).exp_(), truncation)
        # With nan any token: its log-prob reports the problem.
        tokens_n = _invert(probabilities_nv, uniform_n).clamp(max=scaled.shape[1] - 1)
    return tokens_n, scaled.gather(1, tokens_n[:, None])[:, 0] - normaliser_n


def suits_draw_kernel(outputs_nv: Tensor, truncation: Truncation) -> bool:
    """Whether `draw_by_kernel` draws from all of a distribution, on a GPU."""
    whole = truncation.temperature > 0 and truncation == Truncation(truncation.temperature)
    return whole and outputs_nv.is_cuda and outputs_nv.dtype != torch.float64 and find_spec("triton") is not None


@torch.library.custom_op("lockstep::draw_tokens", mutates_args=())
def draw_by_kernel(outputs_nv: Tensor, streams_n: Tensor, positions_n: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `sample_tokens` of the outputs times `scale`, with the random numbers of the positions after these."""
    from lockstep.inference import draw_kernel

    return draw_kernel.draw(outputs_nv, streams_n, positions_n, scale)


@draw_by_kernel.register_fake
def _(outputs_nv: Tensor, streams_n: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(streams_n), outputs_nv.new_empty(len(streams_n), dtype=torch.float32)


def _truncate(probabilities_nv: Tensor, truncation: Truncation) -> Tensor:
    """Not renormalised. Tokens as likely as the last one kept are kept too."""
    if 0 < truncation.top_k < probabilities_nv.shape[1]:
        least_n = probabilities_nv.topk(truncation.top_k, dim=1).values[:, -1]
        probabilities_nv = probabilities_nv * (probabilities_nv >= least_n[:, None])
    if truncation.top_p < 1:
        ranked_nv = probabilities_nv.sort(dim=1, descending=True).values
        reached_nv = ranked_nv.cumsum(dim=1)
        enough_nv = reached_nv >= truncation.top_p * reached_nv[:, -1:]
        least_n = ranked_nv.gather(1, enough_nv.int().argmax(dim=1, keepdim=True))[:, 0]
        probabilities_nv = probabilities_nv * (probabilities_nv >= least_n[:, None])
    if truncation.min_p > 0:
        least_n = truncation.min_p * probabilities_nv.amax(dim=1)
        probabilities_nv = probabilities_nv * (probabilities_nv >= least_n[:, None])
    return probabilities_nv


def _invert(weights_nv: Tensor, uniform_n: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: the first token whose running sum passes `uniform` of the total.

    First the block, then the token in it: running sums over a whole vocabulary are slow, and their rounding depends
    on the batch size.
    """
    missing = -weights_nv.shape[1] % _BLOCK
    whole_nv = F.pad(weights_nv, (0, missing)) if missing else weights_nv  # padding by 0 would copy
    blocks_nbk = whole_nv.unflatten(1, (-1, _BLOCK))
    sums_nb = blocks_nbk.sum(dim=2).double()
    reached_nb = sums_nb.cumsum(dim=1)
    threshold_n = uniform_n * reached_nb[:, -1]
    block_n = _first_beyond(reached_nb, sums_nb, threshold_n)
    before_n = (reached_nb - sums_nb).gather(1, block_n[:, None])[:, 0]
    block_nk = blocks_nbk[torch.arange(len(block_n), device=block_n.device), block_n].double()
    index_n = _first_beyond(block_nk.cumsum(dim=1), block_nk, (threshold_n - before_n).clamp(min=0))
    return block_n * _BLOCK + index_n


def _first_beyond(reached: Tensor, weights: Tensor, threshold_n: Tensor) -> Tensor:
    """The first index with weight whose running sum is above the threshold; the last one with weight if rounding left
    none. An index without weight is never returned."""
    possible = weights > 0
    beyond = possible & (reached > threshold_n[:, None])
    last_n = possible.shape[1] - 1 - possible.flip(1).int().argmax(dim=1)
    return torch.where(beyond.any(dim=1), beyond.int().argmax(dim=1), last_n)


def random_streams(seed: int, keys: list[int], samples: list[int]) -> Tensor:
    """[N] int64, on CPU: each sample's stream, from which and from the position its random numbers follow."""
    start = _mix(torch.tensor(_signed(seed)))
    prompt_streams = _mix(start ^ torch.tensor([_signed(key) for key in keys], dtype=torch.int64))
    return _mix(prompt_streams ^ torch.tensor(samples, dtype=torch.int64))


def uniforms(streams_n: Tensor, positions_n: Tensor) -> Tensor:
    """[N] float64 in [0, 1): the random number of the token at each position."""
    bits = _mix(streams_n ^ positions_n)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: int64 products wrap around on every device."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical, not arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """Any integer as the int64 with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
