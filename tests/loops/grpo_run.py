"""A run of reinforcement learning with a fake backend, a sampler that knows its weight, and a scorer of tokens."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loops.fake_run import DIGEST, make_config

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.parallel.group import ProcessGroup as Ranks
from lockstep.rollouts.episode import EpisodeRunner
from lockstep.rollouts.orchestrator import Orchestrator, PromptStream
from lockstep.rollouts.rewards import Attempt, Outcome, Turn
from lockstep.rollouts.source import ColocatedRollouts, EngineRollouts, RolloutSource, open_buffer, read_rollouts
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
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int]
    ) -> list[list[TextCompletion]]:
        self.requests.append((list(keys), params))
        return [
            [self._complete(key, number, params) for number in range(params.num_samples)]
            for key, _ in zip(keys, prompts, strict=True)
        ]

    def _complete(self, key: int, number: int, params: SamplingParams) -> TextCompletion:
        tokens = draw_completion(params, key, number)
        logprobs = tuple(-((self.backend.weight - token) ** 2) / 2 + self.gap for token in tokens)
        reason = "length" if len(tokens) == params.max_tokens else "stop"
        return TextCompletion(tokens, " ".join(map(str, tokens)), reason, logprobs, self.version)


def draw_completion(params: SamplingParams, key: int, number: int) -> tuple[int, ...]:
    """Decided by seed, key and number, whatever the weights are."""
    drawn = [_mix(params.seed or 0, key, number, place) for place in range(params.max_tokens)]
    return tuple(value % 7 for value in drawn[: 1 + drawn[0] % params.max_tokens])


def _mix(*values: int) -> int:
    state = 17
    for value in values:
        state = (state * 6364136223846793005 + value + 1442695040888963407) % 2**64
    return state >> 33


class SumScorer:
    """The reward is the mean of the tokens; the reward of a text that begins with one of `bad` fails."""

    def __init__(self, bad: str = "", replies: Sequence[str | None] = ()) -> None:
        self._bad, self._replies = bad, replies
        self.scored: list[Attempt] = []

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        self.scored += attempts
        return [self._score(attempt.answer) for attempt in attempts]

    def _score(self, text: str) -> Outcome:
        if self._bad and text[0] in self._bad:
            return Outcome.failed("the scorer is ill")
        value = statistics.fmean(map(int, text.split()))
        return Outcome(value, {"mean": value, "short": float(len(text) < 6)})

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        return [Turn(message=self._replies[len(attempt.turns) - 1]) for attempt in attempts]


def grpo_config(algorithm: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    settings = {"kind": "grpo", "reward": "exact", "group_size": 3, "max_tokens": 4, **(algorithm or {})}
    return make_config(algorithm=settings, **{"optim": {"learning_rate": 1e-3}, **changes})


def make_runner(config: RunConfig, scorer: Any = None) -> EpisodeRunner:
    algorithm = config.algorithm
    return EpisodeRunner(
        scorer or SumScorer(),
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
    scorer: Any = None,
    policy: FakePolicy | None = None,
    engines: Any = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> tuple[RunDir, Progress]:
    """The run in `folder`, from its start or from its newest checkpoint: what train.run does around the loop."""
    run = RunDir(folder, owner=True) if (folder / "config.yaml").exists() else RunDir.create(folder, config)
    progress = resume(run, backend, Ranks(0, 1, torch.device("cpu")), DIGEST)
    checkpoints = Checkpoints(
        run, backend, config.checkpoint, data_digest=DIGEST, timeout_s=20, last_step=progress.step or None
    )
    total = grpo.count_steps(config, prompts)
    stream, runner = PromptStream(config, prompts, total), make_runner(config, scorer)
    state = read_rollouts(run.checkpoints / f"step-{progress.step}")
    buffer = open_buffer(stream, state, step=progress.step, cursor=progress.cursor)
    if engines is not None:
        orchestrator = Orchestrator(stream, buffer, runner, engines, num_threads=6, state=state)
        source: RolloutSource = EngineRollouts(orchestrator, lambda value: value, backend.read_weights, interval_s=5)
    else:
        source = ColocatedRollouts(stream, buffer, runner, policy or FakePolicy(backend))  # type: ignore[arg-type]
    try:
        held_out = validation if validation is not None else Prompts([])
        inputs = LoopInputs(config, backend, prompts, held_out, run, checkpoints, progress, None, asked_to_stop)
        return run, grpo.train(inputs, source, total)
    finally:
        source.close()
        checkpoints.wait()
        checkpoints.close()


def samples_of(run: RunDir, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / f"samples/step-{step}.jsonl").read_text().splitlines()]


class ZeroStdScorer(SumScorer):
    """All rollouts of every other prompt have the same reward."""

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        outcomes = super().score(attempts)
        return [Outcome(1.0, o.scores) if a.row["answer"] % 2 else o for a, o in zip(attempts, outcomes, strict=True)]
