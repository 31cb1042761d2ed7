"""Bytes of a step three times: by the formula, of simulated ranks, and counted on real ones. All three are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import Cell, batches, spawn
from equivalence.plain import STEP, make_model, scale_of
from equivalence.simulated import simulate_ranks
from equivalence.test_layouts import CELLS, LAYOUTS

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.collectives import find_mismatches
from lockstep.types import LossSpec

SEVERAL = {name: layout for name, layout in LAYOUTS.items() if layout[0] > 1}
SEVERAL |= {
    "hybrid-tensor-pipeline": (16, ParallelConfig(replicate=2, shard=2, tensor=2, pipeline=2)),
    "shard-3-tensor-2": (6, ParallelConfig(shard=3, tensor=2)),
}
SEQUENCE: list[Cell] = [("llama-sequence", False, 48), ("qwen3-sequence", True, 96)]


def cells_of(parallel: ParallelConfig) -> list[Cell]:
    return CELLS + (SEQUENCE if parallel.tensor > 1 else [])


def check(cell: Cell, num_ranks: int, parallel: ParallelConfig, ranks: tuple[int, ...] | None = None) -> None:
    found = simulate_ranks(cell, num_ranks, parallel, ranks=ranks)
    assert find_mismatches([said.record for said in found]) == []
    for said in found:
        assert said.expected.keys() == said.sent.keys(), f"rank {said.record.rank} of {cell}"
        for flow, count in said.expected.items():
            assert said.sent[flow] == pytest.approx(count, rel=1e-12), f"{flow} of rank {said.record.rank} of {cell}"


def test_the_formula_is_what_a_simulated_rank_sends() -> None:
    check(("qwen3", False, 48), *SEVERAL["shard-2-tensor-2"], ranks=(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SEVERAL)
def test_the_formula_is_what_every_simulated_rank_sends(layout: str) -> None:
    num_ranks, parallel = SEVERAL[layout]
    for cell in cells_of(parallel):
        check(cell, num_ranks, parallel)


def count_cells(cells: list[Cell], parallel: ParallelConfig, out: Path) -> None:
    """The body of each real process: sent bytes and calls of the second step, by cell and rank."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found: dict[Cell, Any] = {}
    for family, lora, budget in cells:
        model = make_model(family, lora=lora)
        backend = TorchBackend(model, micro_batch_tokens=budget, precision="fp64", group=group, parallel=parallel)
        batch = batches()[0]
        for _ in range(2):
            backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
            counts = backend.traffic.current
            backend.optim_step(STEP)
        found[family, lora, budget] = dict(counts.sent_bytes), dict(counts.num_calls)
    everybody = group.gather_objects(found)
    if group.rank == 0:
        torch.save(everybody, out)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name, (num_ranks, _) in SEVERAL.items() if num_ranks <= 4])
def test_a_real_rank_sends_what_a_simulated_one_does(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = SEVERAL[layout]
    cells = cells_of(parallel)
    spawn(num_ranks, count_cells, cells, parallel, tmp_path / "found.pt")
    everybody = torch.load(tmp_path / "found.pt", weights_only=False)
    for cell in cells:
        for rank, said in enumerate(simulate_ranks(cell, num_ranks, parallel)):
            sent, calls = everybody[rank][cell]
            assert {flow: count for flow, count in sent.items() if count} == said.sent, f"rank {rank} of {cell}"
            assert calls == said.calls, f"rank {rank} of {cell}"
