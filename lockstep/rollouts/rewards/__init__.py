"""Rewards and environments: what is scored, what comes back, and the interfaces that a user's own code implements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = Mapping[str, Any]
RewardFunction = Callable[[str, Row], float]
"""(answer, row of the data) -> reward. An exception or a nan marks the reward of this answer as failed."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer to one row. `turns`: the model's text, turn by turn; exactly one without an environment.

    `origin`: where the row is from, for messages.
    """

    row: Row
    turns: Sequence[str]
    origin: str = ""

    @property
    def answer(self) -> str:
        """The last turn: this is what rewards score."""
        return self.turns[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reward` is the weighted sum of `scores`, or nan where a `problem` kept it from being computed."""

    reward: float
    scores: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def failed(cls, problem: str) -> Outcome:
        return cls(math.nan, {}, problem)

    @property
    def reward_failed(self) -> bool:
        return self.problem is not None


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's reply to an answer. Without a `message` the episode is over."""

    message: str | None = None
    reward: float = 0.0
    problem: str | None = None


class Environment(Protocol):
    """One episode. It may be replayed from its start at any time, and must then reply the same to the same answers.

    So a lost process or a resumed run costs only time.
    """

    def reset(self, row: Row) -> None: ...

    def step(self, answer: str) -> Turn: ...


class Scorer(Protocol):
    """Computes rewards and plays environments."""

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]: ...

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        """The environment's reply to the last turn of each attempt."""
        ...
