"""ZeRO makes the same step: DeepSpeed on real gloo processes against the plainest one-rank loop.

DeepSpeed holds what it trains in float32, so the comparison with float64 allows what float32 rounds.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import batches, spawn
from equivalence.plain import STEP, make_model, plain_run, scale_of

from lockstep.backend.torch_backend import join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import Group
from lockstep.types import LossSpec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")

Cell = tuple[str, bool, int]  # family, LoRA, micro-batch tokens
CELLS: list[Cell] = [("llama", False, 48), ("llama", True, 512), ("qwen3", False, 512), ("qwen3", True, 48)]
# Otherwise DeepSpeed keeps parameters as small as these whole, and stage 3 would not be seen.
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
WAYS: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3, "given": SPLIT_ALL},
    "zero-1-offload": {"zero_stage": 1, "offload": True},
    "zero-2-offload": {"zero_stage": 2, "offload": True},
    "zero-3-offload": {"zero_stage": 3, "offload": True},
    "zero-3-whole-parameters": {"zero_stage": 3},
    "zero-3-recomputed": {"zero_stage": 3, "activation_checkpointing": "full", "given": SPLIT_ALL},
    "zero-2-selective": {"zero_stage": 2, "activation_checkpointing": "selective"},
    "zero-2-overlap": {
        "given": {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2000}},
    },
}
QUICK = ("zero-1", "zero-2", "zero-3")
TOLERANCE = 1e-5


def make_backend(model: torch.nn.Module, group: Group, **settings: Any) -> Any:
    from lockstep.backend.deepspeed_backend import DeepSpeedBackend

    return DeepSpeedBackend(model, **{"precision": "fp32", "micro_batch_tokens": 64, "group": group, **settings})


def record_gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Filled by the next step: whole gradients as they are when DeepSpeed has added them up."""
    from deepspeed.utils import safe_get_full_grad

    seen: dict[str, torch.Tensor] = {}
    optimizer = backend._engine.optimizer
    honest = optimizer.step

    def step(*arguments: Any) -> Any:
        optimizer.step = honest
        for name, parameter in backend.parameters().items():
            gradient = safe_get_full_grad(parameter)
            seen[name] = gradient.reshape(getattr(parameter, "ds_shape", parameter.shape)).clone()
        return honest(*arguments)

    optimizer.step = step
    return seen


def run_cell(cell: Cell, group: Group, settings: dict[str, Any]) -> dict[str, Any]:
    """What `plain_run` returns, from the backend. All ranks."""
    family, lora, budget = cell
    backend = make_backend(make_model(family, lora=lora), group, micro_batch_tokens=budget, **settings)
    first, second = batches()
    found: dict[str, Any] = {"logprobs": backend.forward(first), "warnings": backend.warnings}
    found["gradients"] = record_gradients(backend)
    # In two calls: gradients add up until the step.
    losses = [backend.forward_backward(part, LossSpec(scale=scale_of(first))).loss for part in (first[:4], first[4:])]
    found["loss"] = sum(losses)
    found["norm"] = backend.optim_step(STEP).grad_norm
    backend.forward(second)  # an evaluation between steps must not disturb them
    backend.forward_backward(second, LossSpec(scale=scale_of(second)))
    backend.optim_step(STEP)
    found["weights"] = {name: backend.pieces.get(p).clone() for name, p in backend.parameters().items()}
    backend._engine.destroy()
    return found


def run_ways(ways: list[str], out: Path) -> None:
    """The body of each process."""
    torch.set_num_threads(1)
    group = join_group("cpu", ParallelConfig(), timeout_s=60)
    found = {(way, cell): run_cell(cell, group, WAYS[way]) for way in ways for cell in CELLS}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Cell], dict[str, Any]]:
    """Processes are started once for the quick ways and once for the others."""
    made: dict[tuple[str, Cell], dict[str, Any]] = {}
    waiting = set(WAYS)

    def get(way: str, cell: Cell) -> dict[str, Any]:
        if way in waiting:
            ways = [name for name in WAYS if (name in QUICK) == (way in QUICK)]
            waiting.difference_update(ways)
            out = tmp_path_factory.mktemp("cells") / "found.pt"
            spawn(2, run_ways, ways, out)
            made.update(torch.load(out, weights_only=False))
        return made[way, cell]

    return get


@functools.lru_cache
def reference(family: str, lora: bool) -> dict[str, Any]:
    return plain_run(family, lora=lora, batches=batches())


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["norm"] == pytest.approx(expected["norm"], rel=TOLERANCE)
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            difference = float((found[kind][name] - tensor).abs().max())
            # AdamW magnifies what float32 rounds in gradients near zero: weights are held to a part of their step.
            size = float(tensor.abs().max()) if kind == "gradients" else max(1.0, float(tensor.abs().max()))
            assert difference <= TOLERANCE * size, f"{kind} of {name}: {difference:.3g}"
    for datum, row, plain in zip(batches()[0], found["logprobs"], expected["logprobs"], strict=True):
        for completion, ours, theirs in zip(datum.completions, row, plain, strict=True):
            wanted = [p if w else 0.0 for p, w in zip(theirs, completion.weights, strict=True)]
            assert ours == pytest.approx(wanted, rel=TOLERANCE)


ways = pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)


@ways
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]}-{'lora' if c[1] else 'full'}-{c[2]}")
def test_zero_makes_the_same_step(found: Callable[[str, Cell], dict[str, Any]], way: str, cell: Cell) -> None:
    result = found(way, cell)
    assert_same_step(result, reference(cell[0], cell[1]))
    assert not result["warnings"]


def run_alone(stage: int, out: Path) -> None:
    """One process that met nobody."""
    torch.set_num_threads(1)
    settings = {"zero_stage": stage, "given": SPLIT_ALL}
    torch.save(run_cell(("qwen3", False, 48), Group(0, 1, torch.device("cpu")), settings), out)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_makes_the_same_step(tmp_path: Path, stage: int) -> None:
    spawn(1, run_alone, stage, tmp_path / "found.pt")
    assert_same_step(torch.load(tmp_path / "found.pt", weights_only=False), reference("qwen3", False))
