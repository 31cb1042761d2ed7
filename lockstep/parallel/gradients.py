"""The norm of the whole gradient and clipping by it, however it is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.tensor import local


def gradient_norm(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> Tensor:
    """2-norm over all gradients, the same on every rank. All ranks; a parameter that two stages have counts once: the
    caller leaves it out on one of them."""
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for p in parameters:
        if p.grad is not None:
            split_over = _split_over(p.grad)
            groups |= split_over
            by_axes.setdefault(tuple(split_over), []).append(local(p.grad))
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    # In one order on every rank: which gradients a rank has may differ, the names of axes do not.
    for axes in sorted(by_axes):
        square = torch.stack(torch._foreach_norm(by_axes[axes])).double().square().sum()
        for axis in axes:
            dist.all_reduce(square, group=groups[axis])
        total += square
    if group.degrees.pipeline > 1:
        assert group.mesh is not None
        dist.all_reduce(total, group=group.mesh.get_group("pipeline"))
    return total.sqrt()


def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float, *, scale: float = 1.0) -> None:
    """Multiply every gradient by `scale`, and the whole down to `max_norm`; `norm` is of the scaled gradient."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    factor = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _split_over(tensor: Tensor) -> dict[str, dist.ProcessGroup]:
    """By mesh axis, the process groups whose ranks hold different parts of the tensor."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    split = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    return {(mesh.mesh_dim_names or ())[i]: mesh.get_group(i) for i in split}
