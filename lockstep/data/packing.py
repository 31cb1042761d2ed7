"""Which documents are computed together: micro-batches under a token budget, level over ranks.

A pure function of lengths: every rank computes the same answer and takes its own part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(
    lengths: Sequence[int], *, num_ranks: int, budget_tokens: int, max_documents: int | None = None
) -> list[list[list[int]]]:
    """Indices as [micro_step][rank] -> documents. Every rank gets the same number of micro-steps; some may be empty.

    Longest first into the emptiest bin, with as few micro-steps as the budget allows. The bins of one
    micro-step are neighbours in size, so that ranks which wait for each other have like work.
    """
    longest = max(lengths, default=0)
    if longest > budget_tokens:
        raise ValueError(f"a document of {longest} tokens does not fit into a micro-batch of {budget_tokens}")
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    steps = max(1, -(-sum(lengths) // (num_ranks * budget_tokens)))
    if max_documents is not None:
        steps = max(steps, -(-len(lengths) // (num_ranks * max_documents)))
    while (bins := _fill(order, lengths, steps * num_ranks, budget_tokens, max_documents)) is None:
        steps += 1
    bins.sort(key=lambda b: (-sum(lengths[i] for i in b), b))
    return [bins[s * num_ranks : (s + 1) * num_ranks] for s in range(steps)]


def _fill(
    order: Sequence[int], lengths: Sequence[int], num_bins: int, budget: int, max_documents: int | None
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in order:
        # The emptiest bin that may still take a document; if the emptiest cannot hold it, none can.
        while heap and max_documents is not None and len(bins[heap[0][1]]) >= max_documents:
            heapq.heappop(heap)
        if not heap or heap[0][0] + lengths[i] > budget:
            return None
        load, b = heap[0]
        bins[b].append(i)
        heapq.heapreplace(heap, (load + lengths[i], b))
    return [sorted(b) for b in bins]
