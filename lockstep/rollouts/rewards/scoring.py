"""Rewards and environments by name, the scoring of one attempt, and the pool of processes that score."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.config import ConfigError
from lockstep.config.grpo import ENVIRONMENTS as ENVIRONMENT_NAMES
from lockstep.config.grpo import REWARDS
from lockstep.data.answer_match import collapse_whitespace, find_last, find_number
from lockstep.processes.pool import MAX_DEATHS, PoolStartFailed, WorkerPool
from lockstep.processes.worker import WorkerDied, WorkerError, WorkerFailed, WorkerTimedOut
from lockstep.rollouts.environments.calculator import Calculator
from lockstep.rollouts.environments.reasoning import reasoning_gym
from lockstep.rollouts.rewards import Attempt, Environment, Outcome, RewardFunction, Row, Turn

_MAX_EVENTS = 200  # on record: one bad reward must not fill the disk
_MAX_SCORE = 1e30  # beyond it sums and squares of rewards are no longer finite
ENVIRONMENT = "environment"
"""The name of the reward that the environment itself gives, summed over the turns."""
ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": Calculator}


# --- built-in rewards, each from 0 to 1 -----------------------------------------------------------------------------


def exact(*, answer: str = "answer", pattern: str | None = None, ignore_case: bool = False) -> RewardFunction:
    """1 where the text is the row's answer. `pattern`: compare only the first group of its last match in the text."""
    find = find_last(pattern)

    def reward(text: str, row: Row) -> float:
        extracted, expected = find(text), collapse_whitespace(str(_column(row, answer)))
        if extracted is None:
            return 0.0
        extracted = collapse_whitespace(extracted)
        return float(extracted.casefold() == expected.casefold() if ignore_case else extracted == expected)

    return reward


def numeric(*, answer: str = "answer", pattern: str | None = None, tolerance: float = 0.0) -> RewardFunction:
    """1 where the text comes to the number of the row's answer: after the last ####, in a box, or the last of all."""
    find = find_last(pattern)

    def reward(text: str, row: Row) -> float:
        expected = find_number(str(_column(row, answer)))
        if expected is None:
            raise ValueError(f"the row's {answer!r} has no number: {row[answer]!r}")
        extracted = find(text)
        number = None if extracted is None else find_number(extracted)
        return float(number is not None and abs(number - expected) <= tolerance)

    return reward


def regex(*, pattern: str) -> RewardFunction:
    """1 where the pattern matches anywhere in the text."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, row: float(compiled.search(text) is not None)


def match_format(*, pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*") -> RewardFunction:
    """1 where the pattern matches the whole text."""
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
    "reasoning_gym": reasoning_gym,
}
assert (set(BUILTIN) | {ENVIRONMENT}, set(ENVIRONMENTS)) == (set(REWARDS), set(ENVIRONMENT_NAMES))


def _column(row: Row, name: str) -> object:
    if row.get(name) is None:
        raise ValueError(f"the row has no {name!r}, only {', '.join(map(repr, row))}: name another column in options")
    return row[name]


# --- from names in a configuration to functions ----------------------------------------------------------------------


def load_reward(name: str, options: Mapping[str, object]) -> RewardFunction:
    """`name` is built in, or a user's module:function, which gets `options` by name with every call."""
    if ":" in name:
        function = _import_name(name, "algorithm.reward")
        return lambda text, row: function(text, row, **options)
    if name not in BUILTIN:
        known = ", ".join([*BUILTIN, ENVIRONMENT])
        raise ConfigError(f"algorithm.reward {name!r} is unknown: use {known}, or write module:function")
    try:
        return BUILTIN[name](**options)
    except ConfigError:
        raise
    except Exception as error:  # an unknown option, or an invalid pattern
        raise ConfigError(f"algorithm.reward {name} does not take these options: {error}") from error


def load_environment(name: str) -> Callable[[], Environment]:
    if ":" in name:
        return _import_name(name, "algorithm.environment")
    if name not in ENVIRONMENTS:
        known = ", ".join(ENVIRONMENTS)
        raise ConfigError(f"algorithm.environment {name!r} is unknown: use {known}, or write module:class")
    return ENVIRONMENTS[name]


def _import_name(name: str, key: str) -> Callable[..., Any]:
    """`name` is module:function; the module may be in the working directory."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{key} {name!r}: write module:function, for example rewards:polite")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module runs its own code
        raise ConfigError(
            f"{key} {name!r}: {module_name} cannot be imported ({type(error).__name__}: {error}): put it into the "
            "working directory or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} {name!r}: {module_name} has no function {function_name}")
    return function


# --- scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedReward:
    """`weight` 0: measured and reported, but not learned from."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSpec:
    """All that scoring needs, by name: it travels to the processes that score, which load it there."""

    rewards: Sequence[NamedReward]
    environment: str | None = None

    def prepare(self) -> Callable[[Task], Outcome | Turn]:
        """In a process of the pool."""
        rewards = LoadedRewards(self)

        def run(task: Task) -> Outcome | Turn:
            return rewards.play(task.attempt) if task.method == "play" else rewards.score(task.attempt, task.only)

        return run

    def combine(self, scores: Mapping[str, float]) -> Outcome:
        """`scores`: of every reward."""
        return Outcome(sum(reward.weight * scores[reward.name] for reward in self.rewards), scores)


@dataclass(frozen=True)
class Task:
    """What a process of the pool is asked. `only`: one reward, by name; None: all of them."""

    method: Literal["score", "play"]
    attempt: Attempt
    only: str | None = None


class LoadedRewards:
    """Scores attempts in this process. Raises ConfigError where a reward or an environment cannot be loaded."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._functions = {
            reward.name: load_reward(reward.name, reward.options)
            for reward in spec.rewards
            if reward.name != ENVIRONMENT
        }
        self._make_environment = load_environment(spec.environment) if spec.environment else None

    def score(self, attempt: Attempt, only: str | None = None) -> Outcome:
        """`only`: a reward by name. Its score is all there is in the outcome."""
        scores: dict[str, float] = {}
        for name in [only] if only else [reward.name for reward in self._spec.rewards]:
            try:
                scores[name] = self._environment_reward(attempt) if name == ENVIRONMENT else self._call(name, attempt)
            except Exception as error:  # an error of the user's function concerns this answer alone
                return Outcome.failed(f"reward {name} failed: {_describe(error)}")
            if not math.isfinite(scores[name]):
                return Outcome.failed(f"reward {name} is {scores[name]}, which is not a finite number")
            if abs(scores[name]) > _MAX_SCORE:
                return Outcome.failed(f"reward {name} is {scores[name]:g}, and rewards are taken up to {_MAX_SCORE:g}")
        return Outcome(scores[only], scores) if only else self._spec.combine(scores)

    def play(self, attempt: Attempt) -> Turn:
        """The environment's reply to the last turn."""
        try:
            return self._replay(attempt)[-1]
        except Exception as error:
            return Turn(problem=f"the environment failed: {_describe(error)}")

    def _call(self, name: str, attempt: Attempt) -> float:
        value = self._functions[name](attempt.answer, dict(attempt.row))
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"it returned {value!r}, which is not a number") from None

    def _environment_reward(self, attempt: Attempt) -> float:
        return sum(turn.reward for turn in self._replay(attempt))

    def _replay(self, attempt: Attempt) -> list[Turn]:
        """From the start: the only state of an episode is the model's own turns."""
        assert self._make_environment is not None, "only called where there is an environment"
        environment = self._make_environment()
        environment.reset(attempt.row)
        turns = [environment.step(answer) for answer in attempt.turns]
        for turn in turns:
            if not isinstance(turn, Turn):
                raise TypeError(f"step returned {turn!r}, not a Turn")
        return turns


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- processes -------------------------------------------------------------------------------------------------------


class RewardPool:
    """An attempt that fails or runs out of time fails alone. So does one that its process does not survive, but only
    after others were asked: a process that is killed from outside changes nothing.

    `timeout_s`: for one attempt. `start_timeout_s`: for importing what rewards need. `on_event` gets the kind of an
    event and its fields, from any thread.
    """

    def __init__(
        self,
        spec: RewardSpec,
        procs: int,
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        on_event: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self._spec, self._on_event = spec, on_event
        self._num_events = itertools.count(1)
        self._pool: WorkerPool[Task, Any] = WorkerPool(
            "rewards", spec, procs, timeout_s=timeout_s, start_timeout_s=start_timeout_s, on_death=self._note_death
        )

    def start(self) -> None:
        """Start a first process: what cannot be imported shows now, as a ConfigError."""
        try:
            self._pool.start()
        except PoolStartFailed as error:
            raise _describe_start(error) from error

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        names = [reward.name for reward in self._spec.rewards]
        # Where there are several rewards, the last time each is asked for alone: that shows which one it is.
        max_deaths = MAX_DEATHS if len(names) == 1 else MAX_DEATHS - 1
        futures = self._pool.submit_all([Task("score", attempt) for attempt in attempts], max_deaths)
        return [self._outcome(future, attempt, names) for future, attempt in zip(futures, attempts, strict=True)]

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        futures = self._pool.submit_all([Task("play", attempt) for attempt in attempts])
        return [self._turn(future, attempt) for future, attempt in zip(futures, attempts, strict=True)]

    def close(self) -> None:
        self._pool.close()

    def _outcome(self, future: Future[Outcome], attempt: Attempt, names: Sequence[str]) -> Outcome:
        try:
            return future.result()
        except WorkerDied as error:
            if len(names) > 1 and not self._pool.is_closed:
                return self._score_apart(attempt, names)
            return Outcome.failed(self._blame(error, attempt, f"reward {names[0]}"))
        except WorkerError as error:
            return Outcome.failed(self._blame(error, attempt, "reward " + ", ".join(names)))

    def _score_apart(self, attempt: Attempt, names: Sequence[str]) -> Outcome:
        scores: dict[str, float] = {}
        for name in names:
            outcome = self._outcome(self._pool.submit(Task("score", attempt, name), 1), attempt, [name])
            if outcome.reward_failed:
                return outcome
            scores |= outcome.scores
        return self._spec.combine(scores)

    def _turn(self, future: Future[Turn], attempt: Attempt) -> Turn:
        try:
            return future.result()
        except WorkerError as error:
            return Turn(problem=self._blame(error, attempt, f"environment {self._spec.environment}"))

    def _blame(self, error: WorkerError, attempt: Attempt, what: str) -> str:
        """The problem in a sentence, on record where it was none of the function's own. Raises if nothing can be
        scored at all."""
        if isinstance(error, PoolStartFailed):
            if isinstance(error.cause, WorkerFailed):
                raise _describe_start(error) from error
            # One has started before, so this is the machine's fault: the run may be started again.
            raise RuntimeError(f"the process that scores answers did not start again: {error}") from error
        if isinstance(error, WorkerFailed):
            return f"{what} failed: {error.kind}: {error.reason}"
        if isinstance(error, WorkerTimedOut):
            problem = f"{what} gave no answer within {self._pool.timeout_s:g} s (algorithm.reward_timeout_s)"
        else:
            problem = f"{what} failed: its process ended each time it was asked, {MAX_DEATHS} times; the last: {error}"
        if not self._pool.is_closed:
            self._record("reward_failed", reward=what, row=attempt.origin, reason=problem)
        return problem

    def _note_death(self, task: Task | None, death: WorkerDied) -> None:
        row = "" if task is None else task.attempt.origin
        self._record("reward_process_lost", row=row, reason=str(death))

    def _record(self, kind: str, **fields: object) -> None:
        number = next(self._num_events)
        if number == _MAX_EVENTS:
            fields["note"] = "more of these are not recorded until the run is started again"
        if number <= _MAX_EVENTS:
            self._on_event(kind, **fields)


def _describe_start(error: PoolStartFailed) -> ConfigError:
    if isinstance(error.cause, WorkerFailed) and error.cause.kind == "ConfigError":
        return ConfigError(error.cause.reason)
    return ConfigError(f"algorithm.reward: the process that scores answers did not start: {error}")
