"""What every backend does alike: from log-probs to a loss and its gradient, and back to the rows they belong to.

A loss of separate data is computed in each micro-batch. Any other is computed once, from the log-probs of the whole
batch, and its slopes are what a second pass carries back: exact too, for one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.algorithms.losses import LOSSES, Loss
from lockstep.backend.batching import Document, MicroBatch, MicroBatchPlan, whole_inputs
from lockstep.model.head import TokenFacts
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, Logprobs, LossSpec, OptimStep, Pending

SLOPES = LossSpec("cross_entropy")
"""The second pass: a weighted sum of log-probs."""


@dataclass(frozen=True)
class RankBatch:
    """A global batch, as this rank computes it."""

    batch: Sequence[Datum]
    documents: Sequence[Document]
    share: MicroBatchPlan
    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probs of one micro-batch, without gradient; `collision` where the loss needs facts."""

    logprobs: Tensor
    collision: Tensor | None = None


def keep(found: Tensor | TokenFacts) -> TokenLogprobs:
    return TokenLogprobs(found) if isinstance(found, Tensor) else TokenLogprobs(found.logprobs, found.log_sum_sq_probs)


def find_loss(loss: LossSpec) -> Loss:
    if loss.kind not in LOSSES:
        raise ValueError(f"unknown loss {loss.kind!r}: known are {', '.join(LOSSES)}")
    return LOSSES[loss.kind]


def metric_names(loss: LossSpec) -> list[str]:
    return sorted(["loss", *find_loss(loss).metrics(loss.options)])


def needs_facts(loss: LossSpec) -> bool:
    """Whether the loss reads more of the head than log-probs."""
    rule = find_loss(loss)
    return rule.needs_collision(loss.options) or rule.needs_entropy(loss.options)


def is_direct(loss: LossSpec, work: RankBatch, num_parts: int) -> bool:
    """Whether every loss can be computed where its log-probs are: all completions of a datum in one place, or all
    tokens of each completion where the loss asks for no more.

    `num_parts`: over how many ranks the tokens of a micro-batch are split.
    """
    rule = find_loss(loss)
    if rule.linear:
        return True
    together = work.share.is_whole or not rule.couples_completions(loss.options)
    return rule.is_separable(loss.options) and together and num_parts == 1


def compute_losses(
    micro_batch: MicroBatch, loss: LossSpec, logprobs_of: Callable[..., Any], scale: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(`scale` times the loss, for backward; {"loss": ..., metrics}; log-probs).

    `logprobs_of` is a function of slopes: with them it also gives their weighted sum.
    """
    rule, inputs = find_loss(loss), micro_batch.inputs
    if rule.linear:
        # Scaled before the pass: the head computes its gradient on the way forward.
        total, logprobs = logprobs_of(-inputs.weights * (inputs.scale * scale))
        return total, {"loss": total.detach() / scale}, logprobs.detach()
    if needs_facts(loss):
        logprobs, entropies, log_sum_sq_probs = logprobs_of(None, facts=True)
        inputs = replace(
            inputs, values={**inputs.values, "entropies": entropies, "collision_logprobs": log_sum_sq_probs.detach()}
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


def gather(work: RankBatch, values: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """[asked tokens of the global batch] in float64, from each micro-batch's. All ranks."""
    found = torch.zeros(work.share.num_asked, dtype=torch.float64, device=group.device)
    # Every rank fills its own places and the rest is zero: the sum puts the batch together exactly.
    for micro_batch, part in zip(work.micro_batches, values) if group.counts else ():
        real = torch.from_numpy(micro_batch.rows >= 0).to(group.device)
        found[micro_batch.places[real]] = part.double()[real]
    return group.sum(found)


def find_slopes(
    work: RankBatch,
    loss: LossSpec,
    found: Sequence[TokenLogprobs],
    reference: Sequence[Tensor] | None,
    group: ProcessGroup,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(d loss / d log-prob of every asked token, {"loss": ..., metrics}), from the whole batch. All ranks."""
    if find_loss(loss).needs_entropy(loss.options):
        raise ValueError(f"{loss.kind} with entropy needs every row's answers in one place: raise micro_batch_tokens")
    logprobs = gather(work, [f.logprobs for f in found], group)
    inputs = whole_inputs(work.documents, work.batch, loss, logprobs.device)
    values = dict(inputs.values)
    if reference is not None:
        values["reference_logprobs"] = gather(work, reference, group)
    if found[0].collision is not None:
        values["collision_logprobs"] = gather(work, [f.collision for f in found if f.collision is not None], group)
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        total, metrics = find_loss(loss).fn(leaf, replace(inputs, values=values))
        (grad_logprobs,) = torch.autograd.grad(total, leaf)
    return grad_logprobs, {**metrics, "loss": total.detach()}


def with_slopes(micro_batch: MicroBatch, grad_logprobs: Tensor) -> MicroBatch:
    """Weights with which a linear pass carries these slopes back."""
    real = torch.from_numpy(micro_batch.rows >= 0).to(grad_logprobs.device)
    weights = torch.where(real, -grad_logprobs[micro_batch.places], 0.0)
    inputs = replace(micro_batch.inputs, weights=weights.to(micro_batch.inputs.weights.dtype), scale=1.0)
    return replace(micro_batch, inputs=inputs)


def spread(values: Sequence[float], documents: Sequence[Document], batch: Sequence[Datum]) -> list[Logprobs]:
    """Log-probs of asked tokens back to the places of their completions."""
    rows: list[list[list[float]]] = [[[0.0] * len(c.tokens) for c in datum.completions] for datum in batch]
    for document in documents:
        for branch in document.branches:
            row = rows[document.datum][branch.completion]
            for place, value in zip(branch.supervised.tolist(), values[branch.offset :]):
                row[place] = value
    return [tuple(row) for row in rows]


def name_rows(flags: Sequence[float], batch: Sequence[Datum]) -> tuple[str, ...]:
    return tuple(datum.origin or f"row {i} of the batch" for i, datum in enumerate(batch) if flags[i])


def flag_rows(work: RankBatch, logprobs: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 for each row of the batch some of whose log-probs on this rank are not finite."""
    guilty = torch.zeros(len(work.batch), dtype=torch.float64, device=device)
    for micro_batch, found in zip(work.micro_batches, logprobs):
        broken = ~torch.isfinite(found).cpu().numpy() & (micro_batch.rows >= 0)
        guilty[torch.from_numpy(micro_batch.rows[broken])] = 1
    return guilty


def build_optimizer(parameters: Mapping[str, nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    """Norms and biases (one-dimensional parameters) do not decay."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for p in parameters.values():
        # One kernel cannot take parameters of several layouts at once.
        layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        groups.setdefault((p.ndim >= 2, layout), []).append(p)
    listed = [{"params": members, "decays": decays} for (decays, _), members in groups.items()]
    return torch.optim.AdamW(listed, lr=0.0, fused=device.type == "cuda")


def set_step(optimizer: torch.optim.Optimizer, step: OptimStep) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["eps"] = step.learning_rate, step.eps
        group["betas"] = (step.beta1, step.beta2)
        group["weight_decay"] = step.weight_decay if group["decays"] else 0.0


def read_later(values: Tensor) -> Pending[list[float]]:
    """Numbers on their way to the host: the device is not waited for until somebody reads them."""
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
