"""The parts of a run that samples: its prompts, and rewards that one process computes for all.

Every rank calls these alike. Must not know models: samplers come ready made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import ConfigError, GrpoConfig, RunConfig
from lockstep.config.data import SourceConfig
from lockstep.data.order import Batches
from lockstep.data.prompts import PromptReader, Prompts
from lockstep.data.sources.rows import Row
from lockstep.rollouts.environments.reasoning import is_task, make_rows
from lockstep.rollouts.rewards.loading import ENVIRONMENT, load_environment, load_reward
from lockstep.rollouts.rewards.pool import RewardPool
from lockstep.rollouts.rewards.reward import Attempt, Outcome, Turn
from lockstep.rollouts.rewards.scoring import Judging, NamedReward
from lockstep.train.reference import choose_reference
from lockstep.train.schedule import num_steps


@dataclass(frozen=True)
class PromptData:
    """`reader` also knows how an environment's words become tokens."""

    train: Prompts
    validation: Prompts
    digest: str
    reader: PromptReader

    def warnings(self) -> list[str]:
        dropped = self.train.num_dropped + self.validation.num_dropped
        if not dropped:
            return []
        return [f"{dropped:,} prompts are left out: they leave no room for an answer in data.max_length"]


def read_prompt_data(config: RunConfig, tokenizer: Any) -> PromptData:
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    check_rewards(algorithm)
    if config.data.validation_fraction or config.data.test_fraction:
        raise ConfigError("data.validation_fraction is not for grpo: name a file in data.validation")
    reader = PromptReader(config.data, tokenizer, max_tokens=config.data.max_length - algorithm.max_tokens)

    def rows_of_task(source: SourceConfig) -> Iterable[Row] | None:
        if not is_task(source.path):
            return None
        made = make_rows(source.path, source.options, seed=config.seed)
        return [Row(f"{source.path}:{number}", fields) for number, fields in enumerate(made, start=1)]

    train, validation = (reader.read(part, rows_of_task) for part in ("train", "validation"))
    digest = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()
    return PromptData(train, validation, digest, reader)


def check_rewards(algorithm: GrpoConfig) -> None:
    """Names and options of our own rewards. Those of the user's are loaded where they run."""
    for reward in algorithm.reward:
        if ":" not in reward.name and reward.name not in (ENVIRONMENT, "reasoning_gym"):
            load_reward(reward.name, reward.options)
    if algorithm.environment is not None and ":" not in algorithm.environment:
        load_environment(algorithm.environment)


def describe_prompts(config: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """What can be said of a run's sampling before it samples."""
    algorithm, data = config.algorithm, read_prompt_data(config, tokenizer)
    assert isinstance(algorithm, GrpoConfig)
    batches = Batches(data.train, config.batch, seed=config.seed, shuffle=config.data.shuffle)  # type: ignore[arg-type]
    prompts, _ = batches.batch_at(0)
    return {
        "steps": num_steps(config, batches),
        "prompts": len(prompts),
        "answers": len(prompts) * algorithm.group_size,
        "updates": algorithm.num_updates * min(algorithm.minibatches, len(prompts)),
        "learning_rate": config.learning_rate,
        "rewards": ", ".join(f"{reward.name} x {reward.weight:g}" for reward in algorithm.reward),
        "reference": str(choose_reference(config, num_rows=len(data.train), num_seen=len(data.train))),
        "train_rows": len(data.train),
        "validation_rows": len(data.validation),
        "longest_prompt": int(data.train.lengths.max()),
        "warnings": data.warnings(),
    }


class SharedJudge:
    """Rewards are computed once, by the process that has the `pool`, and `share` gives them to all. All ranks."""

    def __init__(self, pool: RewardPool | None, share: Callable[[Any], Any]) -> None:
        self._pool, self._share = pool, share

    @property
    def pool(self) -> RewardPool:
        """For threads of the process that has it: nobody else is told."""
        assert self._pool is not None
        return self._pool

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        return self._ask("score", attempts)

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        return self._ask("play", attempts)

    def start(self) -> None:
        """What cannot be loaded shows now, everywhere."""
        self._ask("start")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _ask(self, request: str, *arguments: Any) -> Any:
        answer: Any = None
        if self._pool is not None:
            try:
                answer = (True, getattr(self._pool, request)(*arguments))
            except Exception as error:  # the others wait for an answer: they must hear of it
                answer = (False, error)
        is_sound, found = self._share(answer)
        if not is_sound:
            raise found
        return found


def make_judge(algorithm: GrpoConfig, *, computes: bool, share: Callable[[Any], Any]) -> SharedJudge:
    """`computes`: whether this process has the rewards."""
    pool = None
    if computes:
        rewards = [NamedReward(reward.name, reward.weight, reward.options) for reward in algorithm.reward]
        judging = Judging(rewards, algorithm.environment)
        pool = RewardPool(judging, algorithm.reward_procs, timeout_s=algorithm.reward_timeout_s)
    return SharedJudge(pool, share)
