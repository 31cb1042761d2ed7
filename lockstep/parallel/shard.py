"""Parameters, gradients and optimizer state split over ranks (FSDP2).

Must not know models, losses or data: it is given a module and the layers inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(
    roots: Sequence[nn.Module],
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    *,
    keep_parameters: bool = False,
) -> None:
    """Each layer is a unit; what is left in a root (embedding, final norm, head) is its unit. Gradients are sums.

    `keep_parameters`: what was gathered for forward stays for backward.

    Ranks that split the tokens of a micro-batch have parts of its gradient, like ranks with rows of their own: they
    count as shards.
    """
    name = "shard"
    if mesh["context"].size() > 1:
        name = "shard_context"
        mesh["shard", "context"]._flatten(name)
    axes = mesh["replicate", name] if mesh["replicate"].size() > 1 else mesh[name]
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=axes, mp_policy=policy, reshard_after_forward=not keep_parameters)
    for root in roots:
        fully_shard(root, mesh=axes, mp_policy=policy, reshard_after_forward=False)
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # the alternative, a scaled sum, exists in NCCL alone


def reshard(module: nn.Module) -> None:
    """After a pass without backward, FSDP2 keeps the root unit whole, and that copy is not what is trained."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """The root unit whole, for callers that go past the root into the modules below it. All ranks."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
