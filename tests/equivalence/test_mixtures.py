"""Mixtures of experts, full and with adapters on the experts: the step of the plain model, to 1e-10 in float64."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.mixtures import Float64, build_mixture
from equivalence.plain import make_batch, plain_loss, scale_of

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec, OptimStep

LAYOUTS = {
    "ddp-2": (2, ParallelConfig(replicate=2, shard=1)),
    "fsdp-2": (2, ParallelConfig(shard=2)),
    "pipeline-2": (2, ParallelConfig(shard=1, pipeline=2)),
    "context-2": (2, ParallelConfig(shard=1, context=2)),
    "hybrid-2x2": (4, ParallelConfig(replicate=2, shard=2)),
}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")
QUICK = [("qwen3_moe", True), ("deepseek_v3", True), ("mixtral", False)]
CELLS = [(family, lora) for family in FAMILIES for lora in (False, True)]
# Attention with sinks, which packed attention does not have; no plan of stages.
REFUSED = {"pipeline-2": ("gpt_oss", "olmoe"), "context-2": ("gpt_oss",)}
STEP = OptimStep(0.01, eps=1e-4)


def compute_step(
    family: str, lora: bool, group: ProcessGroup, parallel: ParallelConfig, budget: int = 96, **settings: Any
) -> dict[str, Any]:
    batch = make_batch()
    with Float64():
        model = build_mixture(family, lora=lora)
        backend = TorchBackend(
            model, micro_batch_tokens=budget, precision="fp64", parallel=parallel, group=group, **settings
        )
        loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
        gradients = everywhere({n: whole(p.grad) for n, p in backend.parameters().items()}, group)
        norm = backend.optim_step(STEP).grad_norm
        backend.policy.stop_packing()
    return {"loss": loss, "gradients": gradients, "norm": norm}


def compute_cells(cells: list[tuple[str, bool]], layout: str, out: Path) -> None:
    """The body of each process."""
    torch.set_num_threads(1)
    parallel = LAYOUTS[layout][1]
    group = join_group("cpu", parallel, timeout_s=60)
    found = {cell: compute_step(*cell, group, parallel) for cell in cells}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@lru_cache
def plain_step(family: str, lora: bool) -> dict[str, Any]:
    batch = make_batch()
    with Float64():
        model = build_mixture(family, lora=lora)
        loss = plain_loss(model, batch, scale_of(batch))
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    return {"loss": loss.item(), "gradients": gradients, "norm": norm}


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = float((found["gradients"][name] - gradient).abs().max())
        assert difference <= 1e-10 * max(1.0, float(gradient.abs().max())), f"gradient of {name}: {difference:.3g}"
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-10)


@pytest.mark.parametrize("cell", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CELLS], ids=str)
def test_one_rank_makes_the_plain_step(cell: tuple[str, bool]) -> None:
    found = compute_step(*cell, ProcessGroup(0, 1, torch.device("cpu")), ParallelConfig())
    assert_same_step(found, plain_step(*cell))


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp-2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_layout_makes_the_plain_step(layout: str, tmp_path: Path) -> None:
    cells = QUICK if layout == "fsdp-2" else CELLS
    cells = [cell for cell in cells if cell[0] not in REFUSED.get(layout, ())]
    spawn(LAYOUTS[layout][0], compute_cells, cells, layout, tmp_path / "found.pt")
    for cell, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, plain_step(*cell))
