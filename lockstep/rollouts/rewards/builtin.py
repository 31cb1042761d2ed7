"""Rewards that come with Lockstep: pure functions of an answer and its row, each from 0 to 1.

Each takes its settings and gives the function. Must not know how rewards are run or weighed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lockstep.evaluation.metrics import find_number
from lockstep.rollouts.rewards.reward import RewardFunction, Row


def exact(*, answer: str = "answer", pattern: str | None = None, ignore_case: bool = False) -> RewardFunction:
    """1 where the text is the row's answer. `pattern`: of the text only its first group, where it was found last."""
    find = find_last(pattern)

    def reward(text: str, row: Row) -> float:
        found, wanted = find(text), str(_column(row, answer))
        if found is None:
            return 0.0
        found, wanted = (" ".join(part.split()) for part in (found, wanted))
        return float(found.casefold() == wanted.casefold() if ignore_case else found == wanted)

    return reward


def numeric(*, answer: str = "answer", pattern: str | None = None, tolerance: float = 0.0) -> RewardFunction:
    """1 where the text comes to the number of the row's answer: after the last ####, in a box, or the last of all."""
    find = find_last(pattern)

    def reward(text: str, row: Row) -> float:
        wanted = find_number(str(_column(row, answer)))
        if wanted is None:
            raise ValueError(f"the row's {answer!r} has no number: {row[answer]!r}")
        own = find(text)
        found = None if own is None else find_number(own)
        return float(found is not None and abs(found - wanted) <= tolerance)

    return reward


def regex(*, pattern: str) -> RewardFunction:
    """1 where the pattern is found anywhere in the text."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, row: float(compiled.search(text) is not None)


def match_format(*, pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*") -> RewardFunction:
    """1 where the whole text has this form."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, row: float(compiled.fullmatch(text) is not None)


def length(*, most: int, least: int = 1, unit: str = "words", soft: int = 0) -> RewardFunction:
    """1 from `least` up to `most` words or characters; over the next `soft` of them it falls to 0."""
    if unit not in ("words", "characters"):
        raise ValueError(f"unit must be words or characters, not {unit!r}")

    def reward(text: str, row: Row) -> float:
        size = len(text.split()) if unit == "words" else len(text)
        return 0.0 if size < least else max(0.0, 1.0 - max(size - most, 0) / (soft + 1))

    return reward


BUILTIN: dict[str, Callable[..., RewardFunction]] = {
    "exact": exact,
    "numeric": numeric,
    "regex": regex,
    "format": match_format,
    "length": length,
}


def find_last(pattern: str | None) -> Callable[[str], str | None]:
    """The first group of the pattern where it is found last; without a pattern the whole text."""
    if pattern is None:
        return lambda text: text
    compiled = re.compile(pattern, re.DOTALL)
    if compiled.groups < 1:
        raise ValueError(f"pattern {pattern!r} has no group: put ( ) around the answer")

    def find(text: str) -> str | None:
        found = list(compiled.finditer(text))
        return found[-1][1] if found else None

    return find


def _column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"the row has no {name!r}, only {', '.join(map(repr, row))}: name another column in options")
    return row[name]
