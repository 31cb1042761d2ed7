"""The experts of a layer divided over ranks: each token goes to the ranks that have its experts, and what they make of
it comes back (all-to-all, with as many rows as were chosen).

Along `expert` ranks have other tokens; along `tensor` they have the same ones, and each sends those of its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.parallel.tensor import Enter, Leave, local


@dataclass(frozen=True)
class Trip:
    """Of the rows that one rank sent: how many to and from each rank, and how to sort what came by expert."""

    sent: list[int]
    received: list[int]
    order: Tensor


class ExpertRanks:
    """Experts are numbered along both axes: rank (i, j) has those of number i * tensor ranks + j. All ranks of both
    axes make the same calls, also those with no row to send."""

    def __init__(self, mesh: DeviceMesh, num_experts: int) -> None:
        """`mesh` has the axes expert, tensor or both."""
        names = mesh.mesh_dim_names or ()
        axes = {name: mesh[name] for name in names}
        expert, self._tensor = axes.get("expert"), axes.get("tensor")
        self._group = None if expert is None else expert.get_group()
        self._num_ranks, place = (1, 0) if expert is None else (expert.size(), expert.get_local_rank())
        self._num_columns = 1 if self._tensor is None else self._tensor.size()
        self._column = 0 if self._tensor is None else self._tensor.get_local_rank()
        self.count = num_experts // (self._num_ranks * self._num_columns)
        self.first = (place * self._num_columns + self._column) * self.count
        self._num_experts = num_experts

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's experts of a parameter that `split` has divided."""
        return local(parameter)

    def enter(self, value: Tensor) -> Tensor:
        """What the ranks of the tensor axis have alike, and use for other experts each: gradients are summed."""
        return value if self._tensor is None else Enter.apply(value, self._tensor)

    def leave(self, value: Tensor) -> Tensor:
        """The sum over the tensor axis."""
        return value if self._tensor is None else Leave.apply(value, self._tensor)

    def is_sent(self, expert: Tensor) -> Tensor:
        """[S]: whether rows of these experts are this rank's to send; a router may also have chosen none."""
        return (expert // self.count % self._num_columns == self._column) & (expert < self._num_experts)

    def send(self, rows: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Trip]:
        """`rows` [S, H] are sorted by `expert` [S]. Returns those of this rank's experts, sorted, the experts of each,
        counted from `first`, and what `send_back` needs."""
        # [ranks, count]: of this rank's rows, how many are for each expert of its column.
        every = torch.bincount(expert, minlength=self._num_experts).view(self._num_ranks, self._num_columns, -1)
        counts = every[:, self._column]
        theirs = _trade(counts, self._group)  # [ranks, count]: from each rank, for each of this rank's experts
        sent, gets = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()  # one wait for the device
        arrived = (
            torch.arange(self.count, device=rows.device).repeat(self._num_ranks).repeat_interleave(theirs.flatten())
        )
        own, order = torch.sort(arrived, stable=True)
        trip = Trip(sent, gets, order)
        received = rows if self._group is None else _Send.apply(rows, trip.sent, trip.received, self._group)
        return received[order], own, trip

    def send_back(self, rows: Tensor, trip: Trip) -> Tensor:
        """What `send` returned, in its order, to where it came from, in the order of what was given to `send`."""
        order = trip.order
        restored = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = rows[restored]
        return rows if self._group is None else _Send.apply(rows, trip.received, trip.sent, self._group)


def split(name: str, experts: nn.Module, keys: list[str], mesh: DeviceMesh) -> ExpertRanks:
    """Divide the parameters `keys` of a module, [experts, ...] each, over the ranks of `mesh`, in place. All ranks."""
    (num_experts,) = {getattr(experts, key).shape[0] for key in keys}
    if num_experts % mesh.size():
        names = " x ".join(f"parallel.{axis} {mesh[axis].size()}" for axis in mesh.mesh_dim_names or ())
        raise ValueError(f"{names} does not divide the {num_experts} experts of {name}")
    for key in keys:
        whole = getattr(experts, key)
        # Every rank cuts its own part; the values come from rank 0 later.
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        setattr(experts, key, nn.Parameter(part, requires_grad=whole.requires_grad))
    return ExpertRanks(mesh, num_experts)


class _Context(FunctionCtx):
    sizes: tuple[list[int], list[int]]
    group: dist.ProcessGroup


class _Send(torch.autograd.Function):
    """Rows to each rank, in their order; the gradients of what arrived go back."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchange(gradients[0], received, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _trade(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return counts
    theirs = torch.empty_like(counts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    return theirs
