"""Which layouts are verified: their names, how they are written, and which fit the model and this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from lockstep.config import ConfigError, ParallelConfig, RunConfig
from lockstep.config.parallel import Degrees

_STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
_OWN = "own"
_NOT_HERE = ("compression", "auto")  # settings that name no layout
_MOST_FOR_OWN = 8  # processes: the configuration's own layout may overload a small machine for a few seconds
# The default set, in the order in which it is shown; of it, what fits.
_USUAL = (
    "replicate=2; shard=2; tensor=2; context=2; pipeline=2; pipeline=2,schedule=interleaved; "
    "shard=4; replicate=2,shard=2; shard=2,tensor=2; shard=2,context=2; shard=2,pipeline=2; tensor=2,pipeline=2"
)
_OF_MIXTURES = "; shard=2,expert=2; shard=4,expert=2; shard=2,expert=2,tensor=2; shard=2,expert=2,pipeline=2"


@dataclass(frozen=True)
class Layout:
    """The size of every axis, in numbers, and the settings that go with them."""

    parallel: ParallelConfig

    @property
    def degrees(self) -> Degrees:
        return Degrees(**{axis: getattr(self.parallel, axis) for axis in Degrees._fields})

    @property
    def name(self) -> str:
        settings: list[str] = [self.parallel.schedule] if self.parallel.pipeline > 1 else []
        for key, default in ParallelConfig(shard=1).model_dump().items():
            value = getattr(self.parallel, key)
            if key not in (*Degrees._fields, "schedule") and value != default:
                settings.append(key if value is True else f"{key} {value}")
        return self.degrees.name + (f" ({', '.join(settings)})" if settings else "")

    @property
    def num_stages(self) -> int:
        pipeline = self.parallel.pipeline
        return pipeline * _STAGES_PER_RANK[self.parallel.schedule] if pipeline > 1 else 1

    def with_degrees(self, degrees: Degrees) -> Layout:
        return Layout(self.parallel.model_copy(update=degrees._asdict()))


ONE = Layout(ParallelConfig(shard=1))


@dataclass(frozen=True)
class ModelLimits:
    """What the user's model supports. The `not_` are reasons why not, or empty."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    not_tensor: str = ""
    not_pipeline: str = ""
    not_context: str = ""
    not_expert: str = ""
    num_experts: int = 0
    """The least that a layer has; 0 of a model that is no mixture."""


def problem(layout: Layout, limits: ModelLimits) -> str:
    """Why the model does not support this layout; empty if it does."""
    degrees = layout.degrees
    if degrees.expert > 1 and not limits.num_experts:
        return "the model has no experts in stacked matrices to divide over ranks"
    if degrees.expert * degrees.tensor > 1 and limits.not_expert:
        return limits.not_expert
    if limits.num_experts % (degrees.expert * degrees.tensor):
        ranks = " x ".join(f"parallel.{key} {getattr(degrees, key)}" for key in ("expert", "tensor"))
        return f"{ranks} does not divide the model's {limits.num_experts} experts"
    if degrees.tensor > 1 and limits.not_tensor:
        return limits.not_tensor
    for heads, what in ((limits.num_heads, "attention"), (limits.num_key_value_heads, "key-value")):
        if heads % degrees.tensor:
            return f"parallel.tensor {degrees.tensor} does not divide the model's {heads} {what} heads"
    if degrees.pipeline > 1 and limits.not_pipeline:
        return limits.not_pipeline
    if layout.num_stages > limits.num_layers:
        return f"{layout.num_stages} stages need as many layers, and the model has {limits.num_layers}"
    if degrees.context > 1 and limits.not_context:
        return limits.not_context
    if (limits.num_heads // degrees.tensor) % degrees.context:
        return f"parallel.context {degrees.context} does not divide the model's {limits.num_heads} attention heads"
    return ""


def parse_layouts(text: str, config: RunConfig) -> list[Layout]:
    """`shard=2,tensor=2; pipeline=2,schedule=interleaved`; `own` is the configuration's."""
    layouts = [_parse(part.strip(), config) for part in text.split(";") if part.strip()]
    if not layouts:
        raise ConfigError("--layouts names none: write for example --layouts 'shard=2,tensor=2; pipeline=2'")
    return list(dict.fromkeys(layouts))


def _parse(text: str, config: RunConfig) -> Layout:
    if text == _OWN:
        return own_layout(config)
    settings: dict[str, Any] = {"shard": 1}
    for setting in text.split(","):
        key, equals, value = setting.partition("=")
        if not equals or key.strip() not in ParallelConfig.model_fields or key.strip() in _NOT_HERE:
            known = ", ".join(key for key in ParallelConfig.model_fields if key not in _NOT_HERE)
            raise ConfigError(f"--layouts: {setting.strip()!r} is not understood: write KEY=VALUE, of {known}")
        settings[key.strip()] = yaml.safe_load(value)
    for axis in Degrees._fields:
        if axis in settings and not (type(settings[axis]) is int and settings[axis] > 0):
            raise ConfigError(f"--layouts: {axis} is {settings[axis]!r} in {text!r}: write a number of ranks")
    try:
        return Layout(ParallelConfig(**settings))
    except ValidationError as error:
        reason = error.errors()[0]
        key = ".".join(str(part) for part in reason["loc"][:1])
        raise ConfigError(f"--layouts: {key or text!r}: {reason['msg']}") from None


def own_layout(config: RunConfig) -> Layout:
    """What the configuration itself asks for. Gradients are not compressed: that changes the numbers by design."""
    degrees = config.parallel.degrees(config.launch.procs)
    return Layout(config.parallel.model_copy(update={**degrees._asdict(), "compression": "none", "auto": False}))


def num_processes() -> int:
    """How many the default set may use at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(4, cores))


def left_out(layout: Layout, why_not: str) -> str:
    return f"left out: {layout.name} ({why_not})"


def default_layouts(config: RunConfig, limits: ModelLimits, processes: int) -> tuple[list[Layout], list[str]]:
    """(the configuration's own layout first, then the usual ones that fit; what was left out and why)."""
    own, notes = own_layout(config), []
    chosen = [own]
    if own.degrees.num_ranks > max(processes, _MOST_FOR_OWN):
        small = own.with_degrees(Degrees(*(min(size, 2) for size in own.degrees)))
        chosen = [small] if small.degrees.num_ranks <= max(processes, _MOST_FOR_OWN) else []
        instead = f"{small.name} is verified instead" if chosen else "it is left out"
        notes.append(
            f"your own layout, {own.name}, needs {own.degrees.num_ranks} processes: {instead}. To run it anyway: "
            f"--layouts {_OWN}"
        )
    for layout in parse_layouts(_USUAL + (_OF_MIXTURES if limits.num_experts else ""), config):
        if layout.degrees.num_ranks > processes:
            continue
        if why_not := problem(layout, limits):
            notes.append(left_out(layout, why_not))
        else:
            chosen.append(layout)
    return [layout for layout in dict.fromkeys(chosen) if layout != ONE], notes
