"""A global batch becomes this rank's micro-batches of packed tensors.

Every rank sees the whole batch and takes its own share, so no rank has to be told. Must not know models
beyond the tensors they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.losses import LossInputs
from lockstep.data.packing import BY_TOKENS, Cost, measure_balance, partition
from lockstep.model.policy import PackedTokens
from lockstep.types import Completion, Datum, LossSpec


@dataclass(frozen=True)
class Document:
    """One completion with its prompt in front: what one causal pass computes."""

    datum: int
    completion: int
    tokens: np.ndarray  # int64
    asked: np.ndarray  # places in `tokens` whose next token has a weight
    weights: np.ndarray  # float64, one per asked place
    offset: int  # of this document's asked tokens in the global batch


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one pass. For each asked token: where it stands among those of the global batch, and in which row."""

    packed: PackedTokens
    inputs: LossInputs
    places: Tensor
    rows: np.ndarray


@dataclass(frozen=True)
class Share:
    """This rank's micro-batches, and the totals of the global batch."""

    micro_batches: tuple[tuple[Document, ...], ...]
    num_tokens: int
    num_asked: int
    longest_share_tokens: int
    cost_balance: float = 1.0
    """How much longer the ranks take together than were their work level."""


def documents_of(batch: Sequence[Datum]) -> list[Document]:
    documents, offset = [], 0
    for d, datum in enumerate(batch):
        prompt = np.asarray(datum.prompt, dtype=np.int64)
        for c, completion in enumerate(datum.completions):
            document = _document(d, c, prompt, completion, offset)
            documents.append(document)
            offset += len(document.asked)
    return documents


def _document(datum: int, index: int, prompt: np.ndarray, completion: Completion, offset: int) -> Document:
    answer = np.asarray(completion.tokens, dtype=np.int64)
    weights = np.asarray(completion.weights, dtype=np.float64)
    supervised = np.flatnonzero(weights)
    tokens = np.concatenate([prompt, answer])
    return Document(datum, index, tokens, supervised + (len(prompt) - 1), weights[supervised], offset)


def share_of(
    documents: Sequence[Document],
    *,
    rank: int,
    num_ranks: int,
    budget_tokens: int,
    max_documents: int | None = None,
    cost: Cost = BY_TOKENS,
) -> Share:
    """Micro-batches of one rank. An empty one stays in place: ranks that shard must step together."""
    lengths = [len(d.tokens) for d in documents]
    steps = partition(lengths, num_ranks=num_ranks, budget_tokens=budget_tokens, max_documents=max_documents, cost=cost)
    mine = tuple(tuple(documents[i] for i in step[rank]) for step in steps)
    loads = [sum(lengths[i] for step in steps for i in step[r]) for r in range(num_ranks)]
    balance = measure_balance(steps, lengths, cost).cost
    return Share(mine, sum(lengths), sum(len(d.asked) for d in documents), max(loads, default=0), balance)


def to_micro_batch(
    documents: tuple[Document, ...],
    batch: Sequence[Datum],
    loss: LossSpec,
    device: torch.device,
    dtype: torch.dtype,
    multiple_of: int = 1,
    part: tuple[int, int] = (0, 1),
) -> MicroBatch:
    """Lay documents end to end, fill up to a multiple with tokens of which nothing is asked, take (place, of how many).

    The filling is a document of its own, or the tail of a single one, which cannot see what follows it.
    No documents: two tokens whose weight is zero, so that every rank runs the same passes.
    """
    if not documents:
        empty = np.zeros(2, dtype=np.int64)
        documents = (Document(-1, 0, empty, np.zeros(1, dtype=np.int64), np.zeros(1), 0),)
    filling = -sum(len(d.tokens) for d in documents) % multiple_of
    lengths = tuple(len(d.tokens) for d in documents)
    if filling:
        lengths = (lengths[0] + filling,) if len(lengths) == 1 else (*lengths, filling)
    starts = np.cumsum([0, *lengths])
    tokens = np.concatenate([*(d.tokens for d in documents), np.zeros(filling, dtype=np.int64)])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    positions[len(positions) - filling :] = 0  # never past the places that a model knows
    asked = np.concatenate([d.asked + start for d, start in zip(documents, starts, strict=False)])
    targets = np.concatenate([d.tokens[d.asked + 1] for d in documents])
    weights = np.concatenate([d.weights for d in documents]) * loss.scale
    places = np.concatenate([d.offset + np.arange(len(d.asked)) for d in documents])
    rows = np.concatenate([np.full(len(d.asked), d.datum) for d in documents])
    here, mine = _part_of(len(tokens), asked, part)

    def put(array: np.ndarray, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(kind).to(device, non_blocking=True)

    packed = PackedTokens(
        put(tokens[here]), put(positions[here]), lengths, put(asked[mine] - here.start), put(targets[mine])
    )
    values = {name: put(_side_values(documents, batch, name)[mine], dtype) for name in _value_names(batch)}
    inputs = LossInputs(put(weights[mine], dtype), values, loss.options)
    return MicroBatch(packed, inputs, put(places[mine]), rows[mine])


def _part_of(num_tokens: int, asked: np.ndarray, part: tuple[int, int]) -> tuple[slice, np.ndarray]:
    """(the tokens of one of several equal parts, which of the asked ones lie in it)."""
    place, parts = part
    assert num_tokens % parts == 0, "filled up to a multiple of the parts"
    size = num_tokens // parts
    here = slice(place * size, (place + 1) * size)
    return here, (asked >= here.start) & (asked < here.stop)


def _value_names(batch: Sequence[Datum]) -> list[str]:
    return sorted({name for datum in batch for completion in datum.completions for name in completion.values})


def _side_values(documents: Sequence[Document], batch: Sequence[Datum], name: str) -> np.ndarray:
    parts = []
    for document in documents:
        if document.datum < 0:
            parts.append(np.zeros(1))
            continue
        datum = batch[document.datum]
        completion = datum.completions[document.completion]
        if name not in completion.values:
            raise ValueError(f"{datum.origin or 'a datum'} has no {name!r}, which other rows of the batch have")
        values = np.asarray(completion.values[name], dtype=np.float64)
        parts.append(values[document.asked - (len(datum.prompt) - 1)])
    return np.concatenate(parts)
