"""Log-probs of target tokens straight from hidden states, in chunks: full logits never exist.

Ways to the gradient, by what is known when: a frozen head keeps each token's unit gradient; a loss whose slope per
log-prob is known in advance gets its gradients in the forward pass; otherwise logits are kept for the backward pass
as far as memory is granted, and computed again beyond it. Must not know models, losses or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_TRITON = find_spec("triton") is not None

# Legend for names below: N supervised tokens, C tokens of one chunk, H hidden size, V vocabulary.


@dataclass(frozen=True)
class LogitTransform:
    """What the model does to its logits after the head: divide or multiply, then cap with tanh."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Derivative of apply, written in its result."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (transformed / self.softcap) ** 2)

    def at(self, temperature: float) -> LogitTransform:
        """With the result divided by it, which is the same as dividing scale and cap: nothing more is computed."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return LogitTransform(self.scale / temperature, softcap)


class Vocabulary(Protocol):
    """Where the head's rows lie on several ranks: the first row here, and results over all of them."""

    first: int

    def enter(self, hidden: Tensor) -> Tensor: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadOptions:
    """`vocabulary`: None where the whole head is here. `kept_bytes`: logits kept for the backward pass, at most."""

    transform: LogitTransform = LogitTransform()
    chunk_tokens: int = 1024
    vocabulary: Vocabulary | None = None
    kept_bytes: int = 0


class TokenFacts(NamedTuple):
    """Of each asked token: its log-prob, the entropy of the distribution it came from, and the log of the sum of that
    distribution's squared probabilities (which has no gradient)."""

    logprobs: Tensor
    entropies: Tensor
    log_sum_sq_probs: Tensor


def target_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> Tensor:
    """[N, H] hidden, [V, H] weight, [N] targets -> [N] float log-probs, differentiable."""
    return _logprobs_with_facts(hidden, weight, bias, targets, options, facts=False)[0]


def token_facts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> TokenFacts:
    """As `target_logprobs`, with what else one look at the logits tells. Entropies are differentiable too."""
    return TokenFacts(*_logprobs_with_facts(hidden, weight, bias, targets, options, facts=True))


def _logprobs_with_facts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions, *, facts: bool
) -> tuple[Tensor, ...]:
    if options.vocabulary is not None:
        hidden = options.vocabulary.enter(hidden)
    if torch.is_grad_enabled():
        return _TargetLogprobs.apply(hidden, weight, bias, targets, options, facts)
    found = [
        _measure(torch.nn.functional.linear(hidden[rows], weight, bias), targets[rows], options, facts=facts)
        for rows in _chunks(len(targets), options.chunk_tokens)
    ]
    return _join(found, hidden, facts)


def weighted_logprob_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_logprobs: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """(sum of slopes * log-probs, differentiable; the log-probs themselves, detached).

    Gradients are computed in the forward pass, chunk by chunk, so logits are computed once.
    """
    if options.vocabulary is not None:
        hidden = options.vocabulary.enter(hidden)
    return _WeightedLogprobSum.apply(hidden, weight, bias, targets, grad_logprobs, options)


class _TargetLogprobs(torch.autograd.Function):
    """Log-probs; with `facts` also entropies and collisions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: HeadOptions,
        facts: bool,
    ) -> tuple[Tensor, ...]:
        # A gradient of two kinds cannot be kept in units of one.
        frozen = not any(ctx.needs_input_grad[1:3]) and not facts
        keeps = not frozen and len(targets) * len(weight) * hidden.element_size() <= options.kept_bytes
        unit = torch.empty_like(hidden) if frozen else None
        ones = torch.ones(len(targets), dtype=_accumulation_dtype(hidden.dtype), device=hidden.device)
        ctx.logits, found = [], []
        for rows in _chunks(len(targets), options.chunk_tokens):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            if unit is None:
                found.append(_measure(logits, targets[rows], options, facts=facts))
            else:
                logprobs, d_logits = _logprobs_and_gradient(logits, targets[rows], ones[rows], options)
                torch.mm(d_logits, weight, out=unit[rows])
                found.append((logprobs,))
            if keeps:
                ctx.logits.append(logits)
        results = _join(found, hidden, facts)
        ctx.options, ctx.frozen, ctx.facts = options, frozen, facts
        if unit is not None:
            ctx.save_for_backward(unit)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, results[1] if facts else None)
        if facts:
            ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if ctx.frozen:
            (unit,) = ctx.saved_tensors
            return unit * grad[:, None].to(unit.dtype), None, None, None, None, None
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        kept, ctx.logits = ctx.logits, None  # used up below
        assert kept is not None, "the head's logits serve one backward pass"
        for i, rows in enumerate(_chunks(len(targets), ctx.options.chunk_tokens)):
            logits = kept[i] if kept else torch.nn.functional.linear(hidden[rows], weight, bias)
            spread = (grads[1][rows], entropies[rows]) if ctx.facts else None
            _, d_logits = _logprobs_and_gradient(logits, targets[rows], grad[rows], ctx.options, spread)
            gradients.add(rows, d_logits)
            if kept:
                kept[i] = None
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None


class _WeightedLogprobSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        grad_logprobs: Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(targets.shape, dtype=_accumulation_dtype(hidden.dtype))
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in _chunks(len(targets), options.chunk_tokens):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            logprobs[rows], d_logits = _logprobs_and_gradient(logits, targets[rows], grad_logprobs[rows], options)
            gradients.add(rows, d_logits)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(logprobs)
        return (grad_logprobs.to(logprobs.dtype) * logprobs).sum(), logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        assert grad is not None
        # In place: a copy of the weight's gradient would be the largest thing here. They serve one backward pass.
        scaled = (None if g is None else g.mul_(grad.to(g.dtype)) for g in ctx.saved_tensors)
        return (*scaled, None, None, None)


class _Gradients:
    """Gradients of hidden, weight and bias, filled chunk by chunk; only those that somebody needs."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self._hidden, self._weight = hidden, weight
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(self, rows: slice, d_logits: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(d_logits, self._weight, out=self.hidden[rows])
        if self.weight is not None:
            self.weight.addmm_(d_logits.T, self._hidden[rows])
        if self.bias is not None:
            self.bias += d_logits.sum(0)


def _join(found: list[tuple[Tensor, ...]], hidden: Tensor, facts: bool) -> tuple[Tensor, ...]:
    """Chunks one after the other; nothing asked is no chunk."""
    none = hidden.new_empty(0, dtype=_accumulation_dtype(hidden.dtype))
    parts = list(zip(*found, strict=True)) or [(none,)] * (3 if facts else 1)
    return tuple(torch.cat(part) for part in parts)


def _measure(logits: Tensor, targets: Tensor, options: HeadOptions, *, facts: bool) -> tuple[Tensor, ...]:
    """(log-probs,) of one chunk, or with `facts` (log-probs, entropies, collisions)."""
    transform = options.transform
    if options.vocabulary is None and _has_kernel(logits):
        from lockstep.model.head_kernel import measure

        return measure(logits, targets, transform.scale, transform.softcap, facts=facts)
    if options.vocabulary is not None:
        log_probabilities, chosen, _ = _split_log_probabilities(logits, targets, options)
    else:
        wide = transform.apply(logits.to(_accumulation_dtype(logits.dtype)))
        if not facts:
            return (wide.gather(1, targets[:, None])[:, 0] - torch.logsumexp(wide, dim=1),)
        log_probabilities = torch.log_softmax(wide, dim=1)
        chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
    if not facts:
        return (chosen,)
    probabilities = log_probabilities.exp()
    entropies, squares = -(probabilities * log_probabilities).sum(dim=1), probabilities.square_().sum(dim=1)
    if options.vocabulary is not None:
        entropies, squares = options.vocabulary.sum(entropies), options.vocabulary.sum(squares)
    return chosen, entropies, squares.log()


def _logprobs_and_gradient(
    logits: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    options: HeadOptions,
    spread: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of one chunk, and d(sum slopes * log-prob) / d logits in the logits' dtype. The logits are used up.

    `spread`, (slopes of the entropies, the entropies), adds their gradient.
    """
    transform, vocabulary = options.transform, options.vocabulary
    if vocabulary is None and _has_kernel(logits):
        from lockstep.model.head_kernel import logprobs_and_gradient

        return logprobs_and_gradient(logits, targets, grad_logprobs, transform.scale, transform.softcap, spread)
    if vocabulary is not None:
        log_probabilities, chosen, slope = _split_log_probabilities(logits, targets, options)
        here, mine = _in_this_part(targets, logits.shape[1], vocabulary)
        bump = grad_logprobs * mine.to(grad_logprobs.dtype)
    else:
        wide = transform.apply(logits.to(_accumulation_dtype(logits.dtype)))
        slope = transform.slope(wide)
        log_probabilities = torch.log_softmax(wide, dim=1)
        chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
        here, bump = targets, grad_logprobs
    factor: Tensor = -grad_logprobs[:, None]
    if spread is not None:
        entropy_slopes, entropies = spread
        factor = factor - entropy_slopes[:, None] * (log_probabilities + entropies[:, None])
    gradient = log_probabilities.exp_().mul_(factor)
    if gradient.shape[1]:
        gradient.scatter_add_(1, here[:, None], bump[:, None].to(gradient.dtype))
    if isinstance(slope, Tensor) or slope != 1.0:
        gradient.mul_(slope)
    return chosen, gradient.to(logits.dtype)


def _split_log_probabilities(
    logits: Tensor, targets: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor | float]:
    """(log-probabilities of this part's tokens, log-probs of the targets, slope of the transform)."""
    vocabulary = options.vocabulary
    assert vocabulary is not None
    wide = options.transform.apply(logits.to(_accumulation_dtype(logits.dtype)))
    lowest = wide.new_full((len(wide),), -torch.inf)
    top = vocabulary.max(wide.amax(dim=1) if wide.shape[1] else lowest)
    total = vocabulary.sum(torch.exp(wide - top[:, None]).sum(dim=1))
    log_probabilities = wide - (top + torch.log(total))[:, None]
    here, mine = _in_this_part(targets, wide.shape[1], vocabulary)
    chosen = log_probabilities.gather(1, here[:, None])[:, 0] * mine if wide.shape[1] else torch.zeros_like(top)
    return log_probabilities, vocabulary.sum(chosen), options.transform.slope(wide)


def _in_this_part(targets: Tensor, size: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(place of each target in this part, clamped into it; whether it is really there)."""
    here = targets - vocabulary.first
    return here.clamp(0, max(size - 1, 0)), (here >= 0) & (here < size)


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64 and _TRITON


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(total: int, size: int) -> list[slice]:
    """Equal parts, none larger than size: a small rest would waste a pass over the weight."""
    parts = max(1, -(-total // size))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a]
