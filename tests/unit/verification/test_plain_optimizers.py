"""The optimizers of verify's plain loop beside the backend's: two ways to write the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from equivalence.mixtures import Float64, build_mixture
from equivalence.plain import TINY, make_batch, make_model, plain_loss, scale_of
from torch import nn

from lockstep.backend.optimizers import OptimizerSettings, build_optimizer, set_step
from lockstep.config import RunConfig
from lockstep.model.routing import BIAS
from lockstep.types import OptimStep
from lockstep.verification.plain_optimizers import PlainOptimizer

STEP = OptimStep(1e-2, beta2=0.99, eps=1e-3, weight_decay=0.1)


def configure(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "any"}, "data": {"train": "rows.jsonl"}, **sections})


def wide_model() -> nn.Module:
    """With matrices that are large enough for eight bits, of rows that are no whole blocks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TINY, "intermediate_size": 300}, attention_bias=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def give_gradients(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.01
            if name.endswith("embed_tokens.weight"):
                parameter.grad[5:] = 0  # tokens that no text has


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *((kind, {}) for kind in ("adamw", "adamw_8bit", "adafactor", "muon")),
        *((kind, {"lora": {"b_learning_rate_ratio": 4.0}}) for kind in ("adamw", "adafactor")),
    ],
    ids=str,
)
def test_each_kind_makes_the_backends_step(kind: str, lora: dict[str, Any]) -> None:
    plain, ours = (make_model("llama", lora=True) if lora else wide_model() for _ in range(2))
    config = configure(optim={"kind": kind, "momentum": 0.9}, **lora)
    by_hand = PlainOptimizer(plain, STEP, clip_at_half=False, config=config)
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(trained, torch.device("cpu"), OptimizerSettings.of(config), ours)
    assert by_hand.holds_eight_bits == (kind == "adamw_8bit")
    for number in range(3):
        give_gradients(plain, number)
        give_gradients(ours, number)
        by_hand.apply()
        set_step(optimizer, by_hand.step)
        optimizer.step()
        for name, weight in by_hand.snapshot("weights").items():
            torch.testing.assert_close(trained[name].detach(), weight, rtol=1e-12, atol=1e-12, msg=name)


def test_of_a_gradient_that_is_rounding_no_weights_are_compared() -> None:
    model = wide_model()
    by_hand = PlainOptimizer(model, STEP, clip_at_half=False, config=configure(optim={"kind": "adafactor"}))
    give_gradients(model, 0)
    noise = "model.layers.0.self_attn.k_proj.bias"
    gradient = dict(model.named_parameters())[noise].grad
    assert gradient is not None
    gradient.mul_(1e-16)
    by_hand.apply()
    assert by_hand.unsettled == {noise}
    assert noise not in by_hand.snapshot("weights")


def test_biases_move_against_the_load_of_training_alone() -> None:
    with Float64():
        model, batch = build_mixture("deepseek_v3"), make_batch(rows=2)
        by_hand = PlainOptimizer(
            model, STEP, clip_at_half=False, config=configure(model={"path": "any", "router_bias_rate": 0.5})
        )
        before = {name: bias.clone() for name, bias in model.named_buffers() if name.endswith(BIAS)}
        with torch.no_grad():
            plain_loss(model, make_batch(1), 1.0)
        plain_loss(model, batch, scale_of(batch)).backward()
        by_hand.apply()
    after = by_hand.snapshot("weights")
    moved = torch.stack([after[name] - bias for name, bias in before.items()])
    assert set(moved.abs().flatten().tolist()) <= {0.0, 0.5}
    assert (moved > 0).any()
    assert (moved < 0).any()
