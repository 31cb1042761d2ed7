"""The plain loop that every layout must equal: one document at a time, full logits, float64.

Shares no code with the backend; of the order of rows, only shuffling and filling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import ModelConfig, RunConfig
from lockstep.data import epoch_order, fill_batches
from lockstep.types import Completion, Datum
from lockstep.verification.plain_optimizers import PlainOptimizer
from lockstep.verification.sample import NUM_BATCHES, SampleBatch, make_sample_batch, total_weight


@dataclass(frozen=True)
class StepValues:
    """Everything that is compared of one step. Log-probs are of the target tokens, row by row.

    `reference_logprobs` and `metrics` exist for preferences and sampled answers; metrics are sums. `where` names the
    step where a batch has several.
    """

    names: tuple[str, ...]
    cursor: int
    loss: float
    norm: float
    logprobs: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    reference_logprobs: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class PassValues:
    """What a forward-backward pass over one batch computes besides the gradients, which are in the model."""

    loss: float
    logprobs: list[float]
    reference_logprobs: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


ForwardBackward = Callable[[Sequence[Datum]], PassValues]


def plain_batches(rows: Any, config: RunConfig) -> list[SampleBatch]:
    """The first batches, cut without the code that training uses for it."""
    batches: list[SampleBatch] = []
    cursor = 0
    for epoch in range(NUM_BATCHES):
        for batch in _cut_epoch(rows, config, epoch):
            cursor += len(batch)
            batches.append(make_sample_batch(batch, cursor))
            if len(batches) == NUM_BATCHES:
                return batches
    return batches


def _cut_epoch(rows: Any, config: RunConfig, epoch: int) -> Iterator[list[Datum]]:
    order = epoch_order(len(rows), seed=config.seed, epoch=epoch, shuffle=config.data.shuffle)
    if config.batch.tokens is not None and config.data.shuffle:
        order = fill_batches(order, rows.lengths, config.batch.tokens)
    batch: list[Datum] = []
    for row in order:
        if batch and _is_full(batch, rows[row], config):
            yield batch
            batch = []
        batch.append(rows[row])
    yield batch


def _is_full(batch: Sequence[Datum], following: Datum, config: RunConfig) -> bool:
    samples = config.batch.samples_per_step
    if samples is not None:
        return len(batch) == samples
    assert config.batch.tokens is not None
    return sum(d.num_tokens for d in batch) + following.num_tokens > config.batch.tokens


def token_distributions(model: nn.Module, datum: Datum, completion: Completion, temperature: float = 1.0) -> Tensor:
    """Log-probs of the whole vocabulary at each token of the completion: (tokens, vocabulary)."""
    tokens = torch.tensor([[*datum.prompt, *completion.tokens]])
    _forget_lengths(model)
    logits = model(input_ids=tokens, use_cache=False).logits[0]
    return torch.log_softmax(logits / temperature, dim=-1)[len(datum.prompt) - 1 : -1]


def _forget_lengths(model: nn.Module) -> None:
    """Dynamic NTK keeps the frequencies of the longest text so far: each text is to be computed as the first."""
    for module in model.modules():
        for name, frequencies in list(module.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                setattr(module, name.removesuffix("original_inv_freq") + "inv_freq", frequencies)
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)


def target_logprobs(distributions: Tensor, completion: Completion) -> Tensor:
    """The log-prob of each token of the completion."""
    return distributions.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def run_plain_loop(
    model: nn.Module,
    batches: Sequence[SampleBatch],
    optimizer: PlainOptimizer,
    forward_backward: ForwardBackward | None = None,
    config: ModelConfig | None = None,
) -> list[StepValues]:
    """A step on each batch. `forward_backward` adds up gradients in the model; default: cross-entropy. To these
    come those of the router losses in `config`."""
    steps: list[StepValues] = []
    for batch in batches:
        values = plain_cross_entropy(model, batch.data) if forward_backward is None else forward_backward(batch.data)
        if config is not None and (config.router_aux_loss != "off" or config.router_z_loss):
            plain_router_losses(model, batch.data, config).backward()
        gradients, norm = optimizer.snapshot("gradients"), optimizer.apply()
        weights = optimizer.snapshot("weights")
        steps.append(
            StepValues(batch.names, batch.cursor, norm=norm, gradients=gradients, weights=weights, **vars(values))
        )
    return steps


def plain_cross_entropy(model: nn.Module, batch: Sequence[Datum]) -> PassValues:
    """The weighted mean over all target tokens."""
    scale = 1.0 / total_weight(batch)
    total, target_values = 0.0, []
    for datum in batch:
        for completion in datum.completions:
            weights = torch.tensor(completion.weights, dtype=torch.float64)
            logprobs = target_logprobs(token_distributions(model, datum, completion), completion)
            loss = -(weights * scale * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
            target_values += logprobs.detach()[weights != 0].tolist()
    return PassValues(total, target_values)


def plain_router_losses(model: nn.Module, batch: Sequence[Datum], config: ModelConfig) -> Tensor:
    """Switch Transformers' load-balancing loss and the z-loss, over all layers and all tokens of all texts as one."""
    logits: list[Tensor] = []
    for datum in batch:
        for completion in datum.completions:
            _forget_lengths(model)
            tokens = torch.tensor([[*datum.prompt, *completion.tokens]])
            logits += model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
    rows = torch.cat([part.flatten(0, -2) for part in logits])  # (layers x tokens, experts)
    text_config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    aux = text_config.router_aux_loss_coef if config.router_aux_loss == "auto" else config.router_aux_loss
    total = config.router_z_loss * torch.logsumexp(rows, dim=-1).square().mean()
    if aux != "off":
        probabilities = torch.softmax(rows, dim=-1)
        chosen = probabilities.topk(text_config.num_experts_per_tok, dim=-1).indices
        per_token = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mean(dim=0)
        total = total + aux * rows.shape[1] * (per_token * probabilities.mean(dim=0)).sum()
    return total
