"""Prompts from files and tasks, and rewards that are checked before the start and shared by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.rollouts.rewards import Attempt, Outcome
from lockstep.rollouts.source import SharedScorer, on_all_ranks, open_rewards, read_prompt_data
from lockstep.train import grpo


def config_of(folder: Path, algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    settings = {"kind": "grpo", "reward": "exact", "max_tokens": 8, **(algorithm or {})}
    return load_config(tiny.write_config(folder, folder / "model", algorithm=settings, **changes))


def write_prompts(folder: Path, texts: Sequence[str]) -> None:
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{text}", "answer": "x"}}\n' for text in texts))


def test_what_would_be_sampled_can_be_said_before(tmp_path):
    write_prompts(tmp_path, [f"question {i}" for i in range(9)] + ["far too long " * 20])
    algorithm = {"group_size": 5, "num_updates": 2, "minibatches": 2, "reward": {"exact": 1.0, "regex": 0.5}}
    algorithm["reward"] = [{"name": "exact"}, {"name": "regex", "weight": 0.5, "options": {"pattern": "x"}}]
    found = grpo.describe(config_of(tmp_path, algorithm), tiny.build_tokenizer())
    assert (found["steps"], found["prompts"], found["answers"], found["updates"]) == (3, 4, 20, 4)
    assert found["rewards"] == "exact x 1, regex x 0.5"
    assert found["reference"] == "none: kl_coefficient is 0"
    assert (found["train_rows"], found["validation_rows"]) == (9, 0)
    assert found["warnings"] == ["1 prompts are left out: they leave no room for an answer in data.max_length"]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"reward": "nice"}, "algorithm.reward 'nice' is unknown"),
        ({"reward": "regex"}, "algorithm.reward regex does not take these options"),
        ({"environment": "chess"}, "algorithm.environment 'chess' is unknown"),
    ],
)
def test_a_reward_that_there_is_not_shows_before_the_model_is_loaded(tmp_path, algorithm, words):
    write_prompts(tmp_path, ["a"])
    with pytest.raises(ConfigError) as caught:
        read_prompt_data(config_of(tmp_path, algorithm), tiny.build_tokenizer())
    assert words in str(caught.value)


def test_a_share_of_the_prompts_cannot_be_held_out(tmp_path):
    write_prompts(tmp_path, ["a", "b"])
    with pytest.raises(ConfigError, match="is not for grpo: name a file"):
        read_prompt_data(config_of(tmp_path, data={"validation_fraction": 0.5}), tiny.build_tokenizer())


def test_a_task_of_reasoning_gym_is_a_source(tmp_path):
    pytest.importorskip("reasoning_gym")
    source = {"path": "reasoning_gym:chain_sum", "options": {"size": 6, "max_terms": 2}}
    found = read_prompt_data(config_of(tmp_path, data={"train": source}), tiny.build_tokenizer())
    assert len(found.train) == 6
    assert found.train[0].fields["task"] == "chain_sum"
    assert found.train[0].origin == "reasoning_gym:chain_sum:1"


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        self.calls += 1
        return [Outcome(1.0) for _ in attempts]


def test_rewards_are_computed_once_and_given_to_all():
    pool, sent = Counting(), []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return sent[0]

    first, second = SharedScorer(pool, broadcast), SharedScorer(None, broadcast)  # type: ignore[arg-type]
    attempts = [Attempt({}, ["x"])]
    assert first.score(attempts) == second.score(attempts) == [Outcome(1.0)]
    assert pool.calls == 1
    assert sent[1] is None


def test_what_goes_wrong_where_rewards_are_computed_is_raised_everywhere():
    def start() -> None:
        raise ConfigError("no such module")

    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return sent[0]

    for compute in (start, None):
        with pytest.raises(ConfigError, match="no such module"):
            on_all_ranks(broadcast, compute)


def test_rewards_of_a_configuration_are_computed(tmp_path):
    pool = open_rewards(config_of(tmp_path).algorithm)
    try:
        pool.start()
        assert pool.score([Attempt({"answer": "x"}, ["x"])])[0].reward == 1
    finally:
        pool.close()


def test_rewards_of_many_threads_do_not_mix(tmp_path):
    pool = open_rewards(config_of(tmp_path).algorithm)
    try:
        pool.start()

        def score(number: int) -> list[float]:
            attempts = [Attempt({"answer": str(number)}, [str(n)]) for n in range(8)]
            return [outcome.reward for outcome in pool.score(attempts)]

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(score, range(8)))
    finally:
        pool.close()
    assert found == [[float(n == number) for n in range(8)] for number in range(8)]
