"""What both torch backends share: from log-probs to a loss and its gradient, and back to the rows they belong to.

A loss that is a sum over data is computed in each micro-batch. Any other is computed once, from the log-probs of the
whole batch; a second pass carries its gradient with respect to them back. Also exact, for one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.losses import LOSSES, Loss
from lockstep.backend.batching import Document, MicroBatch, RankBatch, whole_inputs
from lockstep.model.head import TokenFacts
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, Logprobs, LossSpec, Pending

WEIGHTED_SUM = LossSpec("cross_entropy")
"""The loss of the second pass: a weighted sum of log-probs."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one micro-batch, without gradient; `log_sum_sq_probs` where the loss needs facts."""

    logprobs: Tensor
    log_sum_sq_probs: Tensor | None = None


def as_token_logprobs(output: Tensor | TokenFacts) -> TokenLogprobs:
    if isinstance(output, Tensor):
        return TokenLogprobs(output)
    return TokenLogprobs(output.logprobs, output.log_sum_sq_probs)


def find_loss(loss: LossSpec) -> Loss:
    if loss.kind not in LOSSES:
        raise ValueError(f"unknown loss {loss.kind!r}: known are {', '.join(LOSSES)}")
    return LOSSES[loss.kind]


def metric_names(loss: LossSpec) -> list[str]:
    return sorted(["loss", *find_loss(loss).metrics(loss.options)])


def needs_facts(loss: LossSpec) -> bool:
    """Whether the loss reads more of the head's output than log-probs."""
    rule = find_loss(loss)
    return rule.needs_log_sum_sq_probs(loss.options) or rule.needs_entropy(loss.options)


def is_direct(loss: LossSpec, rank_batch: RankBatch, num_parts: int) -> bool:
    """Whether one pass is enough: each micro-batch has all that its data's losses depend on.

    `num_parts`: over how many ranks the tokens of a micro-batch are split.
    """
    rule = find_loss(loss)
    if rule.linear:
        return True
    together = rank_batch.plan.is_whole or not rule.couples_completions(loss.options)
    return rule.is_separable(loss.options) and together and num_parts == 1


def compute_losses(
    micro_batch: MicroBatch, loss: LossSpec, logprobs_of: Callable[..., Any], scale: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(`scale` times the loss, for backward; {"loss": ..., metrics}; log-probs).

    `logprobs_of` takes grad_logprobs or None; given them, it also returns their weighted sum of the log-probs.
    """
    rule, inputs = find_loss(loss), micro_batch.inputs
    if rule.linear:
        # Scaled before the pass: the head computes its gradient on the way forward.
        total, logprobs = logprobs_of(-inputs.weights * (inputs.scale * scale))
        return total, {"loss": total.detach() / scale}, logprobs.detach()
    if needs_facts(loss):
        logprobs, entropies, log_sum_sq_probs = logprobs_of(None, facts=True)
        inputs = replace(
            inputs, values={**inputs.values, "entropies": entropies, "log_sum_sq_probs": log_sum_sq_probs.detach()}
        )
    else:
        logprobs = logprobs_of(None)
    total, metrics = rule.fn(logprobs, inputs)
    return total * scale, {**metrics, "loss": total.detach()}, logprobs.detach()


def stack(metrics: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([metrics[name].detach().double() for name in names])


def with_reference(micro_batch: MicroBatch, logprobs: Tensor) -> MicroBatch:
    inputs = micro_batch.inputs
    values = {**inputs.values, "reference_logprobs": logprobs.to(inputs.weights.dtype)}
    return replace(micro_batch, inputs=replace(inputs, values=values))


def gather_targets(rank_batch: RankBatch, values: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """[targets of the global batch] in float64, from each micro-batch's. All ranks."""
    gathered = torch.zeros(rank_batch.plan.num_targets, dtype=torch.float64, device=group.device)
    # Every rank fills in its own targets and the rest is zero: the sum is exact.
    for micro_batch, part in zip(rank_batch.micro_batches, values) if group.counts else ():
        real = torch.from_numpy(micro_batch.rows >= 0).to(group.device)
        gathered[micro_batch.indices[real]] = part.double()[real]
    return group.sum(gathered)


def compute_grad_logprobs(
    rank_batch: RankBatch,
    loss: LossSpec,
    outputs: Sequence[TokenLogprobs],
    reference: Sequence[Tensor] | None,
    group: ProcessGroup,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(d loss / d log-prob of every target, {"loss": ..., metrics}), from the whole batch. All ranks."""
    if find_loss(loss).needs_entropy(loss.options):
        raise ValueError(f"{loss.kind} with entropy needs every row's answers in one place: raise micro_batch_tokens")
    logprobs = gather_targets(rank_batch, [o.logprobs for o in outputs], group)
    inputs = whole_inputs(rank_batch.documents, rank_batch.batch, loss, logprobs.device)
    values = dict(inputs.values)
    if reference is not None:
        values["reference_logprobs"] = gather_targets(rank_batch, reference, group)
    if outputs[0].log_sum_sq_probs is not None:
        parts = [o.log_sum_sq_probs for o in outputs if o.log_sum_sq_probs is not None]
        values["log_sum_sq_probs"] = gather_targets(rank_batch, parts, group)
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        total, metrics = find_loss(loss).fn(leaf, replace(inputs, values=values))
        (grad_logprobs,) = torch.autograd.grad(total, leaf)
    return grad_logprobs, {**metrics, "loss": total.detach()}


def with_grad_logprobs(micro_batch: MicroBatch, grad_logprobs: Tensor) -> MicroBatch:
    """With the weights by which a linear pass carries this gradient back."""
    real = torch.from_numpy(micro_batch.rows >= 0).to(grad_logprobs.device)
    weights = torch.where(real, -grad_logprobs[micro_batch.indices], 0.0)
    inputs = replace(micro_batch.inputs, weights=weights.to(micro_batch.inputs.weights.dtype), scale=1.0)
    return replace(micro_batch, inputs=inputs)


def plan_passes(
    rank_batch: RankBatch,
    loss: LossSpec,
    reference: Sequence[Tensor] | None,
    logprobs_of: Callable[[bool], Sequence[TokenLogprobs]],
    group: ProcessGroup,
    num_parts: int = 1,
) -> tuple[list[MicroBatch], LossSpec, dict[str, Tensor] | None]:
    """(micro-batches, the loss to compute in each, metrics where the whole batch gave them already). All ranks.

    `logprobs_of` makes a pass without gradient; True: with facts, see `needs_facts`.
    """
    micro_batches = rank_batch.micro_batches
    if is_direct(loss, rank_batch, num_parts):
        if reference is not None:
            micro_batches = [with_reference(m, part) for m, part in zip(micro_batches, reference, strict=True)]
        return micro_batches, loss, None
    outputs = logprobs_of(needs_facts(loss))
    grad_logprobs, metrics = compute_grad_logprobs(rank_batch, loss, outputs, reference, group)
    return [with_grad_logprobs(m, grad_logprobs) for m in micro_batches], WEIGHTED_SUM, metrics


def scatter_to_rows(values: Sequence[float], documents: Sequence[Document], batch: Sequence[Datum]) -> list[Logprobs]:
    """Log-probs of targets back to the tokens of their completions; 0 for the others."""
    rows: list[list[list[float]]] = [[[0.0] * len(c.tokens) for c in datum.completions] for datum in batch]
    for document in documents:
        for branch in document.branches:
            found = values[branch.offset : branch.offset + len(branch.targets)]
            if batch[document.datum].completions[branch.completion].targets is not None:
                rows[document.datum][branch.completion] = list(found)
                continue
            row = rows[document.datum][branch.completion]
            for index, value in zip(branch.supervised.tolist(), found):
                row[index] = value
    return [tuple(row) for row in rows]


def origins_of(flags: Sequence[float], batch: Sequence[Datum]) -> tuple[str, ...]:
    return tuple(datum.origin or f"row {i} of the batch" for i, datum in enumerate(batch) if flags[i])


def flag_nonfinite(rank_batch: RankBatch, logprobs: Sequence[Tensor], device: torch.device) -> Tensor:
    """[rows of the batch]: 1 where a log-prob on this rank is not finite."""
    flags = torch.zeros(len(rank_batch.batch), dtype=torch.float64, device=device)
    for micro_batch, part in zip(rank_batch.micro_batches, logprobs):
        nonfinite = ~torch.isfinite(part).cpu().numpy() & (micro_batch.rows >= 0)
        flags[torch.from_numpy(micro_batch.rows[nonfinite])] = 1
    return flags


def read_later(values: Tensor) -> Pending[list[float]]:
    """Numbers on their way to the host: reading them waits for the device, making them does not."""
    if values.device.type != "cuda":
        return Pending(values.tolist)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return Pending(read, deferred=True)
