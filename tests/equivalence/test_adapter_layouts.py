"""Kinds of adapters and optimizers: the same step on every layout, or refused with it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import Cell, batches, everywhere, run_cell, run_cells, spawn, whole
from equivalence.plain import STEP, make_model, plain_run, scale_of
from equivalence.test_layouts import LAYOUTS, assert_same_step
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.backend.build import cut_stages
from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, LossSpec, OptimStep

ADAPTED: list[Cell] = [("llama+pissa", True, 48), ("llama+ends", True, 96), ("llama+saved", True, 48)]
OPTIMIZERS = ("muon", "adafactor", "adamw_8bit")
# Wide enough for eight bits, with rows that are no whole blocks and more ranks than some tensors have rows.
STEPPED: list[Cell] = [("llama", False, 48), ("llama-wide", False, 96)]
SLOW = ("ddp-2", "offload-2", "fsdp-4", "grad-op-2", "hybrid-2x2", "context-2", "pipeline-2", "shard-2-pipeline-2")


@lru_cache
def reference(family: str) -> dict[str, Any]:
    return plain_run(family, lora=True, batches=batches())


@lru_cache
def one_rank(cell: Cell, kind: str) -> dict[str, Any]:
    settings = {"optimizer": OptimizerSettings(kind)}
    return run_cell((cell[0], cell[1], 512), ProcessGroup(0, 1, torch.device("cpu")), settings=settings)


def run_all(cells: list[Cell], stepped: list[Cell], parallel: Any, folder: Path) -> None:
    """Adapters with AdamW and every other optimizer, in the processes of one start."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found: dict[Any, Any] = {cell: run_cell(cell, group, parallel) for cell in cells}
    for kind in OPTIMIZERS:
        if kind == "adamw_8bit" and parallel.tensor > 1:
            continue
        for cell in stepped:
            found[cell, kind] = run_cell(cell, group, parallel, {"optimizer": OptimizerSettings(kind)})
    if group.rank == 0:
        torch.save(found, folder / "found.pt")
    group.leave()


@pytest.mark.parametrize("layout", ["fsdp-2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_layout_makes_the_same_step(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    cells = (ADAPTED[:2], STEPPED[1:]) if layout == "fsdp-2" else (ADAPTED, STEPPED)
    spawn(num_ranks, run_all, *cells, parallel, tmp_path)
    for key, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, one_rank(*key) if len(key) == 2 else reference(key[0]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-2", "shard-2-tensor-2", "tensor-2-pipeline-2"])
def test_whole_matrices_are_seen_where_each_is_split(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    spawn(num_ranks, run_all, [], STEPPED, parallel, tmp_path)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert {kind for _, kind in found} == {"muon", "adafactor"}
    for key, values in found.items():
        assert_same_step(values, one_rank(*key))


def test_stages_refuse_a_shared_matrix_that_is_adapted_at_one_end() -> None:
    from lockstep.model.policy import Policy

    policy = Policy(make_model("qwen3+ends", lora=True))
    group = ProcessGroup(0, 2, torch.device("cpu"), degrees=LAYOUTS["pipeline-2"][1].degrees(2))
    with pytest.raises(ValueError, match=r"set parallel\.pipeline to 1"):
        cut_stages(policy, group, "1f1b")


@pytest.mark.slow
def test_eight_bits_are_refused_where_rows_are_split(tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS["tensor-2"]
    with pytest.raises(Exception, match="adamw_8bit needs whole rows"):
        spawn(
            num_ranks, run_cells, STEPPED[1:], parallel, tmp_path / "f", {"optimizer": OptimizerSettings("adamw_8bit")}
        )


def save_a_step(kind: str, parallel: Any, folder: Path) -> None:
    """A step on two ranks, and a checkpoint after it."""
    backend = _backend(kind, parallel)
    _step(backend, batches()[0])
    backend.save_state(folder / "state").result(timeout=60)
    backend.group.barrier()
    backend.group.leave()


def load_and_step(kind: str, parallel: Any, folder: Path) -> None:
    backend = _backend(kind, parallel)
    backend.load_state(folder / "state")
    _step(backend, batches()[1])
    weights = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, backend.group)
    if backend.group.rank == 0:
        torch.save(weights, folder / f"{parallel.shard}.pt")
    backend.group.leave()


def _backend(kind: str, parallel: Any) -> TorchBackend:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    settings = {"micro_batch_tokens": 512, "precision": "fp64", "parallel": parallel, "group": group}
    return TorchBackend(make_model("llama-wide", lora=False), optimizer=OptimizerSettings(kind), **settings)  # type: ignore[arg-type]


def _step(backend: TorchBackend, batch: list[Datum]) -> None:
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    backend.optim_step(STEP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_goes_on_in_another_layout(kind: str, tmp_path: Path) -> None:
    spawn(2, save_a_step, kind, ParallelConfig(shard=2), tmp_path)
    for shards in (1, 3):
        spawn(shards, load_and_step, kind, ParallelConfig(shard=shards), tmp_path)
        found = torch.load(tmp_path / f"{shards}.pt", weights_only=False)
        for name, tensor in one_rank(("llama-wide", False, 512), kind)["weights"].items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def step_in_bf16(kind: str, parallel: Any, out: Path) -> None:
    """Gradients are given, so that only the rounding of weights is compared: bit for bit."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    settings = OptimizerSettings(kind, stochastic_rounding=True)
    model = make_model("llama-wide", lora=False)
    backend = TorchBackend(model, precision="bf16", parallel=parallel, group=group, compile=False, optimizer=settings)
    for number in range(3):
        for name, parameter in backend.parameters().items():
            draw = torch.Generator().manual_seed(len(name) + number)
            gradient = torch.randn(parameter.shape, generator=draw).bfloat16()
            if isinstance(parameter, DTensor):
                mesh, places = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, places, src_data_rank=None)
            parameter.grad = gradient
        backend.optim_step(OptimStep(learning_rate=1e-3))
    weights = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, group)
    if group.rank == 0:
        torch.save(weights, out)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", *OPTIMIZERS])
def test_weights_in_bf16_are_rounded_alike_on_every_layout(kind: str, tmp_path: Path) -> None:
    spawn(1, step_in_bf16, kind, ParallelConfig(), tmp_path / "one.pt")
    expected = torch.load(tmp_path / "one.pt", weights_only=False)
    for layout in ("fsdp-2", "hybrid-2x2", "pipeline-2"):
        num_ranks, parallel = LAYOUTS[layout]
        spawn(num_ranks, step_in_bf16, kind, parallel, tmp_path / f"{layout}.pt")
        found = torch.load(tmp_path / f"{layout}.pt", weights_only=False)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(found[name], tensor), f"{layout}: {name}"
