"""The supervised loop: its checkpoints, going on from them, and what ends it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from loops.fake_run import (
    DIGEST,
    ScriptedBackend,
    batches_of,
    committed,
    make_config,
    make_rows,
    records_of,
    train,
    without_times,
)

from lockstep.backend.fake import FakeBackend
from lockstep.rundir import RunDir
from lockstep.train import sft
from lockstep.train.checkpoints import CheckpointError, Checkpoints, Progress
from lockstep.train.steps import Diverged, LoopInputs, RunInterrupted
from lockstep.types import Datum, LossResult, LossSpec, LossValues, OptimResult, OptimStep, SavedState

# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"every_steps": 2}, [2, 4, 6, 7]),
        ({"every_steps": 7}, [7]),
        ({"every_steps": 0}, [7]),
        ({"every_steps": 2, "asynchronous": False}, [2, 4, 6, 7]),
        ({"every_steps": 2, "keep_last": 2}, [6, 7]),
        ({"every_steps": 2, "keep_last": 1}, [7]),
    ],
)
def test_checkpoints_are_kept_of_the_steps_that_the_configuration_names(checkpoint, expected, tmp_path):
    backend = FakeBackend()
    config = make_config(checkpoint=checkpoint, optim={"epochs": 9, "max_steps": 7})
    run, _ = train(tmp_path / "run", config, backend, make_rows(10))
    assert committed(run) == expected
    every = checkpoint["every_steps"] or 7
    assert [call.step for call in backend.calls_of("save_state")] == sorted({*range(every, 8, every), 7})
    latest = run.latest_checkpoint()
    assert latest is not None
    assert latest.extra["data_digest"] == DIGEST


def test_training_that_stood_still_for_a_checkpoint_says_so_once(tmp_path):
    class Waiting(FakeBackend):
        def save_state(self, path: Path) -> Future[SavedState]:
            super().save_state(path).result()
            written: Future[SavedState] = Future()
            written.set_result(SavedState(copy_s=2.5, slow="the one before it was still being written"))
            return written

    config = make_config(checkpoint={"every_steps": 2}, optim={"epochs": 9, "max_steps": 6})
    run, _ = train(tmp_path / "run", config, Waiting(), make_rows(10))
    told = (
        "training stood still for 2.5 s while the checkpoint of step 2 was copied: the one before it was still being "
        "written"
    )
    assert run.status()["slow"] == [told]
    assert [event["message"] for event in run.events() if event["event"] == "warning"] == [told]


def test_the_best_checkpoints_are_kept_beside_the_last_ones(tmp_path):
    losses = [5.0, 2.0, 4.0, 1.0, 3.0, 6.0, 7.0]
    config = make_config(
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": 2},
        evaluation={"every_steps": 1},
        optim={"epochs": 9, "max_steps": 7},
    )
    run, _ = train(tmp_path / "run", config, ScriptedBackend(losses), make_rows(10), make_rows(2))
    assert {c.step: c.validation_loss for c in run.list_checkpoints()} == {2: 2.0, 4: 1.0, 7: 7.0}


def test_a_checkpoint_has_the_validation_loss_of_its_own_step_or_none(tmp_path):
    config = make_config(
        checkpoint={"every_steps": 1, "keep_best": 0},
        evaluation={"every_steps": 2},
        optim={"epochs": 9, "max_steps": 5},
    )
    run, _ = train(tmp_path / "run", config, ScriptedBackend([3.0, 2.0, 1.0]), make_rows(10), make_rows(2))
    assert {c.step: c.validation_loss for c in run.list_checkpoints()} == {1: None, 2: 3.0, 3: None, 4: 2.0, 5: 1.0}


def test_a_new_best_step_is_saved_at_once_unless_no_best_is_kept(tmp_path):
    for keep_best, expected in ((1, [1, 3, 5]), (0, [5])):
        config = make_config(
            checkpoint={"keep_best": keep_best}, evaluation={"every_steps": 1}, optim={"epochs": 9, "max_steps": 5}
        )
        backend = ScriptedBackend([5.0, 5.5, 4.0, 4.5, 4.5])
        run, _ = train(tmp_path / f"run-{keep_best}", config, backend, make_rows(10), make_rows(2))
        assert committed(run) == expected


@pytest.mark.parametrize("batch", [{"samples": 4}, {"samples": None, "tokens": 24}], ids=["samples", "tokens"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_a_resumed_run_continues_as_if_it_had_never_stopped(batch, deferred, tmp_path):
    config = make_config(
        batch=batch,
        optim={"epochs": 4, "warmup_steps": 3},
        checkpoint={"every_steps": 3, "keep_best": 0, "asynchronous": False},
        evaluation={"every_steps": 2, "at_start": True, "patience": 50},
    )
    rows, validation = make_rows(10), make_rows(3, name="validation.jsonl")
    whole = FakeBackend(deferred=deferred)
    whole_run, whole_progress = train(tmp_path / "whole", config, whole, rows, validation)

    broken = FakeBackend(deferred=deferred, failures={("forward_backward", 8): RuntimeError("the power went")})
    with pytest.raises(RuntimeError, match="the power went"):
        train(tmp_path / "run", config, broken, rows, validation)
    second = FakeBackend(deferred=deferred)
    run, progress = train(tmp_path / "run", config, second, rows, validation)

    assert [e["step"] for e in run.events() if e["event"] == "resumed"] == [6]
    assert batches_of(second) == batches_of(whole)[6:]
    assert second.calls_of("optim_step") == whole.calls_of("optim_step")[6:]
    assert (second.weight, second.momentum) == (whole.weight, whole.momentum)
    assert progress == whole_progress
    assert without_times(run.metrics()) == without_times(whole_run.metrics())


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path):
    config = make_config(evaluation={"at_start": True})
    train(tmp_path / "run", config, FakeBackend(), make_rows(10), make_rows(2))
    again = FakeBackend()
    _, progress = train(tmp_path / "run", config, again, make_rows(10), make_rows(2))
    assert progress.step == 3
    assert {call.name for call in again.calls} == {"load_state"}


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_a_loss_that_is_not_a_number_ends_the_run_and_names_step_and_rows(deferred, tmp_path):
    backend = FakeBackend(deferred=deferred, nonfinite_at=[5])
    config = make_config(checkpoint={"every_steps": 1, "asynchronous": False}, optim={"epochs": 9})
    with pytest.raises(Diverged) as caught:
        train(tmp_path / "run", config, backend, make_rows(10))
    run = RunDir(tmp_path / "run")
    guilty = backend.calls_of("forward_backward")[4].batch[0].origin
    assert f"the loss is nan at step 5, in rows {guilty}:" in str(caught.value)
    assert committed(run) == [1, 2, 3, 4]
    assert [call.step for call in backend.calls_of("save_state")] == [1, 2, 3, 4]
    assert [r["step"] for r in records_of(run)] == [1, 2, 3, 4]
    # Nothing was learned from it, nor after it.
    latest = run.latest_checkpoint()
    assert latest is not None
    sound = FakeBackend()
    sound.load_state(latest.path, with_optimizer=True)
    assert backend.weight == sound.weight


def test_a_gradient_that_is_not_finite_ends_the_run_and_names_the_whole_batch(tmp_path):
    class Overflowing(FakeBackend):
        def optim_step(self, step: OptimStep) -> OptimResult:
            super().optim_step(step)
            return OptimResult(lambda: math.inf)

    backend = Overflowing()
    with pytest.raises(Diverged) as caught:
        train(tmp_path / "run", make_config(batch={"samples": 7}), backend, make_rows(10))
    first_five = ", ".join(batches_of(backend)[0][:5])
    assert f"the gradient norm is inf at step 1, in rows {first_five} and 2 more:" in str(caught.value)
    assert committed(RunDir(tmp_path / "run")) == []


def test_a_validation_loss_that_is_not_a_number_ends_the_run(tmp_path):
    config = make_config(evaluation={"every_steps": 1}, checkpoint={"every_steps": 1, "asynchronous": False})
    with pytest.raises(Diverged, match="the validation loss is nan after step 2"):
        train(tmp_path / "run", config, ScriptedBackend([5.0, math.nan]), make_rows(10), make_rows(2))
    assert committed(RunDir(tmp_path / "run")) == [1]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "waited for"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_earlier_one(asynchronous, tmp_path):
    backend = FakeBackend(failures={("save_state", 4): OSError(28, "No space left on device")})
    config = make_config(checkpoint={"every_steps": 2, "asynchronous": asynchronous}, optim={"epochs": 9})
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", config, backend, make_rows(10))
    assert str(caught.value) == (
        "the checkpoint of step 4 could not be written: No space left on device; the last good checkpoint is of step 2"
    )
    # In the background the next steps may already be under way, but not the next checkpoint.
    assert backend.step in ({4, 5, 6} if asynchronous else {4})
    run = RunDir(tmp_path / "run")
    assert committed(run) == [2]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-2"]


def test_a_failed_write_surfaces_at_the_next_step_and_not_only_at_the_next_checkpoint(tmp_path, monkeypatch):
    backend = FakeBackend(failures={("save_state", 2): OSError(5, "Input/output error")})
    config = make_config(checkpoint={"every_steps": 2}, optim={"epochs": 9})
    honest = Checkpoints.poll

    def poll_when_written(checkpoints: Checkpoints) -> None:
        if checkpoints.pending is not None:
            checkpoints.pending.exception(timeout=20)  # the thread that commits gets all the time it wants
        honest(checkpoints)

    monkeypatch.setattr(Checkpoints, "poll", poll_when_written)
    with pytest.raises(CheckpointError, match="Input/output error; there is no checkpoint yet"):
        train(tmp_path / "run", config, backend, make_rows(10))
    assert len(backend.calls_of("forward_backward")) == 2


def test_a_checkpoint_that_never_ends_meets_a_deadline(tmp_path):
    class Stuck(FakeBackend):
        written: Future[SavedState] = Future()

        def save_state(self, path: Path) -> Future[SavedState]:
            return self.written

    with pytest.raises(CheckpointError, match="the checkpoint of step 3 was not written within 0 s"):
        train(tmp_path / "run", make_config(), Stuck(), make_rows(10), timeout_s=0.05)
    Stuck.written.set_exception(OSError(5, "let the thread go"))
    assert committed(RunDir(tmp_path / "run")) == []


def test_the_loop_does_not_wait_for_its_last_checkpoint_unless_it_was_asked_to_stop(tmp_path):
    """An export takes its time, too."""
    for stops in (False, True):
        backend = SlowlyWriting()
        config = make_config(checkpoint={"every_steps": 0})
        run = RunDir.create(tmp_path / f"run-{stops}", config)
        checkpoints = Checkpoints(run, backend, config.checkpoint, data_digest=DIGEST, timeout_s=20)
        inputs = LoopInputs(config, backend, make_rows(10), [], run, checkpoints, Progress())
        if stops:
            backend.stops = True
            threading.Timer(0.3, backend.finish).start()
            with pytest.raises(RunInterrupted):
                sft.train(inputs)
        else:
            progress = sft.train(inputs)
            assert (progress.step, committed(run)) == (3, [])
            backend.finish()
            checkpoints.wait()
        checkpoints.close()
        assert committed(run) == [1 if stops else 3]


class SlowlyWriting(FakeBackend):
    """Its checkpoint is written when `finish` is called."""

    stops = False

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        result = super().forward_backward(batch, loss)
        values = LossValues(result.loss, {}, (), self.stops)
        return LossResult(lambda: values, num_tokens=result.num_tokens, num_supervised=result.num_supervised)

    def save_state(self, path: Path) -> Future[SavedState]:
        self._path = path
        self._written: Future[SavedState] = Future()
        return self._written

    def finish(self) -> None:
        super().save_state(self._path)
        self._written.set_result(SavedState())
