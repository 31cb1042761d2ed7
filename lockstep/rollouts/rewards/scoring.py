"""Scores one attempt, or plays one episode: what each process of the pool does.

An error of a reward is an answer here, not an exception: it taints one sample. Must not know processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rollouts.rewards.loading import ENVIRONMENT, load_environment, load_reward
from lockstep.rollouts.rewards.reward import Attempt, Environment, Outcome, Turn


@dataclass(frozen=True)
class NamedReward:
    """`weight` may be 0: then it is measured and not learned."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judging:
    """Everything that is needed to score. Pickled, and made ready where it is used."""

    rewards: Sequence[NamedReward]
    environment: str | None = None

    def prepare(self) -> Scorer:
        return Scorer(self)


class Scorer:
    """Raises ConfigError where a reward or an environment cannot be loaded."""

    def __init__(self, judging: Judging) -> None:
        self._weights = {reward.name: reward.weight for reward in judging.rewards}
        self._functions = {
            reward.name: load_reward(reward.name, reward.options)
            for reward in judging.rewards
            if reward.name != ENVIRONMENT
        }
        self._make = load_environment(judging.environment) if judging.environment else None

    def score(self, attempt: Attempt) -> Outcome:
        scores: dict[str, float] = {}
        for name in self._weights:
            try:
                scores[name] = self._earned(attempt) if name == ENVIRONMENT else self._ask(name, attempt)
            except Exception as error:  # whatever the user's function raises belongs to this answer
                return Outcome.tainted(f"reward {name} failed: {_describe(error)}")
            if not math.isfinite(scores[name]):
                return Outcome.tainted(f"reward {name} is {scores[name]}, which is no number")
        return Outcome(sum(self._weights[name] * score for name, score in scores.items()), scores)

    def play(self, attempt: Attempt) -> Turn:
        """What the environment says to the last turn."""
        try:
            return self._replay(attempt)[-1]
        except Exception as error:
            return Turn(problem=f"the environment failed: {_describe(error)}")

    def _ask(self, name: str, attempt: Attempt) -> float:
        found = self._functions[name](attempt.answer, dict(attempt.row))
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            try:
                found = float(found)
            except (TypeError, ValueError):
                raise TypeError(f"it returned {found!r}, which is no number") from None
        return float(found)

    def _earned(self, attempt: Attempt) -> float:
        return sum(turn.reward for turn in self._replay(attempt))

    def _replay(self, attempt: Attempt) -> list[Turn]:
        """From the start: an episode has no memory but the model's own words."""
        assert self._make is not None, "only asked where there is an environment"
        environment: Environment = self._make()
        environment.reset(attempt.row)
        turns = [environment.step(answer) for answer in attempt.turns]
        for turn in turns:
            if not isinstance(turn, Turn):
                raise TypeError(f"step returned {turn!r}, not a Turn")
        return turns


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
