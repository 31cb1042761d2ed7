"""Experts with adapters on a GPU: the kernels around their products, and a whole step, against float64.

The kernels also run interpreted, see kernel_device.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from kernel_device import DEVICE, dtypes, here, needs_cuda, runs_kernels
from torch import Tensor

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.expert_ops import sort_rows
from lockstep.model.grouped_product import grouped_product, matrix_gradients
from lockstep.model.lora import add_lora
from lockstep.model.quantised import dequantise_base, quantise_base
from lockstep.types import Completion, Datum, LossSpec

pytestmark = [pytest.mark.gpu, runs_kernels]
# tokens, choices, experts, width, rank
SHAPES = here(
    [(40, 2, 5, 96, 16), (130, 4, 7, 200, 8), (33, 1, 130, 64, 24), (70, 8, 12, 3000, 16), (300, 1, 1, 64, 128)],
    [(40, 2, 5, 96, 16), (1, 1, 3, 16, 1), (33, 1, 130, 64, 24), (5, 8, 12, 2100, 5), (150, 1, 1, 64, 128)],
)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_around_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of the middle expert nobody wants anything."""
    from lockstep.model.expert_kernel import add_narrow_product, sum_rows, take_rows

    tokens, choices, experts, width, rank = shape
    torch.manual_seed(0)
    scores = torch.rand(tokens, experts, device=DEVICE)
    scores[:, experts // 2] -= 1 if experts > choices else 0
    rows, expert = sort_rows(scores.topk(choices).indices, experts)
    x = torch.randn(tokens, width, device=DEVICE, dtype=dtype)
    taken = take_rows(x, rows.order, choices)
    assert torch.equal(taken, x[rows.order // choices])
    values = torch.randn_like(taken)
    sums = values[rows.places].double().unflatten(0, (tokens, choices)).sum(1)
    assert distance(sum_rows(values, rows.places, choices), sums) < torch.finfo(dtype).eps
    narrow = torch.randn(len(taken), rank, device=DEVICE, dtype=dtype)
    plain = torch.randn(experts, rank, width, device=DEVICE, dtype=dtype)
    for matrices in (plain, plain.transpose(1, 2).contiguous().transpose(1, 2)):
        exact = values.double() + grouped_product(narrow.double(), matrices.double(), rows.ends)
        assert (
            distance(add_narrow_product(values.clone(), narrow, matrices, rows.ends), exact)
            < 4 * torch.finfo(dtype).eps
        )
    assert torch.equal(expert.long().bincount(minlength=experts).cumsum(0), rows.ends.long())


def test_all_rows_may_be_of_one_expert_and_rows_may_lie_apart() -> None:
    from lockstep.model.expert_kernel import add_narrow_product, sum_rows, take_rows

    torch.manual_seed(0)
    x, narrow, total = (torch.randn(70, 2 * width, device=DEVICE)[:, :width] for width in (48, 8, 130))
    matrices, wanted = torch.randn(4, 8, 130, device=DEVICE), total.clone()
    for ends in ([0, 0, 70, 70], [70, 70, 70, 70], [0, 0, 0, 70], [64, 65, 65, 70]):
        places = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        exact = wanted.double() + grouped_product(narrow.double(), matrices.double(), places)
        assert distance(add_narrow_product(wanted.clone(), narrow, matrices, places), exact) < 1e-6, ends
    order = torch.randperm(70, device=DEVICE)
    assert torch.equal(take_rows(x, order, 2), x[order // 2])
    assert distance(sum_rows(x, order, 2), x[order].double().unflatten(0, (35, 2)).sum(1)) < 1e-6


@needs_cuda
def test_gradients_of_matrices_whose_expert_has_no_row_are_zero() -> None:
    ends = torch.tensor([0, 70, 70, 100, 100], dtype=torch.int32, device="cuda")
    x, grad = (torch.randn(100, width, device="cuda", dtype=torch.bfloat16) for width in (16, 256))
    found = matrix_gradients(x, grad, ends)
    for expert, (start, stop) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        exact = x[start:stop].double().T @ grad[start:stop].double()
        torch.testing.assert_close(found[expert].double(), exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))


def build(family: str) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
    config = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **shape, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64, initializer_range=0.05
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **shape, num_local_experts=8, num_experts_per_tok=2, initializer_range=0.05, sliding_window=64
        ),
    }[family]()
    model = add_lora(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), LoraConfig(rank=12))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def step(model: Any, precision: str, **settings: Any) -> dict[str, Tensor]:
    backend = TorchBackend(model, micro_batch_tokens=1024, precision=precision, **settings)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 512, (n,), generator=draw).tolist() for n in (97, 90, 300)]
    batch = [Datum(text[:3], [Completion(text[3:], [1.0] * (len(text) - 3))]) for text in texts]
    backend.forward_backward(batch, LossSpec(scale=1e-2))
    assert not backend.slow, backend.slow
    return {name: p.grad for name, p in backend.parameters().items() if p.grad is not None}


@needs_cuda
@pytest.mark.parametrize("held", ["plain", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "settings",
    [{"compile": False}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}],
    ids=["eager", "full", "selective"],
)
def test_a_step_with_adapters_on_experts_is_near_float64(family: str, held: str, settings: dict[str, Any]) -> None:
    """No further than the same step in bf16 on a CPU, which takes the plain way."""
    model = build(family)
    if held == "nf4":
        quantise_base(model, "nf4")
    plain, wide = copy.deepcopy(model), copy.deepcopy(model)
    dequantise_base(wide, torch.float64)
    exact = step(wide, "fp64", device="cpu")
    narrow = step(plain, "bf16", device="cpu")
    found = step(model, "bf16", device=DEVICE, **settings)
    assert found.keys() == exact.keys()
    for part in ("lora_A", "lora_B"):
        ours, theirs, true = (
            torch.cat([g.flatten().double().cpu() for name, g in sorted(side.items()) if part in name])
            for side in (found, narrow, exact)
        )
        assert distance(ours, true) < 1.5 * distance(theirs, true) + 1e-3, part
