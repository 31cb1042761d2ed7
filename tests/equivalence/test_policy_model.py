"""Policy gradients of a whole model: the packed step, cut or not, equals one pass per answer with full logits."""

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
from equivalence.policy_plain import make_groups, plain_policy_loss, sampled_answers, scale_of_groups, without_reference
from equivalence.preference_plain import gradients_of
from equivalence.test_layouts import LAYOUTS
from equivalence.test_preference import assert_same_step, backend_of, disturb, policy_of, reference_of

from lockstep.algorithms.advantages import AGGREGATIONS
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.types import Datum, LossSpec

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.28},
    "gspo": {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "full": {"kl_coefficient": 0.2, "dual_clip": 1.5, "importance_weighting": "token", "importance_cap": 1.3},
    "entropy": {"entropy_coefficient": 0.3, "kl": "k2", "kl_coefficient": 0.1},
}


def plain_step(model: Any, batch: Sequence[Datum], options: dict[str, Any], aggregation: str, **extra: Any) -> Any:
    loss = plain_policy_loss(sampled_answers(model, batch, **extra), options, aggregation)
    return loss.detach(), gradients_of(model, loss)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 60, 24], ids=["whole", "packed", "cut"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_the_plain_gradients(name, micro_batch_tokens):
    """Cut: the answers of a group lie in several micro-batches."""
    model, batch = policy_of("llama"), make_groups()
    expected = plain_step(model, batch, VARIANTS[name], "token")
    loss = LossSpec("policy_gradient", scale_of_groups(batch, "token"), VARIANTS[name])
    assert_same_step(backend_of(model, micro_batch_tokens=micro_batch_tokens), batch, loss, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("family", ["qwen3", "gemma", "mistral"])
def test_every_aggregation_gives_the_plain_gradients(family, aggregation):
    model, batch = policy_of(family), make_groups(1, aggregation=aggregation)
    expected = plain_step(model, batch, VARIANTS["entropy"], aggregation)
    loss = LossSpec("policy_gradient", scale_of_groups(batch, aggregation), VARIANTS["entropy"])
    assert_same_step(backend_of(model, micro_batch_tokens=32), batch, loss, expected)


@pytest.mark.parametrize("lora", [False, True], ids=["copy", "adapter_off"])
def test_the_reference_is_that_of_the_backend_where_rows_bring_none(lora):
    batch, options = without_reference(make_groups()), VARIANTS["full"]
    expected = plain_step(policy_of("llama", lora=lora), batch, options, "token", reference=reference_of("llama"))
    model = policy_of("llama", lora=True) if lora else reference_of("llama")
    backend = backend_of(model, micro_batch_tokens=32, reference="adapter_off" if lora else "copy")
    if not lora:
        disturb(backend.parameters().values())
    loss = LossSpec("policy_gradient", scale_of_groups(batch, "token"), options)
    assert_same_step(backend, batch, loss, expected)


def test_a_cut_group_takes_no_second_forward_pass():
    """Its answers need not be together, so its loss is computed where its log-probs are."""
    model, batch = policy_of("llama"), make_groups()
    backend, passes = backend_of(model, micro_batch_tokens=24), []
    backend.policy.register_forward_hook(lambda *_: passes.append(1))
    backend.forward_backward(batch, LossSpec("policy_gradient", 0.1, VARIANTS["grpo"]))
    cut = len(passes)
    backend.forward_backward(batch, LossSpec("cross_entropy", 0.1))
    assert cut == len(passes) - cut > 4


# --- layouts --------------------------------------------------------------------------------------------------------

QUICK = ("one", "ddp-2", "fsdp-2", "tensor-2")
TOLERANCE = 1e-10


class Cell(NamedTuple):
    variant: str
    aggregation: str
    reference: str
    budget: int  # 60 tokens: most groups are whole; 24: most are cut
    temperature: float = 1.0


CELLS = [
    Cell("grpo", "token", "none", 60),
    Cell("grpo", "sequence", "none", 24),
    Cell("gspo", "sequence", "none", 60),
    Cell("full", "fixed", "copy", 60),
    Cell("full", "token", "adapter_off", 24),
    Cell("entropy", "token", "none", 60),
    Cell("entropy", "sequence", "none", 24),
    Cell("entropy", "token", "none", 60, 0.7),
    Cell("full", "token", "copy", 60, 1.3),
]


def family_of(cell: Cell) -> tuple[str, bool]:
    return ("llama", True) if cell.reference == "adapter_off" else ("qwen3", False)


def batches(cell: Cell) -> list[list[Datum]]:
    made = [make_groups(0, aggregation=cell.aggregation), make_groups(1, rows=2, aggregation=cell.aggregation)]
    return made if cell.reference == "none" else [without_reference(batch) for batch in made]


def loss_of(cell: Cell, batch: Sequence[Datum]) -> LossSpec:
    scale = scale_of_groups(batch, cell.aggregation)
    return LossSpec("policy_gradient", scale, VARIANTS[cell.variant])


def is_possible(cell: Cell, layout: str) -> bool:
    """Entropies are computed where tokens are, and a token's context may not lie on several ranks for that."""
    return cell.variant != "entropy" or LAYOUTS[layout][1].context == 1


@lru_cache
def plain_run(cell: Cell) -> dict[str, Any]:
    family, lora = family_of(cell)
    model, reference = make_model(family, lora=lora), make_model(family, lora=False)
    extra: dict[str, Any] = {"temperature": cell.temperature}
    if cell.reference != "none":
        extra["reference"] = reference
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    found: dict[str, Any] = {"losses": []}
    for batch in batches(cell):
        loss, gradients = plain_step(model, batch, VARIANTS[cell.variant], cell.aggregation, **extra)
        for name, p in trained.items():
            p.grad = gradients[name]
        found["losses"].append(loss.item())
        found["gradients"] = copy.deepcopy(gradients)
        torch.nn.utils.clip_grad_norm_(trained.values(), STEP.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: p.detach().clone() for name, p in trained.items()}
    return found


def run_cell(cell: Cell, group: Any, parallel: ParallelConfig) -> dict[str, Any]:
    family, lora = family_of(cell)
    model = make_model(family, lora=lora)
    settings: dict[str, Any] = {"micro_batch_tokens": cell.budget, "precision": "fp64", "parallel": parallel}
    backend = TorchBackend(model, group=group, reference=cell.reference, temperature=cell.temperature, **settings)
    found: dict[str, Any] = {"losses": []}
    for batch in batches(cell):
        found["losses"].append(backend.forward_backward(batch, loss_of(cell, batch)).loss)
        found["gradients"] = everywhere({name: whole(p.grad) for name, p in backend.parameters().items()}, group)
        backend.optim_step(STEP)
    found["weights"] = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, group)
    return found


def run_cells(cells: Sequence[Cell], parallel: ParallelConfig, out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {cell: run_cell(cell, group, parallel) for cell in cells}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Any]]:
    num_ranks, parallel = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp("cells") / "found.pt"
    spawn(num_ranks, run_cells, [cell for cell in CELLS if is_possible(cell, request.param)], parallel, out)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize(
    "found", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS], indirect=True
)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_layout_makes_the_same_policy_steps(found: dict[Cell, dict[str, Any]], cell: Cell) -> None:
    if cell not in found:
        pytest.skip("tokens of a context are split over ranks, and the entropy bonus needs them in one place")
    mine, expected = found[cell], plain_run(cell)
    assert mine["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    for kind in ("gradients", "weights"):
        assert mine[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            difference = float((mine[kind][name] - tensor).abs().max())
            assert difference <= TOLERANCE, f"{kind} of {name}: {difference:.3g}"
