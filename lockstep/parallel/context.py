"""The tokens of one micro-batch split over ranks; attention alone needs them together.

Around attention, ranks trade: each gives away its tokens' heads and gets all tokens of its own heads (all-to-all),
and back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh


class HeadExchange:
    """`mesh` has one axis: the ranks that share a micro-batch, in the order of its tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self.size, self.place = mesh.size(), mesh.get_local_rank()

    def gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, some tokens, dim] each -> [1, some heads, all tokens, dim]."""
        if query.shape[1] % self.size:
            raise ValueError(f"parallel.context {self.size} does not divide the {query.shape[1]} heads of attention")
        copies = 1
        if key.shape[1] % self.size:
            # Fewer key heads than ranks: repeated until every rank has one for each of its query heads' groups.
            copies = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (key, value))
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def scatter(self, attended: Tensor) -> Tensor:
        """[1, all tokens, some heads, dim] -> [1, some tokens, all heads, dim]."""
        by_rank = attended[0].unflatten(0, (self.size, -1))  # [rank, tokens, heads, dim]
        traded = _Trade.apply(by_rank, self._group)
        return traded.transpose(0, 1).flatten(1, 2)[None]

    def _to_heads(self, tensor: Tensor) -> Tensor:
        by_rank = tensor[0].unflatten(0, (self.size, -1))  # [rank, heads, tokens, dim]
        traded = _Trade.apply(by_rank, self._group)
        return traded.transpose(0, 1).flatten(1, 2)[None]


class _Context(FunctionCtx):
    group: dist.ProcessGroup


class _Trade(torch.autograd.Function):
    """Part i of every rank goes to rank i. Its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: _Context, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _trade(parts, group)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _trade(gradients[0], ctx.group), None


def _trade(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
