"""The parallel section: how ranks share the work. One global batch gives one gradient, whatever is said here."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from lockstep.config.schema import ConfigError, PositiveInt, Section

Degree = PositiveInt | Literal["auto"]
# From the axis whose ranks talk least to the one whose ranks talk most: neighbours in rank share a machine.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
# What FSDP's older interface calls the strategies.
_OLDER_NAMES = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "NO_SHARD": "none", "HYBRID_SHARD": "hybrid"}
_STRATEGIES: dict[str, dict[str, str | int]] = {
    "full": {"shard": "auto", "keep_parameters": False},
    "grad_op": {"shard": "auto", "keep_parameters": True},
    "none": {"replicate": "auto", "shard": 1},
    "hybrid": {"replicate": "auto", "shard": "machine"},
}


class Degrees(NamedTuple):
    """How many ranks each axis has."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """No axis beside the others: groups of so many ranks of `expert_axis`, each with a part of the experts."""

    @property
    def data(self) -> int:
        """Ranks that have rows of their own."""
        return self.replicate * self.shard

    @property
    def expert_axis(self) -> str:
        """The axis of data ranks whose neighbours divide the experts among themselves."""
        return "replicate" if self.shard == 1 else "shard"

    @property
    def replicas(self) -> int:
        """Groups of ranks that can compute without each other."""
        return self.replicate // (self.expert if self.expert_axis == "replicate" else 1)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters; it also sums over replicas of a model that is split otherwise."""
        return self.shard * self.context > 1 or (self.replicate > 1 and self.tensor * self.pipeline * self.expert > 1)

    @property
    def name(self) -> str:
        """For people."""
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(self._fields[:5], self[:5], strict=True) if size > 1)
        return (axes or "one rank") + (f", experts over {self.expert}" if self.expert > 1 else "")

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context


ONE_RANK = Degrees()
_NOT_CHOSEN = {**ONE_RANK._asdict(), "shard": "auto"}


class ParallelConfig(Section):
    backend: Literal["torch", "deepspeed"] = "torch"
    """deepspeed: ZeRO over all ranks instead of the axes below. Needs lockstep[deepspeed]."""
    auto: bool = False
    """parallel: auto is short for this: of all layouts that the model and the ranks allow, the run takes the one with
    the fastest step by its plan (docs/plan.md) when it starts, and keeps it as long as the number of ranks stays."""
    replicate: Degree = 1
    """Copies of the whole model that share each batch (DDP)."""
    shard: Degree | Literal["machine"] = "auto"
    """Ranks over which one copy's parameters, gradients and optimizer are split (FSDP2). auto: all that are left;
    machine: those of one machine. full, grad_op, none and hybrid are short for FSDP's strategies."""
    tensor: PositiveInt = 1
    """Ranks over which each matrix is split."""
    pipeline: PositiveInt = 1
    """Ranks over which the layers are split, in stages."""
    context: PositiveInt = 1
    """Ranks over which the tokens of each micro-batch are split."""
    expert: PositiveInt = 1
    """Ranks over which the experts of a mixture are divided: neighbours among those of shard (of replicate, where shard
    is 1), whose number it must divide. It takes no ranks of its own."""
    keep_parameters: bool = False
    """With shard: keep gathered parameters from forward to backward. Less traffic, more memory."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """With shard: how many layers ahead parameters are gathered."""
    offload: bool = False
    """With shard: keep parameters and optimizer in the CPU's memory, and step there."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """With replicate alone: send gradients in lower precision. The one setting here that changes the numbers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """With pipeline: in which order micro-batches pass through. The last two have two stages on each rank; zero_bubble
    goes with tensor alone, and with model.precision fp32."""
    zero_stage: Literal[1, 2, 3] | None = None
    """With deepspeed: what is split over ranks. Default: what deepspeed_config says, otherwise 3."""
    deepspeed_config: str | None = None
    """With deepspeed: a ds_config.json, for settings that this file does not have."""

    @model_validator(mode="before")
    @classmethod
    def _expand_strategy(cls, section: object) -> object:
        """`shard: grad_op` is short for what it means."""
        section = expand_parallel(section)
        if not isinstance(section, (dict, ParallelConfig)):
            raise ValueError(_refuse_word(str(section)))
        if not isinstance(section, dict) or not isinstance(section.get("shard"), str):
            return section
        name = _OLDER_NAMES.get(section["shard"], section["shard"])
        return {**section, **_STRATEGIES[name]} if name in _STRATEGIES else section

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.replicate == "auto" and self.shard == "auto":
            raise ValueError("replicate and shard cannot both be auto: give one of them a number")
        if self.auto:
            self._check_auto()
        if self.backend == "torch" and (self.zero_stage or self.deepspeed_config):
            raise ValueError("zero_stage and deepspeed_config are for backend deepspeed: set it, or remove them")
        if self.backend == "deepspeed" and self.tensor * self.pipeline * self.context * self.expert > 1:
            raise ValueError("backend deepspeed does not know tensor, pipeline, context and expert: set them to 1")
        if self.compression != "none" and (
            self.shard != 1 or self.tensor * self.pipeline * self.context * self.expert > 1
        ):
            raise ValueError(
                f"compression {self.compression} is for replicate alone: set shard, tensor, pipeline, context and "
                "expert to 1"
            )
        return self

    def check_precision(self, precision: str) -> None:
        """`precision`: that which a run computes in."""
        if self.schedule == "zero_bubble" and self.pipeline > 1 and precision not in ("fp32", "fp64"):
            raise ConfigError(
                f"parallel.schedule zero_bubble does not go with {precision}: torch looks for the gradients of weights "
                "that are computed apart at the narrow copies, and not at the weights; use interleaved, or set "
                "model.precision to fp32"
            )

    def _check_auto(self) -> None:
        if self.backend == "deepspeed":
            raise ValueError("auto is for backend torch: ZeRO is over all ranks in any case")
        given = [axis for axis, size in _NOT_CHOSEN.items() if getattr(self, axis) != size]
        if given and not (isinstance(self.shard, int) and isinstance(self.replicate, int)):
            raise ValueError(f"auto chooses the layout: leave {', '.join(given)} out, or set auto to false")

    def chosen_for(self, num_ranks: int) -> bool:
        """Whether the degrees of `auto` were found for so many ranks."""
        sizes = (self.replicate, self.shard, self.tensor, self.pipeline, self.context)
        return self.auto and math.prod(size if isinstance(size, int) else 0 for size in sizes) == num_ranks

    def degrees(self, num_ranks: int, ranks_per_machine: int | None = None) -> Degrees:
        """The size of every axis, or an error that shows the arithmetic. Of `auto` before it is chosen: all shard."""
        if self.auto and not self.chosen_for(num_ranks):
            return Degrees(shard=num_ranks)
        rest = max(num_ranks // (self.tensor * self.pipeline * self.context), 1)
        fixed_shard = (ranks_per_machine or num_ranks) if self.shard == "machine" else self.shard
        if self.shard == "machine":
            fixed_shard = max(int(fixed_shard) // (self.tensor * self.context), 1)
        replicate = self.replicate if self.replicate != "auto" else max(rest // int(fixed_shard), 1)
        shard = fixed_shard if fixed_shard != "auto" else max(rest // replicate, 1)
        found = Degrees(int(replicate), int(shard), self.tensor, self.pipeline, self.context, self.expert)
        if found.num_ranks != num_ranks:
            others = "".join(
                f" x {axis} {getattr(found, axis)}" for axis in found._fields[2:5] if getattr(found, axis) > 1
            )
            raise ConfigError(
                f"parallel: replicate {replicate} x shard {shard}{others} = {found.num_ranks} ranks, but the run has "
                f"{num_ranks}: change launch.procs (--procs) or one of the degrees"
            )
        if self.schedule == "zero_bubble" and self.pipeline > 1 and found.sharded:
            raise ConfigError(
                "parallel.schedule zero_bubble does not go with shard, context or replicate: FSDP2 would lose "
                "gradients that are computed for weights alone; use interleaved"
            )
        among = getattr(found, found.expert_axis)
        if among % self.expert:
            raise ConfigError(
                f"parallel.expert {self.expert} does not divide the {among} ranks of {found.expert_axis}, which "
                "share the experts: change one of them, or launch.procs (--procs)"
            )
        return found


def _refuse_word(word: str) -> str:
    if _OLDER_NAMES.get(word, word) in _STRATEGIES:
        return f"{word} is a way to shard: write parallel: {{shard: {word}}}"
    return f"{word} is no layout: write auto, which chooses one, or settings such as {{shard: 4, tensor: 2}}"


def expand_parallel(section: object) -> object:
    """`parallel: auto`, also over a layout that was chosen before: it is chosen again."""
    return {"auto": True, "keep_parameters": False, **_NOT_CHOSEN} if section == "auto" else section
