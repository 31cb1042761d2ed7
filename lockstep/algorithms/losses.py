"""Every loss, in one dict. Must not know models, batches or ranks."""

from __future__ import annotations

from torch import Tensor

from lockstep.algorithms.loss import Loss, LossFn, LossInputs, TensorMetrics
from lockstep.algorithms.options import check_options
from lockstep.algorithms.policy_gradient import POLICY_GRADIENT
from lockstep.algorithms.preference import KTO, PREFERENCE

__all__ = ["LOSSES", "Loss", "LossFn", "LossInputs", "TensorMetrics", "check_options"]


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    return -(inputs.scale * inputs.weights * logprobs).sum(), {}


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, linear=True),
    "preference": PREFERENCE,
    "kto": KTO,
    "policy_gradient": POLICY_GRADIENT,
}
