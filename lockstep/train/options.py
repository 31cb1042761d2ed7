"""From the algorithm section to the options of its loss."""

from __future__ import annotations

from typing import Any

from lockstep.config import DpoConfig, GrpoConfig, KtoConfig

_SHARED = (
    "beta",
    "label_smoothing",
    "divergence",
    "divergence_alpha",
    "discopop_tau",
    "margin",
    "cpo_alpha",
    "wpo",
    "bco_shift",
    "ld_alpha",
)


def pair_options(algorithm: DpoConfig, num_chosen_tokens: float | None = None) -> dict[str, Any]:
    """`num_chosen_tokens`: supervised tokens of the preferred answers in the global batch."""
    options: dict[str, Any] = {name: getattr(algorithm, name) for name in _SHARED}
    return {**options, "losses": dict(algorithm.loss), "num_chosen_tokens": num_chosen_tokens}


def label_options(algorithm: KtoConfig, kl: float = 0.0) -> dict[str, Any]:
    """`kl`: how far the model is from its reference, estimated over the global batch."""
    names = ("loss", "beta", "desirable_weight", "undesirable_weight")
    return {**{name: getattr(algorithm, name) for name in names}, "kl": kl}


def policy_options(algorithm: GrpoConfig, *, on_policy: bool = False) -> dict[str, Any]:
    """A distance that counts in the reward is none of the loss's business. `on_policy`: see PolicyGradientOptions."""
    names = ("ratio", "objective", "clip_low", "clip_high", "dual_clip", "kl", "entropy_coefficient")
    options = {name: getattr(algorithm, name) for name in (*names, "importance_weighting", "importance_cap")}
    kl_coefficient = algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0
    return {**options, "kl_coefficient": kl_coefficient, "on_policy": on_policy}


def estimates_kl(algorithm: DpoConfig | KtoConfig) -> bool:
    return algorithm.kind == "kto" and algorithm.loss == "kto"
