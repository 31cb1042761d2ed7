"""ZeRO makes the same step: DeepSpeed on real gloo processes against the plainest one-rank loop.

DeepSpeed holds what it trains in float32, so the comparison with float64 allows what float32 rounds. AdamW magnifies
that where a gradient is near zero; its steps are therefore held to two bounds, see `assert_same_weights`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import batches, spawn
from equivalence.plain import STEP, make_model, make_optimizer, plain_run, scale_of

from lockstep.backend.torch_backend import join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")

Cell = tuple[str, bool, int]  # family, LoRA, micro-batch tokens
CELLS: list[Cell] = [("llama", False, 48), ("llama", True, 512), ("qwen3", False, 512), ("qwen3", True, 48)]
# Otherwise DeepSpeed keeps parameters as small as these whole, and stage 3 would not be seen.
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
WAYS: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3, "ds_config": SPLIT_ALL},
    "zero-1-offload": {"zero_stage": 1, "offload": True},
    "zero-2-offload": {"zero_stage": 2, "offload": True},
    "zero-3-offload": {"zero_stage": 3, "offload": True},
    "zero-3-whole-parameters": {"zero_stage": 3},
    "zero-3-recomputed": {"zero_stage": 3, "activation_checkpointing": "full", "ds_config": SPLIT_ALL},
    "zero-2-selective": {"zero_stage": 2, "activation_checkpointing": "selective"},
    "zero-2-overlap": {
        "ds_config": {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2000}},
    },
}
QUICK = ("zero-1", "zero-2", "zero-3")
TOLERANCE = 1e-5
# Of the learning rate, which is about the size of a step: how far weights may be from the plain ones, and from a step
# made in float64 with the very gradients that DeepSpeed had. Seen: 3e-3 and 1e-5.
STEP_SHARE, OWN_STEP_SHARE = 1e-2, 1e-4


def make_backend(model: torch.nn.Module, group: ProcessGroup, **settings: Any) -> Any:
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend

    return DeepSpeedBackend(model, **{"precision": "fp32", "micro_batch_tokens": 64, "group": group, **settings})


def record_gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Filled by the next step: whole gradients as they are when DeepSpeed has added them up."""
    from deepspeed.utils import safe_get_full_grad

    seen: dict[str, torch.Tensor] = {}
    optimizer = backend.engine.optimizer
    honest = optimizer.step

    def step(*arguments: Any) -> Any:
        optimizer.step = honest
        for name, parameter in backend.parameters().items():
            gradient = safe_get_full_grad(parameter)
            seen[name] = gradient.reshape(getattr(parameter, "ds_shape", parameter.shape)).clone()
        return honest(*arguments)

    optimizer.step = step
    return seen


def run_cell(cell: Cell, group: ProcessGroup, settings: dict[str, Any]) -> dict[str, Any]:
    """What `plain_run` returns, from the backend. All ranks."""
    family, lora, budget = cell
    backend = make_backend(make_model(family, lora=lora), group, micro_batch_tokens=budget, **settings)
    first, second = batches()
    found: dict[str, Any] = {"logprobs": backend.forward(first), "slow": backend.slow}
    found["gradients"] = [record_gradients(backend)]
    # In two calls: gradients add up until the step.
    losses = [backend.forward_backward(part, LossSpec(scale=scale_of(first))).loss for part in (first[:4], first[4:])]
    found["loss"] = sum(losses)
    found["norm"] = backend.optim_step(STEP).grad_norm
    found["gradients"].append(record_gradients(backend))
    backend.forward(second)  # an evaluation between steps must not disturb them
    backend.forward_backward(second, LossSpec(scale=scale_of(second)))
    backend.optim_step(STEP)
    found["weights"] = {name: backend.pieces.get(p).clone() for name, p in backend.parameters().items()}
    backend.engine.destroy()
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


def assert_same_step(cell: Cell, found: dict[str, Any]) -> None:
    assert_same_gradients(cell, found)
    assert_same_weights(cell, found)
    for datum, row, plain in zip(batches()[0], found["logprobs"], reference(*cell[:2])["logprobs"], strict=True):
        for completion, ours, theirs in zip(datum.completions, row, plain, strict=True):
            wanted = [p if w else 0.0 for p, w in zip(theirs, completion.weights, strict=True)]
            assert ours == pytest.approx(wanted, rel=TOLERANCE)


def assert_same_gradients(cell: Cell, found: dict[str, Any]) -> None:
    """Of the first batch: the second is computed from weights that differ already."""
    expected = reference(*cell[:2])
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["norm"] == pytest.approx(expected["norm"], rel=TOLERANCE)
    assert found["gradients"][0].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = float((found["gradients"][0][name] - gradient).abs().max())
        assert difference <= TOLERANCE * float(gradient.abs().max()), f"gradient of {name}: {difference:.3g}"


def assert_same_weights(cell: Cell, found: dict[str, Any]) -> None:
    """Near the plain run's, and much nearer to what AdamW makes of DeepSpeed's own gradients in float64."""
    bounds = ((reference(*cell[:2])["weights"], STEP_SHARE), (step_exactly(cell, found["gradients"]), OWN_STEP_SHARE))
    for expected, share in bounds:
        assert found["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            difference = float((found["weights"][name] - weight).abs().max()) / STEP.learning_rate
            assert difference <= share, f"{name}: off by {difference:.3g} of the learning rate, {share:g} allowed"


def step_exactly(cell: Cell, gradients: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights after a step with each of these gradients, in float64 on one rank."""
    family, lora, _ = cell
    trained = {name: p for name, p in make_model(family, lora=lora).named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    for given in gradients:
        for name, parameter in trained.items():
            parameter.grad = given[name].double()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), STEP.max_grad_norm or 0.0)
        optimizer.step()
    return {name: p.detach() for name, p in trained.items()}


ways = pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)


@ways
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c[0]}-{'lora' if c[1] else 'full'}-{c[2]}")
def test_zero_makes_the_same_step(found: Callable[[str, Cell], dict[str, Any]], way: str, cell: Cell) -> None:
    result = found(way, cell)
    assert_same_step(cell, result)
    assert not result["slow"]


ALONE: Cell = ("qwen3", False, 48)


def run_alone(stage: int, out: Path) -> None:
    """One process that met nobody."""
    torch.set_num_threads(1)
    settings = {"zero_stage": stage, "ds_config": SPLIT_ALL}
    torch.save(run_cell(ALONE, ProcessGroup(0, 1, torch.device("cpu")), settings), out)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_makes_the_same_step(tmp_path: Path, stage: int) -> None:
    spawn(1, run_alone, stage, tmp_path / "found.pt")
    assert_same_step(ALONE, torch.load(tmp_path / "found.pt", weights_only=False))


# --- faults -----------------------------------------------------------------------------------------------------------


def _divide_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Half of the gradient: two ranks' average, as if losses were means."""
    from deepspeed import DeepSpeedEngine

    honest = DeepSpeedEngine.backward
    patch.setattr(DeepSpeedEngine, "backward", lambda self, loss: honest(self, loss / 2))


def _leave_out_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Every rank keeps the gradient of its own rows."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    patch.setattr(DeepSpeedZeroOptimizer, "allreduce_bucket", lambda self, bucket, *_, **__: self.flatten(bucket))


def _count_steps_wrongly(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's alone: gradients are right, and moments are not corrected for their zero beginning."""
    honest = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        for state in optimizer.state.values():
            state["step"] += 1
        return honest(optimizer, *arguments)

    patch.setattr(torch.optim.AdamW, "step", step)


FAULTS = {
    "wrong divide factor": _divide_wrongly,
    "no sum over ranks": _leave_out_the_sum,
    "wrong count of steps": _count_steps_wrongly,
}
FAULTY: Cell = ("qwen3", True, 48)


def run_faults(out: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", ParallelConfig(), timeout_s=60)
    found = {}
    for name, inject in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            inject(patch)
            found[name] = run_cell(FAULTY, group, WAYS["zero-1"])
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


def test_faults_are_larger_than_what_float32_rounds(tmp_path: Path) -> None:
    spawn(2, run_faults, tmp_path / "found.pt")
    for name, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        with pytest.raises(AssertionError, match="of the learning rate"):
            assert_same_weights(FAULTY, found)
        if name == "wrong count of steps":
            assert_same_gradients(FAULTY, found)
        else:
            with pytest.raises(AssertionError):
                assert_same_gradients(FAULTY, found)
