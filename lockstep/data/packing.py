"""Packing: which documents share a micro-batch, under a token budget and balanced in cost over ranks.

A pure function of lengths: every rank computes the same partition and takes its own share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Steps = list[list[list[int]]]
"""Documents as [micro_step][rank] -> indices."""


@dataclass(frozen=True)
class Cost:
    """The cost of a document: tokens * (per_token + per_token_squared * tokens), in any unit."""

    per_token: float = 1.0
    per_token_squared: float = 0.0

    def of(self, length: int) -> float:
        return length * (self.per_token + self.per_token_squared * length)

    def of_all(self, lengths: Sequence[int], extra: Sequence[float] | None = None) -> list[float]:
        costs = [self.of(length) for length in lengths]
        return costs if extra is None else [a + b for a, b in zip(costs, extra, strict=True)]

    @classmethod
    def from_hidden_size(cls, hidden_size: int) -> Cost:
        """A token's matrix products take about 24 hidden² operations a layer, and causal attention 2 hidden for every
        token of the document: as much again where a document is 12 times as long as the model is wide."""
        return cls(1.0, 1.0 / (12 * hidden_size))


BY_TOKENS = Cost()


@dataclass(frozen=True)
class Balance:
    """How balanced the ranks are. 1 is perfect; 1.25 means that a step takes a quarter longer than if balanced."""

    tokens_per_rank: tuple[int, ...]
    tokens: float
    """The largest tokens_per_rank over their mean."""
    cost: float
    """The most expensive rank of every micro-step over the mean, for ranks that wait for each other in each one."""


def partition(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    budget_tokens: int,
    max_documents: int | None = None,
    cost: Cost = BY_TOKENS,
    extra_costs: Sequence[float] | None = None,
) -> Steps:
    """Every rank gets the same number of micro-steps; some may be empty. `extra_costs`: beside those of the lengths.

    Longest first into the cheapest bin with room, with as few micro-steps as the budget allows. The bins of one
    micro-step are neighbours in cost, so that ranks which wait for each other have similar work.
    """
    longest = max(lengths, default=0)
    if longest > budget_tokens:
        raise ValueError(
            f"a document of {longest} tokens does not fit into a micro-batch of {budget_tokens}: raise "
            "batch.micro_batch_tokens or lower data.max_length"
        )
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = cost.of_all(lengths, extra_costs)
    fewest = max(1, -(-sum(lengths) // (num_ranks * budget_tokens)))
    if max_documents is not None:
        fewest = max(fewest, -(-len(lengths) // (num_ranks * max_documents)))
    bins, steps = None, fewest
    while bins is None:
        # Balancing by cost may fail to fit the tokens: balance by tokens before adding a micro-step.
        bins = _fill(order, lengths, costs, steps * num_ranks, budget_tokens, max_documents)
        bins = bins or _fill(order, lengths, lengths, steps * num_ranks, budget_tokens, max_documents)
        steps += bins is None
    bins.sort(key=lambda b: (-sum(costs[i] for i in b), b))
    return _deal([bins[s * num_ranks : (s + 1) * num_ranks] for s in range(steps)], costs)


def measure_balance(
    steps: Steps, lengths: Sequence[int], cost: Cost = BY_TOKENS, extra_costs: Sequence[float] | None = None
) -> Balance:
    """`steps` as returned by `partition`."""
    if not steps:
        return Balance((), 1.0, 1.0)
    num_ranks = len(steps[0])
    tokens = [sum(lengths[i] for step in steps for i in step[rank]) for rank in range(num_ranks)]
    costs = cost.of_all(lengths, extra_costs)
    by_step = [[sum(costs[i] for i in share) for share in step] for step in steps]
    return Balance(
        tuple(tokens),
        max(tokens) * num_ranks / sum(tokens),
        sum(map(max, by_step)) * num_ranks / sum(map(sum, by_step)),
    )


def _fill(
    order: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_bins: int,
    budget: int,
    max_documents: int | None,
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap: list[tuple[float, int]] = [(0.0, b) for b in range(num_bins)]
    for i in order:
        full = []
        while heap and tokens[heap[0][1]] + lengths[i] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        spent, b = heapq.heappop(heap)
        bins[b].append(i)
        tokens[b] += lengths[i]
        if max_documents is None or len(bins[b]) < max_documents:
            heapq.heappush(heap, (spent + costs[i], b))
        for entry in full:
            heapq.heappush(heap, entry)
    return [sorted(b) for b in bins]


def _deal(steps: Steps, costs: Sequence[float]) -> Steps:
    """In every micro-step the most expensive bin goes to the rank with the least cost so far."""
    spent = [0.0] * len(steps[0])
    dealt: Steps = []
    for step in steps:
        ranks = sorted(range(len(step)), key=lambda rank: (spent[rank], rank))
        shares: list[list[int]] = [[] for _ in step]
        for rank, share in zip(ranks, step, strict=True):
            shares[rank] = share
            spent[rank] += sum(costs[i] for i in share)
        dealt.append(shares)
    return dealt
