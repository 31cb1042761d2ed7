"""Optimizers against their definitions, what they hold, and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.backend.optimizers import (
    OptimizerSettings,
    build_optimizer,
    hidden_matrices,
    set_step,
    step_on_device,
)
from lockstep.backend.stochastic_rounding import first_place, round_into, salt_of
from lockstep.config import ConfigError, load_config
from lockstep.config.loading import resolve_config
from lockstep.model.codebooks import Blocks, dequantise_blocks, dynamic_table, quantise_blocks
from lockstep.rundir import RunDir, read_jsonl
from lockstep.train.run import run as train
from lockstep.types import OptimStep

STEP = OptimStep(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
CPU = torch.device("cpu")


def draw_steps(*shape: int, num: int = 4) -> tuple[nn.Parameter, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    make = lambda: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    return nn.Parameter(0.1 * make()), [make() for _ in range(num)]


def run_steps(kind: str, weight: nn.Parameter, gradients: list[Tensor], model: nn.Module | None = None) -> Any:
    optimizer = build_optimizer({"weight": weight}, CPU, OptimizerSettings(kind), model)
    for gradient in gradients:
        weight.grad = gradient.clone()
        set_step(optimizer, STEP)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("shape", [(5, 7), (6,), (2, 4, 3)])
def test_adafactor_is_torchs_without_its_scaling_by_weights(shape: tuple[int, ...]) -> None:
    weight, gradients = draw_steps(*shape)
    plain = nn.Parameter(weight.detach().clone())
    decay = STEP.weight_decay if len(shape) > 1 else 0.0
    # Weights smaller than eps2 are scaled by it.
    theirs = torch.optim.Adafactor([plain], lr=STEP.learning_rate, eps=(None, 1.0), weight_decay=decay)
    for gradient in gradients:
        plain.grad = gradient.clone()
        theirs.step()
    run_steps("adafactor", weight, gradients)
    torch.testing.assert_close(weight, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 5, 4)])
def test_muon_changes_singular_values_alone(shape: tuple[int, ...]) -> None:
    weight, gradients = draw_steps(*shape)
    expected, mean = weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients:
        mean = 0.95 * mean + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * mean
        left, sizes, right = torch.linalg.svd(ahead, full_matrices=False)
        sizes = sizes / sizes.norm(dim=-1, keepdim=True)
        for _ in range(5):
            sizes = 3.4445 * sizes - 4.775 * sizes**3 + 2.0315 * sizes**5
        expected = expected * (1 - STEP.learning_rate * STEP.weight_decay)
        scale = 0.2 * math.sqrt(max(shape[-2:])) * STEP.learning_rate
        expected -= scale * (left * sizes[..., None, :]) @ right
    module = nn.Linear(1, 1)
    module.weight = weight
    optimizer = build_optimizer({"weight": weight}, CPU, OptimizerSettings("muon"))
    optimizer.param_groups[0]["orthogonal"] = True
    for gradient in gradients:
        weight.grad = gradient.clone()
        set_step(optimizer, STEP)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-10)


def test_muon_is_for_the_matrices_of_layers() -> None:
    model = tiny.build_model()
    names = {name for name, p in model.named_parameters() if id(p) in hidden_matrices(model)}
    assert len(names) == 2 * 7
    assert all(name.startswith("model.layers.") and name.endswith("_proj.weight") for name in names)
    mixture = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    matrices = hidden_matrices(mixture)
    assert {p.ndim for p in mixture.parameters() if id(p) in matrices} == {2, 3}


def test_eight_bit_moments_are_rounded_block_by_block() -> None:
    weight, gradients = draw_steps(20, 300)
    expected = weight.detach().clone()
    tables = [dynamic_table(CPU, signed=signed) for signed in (True, False)]
    held = [[torch.zeros(300) for _ in range(20)] for _ in tables]
    for number, gradient in enumerate(gradients, start=1):
        for row in range(20):
            mean, square = (moment[row].double() for moment in held)
            mean = 0.8 * mean + 0.2 * gradient[row]
            square = 0.9 * square + 0.1 * gradient[row] ** 2
            root = square.sqrt() / math.sqrt(1 - 0.9**number) + STEP.eps
            expected[row] *= 1 - STEP.learning_rate * STEP.weight_decay
            expected[row] -= STEP.learning_rate * mean / (1 - 0.8**number) / root
            for moment, table, values in zip(held, tables, (mean, square), strict=True):
                blocks = quantise_blocks(values, table, 256)
                codes = torch.where(values > 0, blocks.codes.clamp(min=1), blocks.codes)
                moment[row] = dequantise_blocks(Blocks(codes, blocks.largest), table, 256)
    run_steps("adamw_8bit", weight, gradients)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-10)


def test_a_quiet_weight_beside_a_loud_one_does_not_leap() -> None:
    """A mean square that became zero would be divided by."""
    weight = nn.Parameter(torch.zeros(16, 256))
    gradients = []
    for number in range(6):
        gradient = torch.full((16, 256), 1e-4 if number < 1 else 1e-12)
        gradient[:, 0] = 1.0
        gradients.append(gradient)
    run_steps("adamw_8bit", weight, gradients)
    assert float(weight.abs().max()) < 6 * 2 * STEP.learning_rate


@pytest.mark.parametrize(("kind", "most"), [("adamw", 8.01), ("adamw_8bit", 2.04), ("muon", 4.01), ("adafactor", 0.03)])
def test_bytes_that_each_holds_for_a_parameter(kind: str, most: float) -> None:
    layer = nn.Linear(512, 256, bias=False)
    optimizer = build_optimizer({"weight": layer.weight}, CPU, OptimizerSettings(kind))
    if kind == "muon":
        optimizer.param_groups[0]["orthogonal"] = True
    layer.weight.grad = torch.randn(256, 512)
    set_step(optimizer, STEP)
    optimizer.step()
    held = [value for value in optimizer.state[layer.weight].values() if isinstance(value, torch.Tensor)]
    assert most / 1.02 - 0.02 <= sum(value.nbytes for value in held) / layer.weight.numel() <= most


@pytest.mark.parametrize(
    "kind", ["adamw_8bit", *(pytest.param(k, marks=pytest.mark.slow) for k in ("muon", "adafactor"))]
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model", hidden_size=64, intermediate_size=96)
    losses = {}
    for name, stops in (("whole", (4,)), ("cut", (2, 4))):
        place = tmp_path / name
        place.mkdir()
        for stop in stops:
            settings = {"kind": kind, "learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0}
            path = tiny.write_config(
                place, folder, optim={**settings, "max_steps": stop}, checkpoint={"every_steps": 2, "export": "none"}
            )
            run = RunDir(place / "run", owner=True)
            if not run.path.exists():
                run = RunDir.create(place / "run", load_config(path))
            else:
                (run.path / "config.yaml").write_text(load_config(path).to_yaml())
            train(run.path)
        rows = [row for row in read_jsonl(run.path / "metrics.jsonl") if row.get("split") == "train"]
        losses[name] = [row["loss"] for row in rows]
    assert losses["whole"][-2:] == losses["cut"][-2:]
    assert losses["whole"][-1] < losses["whole"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"kind": "muon"}, "lora": {}}, "not for the factors of lora"),
        ({"optim": {"kind": "adamw_8bit"}, "parallel": {"tensor": 2}}, "whole rows"),
        ({"optim": {"kind": "adamw_8bit"}, "parallel": {"shard": 2, "expert": 2}}, "and parallel.expert to 1"),
        ({"optim": {"kind": "adafactor"}, "parallel": {"backend": "deepspeed"}}, "not for parallel.backend deepspeed"),
        ({"lora": {"b_learning_rate_ratio": 16}, "parallel": {"backend": "deepspeed"}}, "not for parallel.backend"),
        ({"lora": {"init": "pissa", "dora": True}}, "choose one of them"),
        ({"optim": {"stochastic_rounding": True}, "parallel": {"tensor": 2}}, "with parallel.tensor and expert 1"),
        ({"optim": {"stochastic_rounding": True}, "model": {"path": "m", "precision": "fp32"}}, "is for bf16"),
        ({"lora": {"init": "pissa"}, "algorithm": {"kind": "dpo", "reference": "adapter_off"}}, "set it to copy"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config({"model": "m", "data": {"train": "x.jsonl"}, **changes})


# --- weights in bf16 ------------------------------------------------------------------------------------------------


def test_rounding_is_right_on_average_and_exact_where_nothing_is_to_round() -> None:
    wide = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    target = torch.empty(200_000, dtype=torch.bfloat16)
    round_into(target, wide, salt_of("weight", 1))
    assert set(target.float().tolist()) == {1.0, 1.0 + 2**-7}
    assert float(target.double().mean()) == pytest.approx(float(wide[0]), abs=2**-7 * 0.005)
    exact = torch.tensor([0.5, -3.0, 0.0, float("inf"), float("-inf"), 2.0**-130])
    found = torch.empty(6, dtype=torch.bfloat16)
    round_into(found, exact, 7)
    assert torch.equal(found.float()[:5], exact[:5])
    round_into(found, torch.full((6,), float("nan")), 7)
    assert found.isnan().all()


def test_bits_differ_between_steps_tensors_and_places_and_not_between_splits() -> None:
    wide = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    whole, other, part = (torch.empty(64, 96, dtype=torch.bfloat16) for _ in range(3))
    round_into(whole, wide, salt_of("a", 1))
    for salt in (salt_of("a", 2), salt_of("b", 1)):
        round_into(other, wide, salt)
        assert 0.2 < float((whole != other).float().mean()) < 0.8
    round_into(part[:5], wide[:5], salt_of("a", 1))
    round_into(part[5:], wide[5:], salt_of("a", 1), first=5 * 96)
    assert torch.equal(part, whole)


@pytest.mark.parametrize(("rank", "row"), [(0, 0), (1, 2), (2, 4), (3, 6)])
def test_a_ranks_rows_are_rounded_as_at_their_place_in_the_whole(rank: int, row: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        part = distribute_tensor(torch.zeros(7, 2, 5), mesh, [Shard(0)], src_data_rank=None)
        assert first_place(part) == row * 2 * 5
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_small_steps_add_up_in_bf16(kind: str) -> None:
    """Steps of 1e-4 from 1 would all be rounded away."""
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    settings = OptimizerSettings(kind, stochastic_rounding=True)
    optimizer = build_optimizer({"weight": weight}, CPU, settings)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        set_step(optimizer, OptimStep(learning_rate=1e-4, beta1=0.0))
        optimizer.step()
    assert float(weight.detach().double().mean()) == pytest.approx(0.99, abs=1e-3)
    assert all(t.dtype in (torch.float32, torch.uint8) for t in optimizer.state[weight].values())


def test_other_precisions_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"set model\.precision to bf16"):
        OptimizerSettings(stochastic_rounding=True).held_dtype("fp32")


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_the_fused_kernel_clips_as_a_pass_before_it_would(max_norm):
    """And leaves out what is not finite, its count of steps too."""
    torch.manual_seed(0)
    start, gradients = torch.randn(40), [torch.randn(40) for _ in range(3)]
    found = []
    for fused in (True, False):
        weight = nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        for gradient in (*gradients, torch.full((40,), torch.nan)):
            weight.grad = gradient.clone()
            norm = gradient.double().norm()
            if fused:
                step_on_device(optimizer, norm, max_norm)
            elif bool(torch.isfinite(norm)):
                weight.grad.mul_(1.0 if max_norm is None else min(1.0, max_norm / (float(norm) + 1e-6)))
                optimizer.step()
        found.append((weight.detach(), optimizer.state[weight]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(found[0][1][name], found[1][1][name], rtol=1e-5, atol=1e-7)
