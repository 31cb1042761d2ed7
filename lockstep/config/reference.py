"""Where the log-probs of a reference come from: one choice, which the run makes and its plan expects."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.algorithm import DpoConfig, KtoConfig, ReferenceKind, SftConfig
from lockstep.config.grpo import GrpoConfig
from lockstep.config.sections import RunConfig


@dataclass(frozen=True)
class ReferenceChoice:
    """Where the reference's log-probs come from. Made once; `why` completes a sentence for the user."""

    kind: ReferenceKind
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def choose_reference(config: RunConfig, *, num_rows: int, num_seen: int) -> ReferenceChoice:
    """`num_seen`: how many training rows the steps of the run take, each counted as often as it comes."""
    algorithm = config.algorithm
    if isinstance(algorithm, SftConfig):
        return ReferenceChoice("none", "sft has none")
    if isinstance(algorithm, GrpoConfig):
        return _choose_for_samples(config, algorithm)
    if not algorithm.needs_reference:
        return ReferenceChoice("none", f"loss {', '.join(algorithm.loss)} has none")
    if algorithm.reference_model is not None:
        return ReferenceChoice("precomputed", "another model is computed once, and not held beside the one in training")
    if algorithm.reference != "auto":
        return ReferenceChoice(algorithm.reference, "as configured")
    if algorithm.reference_sync_steps is not None:
        return ReferenceChoice("copy", "only a copy can follow the model in training")
    if config.lora is not None and config.lora.init == "pissa":
        return ReferenceChoice("copy", "with lora.init pissa the model without its adapters is not the base")
    if config.lora is not None:
        return ReferenceChoice("adapter_off", "the model without its adapters is the reference, at no memory")
    return _choose_for_full(config, algorithm, num_rows, num_seen)


def _choose_for_samples(config: RunConfig, algorithm: GrpoConfig) -> ReferenceChoice:
    if not algorithm.needs_reference:
        return ReferenceChoice("none", "kl_coefficient is 0")
    if algorithm.reference != "auto":
        return ReferenceChoice(algorithm.reference, "as configured")
    if config.lora is not None and config.lora.init != "pissa" and algorithm.reference_sync_steps is None:
        return ReferenceChoice("adapter_off", "the model without its adapters is the reference, at no memory")
    return ReferenceChoice("copy", "answers are new in every step, so nothing can be computed ahead")


def _choose_for_full(
    config: RunConfig, algorithm: DpoConfig | KtoConfig, num_rows: int, num_seen: int
) -> ReferenceChoice:
    if estimates_kl(algorithm):
        return ReferenceChoice("copy", "loss kto puts prompts and answers together anew in every batch")
    if num_seen < num_rows and config.parallel.backend == "torch":
        why = f"the run takes {num_seen:,} of {num_rows:,} training rows, so computing all of them first would be waste"
        return ReferenceChoice("copy", why)
    return ReferenceChoice("precomputed", "every row once and kept on disk, without a second copy of the weights")


def estimates_kl(algorithm: DpoConfig | KtoConfig) -> bool:
    """Whether the loss needs an estimate of the KL from the reference over each batch."""
    return algorithm.kind == "kto" and algorithm.loss == "kto"
