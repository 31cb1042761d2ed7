"""Preference optimisation on every layout: two steps and a reference that follows equal the plainest one-rank loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.plain import STEP, make_model, make_optimizer
from equivalence.preference_plain import make_pairs, plain_preference
from equivalence.test_layouts import LAYOUTS
from equivalence.test_preference import with_reference, with_tokens

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.types import Datum, LossSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid": {"losses": {"sigmoid": 1.0, "sft": 0.1}, "beta": 0.5},
    # Over the batch, and with what the head must say besides log-probs.
    "batch": {"losses": {"bco_pair": 1.0, "sigmoid": 0.5}, "bco_shift": True, "wpo": True},
}
SHARE = 0.3  # of the policy, in the reference after the second step
QUICK = ("ddp-2", "fsdp-2", "tensor-2", "pipeline-2")
TOLERANCE = 1e-10


class Cell(NamedTuple):
    reference: str
    options: str
    budget: int  # 40 tokens: pairs are whole; 24: some are cut in two


CELLS = [
    Cell(reference, options, budget)
    for reference in ("adapter_off", "copy", "precomputed")
    for options, budget in (("sigmoid", 40), ("sigmoid", 24), ("batch", 40))
]


def family_of(cell: Cell) -> tuple[str, bool]:
    return ("llama", True) if cell.reference == "adapter_off" else ("qwen3", False)


def batches() -> list[list[Datum]]:
    return [make_pairs(0), make_pairs(1, rows=3)]


def loss_of(cell: Cell, batch: Sequence[Datum]) -> LossSpec:
    options = with_tokens(OPTIONS[cell.options], batch)
    return LossSpec("preference", 1 / len(batch), options)


@lru_cache
def plain_run(cell: Cell) -> dict[str, Any]:
    family, lora = family_of(cell)
    model, reference = make_model(family, lora=lora), make_model(family, lora=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    found: dict[str, Any] = {"losses": []}
    for batch in batches():
        loss, gradients = plain_preference(model, batch, reference, loss_of(cell, batch).options)
        for name, p in trained.items():
            p.grad = gradients[name]
        found["losses"].append(loss.item())
        found["gradients"] = copy.deepcopy(gradients)
        torch.nn.utils.clip_grad_norm_(trained.values(), STEP.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: p.detach().clone() for name, p in trained.items()}
    if cell.reference == "copy":
        with torch.no_grad():
            for p, mine in zip(reference.parameters(), model.parameters(), strict=True):
                p.lerp_(mine, SHARE)
        batch = batches()[0]
        found["losses"].append(plain_preference(model, batch, reference, loss_of(cell, batch).options)[0].item())
    return found


def run_cell(cell: Cell, group: Any, parallel: ParallelConfig, scratch: Path) -> dict[str, Any]:
    family, lora = family_of(cell)
    model = make_model(family, lora=lora)
    work = batches()
    if cell.reference == "precomputed":
        work = [with_reference(batch, copy.deepcopy(model)) for batch in work]
    settings: dict[str, Any] = {"micro_batch_tokens": cell.budget, "precision": "fp64", "parallel": parallel}
    reference = "none" if cell.reference == "precomputed" else cell.reference
    backend = TorchBackend(model, group=group, reference=reference, **settings)
    found: dict[str, Any] = {"losses": []}
    for batch in work:
        found["losses"].append(backend.forward_backward(batch, loss_of(cell, batch)).loss)
        found["gradients"] = everywhere({name: whole(p.grad) for name, p in backend.parameters().items()}, group)
        backend.optim_step(STEP)
    found["weights"] = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, group)
    if cell.reference == "copy":
        backend.mix_reference(SHARE)
        backend.save_state(scratch).result()
        group.barrier()
        # A reference that has moved is part of the checkpoint: another backend goes on with it.
        model = make_model(family, lora=lora)
        backend = TorchBackend(model, group=group, reference=reference, **settings)
        backend.load_state(scratch)
        found["losses"].append(backend.forward_backward(work[0], loss_of(cell, work[0])).loss)
    return found


def run_cells(cells: Sequence[Cell], parallel: ParallelConfig, out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {cell: run_cell(cell, group, parallel, out.parent / f"state-{i}") for i, cell in enumerate(cells)}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Any]]:
    num_ranks, parallel = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp("cells") / "found.pt"
    spawn(num_ranks, run_cells, CELLS, parallel, out)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize(
    "found", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS], indirect=True
)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_layout_makes_the_same_preference_steps(found: dict[Cell, dict[str, Any]], cell: Cell) -> None:
    mine, expected = found[cell], plain_run(cell)
    assert mine["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    for kind in ("gradients", "weights"):
        assert mine[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            difference = float((mine[kind][name] - tensor).abs().max())
            assert difference <= TOLERANCE, f"{kind} of {name}: {difference:.3g}"
