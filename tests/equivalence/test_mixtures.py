"""Mixtures of experts, full and with adapters on the experts: the step of the plain model, to 1e-10 in float64."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.mixtures import Float64, build_mixture, own_router_losses, widen_softmax
from equivalence.plain import make_batch, plain_loss, scale_of

from lockstep.backend.batching import Document
from lockstep.backend.router_balance import RouterLosses
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.model import experts
from lockstep.model.quantised import dequantise_base
from lockstep.model.routing import Routers, find_routers
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec, OptimStep

LAYOUTS = {
    "ddp-2": (2, ParallelConfig(replicate=2, shard=1)),
    "fsdp-2": (2, ParallelConfig(shard=2)),
    "pipeline-2": (2, ParallelConfig(shard=1, pipeline=2)),
    "context-2": (2, ParallelConfig(shard=1, context=2)),
    "hybrid-2x2": (4, ParallelConfig(replicate=2, shard=2)),
    "expert-2": (2, ParallelConfig(shard=2, expert=2)),
    "ddp-expert-2": (2, ParallelConfig(replicate=2, shard=1, expert=2)),
    "tensor-2": (2, ParallelConfig(shard=1, tensor=2)),
    "fsdp-4-expert-2": (4, ParallelConfig(shard=4, expert=2)),
    "ddp-4-expert-2": (4, ParallelConfig(replicate=4, shard=1, expert=2)),
    "hybrid-expert-2": (4, ParallelConfig(replicate=2, shard=2, expert=2)),
    "expert-4": (4, ParallelConfig(shard=4, expert=4)),
    "expert-2-tensor-2": (4, ParallelConfig(shard=2, expert=2, tensor=2)),
    "expert-2-pipeline-2": (4, ParallelConfig(shard=2, expert=2, pipeline=2)),
    "expert-2-context-2": (4, ParallelConfig(shard=2, expert=2, context=2)),
}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")
# Experts in NF4 as well: stored as [out, in], or as [in, out] with biases (gpt_oss).
QUANTISED = [("qwen3_moe+nf4", True), ("gpt_oss+nf4", True)]
QUICK = [("qwen3_moe", True), ("deepseek_v3", True), ("mixtral", False), QUANTISED[0]]
CELLS = [*((family, lora) for family in FAMILIES for lora in (False, True)), *QUANTISED]
# No plan of tensors; quantised matrices are not split.
_NOT_SPLIT = ("gpt_oss", "qwen3_moe+nf4", "gpt_oss+nf4")
REFUSED = {"tensor-2": _NOT_SPLIT, "expert-2-tensor-2": _NOT_SPLIT}
STEP = OptimStep(0.01, eps=1e-4)
# Large, so that a wrong gradient of theirs shows. DeepSeek has no load-balancing loss.
AUX, Z = 0.7, 0.03
UNBALANCED = ("deepseek_v3",)


@lru_cache
def losses_of(family: str) -> RouterLosses:
    """With transformers 5.17 routers of DeepSeek-V3 do not tell their logits."""
    if not any(find_routers(build_mixture(family.partition("+")[0]))):
        return RouterLosses()
    return RouterLosses("off" if family in UNBALANCED else AUX, Z)


def compute_step(
    family: str, lora: bool, group: ProcessGroup, parallel: ParallelConfig, budget: int = 96, **settings: Any
) -> dict[str, Any]:
    batch = make_batch()
    settings.setdefault("router_losses", losses_of(family))
    with Float64():
        model = build_mixture(family, lora=lora)
        backend = TorchBackend(
            model, micro_batch_tokens=budget, precision="fp64", parallel=parallel, group=group, **settings
        )
        result = backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        loss, metrics = result.loss, result.metrics
        gradients = everywhere({n: whole(p.grad) for n, p in backend.parameters().items()}, group)
        norm = backend.optim_step(STEP).grad_norm
        backend.policy.stop_packing()
    return {"loss": loss, "gradients": gradients, "norm": norm, "metrics": metrics}


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
        dequantise_base(model, torch.float64)
        loss = plain_loss(model, batch, scale_of(batch))
        if (losses := losses_of(family)).z_loss:
            aux, z = own_router_losses(model, batch)
            metrics = {"router_aux_loss": aux.item(), "router_z_loss": z.item()}
            total = loss + Z * z + (0.0 if losses.aux_loss == "off" else AUX * aux)
        else:
            total, metrics = loss, {}
        total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    return {"loss": loss.item(), "gradients": gradients, "norm": norm, "metrics": metrics}


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = float((found["gradients"][name] - gradient).abs().max())
        assert difference <= 1e-10 * max(1.0, float(gradient.abs().max())), f"gradient of {name}: {difference:.3g}"
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-10)
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-10)


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


ONE = ProcessGroup(0, 1, torch.device("cpu"))


@pytest.fixture
def wide_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_softmax(monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 1024},  # one micro-batch: counted on the way to backward
        {"budget": 1024, "activation_checkpointing": "full"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_losses_of_routers_are_the_same_in_any_pass(settings: dict[str, Any], wide_softmax: None) -> None:
    assert_same_step(compute_step("qwen3_moe", True, ONE, ParallelConfig(), **settings), plain_step("qwen3_moe", True))


def test_without_a_loss_of_routers_a_step_is_what_it_was_to_the_bit() -> None:
    watched = compute_step("qwen3_moe", False, ONE, ParallelConfig(), router_losses=RouterLosses())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routers, "__init__", _no_routers)
        plain = compute_step("qwen3_moe", False, ONE, ParallelConfig(), router_losses=RouterLosses())
    assert "expert_entropy" in watched["metrics"]
    assert "expert_entropy" not in plain["metrics"]
    assert watched["loss"] == plain["loss"]
    assert all(torch.equal(watched["gradients"][name], gradient) for name, gradient in plain["gradients"].items())


def _no_routers(self: Routers, model: object) -> None:
    self.names, self.num_experts, self.top_k, self.have_bias = [], 0, 0, False
    self.tokens, self.replayed, self._counts = None, None, None
    self._is_attached = self._chooses_freely = False


def _count_the_last_micro_batch_alone(patch: pytest.MonkeyPatch) -> None:
    honest = Routers.count

    def forget(self: Routers, place: int, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        assert self._counts is not None
        for part in vars(self._counts).values():
            part[place] = 0.0
        honest(self, place, logits, chosen)

    patch.setattr(Routers, "count", forget)


def _count_prompts_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Document, "count_texts", lambda self: np.ones(self.num_tokens))


def _forget_an_expert(patch: pytest.MonkeyPatch) -> None:
    honest = experts.grouped_product

    def drop(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        held = matrices.clone()
        held[2] = matrices[2].detach()
        return honest(x, held, ends)

    patch.setattr(experts, "grouped_product", drop)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (_count_the_last_micro_batch_alone, {}),
        (_count_prompts_once, {}),
        (_forget_an_expert, {}),
    ],
    ids=lambda value: getattr(value, "__name__", "") or str(value),
)
def test_faults_of_mixtures_are_caught(
    fault: Any, settings: dict[str, Any], wide_softmax: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_step(
            compute_step("qwen3_moe", True, ONE, ParallelConfig(), **settings), plain_step("qwen3_moe", True)
        )
