"""Quantised bases on a GPU: kernels against plain torch, products and a whole step against dequantised weights.

The kernels also run interpreted, see kernel_device.py."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from kernel_device import DEVICE, INTERPRETED, dtypes, here, needs_cuda, runs_kernels
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.codebooks import dequantise_nf4, quantise_nf4
from lockstep.model.grouped_product import nf4_stack_product
from lockstep.model.lora import add_lora
from lockstep.model.quantised import dequantise_base, quantise_base, quantise_stack
from lockstep.model.quantised_layers import QUANTISED, Format, quantise_rows
from lockstep.types import Completion, Datum, LossSpec

pytestmark = [pytest.mark.gpu, runs_kernels]
# Relative, of a product whose inputs are rounded to FP8: three bits of mantissa on both sides.
MOST = {"nf4": 4e-3, "fp8": 5e-2}


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


@pytest.mark.parametrize("shape", [(37, 130), here((256, 4096), (64, 520)), (5, 3), (1, 1), (1, 64), (3, 65)])
def test_nf4_on_a_gpu_is_that_of_the_cpu(shape: tuple[int, int]) -> None:
    from lockstep.model.nf4_kernel import dequantise

    weight = torch.randn(shape)
    host, there = quantise_nf4(weight), quantise_nf4(weight.to(DEVICE))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host, there, strict=True))
    found = dequantise(there, *shape, torch.float32).cpu()
    torch.testing.assert_close(found, dequantise_nf4(host, weight.numel()).view(shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(5, 20, 32), (3, 6, 22), (1, 3, 2), (3, 40, 70)])
def test_only_matrices_of_experts_with_rows_are_dequantised(shape: tuple[int, int, int]) -> None:
    """Sizes that are no multiples of a block, nor of what one program writes."""
    from lockstep.model.nf4_kernel import dequantise_stack

    torch.manual_seed(0)
    stack = quantise_stack(torch.randn(shape).to(DEVICE))
    counts = [7, 0, *[11] * (shape[0] - 2)][: shape[0]]
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    found = dequantise_stack(stack, ends, torch.float32)
    for number, count in enumerate(counts):
        if count:
            torch.testing.assert_close(found[number], stack.expert(number), rtol=1e-6, atol=1e-7)


@needs_cuda
@pytest.mark.parametrize("shape", [(5, 20, 32), here((3, 256, 512), (3, 64, 80)), (4, 32, 10)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_with_experts_in_nf4(shape: tuple[int, int, int], turned: bool) -> None:
    """Against float64; one expert has no row, and its matrix is not even written."""
    stack = quantise_stack(torch.randn(shape).to(DEVICE))
    matrices = torch.stack([stack.expert(number) for number in range(shape[0])]).double()
    matrices = matrices.transpose(1, 2) if turned else matrices
    counts = [7, 0, *[11] * (shape[0] - 2)]
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    dtype = dtypes(torch.bfloat16)[0]
    x = torch.randn(sum(counts), matrices.shape[1], device=DEVICE, dtype=dtype, requires_grad=True)
    y = nf4_stack_product(x, stack, ends, turned=turned)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    parts = zip(x.detach().double().split(counts), gradient.double().split(counts), matrices, strict=True)
    found = [(rows @ matrix, grads @ matrix.T) for rows, grads, matrix in parts]
    assert x.grad is not None
    assert distance(y, torch.cat([product for product, _ in found])) < MOST["nf4"]
    assert distance(x.grad, torch.cat([grads for _, grads in found])) < MOST["nf4"]


@pytest.mark.parametrize("columns", here([48, 4096, 9008], [1, 48, 4096, 5008]))
def test_rows_are_rounded_as_in_plain_torch(columns: int) -> None:
    from lockstep.model import fp8_kernel

    torch.manual_seed(0)
    x = torch.randn(here(33, 5), columns, device=DEVICE, dtype=dtypes(torch.bfloat16)[0])
    factors = 0.1 + torch.rand(columns, device=DEVICE)
    x[1], x[2] = 0.0, 1e-30 * x[2]
    codes, scales = fp8_kernel.quantise_rows(x, factors)
    plain, plain_scales = quantise_rows(x.float() * factors)
    torch.testing.assert_close(scales, plain_scales, rtol=1e-6, atol=0)
    assert not codes[1].float().any()
    if INTERPRETED:  # Triton's interpreter (3.7) loses the carry where rounding reaches the next power of two
        sizes, exact = plain.float().abs(), (x * factors / plain_scales[:, None]).abs()
        carries = (sizes.log2() % 1 == 0) & (exact < sizes)
        assert float(carries.float().mean()) < 0.06
        codes = torch.where(carries, plain.view(torch.uint8), codes.view(torch.uint8)).view(codes.dtype)
    # A number in the middle between two codes may become either, by the rounding of the scale.
    apart = (codes.float() - plain.float()).abs()
    assert bool((apart <= 0.13 * plain.float().abs() + 2**-9).all())
    assert float((apart > 0).float().mean()) < 0.02
    assert torch.equal(fp8_kernel.turn(codes.view(torch.uint8)), codes.view(torch.uint8).T)


def test_what_is_no_number_stays_none() -> None:
    """Rounded to the largest code, a broken gradient would go on as a sound one."""
    from lockstep.model import fp8_kernel

    x = torch.randn(4, 80, device=DEVICE, dtype=dtypes(torch.bfloat16)[0])
    x[0, 3], x[1, 70], x[2, 5] = torch.nan, torch.inf, -torch.inf
    for factors in (None, torch.rand(80, device=DEVICE)):
        codes, scales = fp8_kernel.quantise_rows(x, factors)
        assert scales.isnan().tolist() == [True, False, False, False]
        found = (codes.float() * scales[:, None]).sum(1)
        assert found.isfinite().tolist() == [False, False, False, True]


@needs_cuda
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


@needs_cuda
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
