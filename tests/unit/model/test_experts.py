"""Models with experts in float64, and routers that would draw at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from equivalence.mixtures import DEEPSEEK, EXPERTS
from equivalence.plain import TINY, keep_float64, make_batch, plain_loss, scale_of

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.experts import compute_experts_exactly, noisy_routers
from lockstep.model.lora import add_lora
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

FAMILIES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**TINY, **EXPERTS, head_dim=8, num_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "phimoe": lambda: transformers.PhimoeConfig(**TINY, num_local_experts=4),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4, router_jitter_noise=0.1),
}
ONE = ProcessGroup(0, 1, torch.device("cpu"))


def build(family: str, *, lora: bool = False) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.initializer_range = 0.2  # large, so that another expert shows in the log-probs
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    keep_float64(model.eval())
    if lora:
        model = add_lora(model, LoraConfig(rank=2)).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_train_in_float64_with_the_gradient_of_each_document_alone(family: str, lora: bool) -> None:
    batch, own = make_batch(rows=5), build(family, lora=lora)
    compute_experts_exactly(own, torch.float64)
    loss = plain_loss(own, batch, scale_of(batch))
    loss.backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    backend = TorchBackend(build(family, lora=lora), precision="fp64", group=ONE)
    for _ in range(2):  # twice: nothing is drawn at random
        result = backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        assert result.loss == pytest.approx(loss.item(), rel=1e-8)
    for name, parameter in backend.parameters().items():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Their routers compute in float32 whatever the dtype.
        torch.testing.assert_close(found / 2, expected[name], rtol=0, atol=1e-6 * largest)


def test_a_router_that_would_draw_at_random_does_not_and_says_so() -> None:
    backend = TorchBackend(build("phimoe"), precision="fp64", group=ONE)
    assert len(backend.policy.noisy_routers) == 2
    assert backend.policy.training
    assert not any(router.training for router in backend.policy.noisy_routers)
    assert any("random" in warning for warning in backend.warnings)
    assert not noisy_routers(build("qwen3_moe"))
    quiet = TorchBackend(build("qwen3_moe"), precision="fp64", group=ONE)
    assert not any("random" in warning for warning in quiet.warnings)
