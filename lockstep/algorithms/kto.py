"""KTO: answers that are wanted or not, one to a datum, against how far the policy is from its reference altogether.

That distance comes as a number for the global batch, so a datum's loss depends on nothing else in it.
Must not know models, batches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.loss import CompletionSums, Loss, LossInputs, Options, TensorMetrics, nothing_learned
from lockstep.algorithms.options import KtoOptions

_METRICS = (
    "chosen_reward",
    "rejected_reward",
    "chosen_logprob",
    "rejected_logprob",
    "num_chosen",
    "num_rejected",
    "kl",
)


def kto(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    if inputs.num_completions == 0:
        return nothing_learned(logprobs, _METRICS)
    options, sums, weights = KtoOptions(**inputs.options), CompletionSums(inputs), inputs.weights.double()
    logprob = sums.of(weights * logprobs.double())
    ratio = sums.of(weights * (logprobs.double() - inputs.values["reference_logprobs"].double()))
    wanted = sums.of(inputs.values["label"].double()) / sums.lengths.clamp(min=1) > 0.5
    losses = torch.where(wanted, *_losses(ratio, options))
    return (inputs.scale * losses.sum()).to(logprobs.dtype), _measure(logprob, ratio, wanted, options)


def _losses(ratio: Tensor, options: KtoOptions) -> tuple[Tensor, Tensor]:
    """(were it wanted, were it not)."""
    origin = options.kl if options.loss == "kto" else 0.0
    reward = options.beta * (ratio - origin)
    return options.desirable_weight * torch.sigmoid(-reward), options.undesirable_weight * torch.sigmoid(reward)


def _measure(logprob: Tensor, ratio: Tensor, wanted: Tensor, options: KtoOptions) -> TensorMetrics:
    """Sums over rows: rewards and log-probs over those of their side, the distance over all."""
    chosen, reward = wanted.double(), options.beta * ratio.detach()
    logprob = logprob.detach()
    sides = [(reward * side, logprob * side, side) for side in (chosen, 1 - chosen)]
    values = (*(column for columns in zip(*sides) for column in columns), torch.full_like(reward, options.kl))
    return {name: value.sum() for name, value in zip(_METRICS, values, strict=True)}


def _metric_names(options: Options) -> tuple[str, ...]:
    return _METRICS


KTO = Loss(kto, metrics=_metric_names, needs_reference=lambda options: True)
