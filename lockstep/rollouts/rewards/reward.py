"""What is scored, what comes back, and what an environment is. Nothing else, so that loops can know it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = Mapping[str, Any]
RewardFunction = Callable[[str, Row], float]
"""(answer, row of the data) -> how good it is. Whatever it raises, and a nan, taints the answer."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer to one row. `turns` are the model's own words, turn by turn; without an environment there is one."""

    row: Row
    turns: Sequence[str]

    @property
    def answer(self) -> str:
        """What is scored: the last turn."""
        return self.turns[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reward` is the weighted sum of `scores`, or nan where there is a `problem`: then nobody knows how good it is."""

    reward: float
    scores: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def tainted(cls, problem: str) -> Outcome:
        return cls(math.nan, {}, problem)


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment makes of an answer. Without a `message` the episode is over."""

    message: str | None = None
    reward: float = 0.0
    problem: str | None = None


class Environment(Protocol):
    """One episode. It may be played again from its start at any time, and must then do the same for the same answers.

    So a lost process, or a resumed run, costs nothing but time.
    """

    def reset(self, row: Row) -> None: ...

    def step(self, answer: str) -> Turn: ...


class Judge(Protocol):
    """Who scores and who plays. All ranks call it alike and get the same."""

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]: ...

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        """What the environment says to the last turn of each."""
        ...
