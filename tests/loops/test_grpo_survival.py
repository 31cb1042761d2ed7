"""A run of reinforcement learning that is killed anywhere goes on bit for bit; one that goes wrong says so."""

from __future__ import annotations

import math

import pytest
from loops.fake_run import without_times
from loops.grpo_run import FakePolicy, ZeroStdScorer, grpo_config, make_prompts, samples_of, train

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.train.steps import Diverged

TIMES = {"sample_time_s"}


def all_settings(every: int) -> RunConfig:
    return grpo_config(
        {
            "zero_std_groups": "refill",
            "num_updates": 2,
            "minibatches": 2,
            "kl_coefficient": 0.01,
            "reference_sync_steps": 2,
        },
        optim={"epochs": 2, "warmup_steps": 2, "learning_rate": 1e-4},
        checkpoint={"every_steps": every, "keep_best": 0, "asynchronous": False},
        evaluation={"every_steps": 2, "at_start": True},
    )


PLACES = [("forward", step) for step in range(0, 24, 4)]
PLACES += [(method, step) for method in ("forward_backward", "optim_step") for step in range(0, 24, 3)]


@pytest.mark.parametrize(("method", "step"), PLACES)
def test_a_run_killed_anywhere_goes_on_as_if_it_had_never_stopped(method, step, tmp_path):
    """`step` counts optimizer steps: four of them make a step of the loop."""
    config, held_out = all_settings(every=2), make_prompts(4, "v.jsonl")
    whole = FakeBackend()
    whole_run, whole_progress = train(
        tmp_path / "whole", config, whole, make_prompts(14), held_out, scorer=ZeroStdScorer()
    )
    assert whole.step > 20
    broken = FakeBackend(failures={(method, step): RuntimeError("the power went")})
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, make_prompts(14), held_out, scorer=ZeroStdScorer())
    second = FakeBackend()
    run, progress = train(tmp_path / "run", config, second, make_prompts(14), held_out, scorer=ZeroStdScorer())
    assert (second.weight, second.momentum, second.reference) == (whole.weight, whole.momentum, whole.reference)
    assert progress == whole_progress
    mine, theirs = (
        [{k: v for k, v in record.items() if k not in TIMES} for record in without_times(r.metrics())]
        for r in (run, whole_run)
    )
    assert mine == theirs
    for number in range(1, progress.step + 1):
        assert samples_of(run, number) == samples_of(whole_run, number)


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path):
    with pytest.raises(Diverged, match="the loss is nan at step 2"):
        train(tmp_path / "run", grpo_config(), FakeBackend(nonfinite_at=[2]), make_prompts(10))


def test_a_gap_that_is_not_a_number_ends_the_run(tmp_path):
    backend = FakeBackend()
    with pytest.raises(Diverged, match="sampler and trainer differ by nan"):
        train(tmp_path / "run", grpo_config(), backend, make_prompts(10), policy=FakePolicy(backend, gap=math.nan))
