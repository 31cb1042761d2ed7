"""Frozen matrices held in few bits, for LoRA: NF4 in four, FP8 in eight.

A quantised layer computes with its dequantised weight and gives its input a gradient; the weight has none. In backward
the weight is dequantised again, so that nothing of its full size outlives a product.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lockstep.model.codebooks import NF4_BLOCK, SCALE_BLOCK, Nf4, dequantise_nf4, quantise_nf4

Format = Literal["nf4", "fp8"]
_TRITON = find_spec("triton") is not None
_FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(_FP8).max


class QuantisedLinear(nn.Linear):
    """A linear layer whose `weight` exists only while somebody reads it.

    What is large is a parameter of uint8, which FSDP2 shards and which no cast to another dtype touches; the few
    float32 numbers are buffers, whole on every rank.
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", bias)

    def _hold(self, home: torch.device, large: dict[str, Tensor], small: dict[str, Tensor]) -> None:
        """On `home`; of tensors on the meta device uninitialised ones, unless that is their home."""

        def at_home(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

        for name, tensor in large.items():
            self.register_parameter(name, nn.Parameter(at_home(tensor), requires_grad=False))
        for name, tensor in small.items():
            self.register_buffer(name, at_home(tensor))

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """float32 [out, in], dequantised now."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Nf4Linear(QuantisedLinear):
    codes: nn.Parameter
    block_codes: nn.Parameter
    block_scales: Tensor
    block_mean: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        """`weight`: [out, in], on the device where it is to be quantised, or on the meta device."""
        super().__init__(weight.shape[1], weight.shape[0], linear.bias)
        stored = _meta_nf4(weight.numel()) if weight.is_meta else quantise_nf4(weight)
        self._hold(
            linear.weight.device,
            {"codes": stored.codes, "block_codes": stored.block_codes},
            {"block_scales": stored.block_scales, "block_mean": stored.block_mean},
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        stored = Nf4(self.codes, self.block_codes, self.block_scales, self.block_mean)
        return _dequantise_nf4(stored, self.out_features, self.in_features, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        stored = (self.codes, self.block_codes, self.block_scales, self.block_mean)
        product = nf4_product(x, *stored, self.out_features, self.in_features, False)
        return product if self.bias is None else product + self.bias


class Fp8Linear(QuantisedLinear):
    """Rows of e4m3 with a scale each. On GPUs that have FP8 products the input is rounded too, token by token."""

    codes: nn.Parameter
    scales: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], linear.bias)
        codes, scales = quantise_rows(weight)
        self._hold(linear.weight.device, {"codes": codes.view(torch.uint8)}, {"scales": scales})

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return dequantise_rows(self.codes, self.scales, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        product = _Fp8Product.apply(x, self.codes, self.scales)
        return product if self.bias is None else product + self.bias


def _meta_nf4(num_values: int) -> Nf4:
    blocks = -(-num_values // NF4_BLOCK)
    large = [torch.empty(count, dtype=torch.uint8, device="meta") for count in (-(-num_values // 2), blocks)]
    return Nf4(*large, *(torch.empty(count, device="meta") for count in (-(-blocks // SCALE_BLOCK), 1)))


QUANTISED: dict[Format, type[Nf4Linear | Fp8Linear]] = {"nf4": Nf4Linear, "fp8": Fp8Linear}


# --- products -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lockstep::nf4_product", mutates_args=())
def nf4_product(
    x: Tensor,
    codes: Tensor,
    block_codes: Tensor,
    block_scales: Tensor,
    block_mean: Tensor,
    rows: int,
    columns: int,
    transposed: bool,
) -> Tensor:
    """`x` [..., columns] times the weight's rows; transposed: [..., rows] times its columns.

    Opaque to the compiler, which would otherwise keep the dequantised weight of forward for backward.
    """
    weight = _dequantise_nf4(Nf4(codes, block_codes, block_scales, block_mean), rows, columns, x.dtype)
    return x @ (weight if transposed else weight.T)


@nf4_product.register_fake
def _(x: Tensor, *arguments: Any) -> Tensor:
    rows, columns, transposed = arguments[-3:]
    return x.new_empty(*x.shape[:-1], columns if transposed else rows)


class _Context(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    layout: tuple[int, int, bool]


def _keep_nf4(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *stored, rows, columns, transposed = inputs
    ctx.save_for_backward(*stored)
    ctx.layout = (rows, columns, transposed)


def _nf4_backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, columns, transposed = ctx.layout
    d_x = nf4_product(grad, *ctx.saved_tensors, rows, columns, not transposed) if ctx.needs_input_grad[0] else None
    return (d_x, *[None] * 7)


nf4_product.register_autograd(_nf4_backward, setup_context=_keep_nf4)


def _dequantise_nf4(stored: Nf4, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if stored.codes.is_cuda and _TRITON and dtype != torch.float64:
        from lockstep.model.nf4_kernel import dequantise

        return dequantise(stored, rows, columns, dtype)
    return dequantise_nf4(stored, rows * columns).view(rows, columns).to(dtype)


class _Fp8Product(torch.autograd.Function):
    """In plain torch operations forward: a compiler joins the rounding of the input with what made the input, and does
    it once for layers that read the same."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        tokens = x.reshape(-1, x.shape[-1])
        if _multiplies_fp8(tokens, codes):
            rounded, token_scales = _round_tokens(tokens)
            product = _scaled_product(rounded, token_scales, codes.view(_FP8).T, scales, x.dtype)
        else:
            product = tokens @ dequantise_rows(codes, scales, x.dtype).T
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (fp8_input_gradient(grad, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None), None, None


def _round_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or not _TRITON:
        return quantise_rows(tokens)
    from lockstep.model import fp8_kernel

    return fp8_kernel.quantise_rows(tokens)


@torch.library.custom_op("lockstep::fp8_input_gradient", mutates_args=())
def fp8_input_gradient(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """[..., in] from [..., out]. Opaque to the compiler, which might keep the turned weight from forward on."""
    rows = grad.reshape(-1, grad.shape[-1])
    if _multiplies_fp8(rows, codes):
        # Rows of the weight are summed over here: their scales go to the gradient, before it is rounded.
        rounded, row_scales, turned = _prepare_gradient(rows, codes, scales)
        ones = torch.ones(turned.shape[0], device=grad.device)
        product = _scaled_product(rounded, row_scales, turned.T, ones, grad.dtype)
    else:
        product = rows @ dequantise_rows(codes, scales, grad.dtype)
    return product.view(*grad.shape[:-1], -1)


def _prepare_gradient(rows: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rounded rows times scales, their own scales, the weight's codes as [in, out])."""
    if not _TRITON:
        return *quantise_rows(rows * scales.to(rows.dtype)), codes.T.contiguous().view(_FP8)
    from lockstep.model import fp8_kernel

    return *fp8_kernel.quantise_rows(rows, scales), fp8_kernel.turn(codes).view(_FP8)


@fp8_input_gradient.register_fake
def _(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], codes.shape[1])


# Worth keeping where activations are recomputed, as torch's own products are.
PRODUCTS = (torch.ops.lockstep.nf4_product.default, torch.ops.aten._scaled_mm.default)


def _multiplies_fp8(x: Tensor, codes: Tensor) -> bool:
    """Rows with scales give bf16 alone."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _has_fp8(x.device) and _has_whole_rows(codes)


def _has_fp8(device: torch.device) -> bool:
    """Tensor cores multiply it from compute capability 8.9 on."""
    about = torch.cuda.get_device_properties(device)
    return (about.major, about.minor) >= (8, 9)


def _has_whole_rows(codes: Tensor) -> bool:
    """Of 16 bytes each, as tensor cores take them."""
    return codes.shape[0] % 16 == 0 and codes.shape[1] % 16 == 0


def describe_fp8(model: nn.Module, device: torch.device) -> str:
    """Which layers in FP8 are not multiplied in it on a GPU, if any, and why."""
    layers = [layer for layer in model.modules() if isinstance(layer, Fp8Linear)]
    if device.type != "cuda" or not layers:
        return ""
    slower = "their weights are dequantised for every product, slower"
    if not _has_fp8(device):
        return f"products are not computed in FP8, which GPUs before compute capability 8.9 lack: {slower}"
    odd = [layer for layer in layers if not _has_whole_rows(layer.codes)]
    if odd:
        sizes = ", ".join(sorted({f"{layer.out_features} x {layer.in_features}" for layer in odd})[:4])
        return f"{len(odd)} layers of sizes that are no multiples of 16 ({sizes}) are not multiplied in FP8: {slower}"
    return ""


def _scaled_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        x, weight, scale_a=x_scales[:, None], scale_b=scales[None], out_dtype=dtype, use_fast_accum=True
    )


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [rows, columns], float32 scales [rows])."""
    wide = matrix.float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest, 1.0) / FP8_LARGEST
    return (wide / scales[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(_FP8), scales


def dequantise_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.view(_FP8).float() * scales[:, None]).to(dtype)
