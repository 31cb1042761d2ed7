"""Policy gradients of sampled answers: GRPO and its variants by options, token by token.

Weights, scale and advantages come with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.algorithms.loss import (
    MAX_EXPONENT,
    CompletionSums,
    Loss,
    LossInputs,
    Options,
    TensorMetrics,
    nothing_learned,
)

FRESH_DIFF, STALE_DIFF = "sampler_trainer_logprob_diff", "stale_logprob_diff"
_METRICS = ("ratio", "clipped_low", "clipped_high", "policy_shift")


@dataclass(frozen=True)
class PolicyGradientOptions:
    """`ratio`: of the probability now to that before this step, of each token or of the whole answer: the geometric
    mean over its tokens (GSPO).

    `objective`: clip is PPO's, cispo weighs log-probs with the clipped ratio as a constant. Ratios are clipped to
    1 - `clip_low` .. 1 + `clip_high`; `dual_clip` also bounds one ratio times a negative advantage.
    `kl`: which estimate of the KL from the reference the loss adds, `kl_coefficient` times.
    `importance_weighting`: weighs with trainer over sampler, of each token or each answer, at most `importance_cap`.
    `on_policy`: nothing was learned from these answers before: the old log-probs are the present ones.
    `stale_apart`: then, sampler and trainer are compared for fresh and for stale tokens separately.
    """

    ratio: Literal["token", "sequence"] = "token"
    objective: Literal["clip", "cispo"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    importance_weighting: Literal["none", "token", "sequence"] = "none"
    importance_cap: float = 2.0
    on_policy: bool = False
    stale_apart: bool = False


def policy_gradient(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    """Values: "advantages", "old_logprobs" (the trainer's before this step, unless on policy), and where options ask
    for them "behaviour_logprobs" (the sampler's; on policy always), "fresh" (1 where the present weights have sampled,
    otherwise 0), "reference_logprobs" and "entropies"."""
    if inputs.num_completions == 0:
        return nothing_learned(logprobs, _metric_names(inputs.options))
    options, sums = PolicyGradientOptions(**inputs.options), CompletionSums(inputs)
    values = {name: value.double() for name, value in inputs.values.items()}
    now, advantages = logprobs.double(), values["advantages"]
    old = now.detach() if options.on_policy else values["old_logprobs"]
    ratio = _ratio(now - old, sums, inputs, options)
    losses = -_objective(ratio, now, advantages, options)
    found = _measure(ratio, now - old, advantages, options)
    if options.on_policy:
        diffs = (old - values["behaviour_logprobs"]).abs()
        if options.stale_apart:
            fresh = values["fresh"] != 0
            found[STALE_DIFF] = diffs.masked_fill(fresh, 0.0).sum()
            diffs = diffs.masked_fill(~fresh, 0.0)
        found[FRESH_DIFF] = diffs.sum()
    if options.importance_weighting != "none":
        correction = _correction(old - values["behaviour_logprobs"], sums, inputs, options)
        losses, found["importance_weight"] = losses * correction, correction.sum()
    if options.kl_coefficient:
        distance = estimate_kl(now, values["reference_logprobs"], options.kl)
        losses, found["kl"] = losses + options.kl_coefficient * distance, distance.detach().sum()
    if options.entropy_coefficient:
        losses = losses - options.entropy_coefficient * values["entropies"]
        found["entropy"] = values["entropies"].detach().sum()
    return (inputs.scale * (inputs.weights.double() * losses).sum()).to(logprobs.dtype), found


def estimate_kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Of each sampled token: Schulman's three estimates of KL(policy, reference)."""
    gained = logprobs - reference
    if kind == "k1":
        return gained
    if kind == "k2":
        return gained.square() / 2
    assert kind == "k3", kind
    return torch.expm1((-gained).clamp(max=MAX_EXPONENT)) + gained


def _ratio(gained: Tensor, sums: CompletionSums, inputs: LossInputs, options: PolicyGradientOptions) -> Tensor:
    """[N]: of a sequence the same for all its tokens."""
    if options.ratio == "sequence":
        gained = _of_own_answer(sums.of(gained) / sums.lengths.clamp(min=1), inputs)
    return gained.clamp(max=MAX_EXPONENT).exp()


def _of_own_answer(values: Tensor, inputs: LossInputs) -> Tensor:
    assert inputs.completions is not None
    return values[inputs.completions]


def _objective(ratio: Tensor, logprobs: Tensor, advantages: Tensor, options: PolicyGradientOptions) -> Tensor:
    """What is to grow."""
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.objective == "cispo":
        return clipped.detach() * advantages * logprobs
    found = torch.minimum(ratio * advantages, clipped * advantages)
    if options.dual_clip is not None:
        found = torch.where(advantages < 0, torch.maximum(found, options.dual_clip * advantages), found)
    return found


def _correction(gap: Tensor, sums: CompletionSums, inputs: LossInputs, options: PolicyGradientOptions) -> Tensor:
    """How much likelier the trainer was to write this than the sampler that did, cut off above. No gradient."""
    if options.importance_weighting == "sequence":
        gap = _of_own_answer(sums.of(gap), inputs)
    return gap.clamp(max=MAX_EXPONENT).exp().clamp(max=options.importance_cap).detach()


def _measure(ratio: Tensor, gained: Tensor, advantages: Tensor, options: PolicyGradientOptions) -> TensorMetrics:
    """Sums over tokens. `moved` estimates how far the policy is from where the step began (k3)."""
    ratio, gained = ratio.detach(), gained.detach()
    low, high = ratio < 1 - options.clip_low, ratio > 1 + options.clip_high
    if options.objective == "clip":  # in the other direction the plain ratio is the smaller one
        low, high = low & (advantages < 0), high & (advantages > 0)
    moved = torch.expm1(gained.clamp(max=MAX_EXPONENT)) - gained
    values = (ratio, low.double(), high.double(), moved)
    return {name: value.sum() for name, value in zip(_METRICS, values, strict=True)}


def _metric_names(options: Options) -> tuple[str, ...]:
    wanted = PolicyGradientOptions(**options)
    extra = {
        FRESH_DIFF: wanted.on_policy,
        STALE_DIFF: wanted.on_policy and wanted.stale_apart,
        "importance_weight": wanted.importance_weighting != "none",
        "kl": wanted.kl_coefficient,
        "entropy": _needs_entropy(options),
    }
    return (*_METRICS, *(name for name, is_there in extra.items() if is_there))


def _needs_reference(options: Options) -> bool:
    return PolicyGradientOptions(**options).kl_coefficient != 0


def _needs_entropy(options: Options) -> bool:
    return PolicyGradientOptions(**options).entropy_coefficient != 0


POLICY_GRADIENT = Loss(
    policy_gradient,
    metrics=_metric_names,
    couples_completions=lambda options: False,
    needs_reference=_needs_reference,
    needs_entropy=_needs_entropy,
)
