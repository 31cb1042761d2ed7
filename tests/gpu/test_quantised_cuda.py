"""Quantised bases on a GPU: kernels against plain torch, products and a whole step against dequantised weights."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.codebooks import dequantise_nf4, quantise_nf4
from lockstep.model.grouped_product import nf4_stack_product
from lockstep.model.lora import add_lora
from lockstep.model.quantised import dequantise_base, quantise_base, quantise_stack
from lockstep.model.quantised_layers import QUANTISED, Format, quantise_rows
from lockstep.types import Completion, Datum, LossSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
# Relative, of a product whose inputs are rounded to FP8: three bits of mantissa on both sides.
MOST = {"nf4": 4e-3, "fp8": 5e-2}


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


@needs_triton
@pytest.mark.parametrize("shape", [(37, 130), (256, 4096), (5, 3)])
def test_nf4_on_a_gpu_is_that_of_the_cpu(shape: tuple[int, int]) -> None:
    from lockstep.model.nf4_kernel import dequantise

    weight = torch.randn(shape)
    here, there = quantise_nf4(weight), quantise_nf4(weight.cuda())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    found = dequantise(there, *shape, torch.float32).cpu()
    torch.testing.assert_close(found, dequantise_nf4(here, weight.numel()).view(shape), rtol=1e-6, atol=1e-7)


@needs_triton
@pytest.mark.parametrize("shape", [(5, 20, 32), (3, 256, 512), (4, 32, 10)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_with_experts_in_nf4(shape: tuple[int, int, int], turned: bool) -> None:
    """Against float64; one expert has no row, and its matrix is not even written."""
    stack = quantise_stack(torch.randn(shape).cuda())
    matrices = torch.stack([stack.expert(number) for number in range(shape[0])]).double()
    matrices = matrices.transpose(1, 2) if turned else matrices
    counts = [7, 0, *[11] * (shape[0] - 2)]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    x = torch.randn(sum(counts), matrices.shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = nf4_stack_product(x, stack, ends, turned=turned)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    parts = zip(x.detach().double().split(counts), gradient.double().split(counts), matrices, strict=True)
    found = [(rows @ matrix, grads @ matrix.T) for rows, grads, matrix in parts]
    assert x.grad is not None
    assert distance(y, torch.cat([product for product, _ in found])) < MOST["nf4"]
    assert distance(x.grad, torch.cat([grads for _, grads in found])) < MOST["nf4"]


@needs_triton
@pytest.mark.parametrize("columns", [48, 4096, 9008])
def test_rows_are_rounded_as_in_plain_torch(columns: int) -> None:
    from lockstep.model import fp8_kernel

    x, factors = torch.randn(33, columns, device="cuda", dtype=torch.bfloat16), torch.rand(columns, device="cuda")
    codes, scales = fp8_kernel.quantise_rows(x, factors)
    plain, plain_scales = quantise_rows(x.float() * factors)
    torch.testing.assert_close(scales, plain_scales, rtol=1e-6, atol=0)
    assert distance(codes.float() * scales[:, None], plain.float() * plain_scales[:, None]) < 1e-3
    assert torch.equal(fp8_kernel.turn(codes.view(torch.uint8)), codes.view(torch.uint8).T)


@pytest.mark.parametrize("held", ["nf4", "fp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_products_and_gradients_are_near_those_of_the_dequantised_weight(held: Format, compiled: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(1024, 768, bias=True, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer = QUANTISED[held](linear, linear.weight)
    x = torch.randn(3, 70, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = (torch.compile(layer, dynamic=True) if compiled else layer)(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    weight = layer.weight.double()
    assert distance(y, x.detach().double() @ weight.T + linear.bias.double()) < MOST[held]
    assert x.grad is not None
    assert distance(x.grad, gradient.double() @ weight) < MOST[held]


@pytest.mark.parametrize("held", ["nf4", "fp8"])
def test_a_step_is_near_that_of_dequantised_weights_in_float64(held: Format) -> None:
    shape = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    documents = [torch.randint(0, 512, (n,)) for n in (300, 41, 120)]
    batch = [Datum(d[:1].tolist(), [Completion(d[1:].tolist(), [1.0] * (len(d) - 1))]) for d in documents]
    gradients = {}
    for precision in ("fp64", "bf16"):
        torch.manual_seed(1)
        plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(shape), dtype=torch.bfloat16)
        model = add_lora(plain, LoraConfig(rank=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
        quantise_base(model, held)
        if precision == "fp64":
            dequantise_base(model, torch.float64)
        backend = TorchBackend(model, micro_batch_tokens=512, precision=precision, compile=precision == "bf16")
        backend.forward_backward(batch, LossSpec(scale=1e-2))
        gradients[precision] = torch.cat([p.grad.flatten().double() for p in backend.parameters().values()])  # type: ignore[union-attr]
    assert distance(gradients["bf16"], gradients["fp64"]) < {"nf4": 3e-2, "fp8": 1.5e-1}[held]
