"""The loss on held-out rows: the same weighted mean as in training, over the whole set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.types import Datum, TrainingBackend

# Rows handed to the backend at once: enough to level ranks, few enough to hold.
_ROWS_AT_ONCE = 256


def mean_loss(backend: TrainingBackend, data: Sequence[Datum]) -> float:
    """Per supervised token, weighted. All ranks."""
    total = weight = 0.0
    for batch in _pieces(data):
        for datum, logprobs in zip(batch, backend.forward(batch), strict=True):
            for completion, row in zip(datum.completions, logprobs, strict=True):
                total -= sum(float(w) * lp for w, lp in zip(completion.weights, row, strict=True))
            weight += datum.total_weight
    if weight == 0:
        raise ValueError(f"nothing to measure in {len(data)} validation rows: their weights add up to zero")
    return total / weight


def _pieces(data: Sequence[Datum]) -> Iterator[Sequence[Datum]]:
    for start in range(0, len(data), _ROWS_AT_ONCE):
        yield data[start : start + _ROWS_AT_ONCE]
