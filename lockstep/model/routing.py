"""The routers of a mixture of experts, watched from outside: which experts tokens choose, and gradients that a loss on
their probabilities adds. What such a loss weighs is counted over a whole batch, elsewhere."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

BIAS = "e_score_correction_bias"
"""What transformers calls the bias that decides with the scores which experts are chosen, and is no parameter."""


@dataclass(frozen=True)
class RouterCounts:
    """Sums over tokens, [layers, experts] each: how many chose an expert; how many would by probability alone, which is
    what balancing losses count; and the probabilities themselves. [layers]: squared log-sum-exps, and tokens."""

    chosen: Tensor
    likeliest: Tensor
    probabilities: Tensor
    log_sums: Tensor
    tokens: Tensor

    @classmethod
    def unpack(cls, flat: Tensor, num_layers: int, num_experts: int) -> RouterCounts:
        """The inverse of `flatten`."""
        sizes = [num_layers * num_experts] * 3 + [num_layers] * 2
        *wide, log_sums, tokens = flat.split(sizes)
        chosen, likeliest, probabilities = (part.view(num_layers, num_experts) for part in wide)
        return cls(chosen, likeliest, probabilities, log_sums, tokens)

    def flatten(self) -> Tensor:
        parts = (self.chosen, self.likeliest, self.probabilities, self.log_sums, self.tokens)
        return torch.cat([part.flatten() for part in parts])


class Routers:
    """All routers of a model, in its order. Silent until `counting` or `attached`.

    Packed tokens are `read` before each pass: `tokens` [T] says in how many texts each token is, 0 for padding.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self.layers: list[int] = []  # their numbers, as in the names
        self.num_experts = self.top_k = 0
        self.have_bias = False
        self.tokens: Tensor | None = None
        self.replayed: Tensor | None = None  # [T, routers, K]: choices that are given, see replay.py
        self.slopes: Tensor | None = None  # [experts]: of the loss, per probability of a token
        self.log_sum_slope: Tensor | float = 0.0  # of the loss, per squared log-sum-exp of a token
        self._counts: RouterCounts | None = None
        self._is_attached = self._chooses_freely = False
        for name, module, index in find_routers(model):
            self.num_experts = max(self.num_experts, int(module.num_experts))
            self.top_k = int(module.top_k)
            self.have_bias |= isinstance(getattr(module, BIAS, None), Tensor)
            module.register_forward_hook(self._hook(len(self.names), index))
            number = re.search(r"\.(\d+)\.", name)
            self.layers.append(int(number[1]) if number else len(self.names))
            self.names.append(name)

    def __bool__(self) -> bool:
        return bool(self.names)

    def read(self, tokens: Tensor | None) -> None:
        self.tokens = tokens

    @contextlib.contextmanager
    def replaying(self, choices: Tensor | None) -> Iterator[None]:
        """Around a pass whose `choices` are given. None: they are the routers' own."""
        self.replayed = None if self._chooses_freely else choices
        try:
            yield
        finally:
            self.replayed = None

    @contextlib.contextmanager
    def choosing_freely(self) -> Iterator[None]:
        """Passes whose choices are the routers' own, whatever is given."""
        self._chooses_freely = True
        try:
            yield
        finally:
            self._chooses_freely = False

    @contextlib.contextmanager
    def counting(self, counts: RouterCounts | None) -> Iterator[None]:
        """Passes add to `counts`."""
        self._counts = counts
        try:
            yield
        finally:
            self._counts = self.tokens = None

    @contextlib.contextmanager
    def attached(self, *, when: bool) -> Iterator[None]:
        """Backward passes add the gradient that `slopes` and `log_sum_slope` are of; they may be set after forward."""
        self._is_attached = when
        try:
            yield
        finally:
            self._is_attached, self.tokens = False, None

    def empty_counts(self, device: torch.device) -> RouterCounts:
        num_layers, num_experts = len(self.names), self.num_experts
        flat = torch.zeros(num_layers * (3 * num_experts + 2), dtype=torch.float64, device=device)
        return RouterCounts.unpack(flat, num_layers, num_experts)

    def remembering_tokens(self, recompute: Callable[..., object]) -> Callable[..., object]:
        """`recompute(function, ...)` may call it again, in a backward pass: with the tokens of the first call."""

        def call(
            read: tuple[Tensor | None, Tensor | None], function: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            before = self.tokens, self.replayed
            self.tokens, self.replayed = read
            try:
                return function(*args, **kwargs)
            finally:
                self.tokens, self.replayed = before

        def remember(function: Callable[..., object], *args: object, **kwargs: object) -> object:
            if self._counts is None and not self._is_attached and self.replayed is None:
                return recompute(function, *args, **kwargs)  # nobody asks: the compiler takes a plain call
            return recompute(call, (self.tokens, self.replayed), function, *args, **kwargs)

        return remember if self else recompute

    def _hook(self, place: int, index: int) -> Any:
        def read(module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if self.tokens is None or (self._counts is None and not self._is_attached):
                return None
            logits = output[index].flatten(0, -2)
            if self._counts is not None and not _is_recomputed():
                self.count(place, logits.detach(), chosen_experts(output, logits, self.top_k))
            if not self._is_attached or not logits.requires_grad:
                return None
            weight = next(i for i, part in enumerate(output) if i != index and part.is_floating_point())
            wide = torch.promote_types(logits.dtype, torch.float32)
            log_sums = torch.logsumexp(logits.to(wide), dim=-1)
            carrier = _Attached.apply(output[weight], torch.softmax(logits, dim=-1).to(wide), log_sums, self)
            return (*output[:weight], carrier, *output[weight + 1 :])

        return read

    @torch.no_grad()
    def count(self, place: int, logits: Tensor, chosen: Tensor) -> None:
        counts, tokens = self._counts, self.tokens
        assert counts is not None
        assert tokens is not None
        tokens = tokens.double()
        probabilities = torch.softmax(logits, dim=-1)
        likeliest = torch.topk(probabilities, self.top_k, dim=-1).indices
        for where, experts in ((counts.chosen, chosen), (counts.likeliest, likeliest)):
            known = experts < self.num_experts  # some routers may also choose none
            weights = tokens[:, None].expand_as(experts) * known
            where[place].scatter_add_(0, experts.clamp(max=self.num_experts - 1).flatten(), weights.flatten())
        sums = (probabilities.double() * tokens[:, None]).sum(0)[: self.num_experts]  # some may also choose none
        counts.probabilities[place, : len(sums)] += sums
        counts.log_sums[place] += (torch.logsumexp(logits.double(), dim=-1).square() * tokens).sum()
        counts.tokens[place] += tokens.sum()


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    routers: Routers


class _Attached(torch.autograd.Function):
    """The weights of the chosen experts, unchanged; their backward also is that of the loss on probabilities."""

    @staticmethod
    def forward(ctx: _Context, weights: Tensor, probabilities: Tensor, log_sums: Tensor, routers: Routers) -> Tensor:
        assert routers.tokens is not None
        ctx.save_for_backward(log_sums, routers.tokens)
        ctx.routers = routers
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        log_sums, tokens = ctx.saved_tensors
        slopes = ctx.routers.slopes
        assert slopes is not None, "the loss of routers was not settled before backward"
        per_probability = tokens.to(log_sums.dtype)[:, None] * slopes.to(log_sums.dtype)
        per_log_sum = 2 * ctx.routers.log_sum_slope * log_sums * tokens.to(log_sums.dtype)
        return grad, per_probability, per_log_sum, None


def _is_recomputed() -> bool:
    """Inside of backward: these tokens were counted when they went forward. Compiled layers recompute by themselves."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def chosen_experts(output: tuple[Tensor, ...], logits: Tensor, top_k: int) -> Tensor:
    """[T, K], the experts that a router says it chose; one that does not say it takes the largest logits."""
    said = [part for part in output if not part.is_floating_point()]
    return said[-1].reshape(len(logits), -1) if said else torch.topk(logits, top_k, dim=-1).indices


def find_routers(model: nn.Module) -> Iterator[tuple[str, Any, int]]:
    """(name, module, which of its outputs are logits), as the model itself tells where its router_logits come from."""
    seen: set[int] = set()
    for name, part in model.named_modules():
        records = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if records is None or isinstance(records, list):  # of several kinds of routers, not all are of experts
            continue
        kind, index = getattr(records, "target_class", None), int(getattr(records, "index", 0))
        for inner, module in part.named_modules():
            is_router = kind is not None and isinstance(module, kind)
            if is_router and id(module) not in seen and hasattr(module, "num_experts") and hasattr(module, "top_k"):
                seen.add(id(module))
                yield f"{name}.{inner}".strip("."), module, index


def balancing_problem(causal: nn.Module, routers: Routers) -> str:
    """Why this model has no loss that balances its experts; empty: it has one, that of Switch Transformers."""
    name = type(causal).__name__
    if not routers:
        return f"{name} has no routers that tell their logits"
    formula = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
    if formula is None:
        return f"{name} defines no load-balancing loss"
    if list(inspect.signature(formula).parameters) != ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        return f"{name} has a load-balancing loss of its own kind"
    return ""


def own_coefficient(config: Any) -> float:
    """Of the load-balancing loss, as the model's configuration has it."""
    found = getattr(config, "router_aux_loss_coef", None)
    return float(found or 0.0)


def router_biases(model: nn.Module, routers: Routers) -> dict[int, Tensor]:
    """The biases of the routers on this rank that have one, by the router's place."""
    modules = dict(model.named_modules())
    held = {place: getattr(modules.get(name), BIAS, None) for place, name in enumerate(routers.names)}
    return {place: bias for place, bias in held.items() if isinstance(bias, Tensor)}
