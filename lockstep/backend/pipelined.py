"""The passes of a rank that has some of a model's layers, and the gradients that two such ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.backend import loss_step
from lockstep.backend.batching import MicroBatch
from lockstep.backend.build import Built, find_tied
from lockstep.backend.loss_step import TokenLogprobs
from lockstep.model.policy import causal_lm
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.tensor import local
from lockstep.types import LossSpec

Finish = Callable[[int, Tensor], Tensor]


class PipelinedPasses:
    """The passes of a rank that has some of the layers. All ranks of the pipeline axis have the same micro-batches and
    make the same calls; the last stage has the results."""

    def __init__(self, built: Built, group: ProcessGroup, schedule: str, dtype: torch.dtype) -> None:
        """`dtype`: of hidden states between stages."""
        assert group.mesh is not None
        self._policy, self._stages, self._group, self._dtype = built.policy, built.stages, group, dtype
        self._axis = group.mesh.get_group("pipeline")
        self._pipeline = Pipeline(dict(built.stages), built.num_stages, schedule, self._axis, group.device)
        causal = causal_lm(built.policy.model)
        self._hidden_size = causal.config.get_text_config().hidden_size
        self._tied = find_tied(causal, built.stages, built.num_stages)

    @classmethod
    def of(cls, built: Built, group: ProcessGroup, schedule: str, dtype: torch.dtype) -> PipelinedPasses | None:
        """None where the model is not split into stages."""
        return cls(built, group, schedule, dtype) if built.stages else None

    def num_micro_batches(self, wanted: int) -> int:
        return self._pipeline.num_micro_batches(wanted)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: LossSpec, scale: float
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """(metrics, log-probs) of each micro-batch, on the ranks of the last stage; nothing on the others."""
        results: dict[int, tuple[dict[str, Tensor], Tensor]] = {}

        def finish(number: int, hidden: Tensor) -> Tensor:
            micro_batch = micro_batches[number]
            apply = functools.partial(self._policy.apply_head, hidden, micro_batch.packed)
            total, metrics, logprobs = loss_step.compute_losses(micro_batch, loss, apply, scale)
            results[number] = (metrics, logprobs)
            return total

        self._prepare(micro_batches, finish)
        self._pipeline.forward_backward(len(micro_batches), self._example(micro_batches))
        self._sum_tied()
        return [results[i] for i in sorted(results)]

    def logprobs(self, micro_batches: Sequence[MicroBatch], facts: bool) -> list[TokenLogprobs]:
        """Of each micro-batch, without gradient; zeros on ranks that do not have the last stage."""
        empty = [torch.zeros(len(m.indices), device=self._group.device) for m in micro_batches]
        outputs = [TokenLogprobs(zeros, zeros if facts else None) for zeros in empty]

        def finish(number: int, hidden: Tensor) -> Tensor:
            output = self._policy.apply_head(hidden, micro_batches[number].packed, facts=facts)
            outputs[number] = loss_step.as_token_logprobs(output)
            return outputs[number].logprobs

        self._prepare(micro_batches, finish)
        self._pipeline.forward(len(micro_batches), self._example(micro_batches))
        return outputs

    def own_parameters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Without the tied embedding on the last stage: the first one counts it."""
        if 0 in self._stages:
            return list(parameters)
        tied = {id(p) for p in self._tied}
        return [p for p in parameters if id(p) not in tied]

    def _prepare(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> None:
        for stage in self._stages.values():
            stage.micro_batches, stage.finish = [m.packed for m in micro_batches], finish

    def _example(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        (length,) = {len(m.packed.tokens) for m in micro_batches}
        return torch.zeros(1, length, self._hidden_size, dtype=self._dtype, device=self._group.device)

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
