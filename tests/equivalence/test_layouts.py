"""One global batch gives one gradient, whatever the layout: against the plainest one-rank loop, to 1e-10 in float64."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.families import in_float64
from equivalence.layouts import BUDGETS, Cell, batches, run_cell, run_cells, run_small_batch, spawn
from equivalence.plain import FAMILIES, make_batch, plain_run

from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "ddp-2": (2, ParallelConfig(replicate=2, shard=1)),
    "fsdp-2": (2, ParallelConfig(shard=2)),
    "grad-op-2": (2, ParallelConfig(shard=2, keep_parameters=True, prefetch=2)),
    "offload-2": (2, ParallelConfig(shard=2, offload=True)),
    "ddp-4": (4, ParallelConfig(replicate=4, shard=1)),
    "fsdp-4": (4, ParallelConfig(shard=4)),
    "hybrid-2x2": (4, ParallelConfig(replicate=2, shard=2)),
    "tensor-2": (2, ParallelConfig(tensor=2)),
    "context-2": (2, ParallelConfig(context=2)),
    "shard-2-context-2": (4, ParallelConfig(shard=2, context=2)),
    "tensor-2-context-2": (4, ParallelConfig(tensor=2, context=2)),
    "replicate-2-tensor-2": (4, ParallelConfig(replicate=2, shard=1, tensor=2)),
    "pipeline-2": (2, ParallelConfig(pipeline=2)),
    "shard-2-pipeline-2": (4, ParallelConfig(shard=2, pipeline=2)),
    "gpipe-2": (2, ParallelConfig(pipeline=2, schedule="gpipe")),
    "tensor-2-pipeline-2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "shard-2-tensor-2": (4, ParallelConfig(shard=2, tensor=2)),
}
# CI runs these; `make sweep` all of them.
QUICK = ("one", "ddp-2", "fsdp-2", "context-2", "pipeline-2", "tensor-2")
CELLS: list[Cell] = [(family, lora, b) for family in ("llama", "qwen3") for lora in (False, True) for b in BUDGETS]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, dict[str, Any]]:
    """Every cell of one layout: the processes are started once for all of them."""
    num_ranks, parallel = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp("cells") / "found.pt"
    spawn(num_ranks, run_cells, CELLS, parallel, out)
    return torch.load(out, weights_only=False)


@lru_cache
def reference(family: str, lora: bool) -> dict[str, Any]:
    return plain_run(family, lora=lora, batches=batches())


def assert_same_step(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            difference = float((found[kind][name] - tensor).abs().max())
            assert difference <= tolerance * max(1.0, float(tensor.abs().max())), f"{kind} of {name}: {difference:.3g}"
    assert_same_logprobs(found, expected, batches()[0], tolerance)


def assert_same_logprobs(
    found: dict[str, Any], expected: dict[str, Any], batch: list[Datum], tolerance: float = TOLERANCE
) -> None:
    for datum, row, plain in zip(batch, found["logprobs"], expected["logprobs"], strict=True):
        for completion, ours, theirs in zip(datum.completions, row, plain, strict=True):
            wanted = [p if w else 0.0 for p, w in zip(theirs, completion.weights, strict=True)]
            assert ours == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    "found", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS], indirect=True
)
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]}-{'lora' if c[1] else 'full'}-{c[2]}")
def test_a_layout_makes_the_same_step(found: dict[Cell, dict[str, Any]], cell: Cell) -> None:
    assert_same_step(found[cell], reference(cell[0], cell[1]))


quick_tensor, slow_tensor = "tensor-2", ("shard-2-tensor-2", "tensor-2-pipeline-2", "tensor-2-context-2")


@pytest.mark.parametrize(
    "layout", [quick_tensor, *(pytest.param(name, marks=pytest.mark.slow) for name in slow_tensor)]
)
def test_norms_on_a_part_of_the_tokens_make_the_same_step(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    cells: list[Cell] = [("llama-sequence", False, 48), ("llama-sequence", True, 96), ("qwen3-sequence", False, 512)]
    spawn(num_ranks, run_cells, cells, parallel, tmp_path / "found.pt")
    for cell, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, reference(cell[0].removesuffix("-sequence"), cell[1]))


@pytest.mark.parametrize(
    "layout", [pytest.param("ddp-4", marks=pytest.mark.slow), pytest.param("fsdp-4", marks=pytest.mark.slow)]
)
def test_ranks_without_a_row_add_nothing(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    spawn(num_ranks, run_small_batch, parallel, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    batch = make_batch(2, rows=1)
    expected = plain_run("qwen3", lora=False, batches=[batch])
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    for name, gradient in expected["gradients"].items():
        assert float((found["gradients"][name] - gradient).abs().max()) <= TOLERANCE, name
    assert_same_logprobs(found, expected, batch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_model_family_makes_the_plain_step(family: str, lora: bool) -> None:
    # The attention of two of them rounds to float32.
    with in_float64() if family in ("gemma2", "bloom") else contextlib.nullcontext():
        found = run_cell((family, lora, 64), ProcessGroup(0, 1, torch.device("cpu")))
        assert_same_step(found, reference(family, lora))
    # One does not take attention from outside.
    assert any("one after another" in message for message in found["slow"]) == (family == "bloom")


@pytest.mark.parametrize(
    "settings",
    [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}, {"activation_offload": True}],
)
def test_activations_that_are_not_kept_give_the_same_step(settings: dict[str, Any]) -> None:
    from equivalence.plain import STEP, make_model, scale_of

    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.types import LossSpec

    batch = batches()[0]
    group = ProcessGroup(0, 1, torch.device("cpu"))
    model = make_model("llama", lora=True)
    backend = TorchBackend(model, micro_batch_tokens=64, precision="fp64", group=group, **settings)
    loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
    norm = backend.optim_step(STEP).grad_norm
    expected = reference("llama", True)
    assert loss == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert norm == pytest.approx(expected["norm"], rel=TOLERANCE)


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_activations_in_host_memory_give_the_same_step_on_ranks(layout: str, tmp_path: Path) -> None:
    cells: list[Cell] = [("llama", True, 48), ("qwen3", False, 96)]
    num_ranks, parallel = LAYOUTS[layout]
    spawn(num_ranks, run_cells, cells, parallel, tmp_path / "found.pt", {"activation_offload": True})
    for cell, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, reference(*cell[:2]))


def _cells_with_averaged_gradients(cells: list[Cell], parallel: ParallelConfig, out: Path) -> None:
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    run_cells(cells, parallel, out)


def test_an_average_instead_of_a_sum_is_caught(tmp_path: Path) -> None:
    cell: Cell = ("llama", False, 96)
    spawn(2, _cells_with_averaged_gradients, [cell], ParallelConfig(shard=2), tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    with pytest.raises(AssertionError):
        assert_same_step(found[cell], reference("llama", False))


def test_a_mask_that_leaks_between_documents_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.backend import torch_backend
    from lockstep.model import attention

    honest = attention.segment_by_segment

    def leak(
        q: Any, k: Any, v: Any, scaling: Any, dropout: Any, window: Any, layout: attention.PackedLayout, attend: Any
    ) -> torch.Tensor:
        return honest(q, k, v, scaling, dropout, window, attention.PackedLayout((sum(layout.lengths),)), attend)

    monkeypatch.setattr(attention, "segment_by_segment", leak)
    group = ProcessGroup(0, 1, torch.device("cpu"))
    # The probe sees the leak and has attention take one document at a time: slower, and right.
    guarded = run_cell(("llama", False, 512), group)
    assert "LlamaAttention of LlamaForCausalLM compute each document of a packed row by itself" in guarded["slow"][0]
    assert_same_step(guarded, reference("llama", False))
    monkeypatch.setattr(torch_backend, "check_policy", lambda *arguments: [])
    with pytest.raises(AssertionError):
        assert_same_step(run_cell(("llama", False, 512), group), reference("llama", False))
