"""Losses of preferences: DPO and its variants on pairs, one or several at once, and KTO on labelled answers.

Each formula gives one loss per pair. Lengths are numbers of supervised tokens: `ipo`, `sigmoid_norm`, `simpo` and
`orpo` divide a completion's sum by its own. Names and defaults of options are TRL's where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lockstep.algorithms.loss import (
    MAX_EXPONENT,
    CompletionSums,
    Loss,
    LossInputs,
    Options,
    TensorMetrics,
    nothing_learned,
)
from lockstep.config.algorithm import PREFERENCE_LOSSES, LossTraits

_METRICS = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logprob", "rejected_logprob")
# A probability of 1 has no finite odds. Float32 rounds log-probs closer to 0 than about this.
_MAX_LOG_PROBABILITY = -1e-8


@dataclass(frozen=True)
class PreferenceOptions:
    """`losses`: the weight of each.

    `margin`: how far apart SimPO wants a pair to be (its gamma).
    `cpo_alpha`: weight of the chosen answers' cross-entropy in `cpo`.
    `wpo`: pairs that the policy is unlikely to generate itself weigh less.
    `bco_shift`: `bco_pair` measures rewards from their mean over the batch.
    `ld_alpha`: weight of a token past the shorter answer's length. It reaches the loss as weights of tokens.
    `num_chosen_tokens`: supervised tokens of the chosen answers in the global batch.
    """

    losses: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    divergence_alpha: float = 0.5
    discopop_tau: float = 0.05
    margin: float = 0.5
    cpo_alpha: float = 1.0
    wpo: bool = False
    bco_shift: bool = False
    ld_alpha: float = 1.0
    num_chosen_tokens: float | None = None

    @property
    def traits(self) -> list[LossTraits]:
        return [PREFERENCE_LOSSES[name] for name in self.losses]

    @property
    def needs_reference(self) -> bool:
        return any(loss.reference for loss in self.traits)

    @property
    def is_separable(self) -> bool:
        return all(loss.paired for loss in self.traits) and not (self.bco_shift and "bco_pair" in self.losses)


@dataclass(frozen=True)
class PairSide:
    """The chosen or the rejected answers of all pairs, [P] each.

    `logprob` and `ratio` (to the reference) are weighted sums over tokens; `score` is the ratio under the divergence.
    `plain_logprob` and `length` count every supervised token as 1.
    """

    logprob: Tensor
    ratio: Tensor
    score: Tensor
    plain_logprob: Tensor
    length: Tensor


@dataclass(frozen=True)
class Pairs:
    chosen: PairSide
    rejected: PairSide

    @property
    def score_gap(self) -> Tensor:
        return self.chosen.score - self.rejected.score


def preference(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, TensorMetrics]:
    options = PreferenceOptions(**inputs.options)
    if inputs.num_completions == 0:
        return nothing_learned(logprobs, _metric_names(inputs.options))
    assert inputs.num_completions % 2 == 0, "a pair is two completions"
    sums = CompletionSums(inputs)
    pairs = _gather(sums, logprobs.double(), inputs, options)
    pair_weights = _wpo_weights(sums, logprobs, inputs) if options.wpo else None
    losses = {name: _pair_losses(name, pairs, pair_weights, options, inputs.scale) for name in options.losses}
    total = torch.stack([weight * losses[name].sum() for name, weight in options.losses.items()]).sum()
    return (inputs.scale * total).to(logprobs.dtype), _measure(pairs, losses, options)


def _gather(sums: CompletionSums, logprobs: Tensor, inputs: LossInputs, options: PreferenceOptions) -> Pairs:
    weights = inputs.weights.double()
    logprob, plain_logprob = sums.of(weights * logprobs), sums.of(logprobs)
    ratio = torch.zeros_like(logprob)
    if options.needs_reference:
        ratio = sums.of(weights * (logprobs - inputs.values["reference_logprobs"].double()))
    score = _score(ratio, options)
    length = sums.lengths.clamp(min=1)
    sides = [PairSide(*(x[side::2] for x in (logprob, ratio, score, plain_logprob, length))) for side in (0, 1)]
    return Pairs(*sides)


def _score(ratio: Tensor, options: PreferenceOptions) -> Tensor:
    """f'(t) of the divergence at t = exp(ratio), shifted to 0 where policy and reference agree."""
    if options.divergence == "forward_kl":
        return -torch.expm1((-ratio).clamp(max=MAX_EXPONENT))
    if options.divergence == "js":
        return math.log(2) + logsigmoid(ratio)
    power = options.divergence_alpha - 1
    if options.divergence == "alpha" and abs(power) >= 1e-6:
        return torch.expm1((power * ratio).clamp(max=MAX_EXPONENT)) / power
    return ratio


def _wpo_weights(sums: CompletionSums, logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """[P]: how likely the policy is to generate each pair, relative to its average sample. No gradient."""
    log_weight = sums.of(logprobs.detach().double() - inputs.values["log_sum_sq_probs"].double())
    log_weight = log_weight / sums.lengths.clamp(min=1)
    return torch.exp(log_weight[0::2] + log_weight[1::2])


def _pair_losses(
    name: str, pairs: Pairs, pair_weights: Tensor | None, options: PreferenceOptions, scale: float
) -> Tensor:
    """[P]. WPO weighs comparisons, not the cross-entropy of the chosen answer."""
    losses = torch.zeros_like(pairs.chosen.logprob)
    if name in FORMULAS:
        losses = FORMULAS[name](pairs, options)
        losses = losses if pair_weights is None else losses * pair_weights
    sft_weight = {"sft": 1.0, "orpo": 1.0, "cpo": options.cpo_alpha}.get(name, 0.0)
    if sft_weight == 0:
        return losses
    if options.num_chosen_tokens is None:
        raise ValueError(f"{name} needs the option num_chosen_tokens: the chosen tokens of the global batch")
    # 1 / scale pairs are in the global batch: their mean becomes the mean over its chosen tokens.
    return losses - pairs.chosen.plain_logprob * (sft_weight / (scale * options.num_chosen_tokens))


def _smoothed(margin: Tensor, options: PreferenceOptions) -> Tensor:
    """Logistic loss where a fraction of the labels, `label_smoothing`, is expected to be flipped."""
    wrong = options.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


def _sigmoid(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    return _smoothed(options.beta * pairs.score_gap, options)


def _mean_score_gap(pairs: Pairs) -> Tensor:
    return pairs.chosen.score / pairs.chosen.length - pairs.rejected.score / pairs.rejected.length


def _sigmoid_norm(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    return _smoothed(options.beta * _mean_score_gap(pairs), options)


def _hinge(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    return torch.relu(1 - options.beta * pairs.score_gap)


def _ipo(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    return (_mean_score_gap(pairs) - 1 / (2 * options.beta)) ** 2


def _robust(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    """Unbiased where a fraction of the labels, `label_smoothing`, is known to be flipped."""
    wrong, margin = options.label_smoothing, options.beta * pairs.score_gap
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)


def _exo_pair(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    """KL of the policy's choice from that of an annotator who errs in `label_smoothing` of the cases."""
    wrong, margin = options.label_smoothing, options.beta * pairs.score_gap
    prefers_chosen = torch.sigmoid(margin) * (logsigmoid(margin) - math.log1p(-wrong))
    return prefers_chosen + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(wrong))


def _discopop(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    """Between logistic and exponential loss, the latter as a single exponent, which stays small."""
    margin = options.beta * pairs.score_gap
    mixing = margin / options.discopop_tau
    return torch.exp(logsigmoid(mixing) - margin) - torch.sigmoid(-mixing) * logsigmoid(margin)


def _nca_pair(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _rewards(pairs, options)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _rewards(pairs, options)
    shift = torch.cat([chosen, rejected]).mean().detach() if options.bco_shift else 0.0
    return -logsigmoid(chosen - shift) - logsigmoid(shift - rejected)


def _sppo_hard(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    target = 0.5 / options.beta
    return (pairs.chosen.ratio - target) ** 2 + (pairs.rejected.ratio + target) ** 2


def _apo_zero(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _rewards(pairs, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _rewards(pairs, options)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def _sorted(values: Tensor) -> Tensor:
    return torch.sort(values, stable=True).values


def _aot(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    """Gaps between answers, over the batch, should exceed those of the reference quantile by quantile."""
    gap = pairs.chosen.logprob - pairs.rejected.logprob
    reference_gap = gap - (pairs.chosen.ratio - pairs.rejected.ratio)
    return _smoothed(options.beta * (_sorted(gap) - _sorted(reference_gap.detach())), options)


def _aot_unpaired(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    """Ratios of chosen answers, over the batch, should exceed those of rejected ones quantile by quantile."""
    return _smoothed(options.beta * (_sorted(pairs.chosen.ratio) - _sorted(pairs.rejected.ratio)), options)


def _simpo(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _mean_logprobs(pairs)
    return _smoothed(options.beta * (chosen - rejected) - options.margin, options)


def _cpo(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    return _smoothed(options.beta * (pairs.chosen.logprob - pairs.rejected.logprob), options)


def _orpo(pairs: Pairs, options: PreferenceOptions) -> Tensor:
    chosen, rejected = _mean_logprobs(pairs)
    return -options.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _mean_logprobs(pairs: Pairs) -> tuple[Tensor, Tensor]:
    return pairs.chosen.logprob / pairs.chosen.length, pairs.rejected.logprob / pairs.rejected.length


def _log_odds(logprob: Tensor) -> Tensor:
    logprob = logprob.clamp(max=_MAX_LOG_PROBABILITY)
    return logprob - torch.log(-torch.expm1(logprob))


FORMULAS: dict[str, Callable[[Pairs, PreferenceOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "discopop": _discopop,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "simpo": _simpo,
    "cpo": _cpo,
    "orpo": _orpo,
}


def _rewards(pairs: Pairs, options: PreferenceOptions) -> tuple[Tensor, Tensor]:
    """The implicit rewards of both answers."""
    if options.needs_reference:
        return options.beta * pairs.chosen.ratio, options.beta * pairs.rejected.ratio
    if "simpo" in options.losses or "orpo" in options.losses:
        chosen, rejected = _mean_logprobs(pairs)
        return options.beta * chosen, options.beta * rejected
    return options.beta * pairs.chosen.logprob, options.beta * pairs.rejected.logprob


def _measure(pairs: Pairs, losses: dict[str, Tensor], options: PreferenceOptions) -> TensorMetrics:
    """Sums over pairs. Equal rewards count as wrong."""
    chosen, rejected = _rewards(pairs, options)
    values = (chosen, rejected, chosen - rejected, chosen > rejected, pairs.chosen.logprob, pairs.rejected.logprob)
    metrics = {name: value.detach().double().sum() for name, value in zip(_METRICS, values, strict=True)}
    if len(losses) > 1:
        metrics |= {f"loss_{name}": loss.detach().sum() for name, loss in losses.items()}
    return metrics


def _metric_names(options: Options) -> tuple[str, ...]:
    losses = PreferenceOptions(**options).losses
    return (*_METRICS, *(f"loss_{name}" for name in losses if len(losses) > 1))


PREFERENCE = Loss(
    preference,
    metrics=_metric_names,
    is_separable=lambda options: PreferenceOptions(**options).is_separable,
    needs_reference=lambda options: PreferenceOptions(**options).needs_reference,
    needs_log_sum_sq_probs=lambda options: PreferenceOptions(**options).wpo,
)


@dataclass(frozen=True)
class KtoOptions:
    """`kl`: KL of the policy from the reference, estimated over the global batch; never negative."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0


_KTO_METRICS = (
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
        return nothing_learned(logprobs, _KTO_METRICS)
    options, sums, weights = KtoOptions(**inputs.options), CompletionSums(inputs), inputs.weights.double()
    logprob = sums.of(weights * logprobs.double())
    ratio = sums.of(weights * (logprobs.double() - inputs.values["reference_logprobs"].double()))
    desirable = sums.of(inputs.values["label"].double()) / sums.lengths.clamp(min=1) > 0.5
    losses = torch.where(desirable, *_kto_losses(ratio, options))
    return (inputs.scale * losses.sum()).to(logprobs.dtype), _measure_kto(logprob, ratio, desirable, options)


def _kto_losses(ratio: Tensor, options: KtoOptions) -> tuple[Tensor, Tensor]:
    """(as if desirable, as if not)."""
    origin = options.kl if options.loss == "kto" else 0.0
    reward = options.beta * (ratio - origin)
    return options.desirable_weight * torch.sigmoid(-reward), options.undesirable_weight * torch.sigmoid(reward)


def _measure_kto(logprob: Tensor, ratio: Tensor, desirable: Tensor, options: KtoOptions) -> TensorMetrics:
    """Sums over rows: rewards and log-probs over those of their side, the KL over all."""
    chosen, reward = desirable.double(), options.beta * ratio.detach()
    logprob = logprob.detach()
    sides = [(reward * side, logprob * side, side) for side in (chosen, 1 - chosen)]
    values = (*(column for columns in zip(*sides) for column in columns), torch.full_like(reward, options.kl))
    return {name: value.sum() for name, value in zip(_KTO_METRICS, values, strict=True)}


def _kto_metric_names(options: Options) -> tuple[str, ...]:
    return _KTO_METRICS


KTO = Loss(kto, metrics=_kto_metric_names, needs_reference=lambda options: True)
