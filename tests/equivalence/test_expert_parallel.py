"""Experts divided over ranks: the step of one rank, whoever gets how many tokens; checkpoints, exports and bytes.

Every family in every layout is in test_mixtures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import everywhere, spawn, whole
from equivalence.mixtures import Float64, build_mixture
from equivalence.plain import make_batch, plain_loss, scale_of
from equivalence.test_mixtures import STEP, assert_same_step, compute_step, plain_step

from lockstep.backend.build import split_experts
from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.config.parallel import Degrees
from lockstep.model.policy import Policy
from lockstep.model.routing import BIAS
from lockstep.parallel import expert
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, LossSpec

DIVIDED, WHOLE = ParallelConfig(shard=2, expert=2), ParallelConfig(shard=2)
TENSOR = ParallelConfig(shard=1, tensor=2)
ONE = ProcessGroup(0, 1, torch.device("cpu"))
OPTIMIZERS = ("muon", "adafactor")
CELLS = [("qwen3_moe", True), ("deepseek_v3", False)]


def build_lopsided() -> Any:
    """All tokens choose the first two experts, which one of two ranks has."""
    model = build_mixture("deepseek_v3")
    for name, bias in model.named_buffers():
        if name.endswith(BIAS):
            bias[:2] += 100.0
    return model


def make_backend(model: Any, group: ProcessGroup, parallel: ParallelConfig) -> TorchBackend:
    return TorchBackend(model, micro_batch_tokens=96, precision="fp64", parallel=parallel, group=group)


def take_step(backend: TorchBackend, batch: list[Datum]) -> dict[str, Any]:
    with Float64():
        result = backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        loss, metrics = result.loss, result.metrics
        gradients = everywhere({n: whole(p.grad) for n, p in backend.parameters().items()}, backend.group)
        norm = backend.optim_step(STEP).grad_norm
    return {"loss": loss, "gradients": gradients, "norm": norm, "metrics": metrics}


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return everywhere({n: whole(p.detach()) for n, p in backend.parameters().items()}, backend.group)


def _run_ranks(folder: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", DIVIDED, timeout_s=60)
    found: dict[str, Any] = {cell: compute_step(*cell, group, DIVIDED) for cell in CELLS}
    with Float64():
        found["lopsided"] = take_step(make_backend(build_lopsided(), group, DIVIDED), make_batch())
        # Fewer rows than ranks: one has no token of its own, and computes for the other.
        found["one row"] = take_step(make_backend(build_mixture("qwen3_moe"), group, DIVIDED), make_batch(rows=1))
        backend = make_backend(build_mixture("mixtral"), group, DIVIDED)
        found["first"] = take_step(backend, make_batch())
        backend.save_state(folder / "state").result(timeout=60)
        backend.export_weights(folder / "export")
        found["second"], found["weights"] = take_step(backend, make_batch(1)), weights_of(backend)
        backend = make_backend(build_mixture("mixtral", changes={"initializer_range": 0.1}), group, WHOLE)
        backend.load_state(folder / "state")
        found["resumed whole"] = take_step(backend, make_batch(1))
        backend.save_state(folder / "state of whole").result(timeout=60)
        third = take_step(backend, make_batch(2))
        backend = make_backend(build_mixture("mixtral", changes={"initializer_range": 0.1}), group, DIVIDED)
        backend.load_state(folder / "state of whole")
        found["third"], found["resumed divided"] = third, take_step(backend, make_batch(2))
    found["tensor"] = compute_step(*CELLS[0], join_group("cpu", TENSOR, timeout_s=60), TENSOR)
    everybody = group.gather_objects(found)
    if group.rank == 0:
        torch.save(everybody, folder / "found.pt")
    group.leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    spawn(2, _run_ranks, folder)
    return folder, torch.load(folder / "found.pt", weights_only=False)


Ranks = tuple[Path, list[dict[Any, Any]]]


def plain(build: Callable[[], Any], batch: list[Datum]) -> dict[str, Any]:
    with Float64():
        model = build()
        loss = plain_loss(model, batch, scale_of(batch))
        loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    return {"loss": loss.item(), "gradients": gradients, "norm": norm, "metrics": {}}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_divided_experts_make_the_plain_step(ranks: Ranks, cell: tuple[str, bool]) -> None:
    assert_same_step(ranks[1][0][cell], plain_step(*cell))


def test_tensor_ranks_have_whole_experts(ranks: Ranks) -> None:
    assert_same_step(ranks[1][0]["tensor"], plain_step(*CELLS[0]))


def test_a_rank_whose_experts_no_token_chooses_takes_part(ranks: Ranks) -> None:
    found = ranks[1][0]["lopsided"]
    assert found["metrics"]["expert_share_min"] == 0.0
    assert_same_step(found, plain(build_lopsided, make_batch()))


def test_a_rank_without_a_row_takes_part(ranks: Ranks) -> None:
    assert_same_step(ranks[1][0]["one row"], plain(lambda: build_mixture("qwen3_moe"), make_batch(rows=1)))


def test_a_checkpoint_goes_into_divided_experts_and_out_of_them(ranks: Ranks) -> None:
    folder, (found, _) = ranks
    second, third = ({**found[step], "metrics": {}} for step in ("second", "third"))
    assert_same_step(found["resumed whole"], second)
    assert_same_step(found["resumed divided"], third)
    with Float64():
        alone = make_backend(build_mixture("mixtral", changes={"initializer_range": 0.1}), ONE, ParallelConfig())
    alone.load_state(folder / "state")
    assert_same_step(take_step(alone, make_batch(1)), second)
    for name, weight in weights_of(alone).items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-10, atol=1e-10)


def test_the_export_is_that_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with Float64():
        alone = make_backend(build_mixture("mixtral"), ONE, ParallelConfig())
    take_step(alone, make_batch())
    alone.export_weights(tmp_path / "export")
    expected = load_file(tmp_path / "export" / "model.safetensors")
    found = load_file(ranks[0] / "export" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9)


def test_ranks_send_what_theory_says(ranks: Ranks) -> None:
    """Which of them sends how much depends on the routers; together they send each chosen row and get it back."""
    found = [rank["first"]["metrics"] for rank in ranks[1]]
    sent, least = (sum(m[f"{kind}/expert/all_to_all"] for m in found) for kind in ("traffic", "traffic_least"))
    assert least <= sent <= least * 1.01 + 256 * 8  # and how many rows go where
    for metrics in found:
        assert metrics["traffic_least/shard/all_gather"] == pytest.approx(metrics["traffic/shard/all_gather"], rel=0.01)
        assert not any("expert_shard" in name for name in metrics)  # one rank has each expert


# --- refused --------------------------------------------------------------------------------------------------------


def group_of(degrees: Degrees) -> ProcessGroup:
    return ProcessGroup(0, degrees.num_ranks, torch.device("cpu"), degrees)


def _step_with(kind: str, parallel: ParallelConfig, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Weights after two steps."""
    with Float64():
        backend = TorchBackend(
            build_mixture("mixtral"),
            micro_batch_tokens=96,
            precision="fp64",
            parallel=parallel,
            group=group,
            optimizer=OptimizerSettings(kind),
        )
        for seed in range(2):
            take_step(backend, make_batch(seed))
        return weights_of(backend)


def _step_with_each(parallel: ParallelConfig, file: Path) -> None:
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {kind: _step_with(kind, parallel, group) for kind in OPTIMIZERS}
    if group.rank == 0:
        torch.save(found, file)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        pytest.param(2, DIVIDED, id="shard"),
        pytest.param(4, ParallelConfig(shard=4, expert=2), id="within shard"),
        pytest.param(4, ParallelConfig(replicate=4, shard=1, expert=2), id="within replicate"),
    ],
)
def test_every_optimizer_steps_divided_experts_as_whole_ones(
    num_ranks: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    spawn(num_ranks, _step_with_each, parallel, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    for kind in OPTIMIZERS:
        for name, weight in _step_with(kind, ParallelConfig(shard=1), ONE).items():
            torch.testing.assert_close(found[kind][name], weight, rtol=1e-10, atol=1e-10, msg=f"{kind}: {name}")


def test_a_model_without_experts_is_refused() -> None:
    from equivalence.plain import make_model

    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no experts .* set parallel.expert to 1"):
        split_experts(Policy(make_model("llama", lora=False)), group_of(Degrees(shard=2, expert=2)))


def test_experts_of_a_models_own_code_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts cannot be divided over ranks: Llama4TextExperts is computed by"):
        split_experts(Policy(build_mixture("llama4_text")), group_of(Degrees(shard=2, expert=2)))


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_refused() -> None:
    mesh: Any = _Mesh(3)
    experts = build_mixture("mixtral").model.layers[0].mlp.experts
    with pytest.raises(ValueError, match=r"parallel.expert 3 does not divide the 4 experts of mlp.experts"):
        expert.split("mlp.experts", experts, ["gate_up_proj", "down_proj"], mesh)


class _Mesh:
    mesh_dim_names = ("expert",)

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def __getitem__(self, axis: str) -> _Mesh:
        return self


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "message"),
    [
        (ParallelConfig(expert=2), 1, "parallel.expert 2 does not divide the 1 ranks of replicate"),
        (ParallelConfig(expert=3), 4, "parallel.expert 3 does not divide the 4 ranks of shard"),
        (ParallelConfig(replicate=2, shard=2, expert=4), 4, "parallel.expert 4 does not divide the 2 ranks of shard"),
    ],
)
def test_ranks_that_it_does_not_divide_are_refused(parallel: ParallelConfig, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallel.degrees(num_ranks)


def test_deepspeed_does_not_know_it() -> None:
    with pytest.raises(ValueError, match="does not know tensor, pipeline, context and expert"):
        ParallelConfig(backend="deepspeed", expert=2)
