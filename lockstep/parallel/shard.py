"""Parameters, gradients and optimizer state split over ranks (FSDP2)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard


def shard(
    roots: Sequence[nn.Module],
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    *,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    keep_parameters: bool = False,
    prefetch: int = 1,
    offload: bool = False,
) -> None:
    """Each layer is a unit; what is left in a root (embedding, final norm, head) is its unit. Gradients are sums.

    `experts`: modules with experts that are divided over ranks, in `expert_mesh`. They are units of the ranks that have
    the same ones.

    `keep_parameters`: parameters gathered for forward stay for backward. `prefetch`: layers gathered ahead.

    Ranks that split the tokens of a micro-batch have parts of its gradient, as data-parallel ranks do: they count as
    shards.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        # Inputs as they come: the weights of tokens in the loss are float32, and rounding them would change the loss.
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": _data_axes(mesh, "replicate", "shard"),
        "mp_policy": policy,
        "offload_policy": place,
    }
    for module in experts:
        assert expert_mesh is not None
        axes = _data_axes(expert_mesh, *(_name_for_experts(expert_mesh, axis) for axis in ("replicate", "shard")))
        evenly = functools.partial(_evenly, num_ranks=axes.size(axes.ndim - 1))
        own = {**options, "mesh": axes, "shard_placement_fn": evenly}
        fully_shard(module, reshard_after_forward=not keep_parameters, **own)
    units = [fully_shard(layer, reshard_after_forward=not keep_parameters, **options) for layer in layers]
    if prefetch > 1:  # one layer ahead is FSDP2's default
        _prefetch(units, prefetch)
    for root in roots:
        fully_shard(root, reshard_after_forward=False, **options)
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # the alternative, a scaled sum, exists in NCCL alone


def _data_axes(mesh: DeviceMesh, replicate: str, shards: str) -> DeviceMesh:
    """The ranks that have the same parameters and other tokens: as shards, or as replicas of shards."""
    axis = mesh[shards]
    if mesh["context"].size() > 1:
        axis = mesh[shards, "context"]._flatten(f"{shards}_context")
    return DeviceMesh._concatenate([mesh[replicate], axis]) if mesh[replicate].size() > 1 else axis


def _name_for_experts(mesh: DeviceMesh, axis: str) -> str:
    return f"expert_{axis}" if f"expert_{axis}" in (mesh.mesh_dim_names or ()) else axis


def _evenly(parameter: nn.Parameter, num_ranks: int) -> Shard:
    """Along a dimension that is not the experts', where these are divided already and there may be few."""
    dims = [dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % num_ranks == 0]
    return Shard(dims[0] if dims else 0)


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(i - depth, 0) : i])))


def has_shards(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def reshard(module: nn.Module) -> None:
    """After a pass without backward FSDP2 keeps the root unit gathered: drop that copy, it goes stale."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """The root unit gathered, for callers that use modules below the root directly. All ranks."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
