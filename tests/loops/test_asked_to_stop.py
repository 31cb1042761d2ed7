"""A loop that is asked to stop finishes its step, saves and says so; resumed, it goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import fake_run, grpo_run
from loops.fake_engines import FakeEngines
from loops.fake_run import committed, make_config, make_pairs, make_rows, without_times

from lockstep.backend.fake import FakeBackend
from lockstep.rundir import RunDir
from lockstep.train.steps import RunInterrupted


class AskedAt(FakeBackend):
    """Was asked to stop before its forward pass of one step, counted from 0."""

    def __init__(self, step: int, **options: Any) -> None:
        super().__init__(asked_to_stop=lambda: self.step == step, **options)


def train_sft(folder: Path, backend: FakeBackend) -> RunDir:
    config = make_config(evaluation={"every_steps": 2, "at_start": True})
    return fake_run.train(folder, config, backend, make_rows(40), make_rows(3, name="v.jsonl"))[0]


def train_dpo(folder: Path, backend: FakeBackend) -> RunDir:
    config = make_config(algorithm={"kind": "dpo"}, evaluation={"every_steps": 2})
    return fake_run.train(folder, config, backend, make_pairs(40), make_pairs(3, name="v.jsonl"))[0]


def train_grpo(folder: Path, backend: FakeBackend) -> RunDir:
    return grpo_run.train(folder, grpo_run.grpo_config(), backend, grpo_run.make_prompts(40))[0]


def numbers_of(run: RunDir) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "sample_time_s"} for record in without_times(run.metrics())]


@pytest.mark.parametrize("asked_at", [0, 3, 6])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("train", [train_sft, train_dpo, train_grpo])
def test_an_interrupted_run_goes_on_as_if_nobody_had_asked(
    train: Callable[[Path, FakeBackend], RunDir], deferred: bool, asked_at: int, tmp_path: Path
) -> None:
    """A device whose numbers are read late stops one step later; so do all of its ranks."""
    whole = FakeBackend(deferred=deferred)
    undisturbed = train(tmp_path / "whole", whole)
    with pytest.raises(RunInterrupted, match="can go on"):
        train(tmp_path / "run", AskedAt(asked_at, deferred=deferred))
    is_late = deferred and train is not train_grpo
    assert committed(RunDir(tmp_path / "run"))[-1] in (asked_at + 1, asked_at + 1 + is_late)
    second = FakeBackend(deferred=deferred)
    run = train(tmp_path / "run", second)
    assert (second.weight, second.momentum) == (whole.weight, whole.momentum)
    assert numbers_of(run) == numbers_of(undisturbed)


@pytest.mark.parametrize("train", [train_sft, train_dpo, train_grpo])
def test_a_run_that_is_asked_in_its_last_step_completes(
    train: Callable[[Path, FakeBackend], RunDir], tmp_path: Path
) -> None:
    run = train(tmp_path / "run", AskedAt(9))
    assert committed(run)[-1] == 10


def test_a_run_that_is_asked_while_engines_sample_does_not_wait_for_them(tmp_path: Path) -> None:
    """Its checkpoint has the weights before that step, which is then sampled again."""
    config = grpo_run.grpo_config(rollouts={"engines": 2})
    prompts = grpo_run.make_prompts(40)
    whole, backend, second = FakeBackend(), FakeBackend(), FakeBackend()
    undisturbed, _ = grpo_run.train(tmp_path / "whole", config, whole, prompts, engines=FakeEngines())
    engines = FakeEngines(hold=lambda key, place: key >= 12)  # the fourth step
    with pytest.raises(RunInterrupted):
        grpo_run.train(
            tmp_path / "run", config, backend, prompts, engines=engines, asked_to_stop=lambda: backend.step == 3
        )
    assert committed(RunDir(tmp_path / "run")) == [3]
    run, _ = grpo_run.train(tmp_path / "run", config, second, prompts, engines=FakeEngines())
    assert (second.weight, second.momentum) == (whole.weight, whole.momentum)
    assert [r["loss"] for r in run.metrics()] == [r["loss"] for r in undisturbed.metrics()]
