"""Objectives of sampled tokens as callers of an API give them: every token with its own advantage, summed.

Where the run itself samples and learns, see `policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lockstep.algorithms.loss import (
    MAX_EXPONENT,
    CompletionSums,
    Loss,
    LossFn,
    LossInputs,
    TensorMetrics,
    nothing_learned,
)

CLIPS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "gspo": (0.8, 1.2), "cispo": (0.0, 4.0)}
"""Least and largest ratio, unless options or values say otherwise."""
DRO_BETA = 0.05


class _Tokens:
    """One value for each target, in float64."""

    def __init__(self, logprobs: Tensor, inputs: LossInputs) -> None:
        self.inputs = inputs
        self.now = logprobs.double()
        self.advantages = inputs.values["advantages"].double()
        self.gained = self.now - inputs.values["behaviour_logprobs"].double()

    def option(self, name: str, default: float) -> Tensor | float:
        """Of each token where the rows bring it, otherwise of all."""
        if name in self.inputs.values:
            return self.inputs.values[name].double()
        return float(self.inputs.options.get(name, default))

    def clip(self, ratio: Tensor, kind: str) -> Tensor:
        low, high = (
            torch.as_tensor(self.option(name, default), dtype=ratio.dtype, device=ratio.device)
            for name, default in zip(("clip_low_threshold", "clip_high_threshold"), CLIPS[kind], strict=True)
        )
        return ratio.clamp(low, high)


def _ratio(gained: Tensor) -> Tensor:
    return gained.clamp(max=MAX_EXPONENT).exp()


def _importance_sampling(tokens: _Tokens) -> Tensor:
    return _ratio(tokens.gained) * tokens.advantages


def _ppo(tokens: _Tokens) -> Tensor:
    ratio = _ratio(tokens.gained)
    return torch.minimum(ratio * tokens.advantages, tokens.clip(ratio, "ppo") * tokens.advantages)


def _cispo(tokens: _Tokens) -> Tensor:
    return tokens.clip(_ratio(tokens.gained), "cispo").detach() * tokens.now * tokens.advantages


def _dro(tokens: _Tokens) -> Tensor:
    return tokens.now * tokens.advantages - 0.5 * tokens.option("beta", DRO_BETA) * tokens.gained.square()


def _gspo(tokens: _Tokens) -> Tensor:
    """Every token has the ratio of its sequence, over the tokens that are marked, with a gradient of its own."""
    inputs = tokens.inputs
    assert inputs.completions is not None
    sums, marked = CompletionSums(inputs), (inputs.values["sequence_ratio_mask"] != 0).double()
    mean = sums.of(tokens.gained.detach() * marked) / sums.of(marked).clamp(min=1)
    ratio = _ratio(mean[inputs.completions] + tokens.now - tokens.now.detach())
    return torch.minimum(ratio * tokens.advantages, tokens.clip(ratio, "gspo") * tokens.advantages)


def _loss(objective: Callable[[_Tokens], Tensor]) -> Loss:
    def compute(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
        if inputs.num_completions == 0:
            return nothing_learned(logprobs, ())
        total = (inputs.weights.double() * objective(_Tokens(logprobs, inputs))).sum()
        return (-inputs.scale * total).to(logprobs.dtype), {}

    fn: LossFn = compute
    return Loss(fn, couples_completions=lambda options: False)


TOKEN_OBJECTIVES: dict[str, Loss] = {
    "importance_sampling": _loss(_importance_sampling),
    "ppo": _loss(_ppo),
    "cispo": _loss(_cispo),
    "dro": _loss(_dro),
    "gspo": _loss(_gspo),
}
"""Values: "advantages", "behaviour_logprobs" (the sampler's); gspo also "sequence_ratio_mask"; thresholds may be given
for each token. Options: clip_low_threshold, clip_high_threshold; dro: beta."""
