"""Experts with adapters on a GPU: one operation before the activation and one after it, with a gradient of their own.

The first takes each token to the experts it chose, the second brings their results home. Both are opaque to the
compiler and keep nothing but what they are given: in backward the rows are laid out again, which is a copy. What the
second one gave is not needed there, so that recomputation leaves its products out.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lockstep.model.grouped_product import Nf4Stack, grouped_product, matrix_gradients, nf4_stack_product

_TRITON = find_spec("triton") is not None
_WIDEST_KERNEL = 128  # of ranks


class SortedRows(NamedTuple):
    """One row for each choice of each token, S = T * K, sorted by expert."""

    order: Tensor
    """[S]: which choice each row is, counted token by token."""
    places: Tensor
    """[S]: the row of each choice."""
    ends: Tensor
    """[experts], int32: where the rows of each expert end."""
    num_chosen: int


class Matrices(NamedTuple):
    """Frozen ones of all experts, and the adapter on them."""

    stored: list[Tensor]
    """[experts, in, out], or the parts of an Nf4Stack."""
    turned: bool
    """What is stored is [experts, out, in]."""
    into: Tensor | None
    """[experts, in, rank]."""
    out_of: Tensor | None
    """[experts, rank, out]."""
    scaling: float


def sort_rows(chosen: Tensor, num_experts: int) -> tuple[SortedRows, Tensor]:
    """And the expert of each row, of the experts that each token has `chosen` [T, K]."""
    few_bits = torch.int16 if num_experts < 2**15 else torch.int32  # a GPU sorts bit by bit
    expert, order = torch.sort(chosen.flatten().to(few_bits), stable=True)
    every = torch.arange(num_experts, device=expert.device, dtype=few_bits)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return SortedRows(order, places, ends, chosen.shape[-1]), expert


def enter_experts(hidden: Tensor, rows: SortedRows, matrices: Matrices) -> Tensor:
    """[S, out] of `hidden` [T, in]: each token times the matrices of its experts."""
    return expert_product(hidden, True, *rows, *matrices)


def leave_experts(inner: Tensor, rows: SortedRows, matrices: Matrices) -> Tensor:
    """[T, out] of `inner` [S, in]: of each token the sum of what its experts give."""
    return expert_product(inner, False, *rows, *matrices)


@torch.library.custom_op("lockstep::reorder", mutates_args=())
def reorder(values: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """[S] in the order that `places` undoes. An index's gradient would be added up, as if a place came twice."""
    return values.index_select(0, order)


@torch.library.custom_op("lockstep::expert_product", mutates_args=())
def expert_product(
    x: Tensor,
    enters: bool,
    order: Tensor,
    places: Tensor,
    ends: Tensor,
    num_chosen: int,
    stored: list[Tensor],
    turned: bool,
    into: Tensor | None,
    out_of: Tensor | None,
    scaling: float,
) -> Tensor:
    rows = _take_rows(x, order, num_chosen) if enters else x
    product = _frozen_product(rows, stored, ends, turned=turned)
    if into is not None and out_of is not None:
        product = _add_product(product, grouped_product(rows, into, ends).mul_(scaling), out_of, ends)
    return product if enters else _sum_rows(product, places, num_chosen)


@torch.library.custom_op("lockstep::expert_product_backward", mutates_args=())
def expert_product_backward(
    grad: Tensor,
    x: Tensor,
    enters: bool,
    order: Tensor,
    places: Tensor,
    ends: Tensor,
    num_chosen: int,
    stored: list[Tensor],
    turned: bool,
    into: Tensor | None,
    out_of: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `x`, and of both halves of an adapter: [experts, rank, in], as PEFT holds it, and [experts, rank, out]."""
    grad = grad.contiguous() if enters else _take_rows(grad, order, num_chosen)
    d_rows = _frozen_product(grad, stored, ends, turned=not turned)
    d_into, d_out_of = grad.new_empty(0), grad.new_empty(0)  # results must not be one tensor
    if into is not None and out_of is not None:
        rows = _take_rows(x, order, num_chosen) if enters else x
        narrow = grouped_product(rows, into, ends).mul_(scaling)
        d_narrow = grouped_product(grad, out_of.transpose(-2, -1), ends).mul_(scaling)
        d_into, d_out_of = matrix_gradients(d_narrow, rows, ends), matrix_gradients(narrow, grad, ends)
        d_rows = _add_product(d_rows, d_narrow, into.transpose(-2, -1), ends)
    return (_sum_rows(d_rows, places, num_chosen) if enters else d_rows), d_into, d_out_of


# --- what they are made of ------------------------------------------------------------------------------------------


def _frozen_product(rows: Tensor, stored: list[Tensor], ends: Tensor, *, turned: bool) -> Tensor:
    if len(stored) > 1:
        return nf4_stack_product(rows, Nf4Stack(*stored), ends, turned=turned)
    (matrices,) = stored
    return grouped_product(rows, matrices.transpose(-2, -1) if turned else matrices, ends)


def _take_rows(x: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """[S, width] of [T, width]."""
    if _has_kernels(x):
        from lockstep.model.expert_kernel import take_rows

        return take_rows(x, order, num_chosen)
    return x.index_select(0, order // num_chosen)


def _sum_rows(rows: Tensor, places: Tensor, num_chosen: int) -> Tensor:
    """[T, width] of [S, width]."""
    if _has_kernels(rows):
        from lockstep.model.expert_kernel import sum_rows

        return sum_rows(rows, places, num_chosen)
    return rows.index_select(0, places).unflatten(0, (-1, num_chosen)).sum(dim=1)


def _add_product(total: Tensor, narrow: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """In place: to `total` [S, width], `narrow` [S, rank] times each expert's matrix."""
    if _has_kernels(total) and narrow.shape[1] <= _WIDEST_KERNEL:
        from lockstep.model.expert_kernel import add_narrow_product

        return add_narrow_product(total, narrow, matrices, ends)
    return total.add_(grouped_product(narrow, matrices, ends))


def _has_kernels(rows: Tensor) -> bool:
    return rows.is_cuda and _TRITON and rows.dtype != torch.float64


# --- what the compiler and autograd are told ------------------------------------------------------------------------


@reorder.register_fake
def _(values: Tensor, order: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(values)


@expert_product.register_fake
def _(x: Tensor, enters: bool, order: Tensor, *rest: Any) -> Tensor:
    _places, _ends, num_chosen, stored, turned, *_ = rest
    columns = stored[0].shape[2] * (2 if len(stored) > 1 else 1)
    num_rows = order.shape[0] if enters else order.shape[0] // num_chosen
    return x.new_empty(num_rows, stored[0].shape[1] if turned else columns)


@expert_product_backward.register_fake
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    into, out_of, _scaling = rest[-3:]
    if into is None:
        return x.new_empty(x.shape), grad.new_empty(0), grad.new_empty(0)
    return x.new_empty(x.shape), into.new_empty(into.transpose(-2, -1).shape), out_of.new_empty(out_of.shape)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    enters: bool
    num_chosen: int
    num_stored: int
    turned: bool
    scaling: float


def _keep_order(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _reorder_backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
    order, places = ctx.saved_tensors
    return reorder(grad, places, order), None, None


def _keep_inputs(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.enters, order, places, ends, ctx.num_chosen, stored, ctx.turned, into, out_of, ctx.scaling = inputs
    ctx.num_stored = len(stored)
    ctx.save_for_backward(x, order, places, ends, *stored, *(() if into is None else (into, out_of)))


def _product_backward(ctx: _Context, grad: Tensor) -> tuple[Any, ...]:
    x, order, places, ends, *rest = ctx.saved_tensors
    stored, adapter = rest[: ctx.num_stored], rest[ctx.num_stored :] or (None, None)
    d_x, d_into, d_out_of = expert_product_backward(
        grad, x, ctx.enters, order, places, ends, ctx.num_chosen, stored, ctx.turned, *adapter, ctx.scaling
    )
    halves = (None, None) if adapter[0] is None else (d_into.transpose(-2, -1), d_out_of)
    return d_x, *[None] * 5, [None] * ctx.num_stored, None, *halves, None


reorder.register_autograd(_reorder_backward, setup_context=_keep_order)
expert_product.register_autograd(_product_backward, setup_context=_keep_inputs)
PRODUCTS = {
    torch.ops.lockstep.expert_product.default,
    torch.ops.lockstep.grouped_mm.default,
    torch.ops.lockstep.nf4_grouped_product.default,
    *([torch.ops.aten._grouped_mm.default] if hasattr(torch.ops.aten, "_grouped_mm") else []),
}
"""What selective recomputation keeps."""
