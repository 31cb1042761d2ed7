"""The algorithm section: what is learned from the data. One class for each kind, with the settings that it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.grpo import SHORT_GRPO, GrpoConfig, as_rewards
from lockstep.config.renames import rename_keys
from lockstep.config.schema import NonNegative, Positive, PositiveInt, Section, Share

PreferenceLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
    "simpo",
    "orpo",
    "cpo",
]


@dataclass(frozen=True)
class LossTraits:
    """What is true of one preference loss, whatever the settings.

    `scored`: it depends on the difference of both log-ratios alone, so other divergences than reverse KL fit it.
    `smoothed`: it uses `label_smoothing`.
    `paired`: the loss of a pair depends on that pair alone; otherwise on the order statistics of the whole batch.
    `counted`: it uses the number of supervised tokens, or each of them with weight 1.
    """

    reference: bool = True
    scored: bool = False
    smoothed: bool = False
    paired: bool = True
    counted: bool = False


PREFERENCE_LOSSES: dict[str, LossTraits] = {
    "sigmoid": LossTraits(scored=True, smoothed=True),
    "sigmoid_norm": LossTraits(scored=True, smoothed=True, counted=True),
    "hinge": LossTraits(scored=True),
    "ipo": LossTraits(scored=True, counted=True),
    "robust": LossTraits(scored=True, smoothed=True),
    "exo_pair": LossTraits(scored=True, smoothed=True),
    "discopop": LossTraits(scored=True),
    "nca_pair": LossTraits(),
    "bco_pair": LossTraits(),
    "sppo_hard": LossTraits(),
    "apo_zero": LossTraits(),
    "apo_down": LossTraits(),
    "aot": LossTraits(smoothed=True, paired=False),
    "aot_unpaired": LossTraits(smoothed=True, paired=False),
    "sft": LossTraits(reference=False, counted=True),
    "simpo": LossTraits(reference=False, smoothed=True, counted=True),
    "orpo": LossTraits(reference=False, counted=True),
    "cpo": LossTraits(reference=False, smoothed=True, counted=True),
}


def check_loss_settings(
    losses: Collection[str], *, label_smoothing: float, divergence: str, wpo: bool, bco_shift: bool, ld_alpha: float
) -> None:
    """Raise ValueError, with the name of the setting, for settings of preference losses that are sound alone and not
    together, or that would change nothing."""
    traits = {name: PREFERENCE_LOSSES[name] for name in losses}
    unpaired = [name for name, loss in traits.items() if not loss.paired]
    if wpo and unpaired:
        raise ValueError(f"wpo: {unpaired[0]} sorts the batch, so its losses belong to no pair that could be weighted")
    if wpo and set(traits) == {"sft"}:
        raise ValueError("wpo: it weighs pairs, and sft compares none")
    if "exo_pair" in traits and label_smoothing == 0:
        raise ValueError("label_smoothing: exo_pair needs more than 0; its paper recommends 0.001")
    if label_smoothing > 0 and not any(loss.smoothed for loss in traits.values()):
        raise ValueError(f"label_smoothing: it changes nothing in {', '.join(traits)}")
    if divergence != "reverse_kl":
        for name, loss in traits.items():
            if loss.reference and not loss.scored:
                raise ValueError(f"divergence: {name} is defined for reverse_kl only, not {divergence}")
        if not any(loss.scored for loss in traits.values()):
            raise ValueError(f"divergence: it changes nothing in {', '.join(traits)}, which has no reference")
    if bco_shift and "bco_pair" not in traits:
        raise ValueError("bco_shift: it belongs to bco_pair, which is not among the losses")
    counted = [name for name, loss in traits.items() if loss.counted] + ["wpo"] * wpo
    if ld_alpha == 0 and counted:
        # Tokens of weight 0 are never computed, and these losses would have to count them.
        raise ValueError(f"ld_alpha: 0 leaves tokens out that {counted[0]} counts; take a small number such as 0.001")


# Kinds that are short for another with some settings, with the numbers of its paper where they are far from ours.
SHORT_KINDS: dict[str, dict[str, str | float]] = {
    "simpo": {"kind": "dpo", "loss": "simpo", "beta": 2.0, "margin": 1.0},
    "orpo": {"kind": "dpo", "loss": "orpo"},
    "cpo": {"kind": "dpo", "loss": "cpo"},
    **SHORT_GRPO,
}
# Settings that only one loss reads: beside any other they would do nothing, and say nothing.
_OF_ONE_LOSS = {"margin": "simpo", "cpo_alpha": "cpo", "discopop_tau": "discopop", "bco_shift": "bco_pair"}
ReferenceKind = Literal["adapter_off", "precomputed", "copy", "none"]


class SftConfig(Section):
    kind: Literal["sft"] = "sft"
    """sft: supervised fine-tuning."""

    @property
    def needs_reference(self) -> bool:
        return False


class _ReferencedConfig(Section):
    """What the algorithms share that compare the model in training with a reference."""

    kind: Literal["dpo", "kto"]
    loss: Any
    beta: Positive = 0.1
    """Strength of the penalty for leaving the reference: lower lets the model move further. Also scales rewards and
    margins."""
    reference: Literal["auto"] | ReferenceKind = "auto"
    """Where the reference's log-probs come from. adapter_off: from the model itself without its LoRA adapters.
    precomputed: computed once before the first step and kept on disk. copy: from a frozen second copy of the weights.
    none: for losses without one. auto: the cheapest that is right; the run says which, and why."""
    reference_model: str | None = None
    """Another model as the reference: a folder or a Hub id with the same vocabulary. Always precomputed. Default: the
    model as it was before training."""
    reference_sync_steps: PositiveInt | None = None
    """Move the reference towards the model in training every so many steps. null: never."""
    reference_mix: Share = 0.6
    """Weight of the model in training in each such move: 1 replaces the reference."""

    @property
    def needs_reference(self) -> bool:
        return True

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if self.reference_model is not None and self.reference not in ("auto", "precomputed"):
            raise ValueError(
                f"algorithm.reference {self.reference} does not go with reference_model, which is always precomputed: "
                "remove one of them"
            )
        if self.reference_sync_steps is not None:
            if self.reference_model is not None:
                raise ValueError("algorithm.reference_sync_steps cannot move another reference_model: remove one")
            if self.reference not in ("auto", "copy"):
                raise ValueError(
                    f"algorithm.reference_sync_steps needs a reference that can move: set reference to copy, not "
                    f"{self.reference}"
                )
        return self


def _as_weights(value: object) -> object:
    """`sigmoid`, `[sigmoid, sft]` and `{sigmoid: 1.0, sft: 0.2}` are all losses with their weights."""
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return dict.fromkeys(value, 1.0)
    return value


class DpoConfig(_ReferencedConfig):
    kind: Literal["dpo"]
    """dpo: learns from pairs which of two answers is better. simpo, orpo and cpo are short for dpo with that loss
    (simpo also with beta 2.0 and margin 1.0)."""
    loss: Annotated[dict[PreferenceLoss, Positive], BeforeValidator(_as_weights)] = Field(
        {"sigmoid": 1.0}, min_length=1
    )
    """One of sigmoid, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero,
    apo_down, discopop, sigmoid_norm; without a reference simpo, orpo, cpo, sft. Several: a list, or a mapping with
    weights like {sigmoid: 1.0, sft: 0.2}."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs in the wrong order. Not every loss uses it; exo_pair needs more than 0."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """How the distance from the reference is measured."""
    divergence_alpha: Positive = 0.5
    """The alpha of divergence alpha."""
    ld_alpha: Share = 1.0
    """Length desensitisation: weight of the tokens by which one answer is longer than the other. 1: as all others."""
    wpo: bool = False
    """Weigh each pair by its probability under the model in training."""
    discopop_tau: Positive = 0.05
    """For loss discopop: the temperature of the blend of its two parts."""
    margin: NonNegative = 0.5
    """For loss simpo: how much better the preferred answer should be."""
    cpo_alpha: NonNegative = 1.0
    """For loss cpo: weight of the cross-entropy of the preferred answer."""
    bco_shift: bool = False
    """For loss bco_pair: compare rewards with the mean of the whole batch, as in its paper."""

    @property
    def needs_reference(self) -> bool:
        return any(PREFERENCE_LOSSES[name].reference for name in self.loss)

    @model_validator(mode="after")
    def _applies(self) -> Self:
        for key, loss in _OF_ONE_LOSS.items():
            if loss not in self.loss and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"algorithm.{key} is for loss {loss}, and this is {', '.join(self.loss)}: remove it")
        if self.divergence != "alpha" and self.divergence_alpha != type(self).model_fields["divergence_alpha"].default:
            raise ValueError(f"algorithm.divergence_alpha is for divergence alpha, and this is {self.divergence}")
        try:
            check_loss_settings(
                self.loss,
                label_smoothing=self.label_smoothing,
                divergence=self.divergence,
                wpo=self.wpo,
                bco_shift=self.bco_shift,
                ld_alpha=self.ld_alpha,
            )
        except ValueError as error:
            raise ValueError(f"algorithm.{error}") from error
        if self.needs_reference:
            if self.reference == "none":
                raise ValueError(f"algorithm.reference is none, but loss {', '.join(self.loss)} needs one: set auto")
            return self
        for key in ("reference", "reference_model", "reference_sync_steps"):
            if getattr(self, key) not in ("auto", "none", None):
                raise ValueError(
                    f"algorithm.{key} is given, but loss {', '.join(self.loss)} has no reference: remove it"
                )
        return self


class KtoConfig(_ReferencedConfig):
    kind: Literal["kto"]
    """kto: learns from single answers with a label, good or bad."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto compares with an estimate of how far the model is from its reference; apo_zero_unpaired does not."""
    desirable_weight: Positive = 1.0
    """Weight of a good answer."""
    undesirable_weight: Positive = 1.0
    """Weight of a bad answer. Raise it, or desirable_weight, where one label is much rarer than the other."""

    @model_validator(mode="after")
    def _applies(self) -> Self:
        if self.reference == "none":
            raise ValueError("algorithm.reference is none, but kto needs one: set auto")
        if self.loss == "kto" and (self.reference == "precomputed" or self.reference_model is not None):
            key = "reference_model" if self.reference_model is not None else "reference precomputed"
            raise ValueError(
                f"algorithm.{key} does not go with loss kto, which puts prompts and answers together anew in every "
                "batch: set reference to adapter_off or copy, or loss to apo_zero_unpaired"
            )
        return self


def expand_algorithm(section: Any) -> object:
    """`dpo` is short for `{kind: dpo}`, kind simpo for dpo with that loss; without a kind it is sft."""
    if isinstance(section, str):
        section = {"kind": section}
    if not isinstance(section, Mapping):
        return section
    section = rename_keys(section)
    kind = section.get("kind", "sft")
    if isinstance(kind, str) and kind in SHORT_KINDS:
        short = SHORT_KINDS[kind]
        if "loss" in short and section.get("loss", short["loss"]) != short["loss"]:
            raise ValueError(f"algorithm.loss is {section['loss']}, and kind {kind} already names one: use kind dpo")
        section, kind = {**short, **section}, short["kind"]
    rewards = {"reward": as_rewards(section["reward"])} if kind == "grpo" and "reward" in section else {}
    return {**section, **rewards, "kind": kind}


AlgorithmConfig = Annotated[
    SftConfig | DpoConfig | KtoConfig | GrpoConfig, Field(discriminator="kind"), BeforeValidator(expand_algorithm)
]
KINDS: dict[str, type[Section]] = {"sft": SftConfig, "dpo": DpoConfig, "kto": KtoConfig, "grpo": GrpoConfig}
