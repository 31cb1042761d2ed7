"""Tasks of the reasoning-gym package: rows with a question, and how its authors score an answer.

`data.train: reasoning_gym:NAME` with `options` of the source. The package is imported only when a task is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from lockstep.config import ConfigError
from lockstep.data.answer_match import find_last
from lockstep.rollouts.rewards import RewardFunction, Row

PREFIX = "reasoning_gym:"
_DEFAULT_SIZE = 1000


def is_task(path: str) -> bool:
    return path.startswith(PREFIX)


def make_rows(path: str, options: Mapping[str, object], *, seed: int) -> list[dict[str, Any]]:
    """`size` and `seed` of the options are the number of rows and the task's seed; the rest is the task's own."""
    gym, name = _package(), path.removeprefix(PREFIX)
    if name not in gym.factory.DATASETS:
        raise ConfigError(f"{path}: reasoning-gym has no such task; it has {', '.join(sorted(gym.factory.DATASETS))}")
    settings = {"size": _DEFAULT_SIZE, "seed": seed, **options}
    try:
        entries = gym.create_dataset(name, **settings)
        rows = [entries[i] for i in range(len(entries))]
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{path}: the task does not take these options: {error}") from error
    return [
        {"prompt": row["question"], "answer": row["answer"], "task": name, "metadata": row["metadata"]} for row in rows
    ]


def reasoning_gym(*, pattern: str = r"<answer>(.*?)</answer>") -> RewardFunction:
    """The task's own score of the last match of `pattern`, or of the whole text where nothing matches."""
    score, find = cache(_package().get_score_answer_fn), find_last(pattern)

    def reward(text: str, row: Row) -> float:
        if "task" not in row:
            raise ValueError(f"the row has no 'task': use rows of {PREFIX}NAME")
        extracted = find(text)
        entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
        return float(score(row["task"])((text if extracted is None else extracted).strip(), entry))

    return reward


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise ConfigError("tasks of reasoning_gym need its package: pip install reasoning-gym") from error
    return reasoning_gym
