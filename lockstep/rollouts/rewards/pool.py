"""Rewards in processes of their own: an attempt that fails, dies or runs out of time fails alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from lockstep.config import ConfigError
from lockstep.processes.pool import PoolStartFailed, WorkerPool
from lockstep.processes.worker import WorkerDied, WorkerFailed, WorkerTimedOut
from lockstep.rollouts.rewards import Attempt, Outcome, Turn
from lockstep.rollouts.rewards.scoring import RewardSpec

T = TypeVar("T")


@dataclass(frozen=True)
class RewardTask:
    spec: RewardSpec

    def prepare(self) -> Callable[[tuple[str, Attempt]], Outcome | Turn]:
        rewards = self.spec.load()
        methods: dict[str, Callable[[Attempt], Outcome | Turn]] = {"score": rewards.score, "play": rewards.play}
        return lambda item: methods[item[0]](item[1])


class RewardPool:
    """`timeout_s`: for one attempt. `start_timeout_s`: for importing what rewards need."""

    def __init__(self, spec: RewardSpec, procs: int, *, timeout_s: float, start_timeout_s: float = 120.0) -> None:
        self._pool = WorkerPool(
            "rewards", RewardTask(spec), procs, timeout_s=timeout_s, start_timeout_s=start_timeout_s
        )

    def start(self) -> None:
        """Start a first process: what cannot be imported shows now, as a ConfigError."""
        try:
            self._pool.start()
        except PoolStartFailed as error:
            raise _describe_start(error) from error

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        return self._run("score", attempts, Outcome.failed)

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        return self._run("play", attempts, lambda problem: Turn(problem=problem))

    def close(self) -> None:
        self._pool.close()

    def _run(self, method: str, attempts: Sequence[Attempt], failed: Callable[[str], T]) -> list[T]:
        futures = [self._pool.submit((method, attempt)) for attempt in attempts]
        return [self._result(future, failed) for future in futures]

    def _result(self, future: Future[T], failed: Callable[[str], T]) -> T:
        try:
            return future.result()
        except PoolStartFailed as error:
            raise _describe_start(error) from error
        except WorkerTimedOut:
            return failed(f"no reward within {self._pool.timeout_s:g} s (algorithm.reward_timeout_s)")
        except WorkerDied as error:
            code = "closed" if error.exit_code is None else error.exit_code
            return failed(f"the process that computed the reward ended ({code})")
        except WorkerFailed as error:
            return failed(f"the reward failed: {error.kind}: {error.reason}")


def _describe_start(error: PoolStartFailed) -> ConfigError:
    if isinstance(error.cause, WorkerFailed) and error.cause.kind == "ConfigError":
        return ConfigError(error.cause.reason)
    return ConfigError(f"algorithm.reward: the process that scores answers did not start: {error}")
