"""Log-probs of target tokens straight from hidden states, in chunks: full logits never exist.

The gradient is computed in one of three ways: a frozen head keeps each token's unit gradient; where the gradient per
log-prob is known in advance, all is computed in the forward pass; otherwise logits are kept for the backward pass up to
a memory limit, and recomputed beyond it.
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

    def derivative(self, transformed: Tensor) -> Tensor | float:
        """Of `apply`, as a function of its result."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (transformed / self.softcap) ** 2)

    def at(self, temperature: float) -> LogitTransform:
        """The result divided by the temperature, which is scale and cap divided by it: no extra work."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return LogitTransform(self.scale / temperature, softcap)


class Vocabulary(Protocol):
    """A head whose rows are split over ranks: the first row of this rank, and reductions over all ranks."""

    first: int

    def enter(self, hidden: Tensor) -> Tensor: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadOptions:
    """`vocabulary`: None if the head is not split. `kept_bytes`: logits kept for the backward pass, at most.
    `backward_again`: gradients of inputs and of weights are asked for apart, in a backward pass each."""

    transform: LogitTransform = LogitTransform()
    chunk_tokens: int = 1024
    vocabulary: Vocabulary | None = None
    kept_bytes: int = 0
    backward_again: bool = False


class TokenFacts(NamedTuple):
    """Of each target: its log-prob, the entropy of its distribution, and the log of the sum of that distribution's
    squared probabilities (without gradient)."""

    logprobs: Tensor
    entropies: Tensor
    log_sum_sq_probs: Tensor


def pick_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """[T, H] hidden states -> [N, H], those of the tokens that predict something; some predict several times, where
    answers share a prompt. On CUDA the way back adds up in a fixed order, and in float32."""
    if _has_kernel(hidden) and type(hidden) is Tensor:
        return _PickedRows.apply(hidden, rows)
    return hidden.index_select(0, rows)


class _PickedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_tokens = len(hidden)
        return hidden.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from lockstep.model.head_kernel import add_rows

        return add_rows(grads[0], ctx.saved_tensors[0], ctx.num_tokens), None


def target_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> Tensor:
    """[N, H] hidden, [V, H] weight, [N] targets -> [N] float log-probs, differentiable."""
    return _logprobs_with_facts(hidden, weight, bias, targets, options, facts=False)[0]


def token_facts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> TokenFacts:
    """As `target_logprobs`, with entropies (differentiable) and log_sum_sq_probs from the same logits."""
    return TokenFacts(*_logprobs_with_facts(hidden, weight, bias, targets, options, facts=True))


def _logprobs_with_facts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions, *, facts: bool
) -> tuple[Tensor, ...]:
    if options.vocabulary is not None:
        hidden = options.vocabulary.enter(hidden)
    if torch.is_grad_enabled():
        return _TargetLogprobs.apply(hidden, weight, bias, targets, options, facts)
    chunks = [
        _measure(torch.nn.functional.linear(hidden[rows], weight, bias), targets[rows], options, facts=facts)[0]
        for rows in split_chunks(len(targets), options.chunk_tokens)
    ]
    return _concatenate(chunks, hidden, facts)


def weighted_logprob_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grad_logprobs: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """(sum of grad_logprobs * log-probs, differentiable; the log-probs, detached).

    Gradients are computed in the forward pass, chunk by chunk, so logits are computed once.
    """
    if options.vocabulary is not None:
        hidden = options.vocabulary.enter(hidden)
    return _WeightedLogprobSum.apply(hidden, weight, bias, targets, grad_logprobs, options)


class _TargetLogprobs(torch.autograd.Function):
    """Log-probs; with `facts` also entropies and log_sum_sq_probs."""

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
        # With `facts` there are two gradients per token, which one unit gradient cannot hold.
        frozen = not any(ctx.needs_input_grad[1:3]) and not facts
        keeps = not frozen and len(targets) * len(weight) * hidden.element_size() <= options.kept_bytes
        unit = torch.empty_like(hidden) if frozen else None
        ones = torch.ones(len(targets), dtype=_accumulation_dtype(hidden.dtype), device=hidden.device)
        ctx.logits, ctx.normalisers, chunks = [], [], []
        for rows in split_chunks(len(targets), options.chunk_tokens):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            if unit is None:
                measured, normalisers = _measure(logits, targets[rows], options, facts=facts)
                chunks.append(measured)
                ctx.normalisers.append(normalisers)
            else:
                logprobs, d_logits = _logprobs_and_gradient(logits, targets[rows], ones[rows], options)
                torch.mm(d_logits, weight, out=unit[rows])
                chunks.append((logprobs,))
            if keeps:
                ctx.logits.append(logits)
        results = _concatenate(chunks, hidden, facts)
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
        kept, ctx.logits = ctx.logits, []  # used up below: a second pass computes them again
        for i, rows in enumerate(split_chunks(len(targets), ctx.options.chunk_tokens)):
            logits = kept[i] if kept else torch.nn.functional.linear(hidden[rows], weight, bias)
            entropy = (grads[1][rows], entropies[rows]) if ctx.facts else None
            _, d_logits = _logprobs_and_gradient(
                logits, targets[rows], grad[rows], ctx.options, entropy, ctx.normalisers[i]
            )
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
        for rows in split_chunks(len(targets), options.chunk_tokens):
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            logprobs[rows], d_logits = _logprobs_and_gradient(logits, targets[rows], grad_logprobs[rows], options)
            gradients.add(rows, d_logits)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(logprobs)
        ctx.again = options.backward_again
        return (grad_logprobs.to(logprobs.dtype) * logprobs).sum(), logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        assert grad is not None
        # In place, for one backward pass: a copy of the weight's gradient would be the largest tensor here.
        scale = Tensor.mul if ctx.again else Tensor.mul_
        scaled = (None if g is None else scale(g, grad.to(g.dtype)) for g in ctx.saved_tensors)
        return (*scaled, None, None, None)


class _Gradients:
    """Gradients of hidden, weight and bias, as far as needed, accumulated chunk by chunk."""

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


def _concatenate(chunks: list[tuple[Tensor, ...]], hidden: Tensor, facts: bool) -> tuple[Tensor, ...]:
    """Without targets there is no chunk."""
    empty = hidden.new_empty(0, dtype=_accumulation_dtype(hidden.dtype))
    parts = list(zip(*chunks, strict=True)) or [(empty,)] * (3 if facts else 1)
    return tuple(torch.cat(part) for part in parts)


def _measure(
    logits: Tensor, targets: Tensor, options: HeadOptions, *, facts: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """((log-probs,) of one chunk, or with `facts` (log-probs, entropies, log_sum_sq_probs); of a split head, the
    normalisers that all ranks found together, which backward need not ask for again)."""
    transform, normalisers = options.transform, None
    if options.vocabulary is None and _has_kernel(logits):
        from lockstep.model.head_kernel import measure

        return measure(logits, targets, transform.scale, transform.softcap, facts=facts), None
    wide = transform.apply(logits.to(_accumulation_dtype(logits.dtype)))
    if options.vocabulary is not None:
        normalisers = _normalisers(wide, options.vocabulary)
        log_probabilities = wide - normalisers[:, None]
        chosen = options.vocabulary.sum(_own_logprobs(log_probabilities, targets, options.vocabulary))
    elif not facts:
        return (wide.gather(1, targets[:, None])[:, 0] - torch.logsumexp(wide, dim=1),), None
    else:
        log_probabilities = torch.log_softmax(wide, dim=1)
        chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
    if not facts:
        return (chosen,), normalisers
    probabilities = log_probabilities.exp()
    entropies, squares = -(probabilities * log_probabilities).sum(dim=1), probabilities.square_().sum(dim=1)
    if options.vocabulary is not None:
        entropies, squares = options.vocabulary.sum(entropies), options.vocabulary.sum(squares)
    return (chosen, entropies, squares.log()), normalisers


def _logprobs_and_gradient(
    logits: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    options: HeadOptions,
    entropy: tuple[Tensor, Tensor] | None = None,
    normalisers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of one chunk, and d(sum grad_logprobs * log-prob) / d logits in the logits' dtype. The logits may be
    overwritten. `entropy`, (grad_entropies, entropies), adds the gradient of the entropies. `normalisers`: of a split
    head, from the forward pass: ranks then exchange nothing, and log-probs are of this rank's tokens alone."""
    transform, vocabulary = options.transform, options.vocabulary
    if vocabulary is None and _has_kernel(logits):
        from lockstep.model.head_kernel import logprobs_and_gradient

        return logprobs_and_gradient(logits, targets, grad_logprobs, transform.scale, transform.softcap, entropy)
    wide = transform.apply(logits.to(_accumulation_dtype(logits.dtype)))
    derivative = transform.derivative(wide)
    if vocabulary is not None:
        log_probabilities = wide - (_normalisers(wide, vocabulary) if normalisers is None else normalisers)[:, None]
        chosen = _own_logprobs(log_probabilities, targets, vocabulary)
        if normalisers is None:
            chosen = vocabulary.sum(chosen)
        here, mine = _on_this_rank(targets, logits.shape[1], vocabulary)
        bump = grad_logprobs * mine.to(grad_logprobs.dtype)
    else:
        log_probabilities = torch.log_softmax(wide, dim=1)
        chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
        here, bump = targets, grad_logprobs
    factor: Tensor = -grad_logprobs[:, None]
    if entropy is not None:
        grad_entropies, entropies = entropy
        factor = factor - grad_entropies[:, None] * (log_probabilities + entropies[:, None])
    gradient = log_probabilities.exp_().mul_(factor)
    if gradient.shape[1]:
        gradient.scatter_add_(1, here[:, None], bump[:, None].to(gradient.dtype))
    if isinstance(derivative, Tensor) or derivative != 1.0:
        gradient.mul_(derivative)
    return chosen, gradient.to(logits.dtype)


def _normalisers(wide: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The log of the sum of exponentials over all ranks' parts of the logits. All ranks."""
    lowest = wide.new_full((len(wide),), -torch.inf)
    top = vocabulary.max(wide.amax(dim=1) if wide.shape[1] else lowest)
    return top + torch.log(vocabulary.sum(torch.exp(wide - top[:, None]).sum(dim=1)))


def _own_logprobs(log_probabilities: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Of the targets that this rank has; zero for the others."""
    here, mine = _on_this_rank(targets, log_probabilities.shape[1], vocabulary)
    if not log_probabilities.shape[1]:
        return log_probabilities.new_zeros(len(targets))
    return log_probabilities.gather(1, here[:, None])[:, 0] * mine


def _on_this_rank(targets: Tensor, size: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(row of each target on this rank, clamped; whether it is on this rank)."""
    here = targets - vocabulary.first
    return here.clamp(0, max(size - 1, 0)), (here >= 0) & (here < size)


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and _TRITON


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_chunks(total: int, size: int) -> list[slice]:
    """Equal parts, none larger than `size`: a small last one would waste a pass over the weight."""
    parts = max(1, -(-total // size))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a]
