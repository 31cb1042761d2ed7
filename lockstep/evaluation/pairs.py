"""Which of two answers a model finds likelier, and how far it moved from its reference: accuracy and margin of pairs.

Pure functions on log-probs of whole answers. Must not know models or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class PairLogprobs(NamedTuple):
    chosen: float
    rejected: float


class _Measured(Protocol):
    @property
    def total(self) -> float: ...


def pair_logprobs(answers: Sequence[_Measured]) -> PairLogprobs:
    """From the losses of both answers."""
    chosen, rejected = answers
    return PairLogprobs(-chosen.total, -rejected.total)


def reward_margins(
    policy: Sequence[PairLogprobs | None], reference: Sequence[PairLogprobs | None], beta: float
) -> list[float | None]:
    """How much more the preferred answer gained on the reference than the other; None where a row was not measured."""
    found: list[float | None] = []
    for own, other in zip(policy, reference, strict=True):
        if own is None or other is None:
            found.append(None)
        else:
            found.append(beta * ((own.chosen - other.chosen) - (own.rejected - other.rejected)))
    return found
