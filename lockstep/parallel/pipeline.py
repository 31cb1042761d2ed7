"""Pipeline stages: which layers each gets, and torch's schedules of micro-batches through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

# Schedules with one stage on each rank, and those with several.
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


def stages_per_rank(schedule: str) -> int:
    return 1 if schedule in _SINGLE else 2


def cut(costs: Sequence[float], head_cost: float, num_stages: int) -> list[range]:
    """Consecutive layers for each stage, such that the most expensive stage is as cheap as possible; the head is on the
    last."""
    if len(costs) < num_stages:
        raise ValueError(
            f"parallel.pipeline needs {num_stages} stages, and the model has {len(costs)} layers: every stage needs one"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    num_layers = len(costs)
    # best[k][i]: (cost of the most expensive stage, where the last one starts) if the first i layers make k stages.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, num_stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(k, num_layers - (num_stages - k) + 1):
            extra = head_cost if k == num_stages else 0.0
            options = [(max(best[k - 1][s][0], before[end] - before[s] + extra), s) for s in best[k - 1] if s < end]
            if options:
                row[end] = min(options)
        best.append(row)
    bounds = [num_layers]
    for k in range(num_stages, 0, -1):
        bounds.append(best[k][bounds[-1]][1])
    bounds.reverse()
    return [range(a, b) for a, b in pairwise(bounds)]


def stages_of(rank: int, num_ranks: int, num_stages: int) -> list[int]:
    """The stages of one rank: round robin."""
    return list(range(rank, num_stages, num_ranks))


class Pipeline:
    """Runs micro-batches of one size through the stages of this rank. All ranks of the axis make the same calls."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        num_stages: int,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stages, self._num_stages = stages, num_stages
        self._schedule_name, self._group, self._device = schedule, group, device
        self._size = dist.get_world_size(group)
        self._schedules: dict[tuple[tuple[int, ...], torch.dtype, int], Any] = {}

    def num_micro_batches(self, wanted: int) -> int:
        """At least as many as ranks, and a multiple of them where the schedule needs that."""
        if self._schedule_name in _SINGLE:
            return max(wanted, self._size)
        return -(-max(wanted, self._size) // self._size) * self._size

    def forward_backward(self, num_micro_batches: int, hidden: Tensor) -> None:
        """`hidden` is an example of what passes between stages. Losses and gradients stay with the stages."""
        schedule = self._schedule(num_micro_batches, hidden)
        arguments = (torch.zeros(num_micro_batches, 1, device=self._device),) if 0 in self._stages else ()
        schedule.step(
            *arguments,
            number=torch.arange(num_micro_batches),
            target=torch.zeros(num_micro_batches) if self._num_stages - 1 in self._stages else None,
            return_outputs=False,
        )

    @torch.no_grad()
    def forward(self, num_micro_batches: int, hidden: Tensor) -> None:
        """Without gradient: one micro-batch after another, through all stages."""
        for number in range(num_micro_batches):
            output = hidden
            for index in range(self._num_stages):
                owner, previous = index % self._size, (index - 1) % self._size
                if owner != dist.get_rank(self._group):
                    continue
                received = output
                if index > 0 and previous != owner:
                    received = torch.empty_like(hidden)
                    dist.recv(received, group=self._group, group_src=previous)
                output = self._stages[index](received, torch.tensor(number))
                if index + 1 < self._num_stages and (index + 1) % self._size != owner:
                    dist.send(output.contiguous(), group=self._group, group_dst=(index + 1) % self._size)

    def _schedule(self, num_micro_batches: int, hidden: Tensor) -> Any:
        key = (tuple(hidden.shape), hidden.dtype, num_micro_batches)
        if key not in self._schedules:
            stages: list[Any] = [self._stage(index, hidden) for index in self._stages]
            options: dict[str, Any] = {"n_microbatches": num_micro_batches, "loss_fn": _own_loss, "scale_grads": False}
            if self._schedule_name in _SINGLE:
                self._schedules[key] = _SINGLE[self._schedule_name](stages[0], **options)
            else:
                self._schedules[key] = _SEVERAL[self._schedule_name](stages, **options)
        return self._schedules[key]

    def _stage(self, index: int, hidden: Tensor) -> PipelineStage:
        is_first, is_last = index == 0, index == self._num_stages - 1
        example = hidden.detach().requires_grad_()
        argument = torch.zeros(1, 1, device=self._device) if is_first else example
        # Losses are computed in float32 or wider; torch 2.11 compares what a stage gives with this.
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=wide, device=self._device, requires_grad=True)
        return PipelineStage(
            self._stages[index],
            index,
            self._num_stages,
            self._device,
            input_args=(argument,),
            output_args=(loss if is_last else example,),
            group=self._group,
        )


def _own_loss(output: Tensor, _target: Tensor) -> Tensor:
    """The last stage's output is the loss."""
    return output
