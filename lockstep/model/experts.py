"""What models with experts need beyond others: products of tokens with their own expert's matrices, also with adapters
on them and in float64; and routing without noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


def compute_experts_exactly(causal: Any, dtype: torch.dtype) -> None:
    """In float64, one expert after another: transformers' grouped products (torch 2.13) have no float64."""
    if dtype == torch.float64 and hasattr(causal, "set_experts_implementation"):
        causal.set_experts_implementation("eager")


def noisy_routers(model: nn.Module) -> list[nn.Module]:
    """Modules that add noise to their input or draw experts at random while they train.

    Transformers' models keep the size of that noise in an attribute called jitter (phimoe, mixtral, minimax, dbrx).
    """
    return [
        module
        for module in model.modules()
        if any("jitter" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
    ]


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The stacked matrices of experts that a module holds itself, by name: [experts, ..., ...] each."""
    if "expert" not in type(module).__name__.lower():
        return {}
    return {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}


def follows_transformers(experts: nn.Module) -> bool:
    """Whether transformers may compute these experts in another way than their own code: so may `compute_experts`."""
    return hasattr(experts, "_is_expert_parallel") and hasattr(experts, "_apply_gate")


@dataclass(frozen=True)
class ExpertAdapter:
    """What is added to an expert's matrix: `scaling` times the product of its two narrow ones."""

    into: Tensor  # [experts, in, rank]
    out_of: Tensor  # [experts, rank, out]
    scaling: float


def compute_experts(
    experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, adapters: Mapping[str, ExpertAdapter]
) -> Tensor:
    """[T, H] of `hidden` [T, H], by the experts that each token has `chosen` [T, K], with their `weights` [T, K].

    Tokens are sorted by expert, so that each matrix is read once. `adapters` by the name of the matrix they are on.
    """
    num_chosen = chosen.shape[-1]
    expert, order = torch.sort(chosen.flatten(), stable=True)  # [S], S = T * K
    ends = torch.searchsorted(
        expert, torch.arange(experts.num_experts, device=expert.device), right=True, out_int32=True
    )

    def product(name: str, x: Tensor) -> Tensor:
        matrices = getattr(experts, name)
        y = grouped_product(x, matrices if experts.is_transposed else matrices.transpose(-2, -1), ends)
        if experts.has_bias:
            y = y + getattr(experts, f"{name}_bias")[expert]
        adapter = adapters.get(name)
        if adapter is None:
            return y
        narrow = grouped_product(x, adapter.into.to(x.dtype), ends) * adapter.scaling
        return y + grouped_product(narrow, adapter.out_of.to(x.dtype), ends)

    x = hidden[order // num_chosen]
    inner = (
        experts._apply_gate(product("gate_up_proj", x)) if experts.has_gate else experts.act_fn(product("up_proj", x))
    )
    outer = product("down_proj", inner)
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    outer = outer * weights.flatten()[order, None]
    restored = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return outer[restored].unflatten(0, (-1, num_chosen)).sum(dim=1).to(hidden.dtype)


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[S, out]: rows of `x` [S, in] times the one of `matrices` [experts, in, out] whose rows `ends` [experts] ends."""
    if _takes_grouped_mm(x, matrices):
        return F.grouped_mm(x.to(matrices.dtype), matrices, offs=ends)
    return _GroupedProduct.apply(x.to(matrices.dtype), matrices, ends)


def _takes_grouped_mm(x: Tensor, matrices: Tensor) -> bool:
    """torch's kernel has no float64 (torch 2.13), wants rows of whole 16 bytes, and compiles in bf16 alone."""
    if matrices.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return False
    if torch.compiler.is_compiling() and matrices.dtype != torch.bfloat16:
        return False
    return all(width * matrices.itemsize % 16 == 0 for width in matrices.shape[-2:])


class _Context(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    bounds: list[tuple[int, int]]


class _GroupedProduct(torch.autograd.Function):
    """One expert after another; those without a token cost nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        stops = ends.tolist()
        ctx.bounds = list(zip([0, *stops], stops, strict=False))
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
        d_matrices = torch.empty_like(matrices) if needs_matrices else None
        for expert, (start, stop) in enumerate(ctx.bounds):
            if d_x is not None and start < stop:
                torch.mm(grad[start:stop], matrices[expert].T, out=d_x[start:stop])
            if d_matrices is not None:
                torch.mm(x[start:stop].T, grad[start:stop], out=d_matrices[expert])
        return d_x, d_matrices, None
