"""From a plain model to one that trains on this group, in one fixed order:
activation checkpointing, compile, sharding or replication, weights.

The only place where parallelism meets the model. All ranks call it together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lockstep.model.lora import speed_up_eager
from lockstep.model.policy import Policy, causal_lm, decoder_layers
from lockstep.parallel.group import Group
from lockstep.parallel.replicate import replicate
from lockstep.parallel.shard import shard


def build_policy(
    model: nn.Module,
    group: Group,
    *,
    compute_dtype: torch.dtype | None,
    activation_checkpointing: bool,
    compile_layers: bool,
) -> tuple[Policy, nn.Module]:
    """(the policy, the module to call: the policy itself or its DDP wrapper). Rank 0's weights win."""
    chunk_tokens = 4096 if group.device.type == "cuda" else 512
    policy = Policy(model, chunk_tokens=chunk_tokens)
    layers = decoder_layers(model)
    for layer in layers:
        if activation_checkpointing:
            layer.forward = _recomputed(layer.forward)
        if compile_layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if not compile_layers:
        speed_up_eager(model)
    policy.use_variable_length(group.device, compute_dtype or next(model.parameters()).dtype)
    weights = _full_weights(policy) if group.rank == 0 else None
    sharded = group.degrees.shard > 1
    if sharded:
        assert group.mesh is not None
        shard(policy, layers, group.mesh, compute_dtype)
    policy.to(group.device)
    if group.num_ranks > 1:
        _distribute_weights(policy, weights, group)
    causal_lm(model).config.use_cache = False
    callable_module: nn.Module = policy
    if group.num_ranks > 1 and not sharded:
        callable_module = replicate(policy, group.device)
    return policy.train(), callable_module


def settle_dtypes(model: nn.Module, compute: torch.dtype) -> None:
    """What is trained is held in float32 or wider, what is frozen in the dtype of the computation. In place.

    A model that its owner loaded in bf16 would otherwise be stepped in bf16, where small updates vanish.
    """
    wide = torch.promote_types(compute, torch.float32)
    for parameter in model.parameters():
        wanted = wide if parameter.requires_grad else compute
        if parameter.is_floating_point() and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(checkpoint, forward, use_reentrant=False)


def _full_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in _all_tensors(module)}


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


@torch.no_grad()
def _distribute_weights(module: nn.Module, weights: dict[str, Tensor] | None, group: Group) -> None:
    """Give every rank its part of rank 0's parameters and buffers, one tensor at a time."""
    tensors = _all_tensors(module)
    layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    if layout != group.broadcast_object(layout):
        raise ValueError(f"rank {group.rank} built another model than rank 0: give every rank the same")
    for name, tensor in tensors:
        if weights is not None:
            full = weights.pop(name).to(group.device, tensor.dtype)
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.device)
        if isinstance(tensor, DTensor):
            part = distribute_tensor(full, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(part.to_local())
        else:
            dist.broadcast(full, src=0)
            tensor.copy_(full)
