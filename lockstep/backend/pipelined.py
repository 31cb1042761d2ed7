"""The passes of a rank that has some of a model's layers, and the gradients that two such ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.backend.batching import MicroBatch
from lockstep.backend.build import Built, find_tied
from lockstep.model.policy import causal_lm
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.tensor import local

Finish = Callable[[int, Tensor], Tensor]


class PipelinedPasses:
    """The passes of a rank that has some of the layers. All ranks of the pipeline axis have the same micro-batches and
    make the same calls; the last stage has the results."""

    def __init__(self, built: Built, group: ProcessGroup, schedule: str) -> None:
        assert group.mesh is not None
        self._stages, self._group = built.stages, group
        self._axis = group.mesh.get_group("pipeline")
        self._pipeline = Pipeline(dict(built.stages), built.num_stages, schedule, self._axis, group.device)
        causal = causal_lm(built.policy.model)
        self._hidden_size = causal.config.get_text_config().hidden_size
        self._tied = find_tied(causal, built.stages, built.num_stages)

    def num_micro_batches(self, wanted: int) -> int:
        return self._pipeline.num_micro_batches(wanted)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype, finish: Finish) -> None:
        self._prepare(micro_batches, finish)
        self._pipeline.forward_backward(len(micro_batches), self._example(micro_batches, dtype))
        self._sum_tied()

    def forward(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype, finish: Finish) -> None:
        self._prepare(micro_batches, finish)
        self._pipeline.forward(len(micro_batches), self._example(micro_batches, dtype))

    def own_parameters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Without the tied embedding on the last stage: the first one counts it."""
        if 0 in self._stages:
            return list(parameters)
        tied = {id(p) for p in self._tied}
        return [p for p in parameters if id(p) not in tied]

    def _prepare(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> None:
        for stage in self._stages.values():
            stage.micro_batches, stage.finish = [m.packed for m in micro_batches], finish

    def _example(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> Tensor:
        (length,) = {len(m.packed.tokens) for m in micro_batches}
        return torch.zeros(1, length, self._hidden_size, dtype=dtype, device=self._group.device)

    def _sum_tied(self) -> None:
        """First and last stage exchange their parts of the tied gradients. The last one does not use adapters."""
        other = dist.get_global_rank(self._axis, self._group.degrees.pipeline - 1 if 0 in self._stages else 0)
        for parameter in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad)
            theirs = torch.empty_like(mine)
            ways = ((dist.isend, mine.contiguous()), (dist.irecv, theirs))
            exchange = [dist.P2POp(way, tensor, other, group=self._axis) for way, tensor in ways]
            for request in dist.batch_isend_irecv(exchange):
                request.wait()
            mine.add_(theirs)
