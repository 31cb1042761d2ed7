"""A rank that does not exist: the same steps as a real one, and what it would send."""

from __future__ import annotations

from typing import Any, NamedTuple

from equivalence.layouts import Cell, batches
from equivalence.plain import STEP, make_model, scale_of

from lockstep.config import ParallelConfig
from lockstep.parallel.collectives import Record
from lockstep.parallel.expected_traffic import Bytes
from lockstep.types import LossSpec
from lockstep.verification.fake_rank import fake_rank
from lockstep.verification.simulation import SimulatedBackend


class Said(NamedTuple):
    """In the second step. `expected`: by the formula. `peak_bytes`: of memory, by kind."""

    record: Record
    expected: Bytes
    peak_bytes: dict[str, int]

    @property
    def sent(self) -> Bytes:
        return {flow: sent for flow, (_, sent, _) in self.record.traffic().items() if sent}

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        """Those that send."""
        every = {flow: calls for flow, (calls, _, _) in self.record.traffic().items()}
        return {flow: calls for flow, calls in every.items() if flow[1] != "recv"}


def simulate_cell(
    cell: Cell, num_ranks: int, parallel: ParallelConfig, rank: int, heard: list[Any], precision: str = "fp64"
) -> Said:
    """`heard` is of rank 0, which comes first."""
    family, lora, budget = cell
    batch = batches()[0]
    with fake_rank(rank, parallel.degrees(num_ranks), heard) as fake:
        backend = SimulatedBackend(
            make_model(family, lora=lora),
            fake.memory,
            micro_batch_tokens=budget,
            precision=precision,
            group=fake.group,
            parallel=parallel,
        )
        for _ in range(2):
            fake.recorder.end_step()
            fake.memory.start_step()
            backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
            backend.optim_step(STEP)
        return Said(fake.recorder.end_step(), backend.expected, dict(fake.memory.peak))


def simulate_ranks(
    cell: Cell, num_ranks: int, parallel: ParallelConfig, precision: str = "fp64", ranks: tuple[int, ...] | None = None
) -> list[Said]:
    """Of all ranks, or of these; the first is rank 0."""
    heard: list[Any] = []
    wanted = range(num_ranks) if ranks is None else ranks
    return [simulate_cell(cell, num_ranks, parallel, rank, heard, precision) for rank in wanted]
