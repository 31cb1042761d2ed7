"""From a global batch to this rank's micro-batches of packed tensors. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.losses import LossInputs
from lockstep.data.packing import BY_TOKENS, Cost, measure_balance, partition
from lockstep.model.policy import PackedTokens, Policy, to_device
from lockstep.model.replay import OWN_CHOICE, RoutingRows
from lockstep.types import Completion, Datum, LossSpec


@dataclass(frozen=True)
class Branch:
    """One completion."""

    completion: int
    tokens: np.ndarray  # int64
    supervised: np.ndarray  # indices of the tokens with a target; negative ones count back from the prompt's end
    targets: np.ndarray  # int64, what is predicted there
    weights: np.ndarray  # float64, one per target
    offset: int  # of its targets among those of the global batch


@dataclass(frozen=True)
class Document:
    """A prompt and the completions that are computed behind one copy of it, without attention to each other."""

    datum: int
    prompt: np.ndarray  # int64
    branches: tuple[Branch, ...]

    @cached_property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(b.tokens) for b in self.branches)

    @cached_property
    def num_targets(self) -> int:
        return sum(len(b.supervised) for b in self.branches)

    @property
    def segments(self) -> list[int]:
        """Lengths: the first branch continues the prompt, each other one is a segment of its own."""
        first, *others = (len(b.tokens) for b in self.branches)
        return [len(self.prompt) + first, *others]

    def count_texts(self) -> np.ndarray:
        """[tokens]: of how many texts each is."""
        return np.repeat([float(len(self.branches)), 1.0], [len(self.prompt), self.num_tokens - len(self.prompt)])

    def lay_out(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, each one's position in its own text, indices of the tokens that predict a target)."""
        tokens, positions, predictors = [self.prompt], [np.arange(len(self.prompt))], []
        end = len(self.prompt)
        for branch in self.branches:
            tokens.append(branch.tokens)
            positions.append(len(self.prompt) + np.arange(len(branch.tokens)))
            # The first token of every branch is predicted by the end of the prompt, the others by the one before.
            starts = np.where(branch.supervised <= 0, len(self.prompt), end)
            predictors.append(starts + branch.supervised - 1)
            end += len(branch.tokens)
        return np.concatenate(tokens), np.concatenate(positions), np.concatenate(predictors)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one pass. For each target: its index among those of the global batch, and its row."""

    packed: PackedTokens
    inputs: LossInputs
    indices: Tensor
    rows: np.ndarray


@dataclass(frozen=True)
class MicroBatchPlan:
    """This rank's micro-batches, and the totals of the global batch."""

    micro_batches: tuple[tuple[Document, ...], ...]
    num_tokens: int
    num_targets: int
    max_rank_tokens: int
    cost_balance: float = 1.0
    """Compute time of all ranks together over what it would be with equal loads: 1 is balanced."""
    is_whole: bool = True
    """All completions of each datum are in one micro-batch, on all ranks."""


@dataclass(frozen=True)
class RankBatch:
    """A global batch, as this rank computes it."""

    batch: Sequence[Datum]
    documents: Sequence[Document]
    plan: MicroBatchPlan
    micro_batches: list[MicroBatch]


def documents_of(
    batch: Sequence[Datum], *, max_shared_tokens: int = 0, group_of: Callable[[int], object] = lambda length: None
) -> list[Document]:
    """Completions of a datum behind one copy of its prompt, as long as they fit into `max_shared_tokens` together.

    `group_of` a text's length: a prompt is computed in the same way in texts of one group only.
    """
    documents, offset = [], 0
    for d, datum in enumerate(batch):
        prompt = _token_ids(datum.prompt)
        together: list[Branch] = []
        num_tokens, last_group = len(prompt), None
        for c, completion in enumerate(datum.completions):
            branch = _branch(c, completion, offset)
            if len(branch.supervised) and branch.supervised[0] <= -len(prompt):
                raise ValueError(
                    f"{datum.origin or 'a datum'} has a target before its first token: nothing predicts it"
                )
            offset += len(branch.supervised)
            is_full = num_tokens + len(branch.tokens) > max_shared_tokens
            group = group_of(len(prompt) + len(branch.tokens))
            if together and (is_full or group != last_group):
                documents.append(Document(d, prompt, tuple(together)))
                together, num_tokens = [], len(prompt)
            last_group = group
            together.append(branch)
            num_tokens += len(branch.tokens)
        documents.append(Document(d, prompt, tuple(together)))
    return documents


def documents_for(policy: Policy, batch: Sequence[Datum], budget_tokens: int) -> list[Document]:
    """As this policy can compute them: completions share a prompt where it allows that, within a micro-batch."""
    _refuse_too_long(batch, policy.max_positions)
    shared = budget_tokens if policy.shares_prompts else 0
    documents = documents_of(batch, max_shared_tokens=shared, group_of=policy.rotary.group)
    _refuse_unknown_tokens(batch, documents, policy.num_tokens)
    return documents


def _refuse_too_long(batch: Sequence[Datum], limit: int | None) -> None:
    """`limit`: of a model that has no positions beyond it."""
    if limit is None:
        return
    for i, datum in enumerate(batch):
        length = len(datum.prompt) + max((len(c.tokens) for c in datum.completions), default=0)
        if length > limit:
            raise ValueError(
                f"{datum.origin or f'row {i} of the batch'} has {length:,} tokens, and the model learned positions for "
                f"{limit:,}: set data.max_length to {limit} or less"
            )


def _refuse_unknown_tokens(batch: Sequence[Datum], documents: Sequence[Document], limit: int | None) -> None:
    """On a GPU an index outside of the table ends the process, and names nothing. `limit`: how many the model knows.

    What stands for an image need not be one of them.
    """
    plain = [document for document in documents if not batch[document.datum].images]
    if limit is None or not plain:
        return
    every = np.concatenate([_ids_of(document) for document in plain])
    if every.min() >= 0 and every.max() < limit:
        return
    for document in plain:
        tokens = _ids_of(document)
        unknown = tokens[(tokens < 0) | (tokens >= limit)]
        if len(unknown):
            name = batch[document.datum].origin or f"row {document.datum} of the batch"
            raise ValueError(
                f"{name} has token {unknown[0]}, and the model knows 0 to {limit - 1}: check the tokenizer"
            )


def _ids_of(document: Document) -> np.ndarray:
    return np.concatenate([document.prompt, *(ids for b in document.branches for ids in (b.tokens, b.targets))])


def _token_ids(tokens: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" and ids.size:
        raise ValueError(f"tokens are whole numbers, and these are {ids.dtype}: {str(ids[:4].tolist())[:80]}")
    return ids.astype(np.int64, copy=False)


def _branch(index: int, completion: Completion, offset: int) -> Branch:
    tokens, weights = _token_ids(completion.tokens), np.asarray(completion.weights, dtype=np.float64)
    if not np.isfinite(weights).all():
        raise ValueError("a completion has weights that are not finite numbers")
    if completion.targets is None:
        supervised = np.flatnonzero(weights)
        return Branch(index, tokens, supervised, tokens[supervised], weights[supervised], offset)
    targets = _token_ids(completion.targets)
    if weights.shape != targets.shape:
        raise ValueError(f"a completion has targets of the shape {targets.shape} and weights of {weights.shape}")
    places = np.arange(len(tokens) - len(targets), len(tokens))
    supervised = np.repeat(places, targets.size // max(len(targets), 1))
    return Branch(index, tokens, supervised, targets.ravel(), weights.ravel(), offset)


def no_branch() -> Branch:
    """Of a document that only keeps a rank in step with others."""
    zero = np.zeros(1, dtype=np.int64)
    return Branch(0, zero, zero, zero, np.zeros(1), 0)


def plan_micro_batches(
    documents: Sequence[Document],
    *,
    rank: int,
    num_ranks: int,
    budget_tokens: int,
    max_documents: int | None = None,
    cost: Cost = BY_TOKENS,
    extra_costs: Sequence[float] | None = None,
) -> MicroBatchPlan:
    """Micro-batches of one rank. Empty ones are kept: ranks that shard must make the same passes.

    `extra_costs`: of each document beside that of its tokens.
    """
    lengths = [d.num_tokens for d in documents]
    steps = partition(
        lengths,
        num_ranks=num_ranks,
        budget_tokens=budget_tokens,
        max_documents=max_documents,
        cost=cost,
        extra_costs=extra_costs,
    )
    mine = tuple(tuple(documents[i] for i in step[rank]) for step in steps)
    loads = [sum(lengths[i] for step in steps for i in step[r]) for r in range(num_ranks)]
    balance = measure_balance(steps, lengths, cost, extra_costs).cost
    data = [{documents[i].datum for i in part} for step in steps for part in step]
    is_whole = sum(map(len, data)) == len({d.datum for d in documents})
    return MicroBatchPlan(
        mine, sum(lengths), sum(d.num_targets for d in documents), max(loads, default=0), balance, is_whole
    )


def to_micro_batch(
    documents: tuple[Document, ...],
    batch: Sequence[Datum],
    loss: LossSpec,
    device: torch.device,
    dtype: torch.dtype,
    multiple_of: int = 1,
    part: tuple[int, int] = (0, 1),
    routing: RoutingRows | None = None,
) -> MicroBatch:
    """Lay documents end to end, pad to a multiple, and take one of several equal parts: (index, number of parts).

    `routing`: how that of completions is written, where it is to be replayed.

    The padding is a document of its own, or the tail of a single one, which cannot see what follows it.
    No documents: two tokens whose weight is zero, so that every rank makes the same passes.
    """
    is_padding = not documents
    if is_padding:
        documents = (Document(-1, np.zeros(1, dtype=np.int64), (no_branch(),)),)
    tokens, positions, predictors = _lay_out(documents)
    padding = -len(tokens) % multiple_of
    lengths, shared = _segments(documents, padding)
    tokens = np.concatenate([tokens, np.zeros(padding, dtype=np.int64)])
    positions = np.concatenate([positions, np.zeros(padding, dtype=np.int64)])  # never past those that a model knows
    branches = [(document, branch) for document in documents for branch in document.branches]
    targets = np.concatenate([b.targets for _, b in branches])
    indices = np.concatenate([b.offset + np.arange(len(b.supervised)) for _, b in branches])
    rows = np.concatenate([np.full(len(b.supervised), d.datum) for d, b in branches])
    counts = np.concatenate([d.count_texts() for d in documents] + [np.zeros(padding)]) * (not is_padding)
    here, mine = _part_of(len(tokens), predictors, part)

    def move(array: np.ndarray, kind: torch.dtype = torch.int64) -> Tensor:
        return to_device(array, device, kind)

    packed = PackedTokens(
        move(tokens[here]),
        move(positions[here]),
        lengths,
        move(predictors[mine] - here.start),
        move(targets[mine]),
        shared,
        padding,
        move(counts[here], torch.float64),
    )
    if routing is not None:
        given = _routing_rows(documents, batch, routing.num_bytes, len(tokens))
        packed = replace(packed, routing=routing.read(move(given[here], torch.uint8)))
    inputs = _loss_inputs(branches, batch, loss, lambda array, kind=None: move(array[mine], kind or dtype))
    if is_padding:
        inputs = LossInputs(inputs.weights, inputs.scale, inputs.values, inputs.options, inputs.completions, 0)
    return MicroBatch(packed, inputs, move(indices[mine]), rows[mine])


def whole_inputs(
    documents: Sequence[Document], batch: Sequence[Datum], loss: LossSpec, device: torch.device
) -> LossInputs:
    """Inputs of a loss over the whole global batch, in float64: every target, in order."""
    branches = [(document, branch) for document in documents for branch in document.branches]
    return _loss_inputs(
        branches, batch, loss, lambda array, kind=None: torch.from_numpy(array).to(device, kind or torch.float64)
    )


class _ToDevice(Protocol):
    def __call__(self, array: np.ndarray, kind: torch.dtype | None = None) -> Tensor: ...


def _loss_inputs(
    branches: Sequence[tuple[Document, Branch]], batch: Sequence[Datum], loss: LossSpec, to_device: _ToDevice
) -> LossInputs:
    counts = [len(branch.supervised) for _, branch in branches]
    return LossInputs(
        weights=to_device(np.concatenate([b.weights for _, b in branches])),
        scale=loss.scale,
        values={name: to_device(_side_values(branches, batch, name)) for name in _value_names(batch)},
        options=loss.options,
        completions=to_device(np.repeat(np.arange(len(branches)), counts), torch.int64),
        num_completions=len(branches),
    )


def _lay_out(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, positions, predictors = zip(*(d.lay_out() for d in documents))
    starts = np.cumsum([0, *(d.num_tokens for d in documents)])
    shifted = [indices + start for indices, start in zip(predictors, starts, strict=False)]
    return np.concatenate(tokens), np.concatenate(positions), np.concatenate(shifted)


def _segments(documents: Sequence[Document], padding: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(lengths of the segments; of each, start and length of the prompt that it continues from elsewhere).

    The second is empty where no prompt is shared.
    """
    lengths: list[int] = []
    shared: list[tuple[int, int]] = []
    start = 0
    for document in documents:
        lengths += document.segments
        shared += [(0, 0), *([(start, len(document.prompt))] * (len(document.branches) - 1))]
        start += document.num_tokens
    if padding and len(lengths) == 1:
        lengths[0] += padding
    elif padding:
        lengths.append(padding)
        shared.append((0, 0))
    return tuple(lengths), tuple(shared) if any(length for _, length in shared) else ()


def _part_of(num_tokens: int, predictors: np.ndarray, part: tuple[int, int]) -> tuple[slice, np.ndarray]:
    """(the tokens of one of several equal parts, a mask of the predictors in it)."""
    index, num_parts = part
    assert num_tokens % num_parts == 0, "padded to a multiple of the parts"
    size = num_tokens // num_parts
    here = slice(index * size, (index + 1) * size)
    return here, (predictors >= here.start) & (predictors < here.stop)


def _routing_rows(documents: Sequence[Document], batch: Sequence[Datum], num_bytes: int, num_tokens: int) -> np.ndarray:
    """[T, bytes]: the experts that were chosen when the tokens were sampled; a router's own choice for all others.

    A prompt that is computed once has those of its first completion: all were sampled from one computation of it.
    """
    rows = np.full((num_tokens, num_bytes), OWN_CHOICE[0], dtype=np.uint8)
    start = 0
    for document in documents:
        end = start + len(document.prompt)
        for number, branch in enumerate(document.branches if document.datum >= 0 else ()):
            datum = batch[document.datum]
            given = datum.completions[branch.completion].routing
            length = len(document.prompt) + len(branch.tokens) - 1  # nothing follows the last token
            if given and len(given) != length * num_bytes:
                raise ValueError(
                    f"an answer to {datum.origin or 'a datum'} has the routing of {len(given) / num_bytes:g} tokens, "
                    f"and {length} are computed: it was recorded with another model"
                )
            found = np.frombuffer(given, dtype=np.uint8).reshape(-1, num_bytes)
            if number == 0:
                rows[start : start + len(found)] = found
            else:
                rows[end : end + max(len(found) - len(document.prompt), 0)] = found[len(document.prompt) :]
            end += len(branch.tokens)
        start += document.num_tokens
    return rows


def _value_names(batch: Sequence[Datum]) -> list[str]:
    return sorted({name for datum in batch for completion in datum.completions for name in completion.values})


def _side_values(branches: Sequence[tuple[Document, Branch]], batch: Sequence[Datum], name: str) -> np.ndarray:
    parts = []
    for document, branch in branches:
        if document.datum < 0:
            parts.append(np.zeros(1))
            continue
        datum = batch[document.datum]
        completion = datum.completions[branch.completion]
        if name not in completion.values:
            raise ValueError(f"{datum.origin or 'a datum'} has no {name!r}, which other rows of the batch have")
        values = np.asarray(completion.values[name], dtype=np.float64)
        parts.append(values[branch.supervised] if completion.targets is None else values.ravel())
    return np.concatenate(parts)
