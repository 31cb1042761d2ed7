"""Rows that are sorted by expert, times each expert's own matrix: plain ones, and ones held in NF4."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lockstep.model.codebooks import Nf4, dequantise_nf4

_TRITON = find_spec("triton") is not None


class _Context(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    bounds: list[tuple[int, int]]
    turned: bool


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[S, out]: rows of `x` [S, in] times the one of `matrices` [experts, in, out] whose rows `ends` [experts] ends."""
    if _takes_grouped_mm(x, matrices):
        x = x.to(matrices.dtype)
        return grouped_mm(x, matrices, ends) if torch.compiler.is_compiling() else F.grouped_mm(x, matrices, offs=ends)
    return _GroupedProduct.apply(x.to(matrices.dtype), matrices, ends)


def _takes_grouped_mm(x: Tensor, matrices: Tensor) -> bool:
    """torch's kernel compiles in bf16 alone."""
    compiles = not torch.compiler.is_compiling() or matrices.dtype == torch.bfloat16
    return compiles and _takes_widths(matrices.dtype, matrices.shape[-2:])


def _takes_widths(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """torch's kernel has no float64 (torch 2.13), and wants rows of whole 16 bytes."""
    if dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return False
    return all(width * dtype.itemsize % 16 == 0 for width in widths)


@torch.library.custom_op("lockstep::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Opaque to the compiler, which gives torch's kernel matrices in layouts that it does not take (torch 2.11)."""
    return F.grouped_mm(_dense(x), _dense(matrices), offs=ends)


@torch.library.custom_op("lockstep::grouped_mm_weights", mutates_args=())
def grouped_mm_weights(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[experts, in, out]: the gradient of the matrices."""
    return F.grouped_mm(_dense(x).T, _dense(grad), offs=ends)


def _dense(tensor: Tensor) -> Tensor:
    is_dense = tensor.is_contiguous() or tensor.transpose(-2, -1).is_contiguous()
    return tensor if is_dense and tensor.ndim == 3 else tensor.contiguous()


@grouped_mm.register_fake
def _(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[-1])


@grouped_mm_weights.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[-1], grad.shape[-1])


def _keep_operands(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, matrices, ends = inputs
    needs_x, needs_matrices = ctx.needs_input_grad[:2]
    ctx.save_for_backward(*[x] * needs_matrices, *[matrices] * needs_x, ends)


def _grouped_mm_backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_matrices = ctx.needs_input_grad[:2]
    *operands, ends = ctx.saved_tensors
    d_x = grouped_mm(grad, operands[-1].transpose(-2, -1), ends) if needs_x else None
    d_matrices = grouped_mm_weights(operands[0], grad, ends) if needs_matrices else None
    return d_x, d_matrices, None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_keep_operands)


class _GroupedProduct(torch.autograd.Function):
    """One expert after another; those without a token cost nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.bounds = _bounds(ends)
        ctx.save_for_backward(x, matrices)
        product = x.new_zeros(len(x), matrices.shape[-1])
        for matrix, (start, stop) in zip(matrices, ctx.bounds, strict=True):
            if start < stop:
                torch.mm(x[start:stop], matrix, out=product[start:stop])
        return product

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, matrices = ctx.saved_tensors
        needs_x, needs_matrices = ctx.needs_input_grad[:2]
        d_x = torch.zeros_like(x) if needs_x else None
        for expert, (start, stop) in enumerate(ctx.bounds):
            if d_x is not None and start < stop:
                torch.mm(grad[start:stop], matrices[expert].T, out=d_x[start:stop])
        return d_x, _each_gradient(x, grad, ctx.bounds) if needs_matrices else None, None


def matrix_gradients(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[experts, in, out]: of `x` [S, in] and `grad` [S, out], the products of each expert's rows."""
    if _takes_widths(x.dtype, (x.shape[1], grad.shape[1])):
        return F.grouped_mm(x.contiguous().T, grad.contiguous(), offs=ends)
    return _each_gradient(x, grad, _bounds(ends))


def _each_gradient(x: Tensor, grad: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
    gradients = x.new_empty(len(bounds), x.shape[1], grad.shape[1])
    for gradient, (start, stop) in zip(gradients, bounds, strict=True):
        torch.mm(x[start:stop].T, grad[start:stop], out=gradient)
    return gradients


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


# --- matrices in NF4 ------------------------------------------------------------------------------------------------


class Nf4Stack(NamedTuple):
    """Matrices [experts, rows, columns], each expert's quantised by itself; all parts are uint8 and begin with a
    dimension of experts, so that they are divided over ranks like the matrices they stand for."""

    codes: Tensor
    """[experts, rows, columns / 2], see Nf4."""
    block_codes: Tensor
    """[experts, blocks]."""
    scales: Tensor
    """[experts, 4 * (blocks / 256 + 1)]: the bytes of the blocks' float32 scales and, last, of their mean."""

    @property
    def num_columns(self) -> int:
        return 2 * self.codes.shape[-1]

    def expert(self, number: int) -> Tensor:
        """float32 [rows, columns]."""
        scales = self.scales[number].contiguous().view(torch.float32)
        stored = Nf4(self.codes[number].flatten(), self.block_codes[number], scales[:-1], scales[-1:])
        rows = self.codes.shape[1]
        return dequantise_nf4(stored, rows * self.num_columns).view(rows, self.num_columns)


def nf4_stack_product(x: Tensor, stack: Nf4Stack, ends: Tensor, *, turned: bool) -> Tensor:
    """As `grouped_product`, with the matrices or, `turned`, with their transposes."""
    return nf4_grouped_product(x, *stack, ends, turned)


@torch.library.custom_op("lockstep::nf4_grouped_product", mutates_args=())
def nf4_grouped_product(
    x: Tensor, codes: Tensor, block_codes: Tensor, scales: Tensor, ends: Tensor, turned: bool
) -> Tensor:
    """Opaque to the compiler, which would otherwise keep the dequantised matrices of forward for backward."""
    stack = Nf4Stack(codes, block_codes, scales)
    if x.is_cuda and _TRITON and x.dtype != torch.float64:
        from lockstep.model.nf4_kernel import dequantise_stack

        matrices = dequantise_stack(stack, ends, x.dtype)
        return grouped_product(x, matrices.transpose(-2, -1) if turned else matrices, ends)
    product = x.new_zeros(len(x), codes.shape[1] if turned else stack.num_columns)
    for expert, (start, stop) in enumerate(_bounds(ends)):
        if start < stop:
            matrix = stack.expert(expert).to(x.dtype)
            torch.mm(x[start:stop], matrix.T if turned else matrix, out=product[start:stop])
    return product


@nf4_grouped_product.register_fake
def _(x: Tensor, codes: Tensor, block_codes: Tensor, scales: Tensor, ends: Tensor, turned: bool) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1] if turned else 2 * codes.shape[2])


def _keep_stack(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *stored, turned = inputs
    ctx.save_for_backward(*stored)
    ctx.turned = turned


def _stack_backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = nf4_grouped_product(grad.contiguous(), *ctx.saved_tensors, not ctx.turned)
    return (d_x, *[None] * 5)


nf4_grouped_product.register_autograd(_stack_backward, setup_context=_keep_stack)
