"""A rank that does not exist: the same steps as a real one, and what it would send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from equivalence import mixtures
from equivalence.layouts import batches
from equivalence.plain import STEP, make_model, scale_of

from lockstep.config import ParallelConfig
from lockstep.parallel.collectives import Record
from lockstep.parallel.expected_traffic import Bytes
from lockstep.types import LossSpec
from lockstep.verification.fake_rank import fake_rank
from lockstep.verification.simulation import SimulatedBackend


@dataclass(frozen=True)
class Case:
    """A model of either list; the name of a mixture may end in the number of its layers."""

    family: str
    lora: bool
    budget: int
    precision: str = "fp64"
    imbalance: float = 1.0


def build(case: Case) -> Any:
    name, _, num_layers = case.family.partition("*")
    if name not in mixtures.FAMILIES:
        return make_model(case.family, lora=case.lora)
    return mixtures.build_mixture(name, lora=case.lora, changes={"num_hidden_layers": int(num_layers or 2)})


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


def simulate_case(case: Case, num_ranks: int, parallel: ParallelConfig, rank: int, heard: list[Any]) -> Said:
    """`heard` is of rank 0, which comes first."""
    batch = batches()[0]
    with fake_rank(rank, parallel.degrees(num_ranks), heard) as fake:
        backend = SimulatedBackend(
            build(case),
            fake,
            micro_batch_tokens=case.budget,
            precision=case.precision,
            parallel=parallel,
            imbalance=case.imbalance,
        )
        for _ in range(2):
            fake.recorder.end_step()
            fake.memory.start_step()
            backend.start_step()
            backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
            backend.optim_step(STEP)
        return Said(fake.recorder.end_step(), backend.expected, dict(fake.memory.peak))


def simulate_ranks(
    case: Case, num_ranks: int, parallel: ParallelConfig, ranks: tuple[int, ...] | None = None
) -> list[Said]:
    """Of all ranks, or of these; the first is rank 0."""
    heard: list[Any] = []
    wanted = range(num_ranks) if ranks is None else ranks
    return [simulate_case(case, num_ranks, parallel, rank, heard) for rank in wanted]
