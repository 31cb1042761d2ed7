"""The interface of a loss: log-probs of supervised tokens in, a sum and its metrics out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TensorMetrics = dict[str, Tensor]
# Larger exponents are clamped: their exponential, and a gradient multiplied by it, would overflow float32.
MAX_EXPONENT = 80.0
Options = Mapping[str, Any]


@dataclass(frozen=True)
class LossInputs:
    """Of one micro-batch or of the whole global batch: one value per supervised token (N of them), in order.

    `weights`: how much a token's log-prob counts in the sum of its completion. Not multiplied by `scale`.
    `scale`: the one number that normalises the sum over the global batch; a loss multiplies its result by it.
    `completions`: which completion a token belongs to (0, 1, 2, ... in order); a pair is chosen 2k, rejected 2k + 1.
    `num_completions`: 0 in a micro-batch without data, which only keeps this rank in step with others.
    """

    weights: Tensor
    scale: float = 1.0
    values: Mapping[str, Tensor] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    completions: Tensor | None = None
    num_completions: int = 0


LossFn = Callable[[Tensor, LossInputs], tuple[Tensor, TensorMetrics]]


def _no_metrics(options: Options) -> tuple[str, ...]:
    return ()


def _always(options: Options) -> bool:
    return True


def _never(options: Options) -> bool:
    return False


@dataclass(frozen=True)
class Loss:
    """`fn` is pure and never waits for the device. Losses and metrics are sums, never means; metrics are not scaled.

    `linear`: the loss is -sum(scale * weights * logprobs), so its gradient is known before the forward pass.
    `metrics`: the names that `fn` returns under these options, needed also on ranks that do not compute the loss.
    `is_separable`: the loss of a batch is the sum of the losses of its data.
    `couples_completions`: the loss of a datum needs all its completions together, not only all tokens of each.
    `needs_reference`, `needs_log_sum_sq_probs`: whether `fn` reads values "reference_logprobs", "log_sum_sq_probs".
    `needs_entropy`: whether it reads "entropies", of the distribution at each token; these have a gradient too.
    """

    fn: LossFn
    linear: bool = False
    metrics: Callable[[Options], tuple[str, ...]] = _no_metrics
    is_separable: Callable[[Options], bool] = _always
    couples_completions: Callable[[Options], bool] = _always
    needs_reference: Callable[[Options], bool] = _never
    needs_log_sum_sq_probs: Callable[[Options], bool] = _never
    needs_entropy: Callable[[Options], bool] = _never


class CompletionSums:
    """Sums over the tokens of each completion, of float64 values.

    Long completions lose digits in float32, and what is learned is the small difference between two such sums.
    """

    def __init__(self, inputs: LossInputs) -> None:
        assert inputs.completions is not None, "this loss works on completions"
        places = torch.arange(inputs.num_completions + 1, device=inputs.completions.device)
        self._bounds = torch.searchsorted(inputs.completions, places)
        self.lengths = self._bounds.diff().double()

    def of(self, values: Tensor) -> Tensor:
        assert values.dtype == torch.float64
        # Unlike index_add this adds in the same order every time on CUDA too. `unsafe` skips a check that waits for it.
        return torch.segment_reduce(values, "sum", offsets=self._bounds, axis=0, unsafe=True, initial=0)


def nothing_learned(logprobs: Tensor, names: tuple[str, ...]) -> tuple[Tensor, TensorMetrics]:
    """Zero with a graph, so that a rank without data still makes its backward pass."""
    return (logprobs * 0).sum(), {name: logprobs.new_zeros(()) for name in names}
