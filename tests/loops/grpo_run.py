"""A run of reinforcement learning with a fake backend, a sampler that knows its weight, and a judge of tokens."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loops.fake_run import DIGEST, make_config

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.parallel.group import ProcessGroup as Ranks
from lockstep.rollouts.episode import Rollouts
from lockstep.rollouts.orchestrator import Orchestrator
from lockstep.rollouts.rewards.reward import Attempt, Outcome, Turn
from lockstep.rollouts.source import ColocatedRollouts, EngineRollouts, RolloutSource, Task, read_rollouts
from lockstep.rundir import RunDir
from lockstep.train import grpo
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.run import resume
from lockstep.train.steps import LoopInputs
from lockstep.types import Prompt, SamplingParams, TextCompletion


def make_prompts(count: int, name: str = "train.jsonl") -> Prompts:
    rows = [
        PromptRow(f"{name}:{i + 1}", (1, 2, i % 50), {"prompt": f"question {i}", "answer": i}) for i in range(count)
    ]
    return Prompts(rows)


@dataclass
class FakePolicy:
    """Samples tokens by a hash of seed, key, sample and place; its log-probs are those of the backend."""

    backend: FakeBackend
    gap: float = 0.0
    version: int = 0
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int]
    ) -> list[list[TextCompletion]]:
        self.asked.append((list(keys), params))
        return [
            [self._answer(key, number, params) for number in range(params.num_samples)]
            for key, _ in zip(keys, prompts, strict=True)
        ]

    def _answer(self, key: int, number: int, params: SamplingParams) -> TextCompletion:
        tokens = draw_answer(params, key, number)
        logprobs = tuple(-((self.backend.weight - token) ** 2) / 2 + self.gap for token in tokens)
        reason = "length" if len(tokens) == params.max_tokens else "stop"
        return TextCompletion(tokens, " ".join(map(str, tokens)), reason, logprobs, self.version)


def draw_answer(params: SamplingParams, key: int, number: int) -> tuple[int, ...]:
    """Decided by seed, key and number, whatever the weights are."""
    drawn = [_mix(params.seed or 0, key, number, place) for place in range(params.max_tokens)]
    return tuple(value % 7 for value in drawn[: 1 + drawn[0] % params.max_tokens])


def _mix(*values: int) -> int:
    state = 17
    for value in values:
        state = (state * 6364136223846793005 + value + 1442695040888963407) % 2**64
    return state >> 33


class SumJudge:
    """The reward is the mean of the tokens said; a text that begins with one of `bad` cannot be scored."""

    def __init__(self, bad: str = "", replies: Sequence[str | None] = ()) -> None:
        self._bad, self._replies = bad, replies
        self.scored: list[Attempt] = []

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        self.scored += attempts
        return [self._score(attempt.answer) for attempt in attempts]

    def _score(self, text: str) -> Outcome:
        if self._bad and text[0] in self._bad:
            return Outcome.tainted("the judge is ill")
        value = statistics.fmean(map(int, text.split()))
        return Outcome(value, {"mean": value, "short": float(len(text) < 6)})

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        return [Turn(message=self._replies[len(attempt.turns) - 1]) for attempt in attempts]


def grpo_config(algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    settings = {"kind": "grpo", "reward": "exact", "group_size": 3, "max_tokens": 4, **(algorithm or {})}
    return make_config(algorithm=settings, **{"optim": {"learning_rate": 1e-3}, **changes})


def make_rollouts(config: RunConfig, sample: Any, judge: Any = None) -> Rollouts:
    algorithm = config.algorithm
    return Rollouts(
        sample,
        judge or SumJudge(),
        lambda message, last: [int(word) for word in message.split()],
        algorithm.max_turns if algorithm.environment else 1,
        config.data.max_length,
    )


def train(
    folder: Path,
    config: RunConfig,
    backend: FakeBackend,
    prompts: Prompts,
    validation: Prompts | None = None,
    *,
    judge: Any = None,
    policy: FakePolicy | None = None,
    engines: Any = None,
) -> tuple[RunDir, Progress]:
    """The run in `folder`, from its start or from its newest checkpoint: what train.run does around the loop."""
    run = RunDir(folder, owner=True) if (folder / "config.yaml").exists() else RunDir.create(folder, config)
    progress = resume(run, backend, Ranks(0, 1, torch.device("cpu")), DIGEST)
    checkpoints = Checkpoints(
        run, backend, config.checkpoint, data_digest=DIGEST, timeout_s=20, last_step=progress.step or None
    )
    task = Task(config, prompts)
    found = read_rollouts(run.checkpoints / f"step-{progress.step}")
    buffer = task.open_buffer(progress, found)
    if engines is not None:
        rollouts, begun = make_rollouts(config, None, judge), (found or {}).get("under_way")
        collector = Orchestrator(task, buffer, rollouts, engines, num_threads=6, found=begun)
        feed: RolloutSource = EngineRollouts(collector, lambda value: value, backend.read_weights, interval_s=5)
    else:
        feed = ColocatedRollouts(
            task, buffer, make_rollouts(config, _own_sample(policy or FakePolicy(backend), buffer), judge)
        )
    try:
        held_out = validation if validation is not None else Prompts([])
        total = task.schedule.num_steps
        inputs = LoopInputs(config, backend, prompts, held_out, run, checkpoints, progress)
        return run, grpo.train(inputs, feed, total)
    finally:
        feed.close()
        checkpoints.wait()
        checkpoints.close()


def _own_sample(policy: FakePolicy, buffer: Any) -> Any:
    def sample(prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int]) -> list[list[TextCompletion]]:
        policy.version = buffer.version
        return policy.sample(prompts, params, keys)

    return sample


def samples_of(run: RunDir, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / f"samples/step-{step}.jsonl").read_text().splitlines()]


class FlatJudge(SumJudge):
    """Answers to every other question all earn the same."""

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        found = super().score(attempts)
        return [Outcome(1.0, o.scores) if a.row["answer"] % 2 else o for a, o in zip(attempts, found, strict=True)]
