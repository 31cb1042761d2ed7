"""Four ranks, in layouts where a mistake shows on some of them alone.

One group of processes does all the work, once; only rank 0 has the weights, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equivalence.layouts
import pytest
import torch
from equivalence.layouts import batches, everywhere, run_cell, whole
from equivalence.plain import STEP, make_batch, make_model, plain_run, scale_of
from equivalence.test_layouts import assert_same_step
from equivalence.test_preference_layouts import Cell as PairCell
from equivalence.test_preference_layouts import plain_run as plain_pairs
from equivalence.test_preference_layouts import run_cell as run_pairs
from ranks import run_together
from torch import Tensor, nn
from unit.backend.test_dropout import make_adapted

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

HYBRID = ParallelConfig(replicate=2, shard=2)
CONTEXT = ParallelConfig(context=4)
TENSOR = ParallelConfig(replicate=2, shard=1, tensor=2)
LAYOUTS = {"hybrid": HYBRID, "context": CONTEXT, "tensor": TENSOR}
# Two key-value heads for four context ranks, and a window of six tokens; biases and padding for tensor ranks.
CELLS = {
    "hybrid": ("llama", False, 48),
    "context": ("mistral", False, 48),
    "tensor": ("llama-biased", False, 96),
}
PAIRS = PairCell("adapter_off", "sigmoid", 40)


def measure(folder: Path) -> None:
    """On every rank; rank 0 writes what all found."""
    found: dict[str, Any] = {}
    groups = {name: join_group("cpu", parallel, timeout_s=120) for name, parallel in LAYOUTS.items()}
    rank = groups["hybrid"].rank
    equivalence.layouts.make_model = _only_on_rank_0(rank)
    for name, cell in CELLS.items():
        found[name] = run_cell(cell, groups[name], LAYOUTS[name])
    found["pairs"] = run_pairs(PAIRS, groups["context"], CONTEXT, folder / "pairs")
    found["random"] = {name: _draws(groups[name], LAYOUTS[name], folder / f"state-{name}") for name in LAYOUTS}
    for name, parallel in {"sharded": ParallelConfig(shard=4), "replicated": ParallelConfig(replicate=4)}.items():
        found[name] = _pass_in_bf16(parallel)
    everybody = groups["hybrid"].gather_objects(found.pop("random"))
    if rank == 0:
        torch.save({**found, "random": everybody}, folder / "found.pt")
    groups["hybrid"].leave()


def _only_on_rank_0(rank: int) -> Callable[..., nn.Module]:
    def build(family: str, *, lora: bool) -> nn.Module:
        model = make_model(family, lora=lora)
        for tensor in (*model.parameters(), *model.buffers()) if rank else ():
            tensor.data.fill_(3.0)
        return model

    return build


def _draws(group: ProcessGroup, parallel: ParallelConfig, state: Path) -> dict[str, Any]:
    """What this rank draws at first; after a step and a checkpoint; and after reading that with another seed."""
    drawn: dict[str, Any] = {"place": (group.data_rank, group.place("context"), group.place("tensor"))}

    def build(seed: int) -> TorchBackend:
        return TorchBackend(make_adapted(0.5), precision="fp64", parallel=parallel, seed=seed, group=group)

    backend = build(1)
    drawn["first"] = torch.rand(4).tolist()
    batch = make_batch(rows=4)
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    backend.optim_step(STEP)
    backend.save_state(state).result(timeout=120)
    group.barrier()
    drawn["next"] = torch.rand(4).tolist()
    build(2).load_state(state)
    drawn["resumed"] = torch.rand(4).tolist()
    return drawn


def _pass_in_bf16(parallel: ParallelConfig) -> tuple[float, dict[str, Tensor]]:
    group, batch = join_group("cpu", parallel, timeout_s=120), make_batch(rows=8)
    # CPUs that show AMX but forbid it die in oneDNN's bf16 products.
    with torch.backends.mkldnn.flags(enabled=False):
        model = make_model("llama", lora=False).float()
        backend = TorchBackend(model, micro_batch_tokens=512, precision="bf16", parallel=parallel, group=group)
        loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
    return loss, everywhere({name: whole(p.grad) for name, p in backend.parameters().items()}, group)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    run_together(4, measure, folder)
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("name", CELLS)
def test_they_make_the_plain_step(name: str, found: dict[str, Any]) -> None:
    family, lora, _ = CELLS[name]
    assert_same_step(found[name], plain_run(family, lora=lora, batches=batches()))


def test_answers_that_are_spread_over_ranks_give_the_loss_of_whole_pairs(found: dict[str, Any]) -> None:
    expected = plain_pairs(PAIRS)
    assert found["pairs"]["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["pairs"]["gradients"][name], gradient, rtol=0, atol=1e-10)


def draws_of(found: dict[str, Any], layout: str, key: str) -> dict[tuple[int, int, int], list[float]]:
    """By the rank's place: data, context, tensor."""
    return {own[layout]["place"]: own[layout][key] for own in found["random"]}


@pytest.mark.parametrize("layout", ["hybrid", "context"])
def test_ranks_with_other_tokens_draw_another_dropout(layout: str, found: dict[str, Any]) -> None:
    drawn = draws_of(found, layout, "first")
    assert len(drawn) == len({tuple(numbers) for numbers in drawn.values()}) == 4


def test_tensor_ranks_draw_the_same_dropout_and_replicas_another(found: dict[str, Any]) -> None:
    drawn = draws_of(found, "tensor", "first")
    assert drawn[0, 0, 0] == drawn[0, 0, 1] != drawn[1, 0, 0] == drawn[1, 0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_goes_on_with_its_own_dropout_after_a_resume(layout: str, found: dict[str, Any]) -> None:
    drawn = draws_of(found, layout, "next")
    assert draws_of(found, layout, "resumed") == drawn
    assert len({tuple(numbers) for numbers in drawn.values()}) == (2 if layout == "tensor" else 4)


def test_shards_in_bf16_have_the_loss_and_the_gradient_of_replicas(found: dict[str, Any]) -> None:
    """Gradients are added, and tokens weighted, in float32 in both."""
    (loss, gradients), (expected_loss, expected) = found["sharded"], found["replicated"]
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        assert error < 1e-6, f"{name}: {error:.2g}"  # sums in bf16 would be off by 1e-3
