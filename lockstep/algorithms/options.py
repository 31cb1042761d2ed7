"""What the losses can be told, and what is nonsense: settings, defaults and checks, before anything is loaded.

Names and defaults are those of TRL where it has them. Must not know torch: a configuration is checked with this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.config.algorithm import PREFERENCE_LOSSES, LossTraits, check_loss_settings

Options = Mapping[str, Any]


DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
KTO_LOSSES = ("kto", "apo_zero_unpaired")
RATIOS = ("token", "sequence")
OBJECTIVES = ("clip", "cispo")
KL_ESTIMATES = ("k1", "k2", "k3")
IMPORTANCE_WEIGHTINGS = ("none", "token", "sequence")


@dataclass(frozen=True)
class PreferenceOptions:
    """`losses`: how much each part counts.

    `margin`: how far apart SimPO wants a pair to be (its gamma).
    `cpo_alpha`: how much the chosen answers' own cross-entropy counts in `cpo`.
    `wpo`: pairs that the policy would hardly write itself count less.
    `bco_shift`: `bco_pair` measures rewards from their mean over the batch.
    `ld_alpha`: what a token past the shorter answer's length counts. It reaches the loss as weights of tokens.
    `num_chosen_tokens`: supervised tokens of the chosen answers in the global batch.
    """

    losses: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: str = "reverse_kl"
    divergence_alpha: float = 0.5
    discopop_tau: float = 0.05
    margin: float = 0.5
    cpo_alpha: float = 1.0
    wpo: bool = False
    bco_shift: bool = False
    ld_alpha: float = 1.0
    num_chosen_tokens: float | None = None

    @property
    def parts(self) -> list[LossTraits]:
        return [PREFERENCE_LOSSES[name] for name in self.losses]

    @property
    def needs_reference(self) -> bool:
        return any(part.reference for part in self.parts)

    @property
    def is_separable(self) -> bool:
        return all(part.paired for part in self.parts) and not (self.bco_shift and "bco_pair" in self.losses)


@dataclass(frozen=True)
class KtoOptions:
    """`kl`: how far the policy is from the reference, estimated over the global batch and never negative."""

    loss: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0


@dataclass(frozen=True)
class PolicyGradientOptions:
    """`ratio`: how likely now over how likely before this step, of each token or of the whole answer: the geometric
    mean over its tokens (GSPO).

    `objective`: clip is PPO's, cispo weighs log-probs with the clipped ratio as a constant. Ratios are clipped to
    1 - `clip_low` .. 1 + `clip_high`; `dual_clip` also bounds what one ratio times a negative advantage may cost.
    `kl`: which estimate of the distance from the reference the loss adds, `kl_coefficient` times.
    `importance_weighting`: weighs with trainer over sampler, of each token or each answer, at most `importance_cap`.
    `on_policy`: nothing was learned from these answers before, so that how likely they were is how likely they are.
    """

    ratio: str = "token"
    objective: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    importance_weighting: str = "none"
    importance_cap: float = 2.0
    on_policy: bool = False


def check_options(kind: str, options: Options) -> None:
    """Raise ValueError, with the name of the option, for what no loss of this kind can mean."""
    if kind == "preference":
        check_preference(_read(PreferenceOptions, kind, options))
    elif kind == "kto":
        check_kto(_read(KtoOptions, kind, options))
    elif kind == "policy_gradient":
        check_policy_gradient(_read(PolicyGradientOptions, kind, options))
    elif kind != "cross_entropy":
        raise ValueError(f"unknown loss {kind!r}: known are cross_entropy, preference, kto, policy_gradient")
    elif options:
        raise ValueError(f"{_first(options)}: cross_entropy has no options")


def _read(shape: Any, kind: str, options: Options) -> Any:
    known = [f.name for f in fields(shape)]
    for name in options:
        if name not in known:
            raise ValueError(f"{name}: {kind} has no such option; it has {', '.join(known)}")
    return shape(**options)


def check_preference(options: PreferenceOptions) -> None:
    _check_losses(options.losses)
    _check_number("beta", options.beta, above=0)
    _check_number("label_smoothing", options.label_smoothing, least=0, below=0.5)
    _check_choice("divergence", options.divergence, DIVERGENCES)
    _check_number("divergence_alpha", options.divergence_alpha)
    _check_number("discopop_tau", options.discopop_tau, above=0)
    _check_number("margin", options.margin, least=0)
    _check_number("cpo_alpha", options.cpo_alpha, least=0)
    _check_number("ld_alpha", options.ld_alpha, least=0, most=1)
    if options.num_chosen_tokens is not None:
        _check_number("num_chosen_tokens", options.num_chosen_tokens, above=0)
    check_loss_settings(
        options.losses,
        label_smoothing=options.label_smoothing,
        divergence=options.divergence,
        wpo=options.wpo,
        bco_shift=options.bco_shift,
        ld_alpha=options.ld_alpha,
    )


def check_kto(options: KtoOptions) -> None:
    _check_choice("loss", options.loss, KTO_LOSSES)
    _check_number("beta", options.beta, above=0)
    _check_number("desirable_weight", options.desirable_weight, least=0)
    _check_number("undesirable_weight", options.undesirable_weight, least=0)
    if options.desirable_weight == options.undesirable_weight == 0:
        raise ValueError("desirable_weight: both weights are 0, nothing would be learned")
    _check_number("kl", options.kl, least=0)


def check_policy_gradient(options: PolicyGradientOptions) -> None:
    _check_choice("ratio", options.ratio, RATIOS)
    _check_choice("objective", options.objective, OBJECTIVES)
    _check_number("clip_low", options.clip_low, least=0, most=1)
    _check_number("clip_high", options.clip_high, least=0)
    _check_choice("kl", options.kl, KL_ESTIMATES)
    _check_number("kl_coefficient", options.kl_coefficient, least=0)
    _check_number("entropy_coefficient", options.entropy_coefficient)
    _check_choice("importance_weighting", options.importance_weighting, IMPORTANCE_WEIGHTINGS)
    _check_number("importance_cap", options.importance_cap, above=0)
    if options.dual_clip is not None:
        _check_number("dual_clip", options.dual_clip, above=1)
        if options.objective != "clip":
            raise ValueError(f"dual_clip: it belongs to the objective clip, and this is {options.objective}")


def _check_losses(losses: Any) -> None:
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(f"losses: write each loss with its weight, such as {{sigmoid: 1.0}}, not {losses!r}")
    for name, weight in losses.items():
        if name not in PREFERENCE_LOSSES:
            raise ValueError(f"losses: unknown loss {name!r}; known are {', '.join(PREFERENCE_LOSSES)}")
        _check_number(f"losses.{name}", weight, least=0)
    if not any(losses.values()):
        raise ValueError("losses: every weight is 0, nothing would be learned")


def _check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: must be a number, not {value!r}")
    limits = {"at least": least, "above": above, "at most": most, "below": below}
    if not (least <= value <= most and above < value < below):
        wanted = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
        raise ValueError(f"{name}: must be {wanted}, not {value!r}")


def _check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: must be one of {', '.join(known)}, not {value!r}")


def _first(options: Options) -> str:
    return next(iter(options))
