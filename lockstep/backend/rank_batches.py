"""From a global batch to the micro-batches that one rank computes, for every torch backend and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.backend.batching import (
    Document,
    MicroBatch,
    MicroBatchPlan,
    RankBatch,
    documents_for,
    plan_micro_batches,
    to_micro_batch,
)
from lockstep.backend.images import BatchImages, image_costs
from lockstep.backend.out_of_memory import longest_text
from lockstep.backend.pipelined import PipelinedPasses
from lockstep.data.packing import BY_TOKENS, Cost
from lockstep.model.policy import Policy
from lockstep.model.replay import RoutingRows
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, LossSpec


@dataclass(frozen=True)
class RankBatches:
    """`tile_tokens`: micro-batches are filled up to whole tiles; they may exceed the budget by that little.

    `takes_longer`: a text beyond the budget is tried all the same, where what does not fit is made smaller.
    """

    policy: Policy
    group: ProcessGroup
    tile_tokens: int
    dtype: torch.dtype = torch.float32
    cost: Cost = BY_TOKENS
    pipelined: PipelinedPasses | None = None
    images: BatchImages | None = None
    routing: RoutingRows | None = None
    takes_longer: bool = False

    def make(self, batch: Sequence[Datum], loss: LossSpec, micro_batch_tokens: int) -> RankBatch:
        documents, plan = self.plan(batch, micro_batch_tokens)
        return RankBatch(batch, documents, plan, self._micro_batches(plan, batch, loss))

    def plan(
        self, batch: Sequence[Datum], micro_batch_tokens: int, data_rank: int | None = None
    ) -> tuple[list[Document], MicroBatchPlan]:
        """Of this rank's part of a batch, or of another one's."""
        budget = micro_batch_tokens * self.group.degrees.context
        if self.takes_longer:
            budget = max(budget, longest_text(batch, whole=False))
        documents = documents_for(self.policy, batch, budget)
        plan = plan_micro_batches(
            documents,
            rank=self.group.data_rank if data_rank is None else data_rank,
            num_ranks=self.group.degrees.data,
            budget_tokens=budget,
            max_documents=None if self.policy.packs else 1,
            cost=self.cost,
            extra_costs=image_costs(documents, batch, self.images),
        )
        if self.pipelined is not None:
            missing = self.pipelined.num_micro_batches(len(plan.micro_batches)) - len(plan.micro_batches)
            plan = replace(plan, micro_batches=(*plan.micro_batches, *([()] * missing)))
        return documents, plan

    def multiple_of(self, plan: MicroBatchPlan) -> int:
        """What the tokens of each micro-batch are filled up to."""
        multiple = (self.tile_tokens if self.policy.packs else 1) * self.group.degrees.context
        if self.pipelined is not None:  # hidden states between stages must have one size
            longest = max(sum(d.num_tokens for d in part) for part in plan.micro_batches)
            multiple *= -(-max(longest, 2) // multiple)
        return multiple

    def _micro_batches(self, plan: MicroBatchPlan, batch: Sequence[Datum], loss: LossSpec) -> list[MicroBatch]:
        context, multiple_of = (self.group.place("context"), self.group.degrees.context), self.multiple_of(plan)

        def make(part: tuple[Document, ...]) -> MicroBatch:
            return to_micro_batch(part, batch, loss, self.group.device, self.dtype, multiple_of, context, self.routing)

        if self.images is None:
            return [make(part) for part in plan.micro_batches]
        return [self.images.make(part, batch, make) for part in plan.micro_batches]


def tile_tokens(device: torch.device) -> int:
    """Whole tiles for matrix kernels, and fewer shapes for compiled ones."""
    return 128 if device.type == "cuda" else 1
