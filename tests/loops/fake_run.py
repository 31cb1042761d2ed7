"""A run of a loop with a fake backend and a real run directory, and what tests look at in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.rundir import RunDir
from lockstep.train import dpo, sft
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.run import resume
from lockstep.train.steps import LoopInputs
from lockstep.types import Completion, Datum, Logprobs

DIGEST = "the rows of this test"
TIMES = {"time", "tokens_per_s", "step_time_s", "time_s"}


def make_config(**changes: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train": ["none.jsonl"], "max_length": 16, "validation": ["none.jsonl"]},
        "batch": {"samples": 4},
        "optim": {"learning_rate": 0.1},
        "checkpoint": {"every_steps": 0, "keep_last": 100},
        "evaluation": {"every_steps": 0, "at_start": False},
        "logging": {"tensorboard": False},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return RunConfig.model_validate(tree)


def make_rows(count: int, *, length: int | None = None, name: str = "train.jsonl") -> list[Datum]:
    """Weights of several sizes, some zero; 5 to 9 tokens unless a length is given."""
    rows = []
    for i in range(count):
        num_answer = (length or 5 + i * 3 % 5) - 2
        weights = [(0.0, 1.0, 0.5)[(i + t) % 3] for t in range(num_answer)]
        answer = Completion([(i * 5 + t * 3) % 97 for t in range(num_answer)], [*weights[:-1], 1.0])
        rows.append(Datum([1, 2], [answer], f"{name}:{i + 1}"))
    return rows


def make_pairs(count: int, *, name: str = "train.jsonl") -> list[Datum]:
    """One prompt and two answers of different lengths, each; the preferred one has tokens further from the weight."""
    rows = []
    for i in range(count):
        chosen, rejected = ([(i + t * 3) % 5 for t in range(3 + i % 3)], [(5 + i * t) % 7 for t in range(2 + i % 4)])
        answers = [Completion(tokens, [0.0] * (i % 2) + [1.0] * (len(tokens) - i % 2)) for tokens in (chosen, rejected)]
        rows.append(Datum([1, 2, i % 50], answers, f"{name}:{i + 1}"))
    return rows


def make_labelled(count: int, *, name: str = "train.jsonl") -> list[Datum]:
    rows = []
    for i, pair in enumerate(make_pairs(count, name=name)):
        answer = pair.completions[i % 2]
        label = [float(i % 2 == 0)] * len(answer.tokens)
        rows.append(Datum(pair.prompt, [Completion(answer.tokens, answer.weights, {"label": label})], pair.origin))
    return rows


def train(
    folder: Path,
    config: RunConfig,
    backend: FakeBackend,
    rows: Sequence[Datum],
    validation: Sequence[Datum] = (),
    timeout_s: float = 20.0,
) -> tuple[RunDir, Progress]:
    """The run in `folder`, from its start or from its newest checkpoint: what train.run does around the loop."""
    run = RunDir(folder, owner=True) if (folder / "config.yaml").exists() else RunDir.create(folder, config)
    run.sweep()
    progress = resume(run, backend, ProcessGroup(0, 1, torch.device("cpu")), DIGEST)
    checkpoints = Checkpoints(
        run,
        backend,
        config.checkpoint,
        data_digest=DIGEST,
        timeout_s=timeout_s,
        last_step=progress.step or None,
    )
    loop = sft.train if config.algorithm.kind == "sft" else dpo.train
    try:
        progress = loop(LoopInputs(config, backend, rows, validation, run, checkpoints, progress))
        checkpoints.wait()
        return run, progress
    finally:
        checkpoints.close()


def records_of(run: RunDir, split: str = "train") -> list[dict[str, Any]]:
    return [r for r in run.metrics() if r["split"] == split]


def committed(run: RunDir) -> list[int]:
    return [c.step for c in run.list_checkpoints()]


def batches_of(backend: FakeBackend) -> list[list[str]]:
    return [call.origins for call in backend.calls_of("forward_backward")]


def without_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


class ScriptedBackend(FakeBackend):
    """Its validation losses are given, one for each evaluation."""

    def __init__(self, losses: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.losses = list(losses)

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        super().forward(batch, reference=reference)
        loss = self.losses.pop(0)
        return [[[-loss] * len(c.tokens) for c in datum.completions] for datum in batch]
