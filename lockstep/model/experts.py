"""What models with experts need beyond others: each token computed by its own experts, also with adapters on them, held
in NF4 or divided over ranks; and routing without noise."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.model.expert_ops import Matrices, enter_experts, leave_experts, reorder, sort_rows
from lockstep.model.grouped_product import Nf4Stack, grouped_product, nf4_stack_product


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
    return hasattr(experts, "is_transposed") and hasattr(experts, "_apply_gate")


@dataclass(frozen=True)
class ExpertAdapter:
    """What is added to an expert's matrix: `scaling` times the product of its two narrow ones."""

    into: Tensor  # [experts, in, rank]
    out_of: Tensor  # [experts, rank, out]
    scaling: float


class SplitExperts(Protocol):
    """Experts that are divided over ranks: this one has `count` of them, from `first` on.

    `send` takes rows to the ranks that have their experts, `send_back` brings them home. `enter` and `leave` are around
    what ranks with the same tokens compute.
    """

    first: int
    count: int

    def local(self, parameter: Tensor) -> Tensor: ...

    def enter(self, value: Tensor) -> Tensor: ...

    def leave(self, value: Tensor) -> Tensor: ...

    def is_sent(self, expert: Tensor) -> Tensor: ...

    def send(self, rows: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Any]: ...

    def send_back(self, rows: Tensor, trip: Any) -> Tensor: ...


def split_problem(experts: nn.Module) -> str:
    """Why these experts cannot be divided over ranks; empty if they can."""
    name = type(experts).__name__
    if not follows_transformers(experts):
        return f"{name} is computed by the model's own code, which needs all experts"
    return f"{name} has a norm that its experts share" if _has_norm(experts) else ""


def _has_norm(experts: nn.Module) -> bool:
    """In transformers 5.17 no experts have one, and none say so."""
    return bool(getattr(experts, "has_post_expert_norm", False))


def stacked_parameters(experts: nn.Module) -> list[str]:
    """The names of all parameters that have a part for each expert, biases too."""
    (num_experts,) = {p.shape[0] for p in expert_parameters(experts).values()}
    return [name for name, p in experts.named_parameters(recurse=False) if p.shape[0] == num_experts]


def divide_experts(experts: Any, split: SplitExperts) -> None:
    """From here on each rank computes with its own experts, and sends the tokens of others to them. In place."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor, adapters: Adapters | None = None) -> Tensor:
        return compute_split_experts(experts, split, hidden, chosen, weights, adapters or {})

    experts.forward = torch.compiler.disable(forward)  # how many rows go where is known only on the way
    experts.is_divided = True


def is_divided(experts: nn.Module) -> bool:
    return "is_divided" in vars(experts)


# --- experts held in NF4 ----------------------------------------------------------------------------------------------

_BLOCKS, _SCALES = "_nf4_blocks", "_nf4_scales"  # ends of parameters' names, beside the codes' own


def held_in_nf4(experts: nn.Module) -> list[str]:
    """The names of stacked matrices whose parameter holds codes."""
    return [name.removesuffix(_BLOCKS) for name, _ in experts.named_parameters(recurse=False) if name.endswith(_BLOCKS)]


def hold_in_nf4(experts: Any, stacks: Mapping[str, Nf4Stack]) -> None:
    """From here on the parameters of these names hold codes, and two more stand beside each. In place."""
    for name, stack in stacks.items():
        for key, part in zip((name, name + _BLOCKS, name + _SCALES), stack, strict=True):
            experts.register_parameter(key, nn.Parameter(part, requires_grad=False))

    kind: Any = type(experts)
    experts.__class__ = _kind_in_nf4(kind)


@functools.cache
def _kind_in_nf4(kind: Any) -> Any:
    """No function of each module: the compiler would compile every layer anew."""

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return compute_experts(self, hidden, chosen, weights, {})

    return type(kind.__name__, (kind,), {"forward": forward, "plain_kind": kind})


def restore_plain(experts: Any, dtype: torch.dtype) -> None:
    """Back to the model's own computation, with the matrices that the codes stand for. In place."""
    for name in held_in_nf4(experts):
        stack = nf4_stack(experts, name)
        assert stack is not None
        matrices = torch.stack([stack.expert(number) for number in range(len(stack.codes))]).to(dtype)
        experts.register_parameter(name, nn.Parameter(matrices, requires_grad=False))
        for end in (_BLOCKS, _SCALES):
            delattr(experts, name + end)
    experts.__class__ = experts.plain_kind


def nf4_sizes(experts: nn.Module) -> dict[int, int]:
    """By id of each parameter that is a part of matrices in NF4: how many weights it holds."""
    sizes: dict[int, int] = {}
    for name in held_in_nf4(experts):
        codes, *others = (getattr(experts, key) for key in (name, name + _BLOCKS, name + _SCALES))
        sizes |= {id(codes): 2 * codes.numel(), **{id(other): 0 for other in others}}
    return sizes


def nf4_stack(experts: Any, name: str, split: SplitExperts | None = None) -> Nf4Stack | None:
    """None: these matrices are plain ones."""
    if not hasattr(experts, name + _BLOCKS):
        return None
    parts = [getattr(experts, key) for key in (name, name + _BLOCKS, name + _SCALES)]
    return Nf4Stack(*(parts if split is None else map(split.local, parts)))


Adapters = Mapping[str, ExpertAdapter]


def compute_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, adapters: Adapters) -> Tensor:
    """[T, H] of `hidden` [T, H], by the experts that each token has `chosen` [T, K], with their `weights` [T, K].

    Tokens are sorted by expert, so that each matrix is read once. `adapters` by the name of the matrix they are on.
    """
    if hidden.is_cuda and not _has_norm(experts):
        return compute_in_two(experts, hidden, chosen, weights, adapters)
    num_chosen = chosen.shape[-1]
    expert, order = torch.sort(chosen.flatten(), stable=True)  # [S], S = T * K
    outer = _apply_matrices(experts, hidden[order // num_chosen], expert, experts.num_experts, adapters)
    outer = outer * weights.flatten()[order, None]
    restored = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return outer[restored].unflatten(0, (-1, num_chosen)).sum(dim=1).to(hidden.dtype)


def compute_in_two(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, adapters: Adapters) -> Tensor:
    """The same by operations that move less memory. Weights are applied in the middle, where rows are narrow: what
    comes after it is a product, in which they are a factor of the row, and its bias."""
    rows, expert = sort_rows(chosen, experts.num_experts)

    def matrices(name: str) -> Matrices:
        stack, adapter = nf4_stack(experts, name), adapters.get(name)
        stored = [getattr(experts, name)] if stack is None else list(stack)
        if adapter is None:
            return Matrices(stored, not experts.is_transposed, None, None, 1.0)
        halves = (adapter.into.to(hidden.dtype), adapter.out_of.to(hidden.dtype))
        return Matrices(stored, not experts.is_transposed, *halves, adapter.scaling)

    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = enter_experts(hidden, rows, matrices(name))
    if experts.has_bias:
        inner = inner + getattr(experts, f"{name}_bias")[expert.to(torch.int64)]
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    inner = inner * reorder(weights.flatten(), rows.order, rows.places)[:, None]
    outer = leave_experts(inner.to(hidden.dtype), rows, matrices("down_proj"))
    if experts.has_bias:
        outer = outer + (experts.down_proj_bias[chosen] * weights[..., None]).sum(dim=1)
    return outer.to(hidden.dtype)


def compute_split_experts(
    experts: Any, split: SplitExperts, hidden: Tensor, chosen: Tensor, weights: Tensor, adapters: Adapters
) -> Tensor:
    """The same where each rank has some of the experts. All ranks that share them, also without a token."""
    num_chosen, dtype = chosen.shape[-1], hidden.dtype
    hidden, weights = split.enter(hidden), split.enter(weights)
    expert, order = torch.sort(chosen.flatten(), stable=True)
    is_sent = split.is_sent(expert)
    expert, order = expert[is_sent], order[is_sent]
    rows, own, trip = split.send(hidden[order // num_chosen], expert)
    mine = {name: _part_of(adapter, split) for name, adapter in adapters.items()}
    outer = _apply_matrices(experts, rows, own, split.count, mine, split)
    outer = split.send_back(outer, trip) * weights.flatten()[order, None]
    whole = outer.new_zeros(chosen.numel(), hidden.shape[-1]).index_copy(0, order, outer)
    return split.leave(whole.unflatten(0, (-1, num_chosen)).sum(dim=1).to(dtype))


def _part_of(adapter: ExpertAdapter, split: SplitExperts) -> ExpertAdapter:
    """Every rank has the adapters of all experts."""
    here = slice(split.first, split.first + split.count)
    return replace(adapter, into=split.enter(adapter.into)[here], out_of=split.enter(adapter.out_of)[here])


def _apply_matrices(
    experts: Any,
    rows: Tensor,
    expert: Tensor,
    num_experts: int,
    adapters: Adapters,
    split: SplitExperts | None = None,
) -> Tensor:
    """[S, H] of `rows` [S, H], which are sorted by `expert` [S]."""
    ends = torch.searchsorted(expert, torch.arange(num_experts, device=expert.device), right=True, out_int32=True)

    def held(name: str) -> Tensor:
        return getattr(experts, name) if split is None else split.local(getattr(experts, name))

    def product(name: str, x: Tensor) -> Tensor:
        if (stack := nf4_stack(experts, name, split)) is not None:
            y = nf4_stack_product(x, stack, ends, turned=not experts.is_transposed)
        else:
            matrices = held(name)
            y = grouped_product(x, matrices if experts.is_transposed else matrices.transpose(-2, -1), ends)
        if experts.has_bias:
            y = y + held(f"{name}_bias")[expert]
        adapter = adapters.get(name)
        if adapter is None:
            return y
        narrow = grouped_product(x, adapter.into.to(x.dtype), ends) * adapter.scaling
        return y + grouped_product(narrow, adapter.out_of.to(x.dtype), ends)

    inner = (
        experts._apply_gate(product("gate_up_proj", rows))
        if experts.has_gate
        else experts.act_fn(product("up_proj", rows))
    )
    outer = product("down_proj", inner)
    return experts.post_expert_norm(outer) if _has_norm(experts) else outer
