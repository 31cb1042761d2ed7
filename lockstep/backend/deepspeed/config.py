"""DeepSpeed's configuration: a ds_config.json, the keys of the parallel section, and what Lockstep decides.

A key that Lockstep decides is refused, with where to set it; "auto" leaves any key to Lockstep or to DeepSpeed's
default; keys that are not known here go to DeepSpeed as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError

_AUTO = "auto"
_NARROW = ("bf16", "fp16")
_OTHER_AXES = "DeepSpeed shares rows only here; for other axes use parallel.backend torch"
_OTHER_BATCHES = "it would change which tokens a step sees or what is computed for them: leave it out"
_SUMS = "Lockstep sums gradients over ranks: leave it out"
# Key -> why it cannot be set there, and where to set it.
_REFUSED = {
    "train_batch_size": "set batch.samples or batch.tokens instead",
    "train_micro_batch_size_per_gpu": "set batch.micro_batch_tokens instead",
    "gradient_accumulation_steps": "it follows from batch.micro_batch_tokens and may differ from batch to batch",
    "optimizer": "the optimizer is AdamW: set learning_rate, betas, eps and weight_decay in optim",
    "scheduler": "set optim.schedule and optim.warmup_steps instead",
    "managed_gradient_accumulation": "Lockstep decides when gradients are complete: leave it out",
    "gradient_allreduce_op": _SUMS,
    "gradient_predivide_factor": _SUMS,
    "prescale_gradients": _SUMS,
    "sparse_gradients": _SUMS,
    "amp": "set model.precision instead",
    "torch_autocast": "set model.precision instead",
    "data_types": "gradients are added up in float32: leave it out",
    "communication_data_type": "gradients are sent in float32: leave it out",
    "tensor_parallel": _OTHER_AXES,
    "sequence_parallel_size": _OTHER_AXES,
    "pipeline": _OTHER_AXES,
    "curriculum_learning": _OTHER_BATCHES,
    "data_efficiency": _OTHER_BATCHES,
    "progressive_layer_drop": _OTHER_BATCHES,
    "compression_training": _OTHER_BATCHES,
    "checkpoint": "checkpoints are Lockstep's own: see the checkpoint section",
}
# In activation_checkpointing: what only DeepSpeed's own checkpoint function does, which models here do not call.
_OWN_RECOMPUTATION = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")


def read_config(path: Path) -> dict[str, object]:
    """A ds_config.json as it is."""
    try:
        ds_config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"parallel.deepspeed_config {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"parallel.deepspeed_config {path} is not JSON: {error}") from error
    if not isinstance(ds_config, dict):
        raise ConfigError(f"parallel.deepspeed_config {path} must hold an object, not a {type(ds_config).__name__}")
    return ds_config


def wanted_precision(ds_config: Mapping[str, Any], precision: str) -> str:
    """model.precision, unless it is auto and the file asks for bf16 or fp16."""
    for narrow in _NARROW if precision == "auto" else ():
        if _without_auto(ds_config.get(narrow) or {}).get("enabled"):
            return narrow
    return precision


def resolve_ds_config(
    ds_config: Mapping[str, object],
    *,
    stage: int | None = None,
    offload: bool = False,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
) -> dict[str, Any]:
    """What `deepspeed.initialize` gets. `precision` is not auto; a `stage` of None leaves it to the file, then to 3."""
    resolved = _without_auto(ds_config)
    for key, where in _REFUSED.items():
        if key in resolved:
            raise ConfigError(f"parallel.deepspeed_config: {key} is not taken from there: {where}")
    _check_clipping(resolved.pop("gradient_clipping", None), max_grad_norm)
    _check_precision(resolved, precision)
    _check_recomputation(resolved.get("activation_checkpointing") or {})
    resolved["zero_optimization"] = _zero_section(resolved.get("zero_optimization") or {}, stage, offload)
    resolved |= {
        # DeepSpeed wants to know a batch; shares and micro-batches are Lockstep's.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision in _NARROW:
        resolved[precision] = {**(resolved.get(precision) or {}), "enabled": True}
        resolved |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    return resolved


def _zero_section(settings: Mapping[str, Any], stage: int | None, offload: bool) -> dict[str, Any]:
    section = dict(settings)
    if stage is not None and section.setdefault("stage", stage) != stage:
        raise ConfigError(
            f"parallel.zero_stage {stage}, but zero_optimization.stage in parallel.deepspeed_config is "
            f"{section['stage']}: set it once"
        )
    stage = section.setdefault("stage", 3)
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage {stage!r}: DeepSpeed runs with 1, 2 or 3 here")
    if stage == 1 and section.get("overlap_comm"):
        raise ConfigError("zero_optimization.overlap_comm needs stage 2 or 3: stage 1 sends gradients once, at the end")
    if section.get("zenflow"):
        raise ConfigError(
            "zero_optimization.zenflow applies parts of a step late, which gives another result: leave it out"
        )
    if offload:
        for key in ("offload_optimizer", "offload_param")[: 2 if stage == 3 else 1]:
            section[key] = {**(section.get(key) or {}), "device": "cpu"}
    for key in ("offload_optimizer", "offload_param"):
        device = (section.get(key) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise ConfigError(f"zero_optimization.{key}.device {device!r}: cpu or none")
        if key == "offload_param" and device == "cpu" and stage != 3:
            raise ConfigError("zero_optimization.offload_param needs stage 3")
    return section


def _check_clipping(clipping: float | None, max_grad_norm: float | None) -> None:
    if clipping is None or (clipping or None) == max_grad_norm:  # DeepSpeed's 0 is our null
        return
    raise ConfigError(
        f"parallel.deepspeed_config: gradient_clipping {clipping}, but optim.max_grad_norm is "
        f"{'null' if max_grad_norm is None else max_grad_norm}: set the same in both, or leave gradient_clipping out"
    )


def _check_precision(resolved: Mapping[str, Any], precision: str) -> None:
    if precision not in ("fp32", *_NARROW):
        raise ConfigError(
            f"model.precision {precision}: DeepSpeed holds what it trains in float32: use fp32, bf16 or fp16"
        )
    for narrow in _NARROW:
        enabled = (resolved.get(narrow) or {}).get("enabled")
        if enabled is not None and enabled != (precision == narrow):
            raise ConfigError(
                f"parallel.deepspeed_config: {narrow}.enabled is {str(enabled).lower()}, but model.precision is "
                f"{precision}: set the same in both, or leave {narrow} out"
            )


def _check_recomputation(section: Mapping[str, object]) -> None:
    """The section does not turn recomputation on, here or in DeepSpeed: model.activation_checkpointing does."""
    for key in _OWN_RECOMPUTATION:
        if section.get(key):
            raise ConfigError(
                f"parallel.deepspeed_config: activation_checkpointing.{key} is for models that call DeepSpeed's "
                "own checkpoint function: leave it out and set model.activation_checkpointing"
            )


def _without_auto(ds_config: Mapping[str, object]) -> dict[str, Any]:
    """Without every value that is "auto", at any depth."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in ds_config.items()
        if value != _AUTO
    }
