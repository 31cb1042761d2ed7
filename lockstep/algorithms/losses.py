"""Every loss, in one dict."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.algorithms.loss import Loss, LossFn, LossInputs, TensorMetrics
from lockstep.algorithms.policy_gradient import POLICY_GRADIENT
from lockstep.algorithms.preference import KTO, PREFERENCE
from lockstep.algorithms.token_objectives import TOKEN_OBJECTIVES
from lockstep.types import Datum, LossSpec

__all__ = ["LOSSES", "Loss", "LossFn", "LossInputs", "TensorMetrics", "lacks_reference"]


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    return -(inputs.scale * inputs.weights * logprobs).sum(), {}


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, linear=True),
    "preference": PREFERENCE,
    "kto": KTO,
    "policy_gradient": POLICY_GRADIENT,
    **TOKEN_OBJECTIVES,
}


def lacks_reference(loss: LossSpec, batch: Sequence[Datum]) -> bool:
    """Whether the loss reads the reference's log-probs and the rows do not bring them: the backend computes them."""
    brings = any("reference_logprobs" in c.values for datum in batch for c in datum.completions)
    return LOSSES[loss.kind].needs_reference(loss.options) and not brings
