"""The loss of reference answers under a model, encoded and packed as in training; of pairs, which one is likelier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lockstep.backend.batching import documents_for, plan_micro_batches, to_micro_batch
from lockstep.backend.probe import check_policy
from lockstep.config import DataConfig
from lockstep.data.chat_template import Template
from lockstep.data.encoder import Encoder
from lockstep.data.formats.conversation import Content
from lockstep.data.rendering import render
from lockstep.data.sources.rows import DataError
from lockstep.model.load import DTYPES
from lockstep.model.policy import CausalLM, Policy
from lockstep.types import Completion, Datum, LossSpec, Tokenizer

# Rows laid out at once: enough to fill micro-batches evenly, few enough to hold.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RowLoss:
    """Of one answer. `total` is the weighted sum of -log p over its tokens that count."""

    total: float
    weight: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """One datum per row, None where `data.truncate` drops it; and what was cut to fit."""

    data: list[Datum | None]
    prompts_cut: int
    answers_cut: int
    dropped: int


def encode_rows(
    contents: Sequence[Content], tokenizer: Tokenizer, template: Template | None, data: DataConfig, max_length: int
) -> EncodedRows:
    """Tokens and weights as training makes them. A row that cannot be used raises with its origin."""
    encoder = Encoder(tokenizer, max_length=max_length, truncate=data.truncate)
    encoded = encoder.encode([render(content, template) for content in contents])
    for row in encoded:
        if isinstance(row, DataError):
            raise row
    rows = [row for row in encoded if not isinstance(row, DataError)]
    return EncodedRows(
        [row.datum for row in rows],
        prompts_cut=sum(row.prompt_cut for row in rows if row.datum is not None),
        answers_cut=sum(row.answer_cut for row in rows if row.datum is not None),
        dropped=sum(row.datum is None for row in rows),
    )


def measure_losses(
    model: CausalLM, data: Sequence[Datum], *, budget_tokens: int = 4096
) -> Iterator[tuple[RowLoss, ...]]:
    """One per datum, in order, and in it one per answer. The model's own attention is back when the iteration ends."""
    device, dtype = model.device, next(model.parameters()).dtype
    precision = next(name for name, known in DTYPES.items() if known == dtype)
    model.eval()
    policy = Policy(model, chunk_tokens=4096 if device.type == "cuda" else 512)
    try:
        policy.use_variable_length(device, dtype)
        with torch.no_grad():
            check_policy(policy, contextlib.nullcontext(), device, precision)
        for start in range(0, len(data), _ROWS_AT_ONCE):
            yield from _measure_batch(policy, data[start : start + _ROWS_AT_ONCE], device, budget_tokens)
    finally:
        policy.stop_packing()


@torch.no_grad()
def _measure_batch(
    policy: Policy, batch: Sequence[Datum], device: torch.device, budget_tokens: int
) -> list[tuple[RowLoss, ...]]:
    documents = documents_for(policy, batch, budget_tokens)
    plan = plan_micro_batches(
        documents, rank=0, num_ranks=1, budget_tokens=budget_tokens, max_documents=None if policy.packs else 1
    )
    totals = [[0.0] * len(datum.completions) for datum in batch]
    for part in plan.micro_batches:
        if not part:
            continue
        micro_batch = to_micro_batch(part, batch, LossSpec(), device, torch.float32)
        logprobs = policy(micro_batch.packed).double().cpu().numpy()
        branches = [(document, branch) for document in part for branch in document.branches]
        ends = np.cumsum([len(branch.supervised) for _, branch in branches])
        for (document, branch), values in zip(branches, np.split(logprobs, ends[:-1]), strict=True):
            totals[document.datum][branch.completion] = -float(values @ branch.weights)
    return [
        tuple(_row_loss(completion, total) for completion, total in zip(datum.completions, own, strict=True))
        for datum, own in zip(batch, totals, strict=True)
    ]


def _row_loss(completion: Completion, total: float) -> RowLoss:
    return RowLoss(total, float(np.sum(completion.weights)), int(np.count_nonzero(completion.weights)))


class PairLogprobs(NamedTuple):
    chosen: float
    rejected: float


def pair_logprobs(answers: Sequence[RowLoss]) -> PairLogprobs:
    """From the losses of both answers."""
    chosen, rejected = answers
    return PairLogprobs(-chosen.total, -rejected.total)


def reward_margins(
    policy: Sequence[PairLogprobs | None], reference: Sequence[PairLogprobs | None], beta: float
) -> list[float | None]:
    """How much more the preferred answer gained on the reference than the other; None where a row was not measured."""
    return [
        None if own is None or other is None else beta * ((own.chosen - other.chosen) - (own.rejected - other.rejected))
        for own, other in zip(policy, reference, strict=True)
    ]
