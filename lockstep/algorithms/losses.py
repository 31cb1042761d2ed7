"""Every loss, in one dict: log-probs of supervised tokens in, a sum and its metrics out.

Losses are sums, never means: `inputs.weights` already carry the normalisation of the global batch.
Must not know models, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

TensorMetrics = dict[str, Tensor]


@dataclass(frozen=True)
class LossInputs:
    """One value per supervised token of the micro-batch, in order."""

    weights: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)


LossFn = Callable[[Tensor, LossInputs], tuple[Tensor, TensorMetrics]]


@dataclass(frozen=True)
class Loss:
    """`linear`: the loss is -sum(weights * logprobs), so its gradient is known before the forward pass.

    `metrics` are the names that `fn` gives: ranks that do not compute the loss must know them too.
    """

    fn: LossFn
    linear: bool = False
    metrics: tuple[str, ...] = ()


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    return -(inputs.weights * logprobs).sum(), {}


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, linear=True),
}
