"""Advantages of sampled answers: baselines over their group or over the global batch, in float64.

Every rank has all rewards and computes the same. Answers whose reward is unknown (nan) have no part in any baseline
and get no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

# (what a reward is compared with, whose standard deviation the difference is divided by)
BASELINES: dict[str, tuple[str, str]] = {
    "grpo": ("group", "group"),
    "dr_grpo": ("group", "none"),
    "rloo": ("others", "none"),
    "reinforce++": ("batch", "batch"),
    "reinforce++_baseline": ("group", "batch"),
}
AGGREGATIONS = ("token", "sequence", "fixed")
# Added to a standard deviation before dividing by it.
_EPSILON = 1e-4

Groups = Sequence[Sequence[float]]


def find_advantages(rewards: Groups, baseline: str) -> list[list[float]]:
    """Of each group, of each answer; nan where there is none. Groups may differ in size.

    Where the baseline is made of the group itself, a single known reward in it has nothing to be compared with.
    """
    centre, spread = BASELINES[baseline]
    everywhere = _known(chain.from_iterable(rewards))
    differences = [_differences(group, centre, everywhere) for group in rewards]
    if spread == "batch":
        size = _deviation(_known(chain.from_iterable(differences)))
        return [[d / (size + _EPSILON) for d in group] for group in differences]
    if spread == "group":
        sizes = [_deviation(_known(group)) for group in rewards]
        return [[d / (size + _EPSILON) for d in group] for group, size in zip(differences, sizes, strict=True)]
    return differences


def has_zero_std(rewards: Sequence[float]) -> bool:
    """Whether all known rewards of a group are equal: it has no advantages to learn from."""
    return len(set(_known(rewards))) < 2


def _differences(group: Sequence[float], centre: str, everywhere: Sequence[float]) -> list[float]:
    if centre == "batch":
        return [reward - _mean(everywhere) for reward in group]
    known = _known(group)
    if len(known) < 2:
        return [math.nan for _ in group]
    if has_zero_std(group):  # exactly: the mean of equal numbers need not be that number
        return [reward - known[0] for reward in group]
    if centre == "others":
        return [reward - (math.fsum(known) - reward) / (len(known) - 1) for reward in group]
    return [reward - _mean(known) for reward in group]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    """Of a sample: divided by one less than there are."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def scale_of(aggregation: str, *, num_tokens: int, num_answers: int, max_tokens: int) -> float:
    """The one number that normalises a global batch in which this many tokens of this many answers are learned."""
    if aggregation == "token":
        return 1.0 / num_tokens
    if aggregation == "sequence":
        return 1.0 / num_answers
    assert aggregation == "fixed", aggregation
    return 1.0 / (num_answers * max_tokens)


def token_weight(aggregation: str, num_tokens: int) -> float:
    """Weight of a token in an answer of which `num_tokens` are learned."""
    return 1.0 / num_tokens if aggregation == "sequence" else 1.0
