"""A job in Llama Stack's words: states, times, resources, checkpoints and what of them loads elsewhere."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import resolve_config
from lockstep.rundir import RunDir
from lockstep.service.llama_stack.post_training import STATES, SUBMISSION_FILE, artifacts_of, status_of
from lockstep.service.schemas import FINISHED, JobMetrics, JobView, RunProgress


def make_run(folder: Path) -> RunDir:
    (folder / "train.jsonl").write_text("")
    config = resolve_config({"model": "org/model", "data": {"train": str(folder / "train.jsonl")}})
    return RunDir.create(folder / "run", config)


def commit(run: RunDir, step: int, loss: float, validation_loss: float | None = None, at: int | None = None) -> None:
    """`at` is the step after which the validation loss was measured, if not this one."""
    (run.begin_checkpoint(step) / "weights").write_text("x")
    progress = {"step": step, "loss": loss, "validation_loss": validation_loss, "validation_step": at or step}
    run.commit_checkpoint(step, {"progress": progress}, validation_loss)


def make_job(state: str = "running", **changes: Any) -> JobView:
    facts: dict[str, Any] = {"id": "one", "name": "one", "kind": "sft", "model": "m", "procs": 2}
    times = {"created_at": 100.0, "queued_at": 100.0, "prepared_at": 101.0}
    return JobView(**{**facts, **times, "state": state, **changes})


def finish(run: RunDir, kind: str = "adapter", step: int = 4) -> Path:
    folder = run.export / kind
    folder.mkdir(parents=True)
    if kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    run.write_status(state="completed", export=str(folder), step=step)
    return folder


def test_every_state_has_a_word(tmp_path):
    run = make_run(tmp_path)
    words = {state: status_of(make_job(state), run).status for state in STATES}
    assert words["queued"] == words["preparing"] == "scheduled"
    assert words["running"] == "in_progress"
    assert all(words[state] == state for state in FINISHED)


def test_times_are_of_the_world(tmp_path):
    job = make_job("completed", started_at=110.0, finished_at=120.5)
    answer = status_of(job, make_run(tmp_path))
    assert answer.scheduled_at == datetime.fromtimestamp(100.0, UTC)
    assert answer.started_at == datetime.fromtimestamp(110.0, UTC)
    assert answer.completed_at == datetime.fromtimestamp(120.5, UTC)


def test_a_job_that_waits_has_no_resources_yet(tmp_path):
    answer = status_of(make_job("queued", prepared_at=None, queue_position=3), make_run(tmp_path))
    assert answer.resources_allocated is None
    assert answer.progress.queue_position == 3


def test_resources_name_processes_devices_and_memory(tmp_path):
    run = make_run(tmp_path)
    run.write_status(device="cuda:0", precision="bf16")
    metrics = JobMetrics(train={"memory_gib": 1.5, "memory_gib_max": 2.5})
    found = status_of(make_job(devices=["0", "1"], metrics=metrics), run).resources_allocated
    assert found["processes"] == 2
    assert found["gpus"] == ["0", "1"]
    assert found["peak_memory_gib"] == {"rank_0": 1.5, "largest": 2.5}
    assert (found["device"], found["precision"]) == ("cuda:0", "bf16")


def test_progress_and_metrics_are_passed_on(tmp_path):
    job = make_job(
        progress=RunProgress(phase="training", step=3, total_steps=4, fraction=0.75, eta_s=2.0),
        metrics=JobMetrics(train={"loss": 1.0}, validation={"loss": 2.0}),
    )
    answer = status_of(job, make_run(tmp_path))
    assert (answer.progress.step, answer.progress.total_steps, answer.progress.eta_s) == (3, 4, 2.0)
    assert answer.metrics == {"train": {"loss": 1.0}, "validation": {"loss": 2.0}}


@pytest.mark.parametrize(("state", "error"), [("failed", "rank 0: no"), ("cancelled", None), ("running", None)])
def test_only_a_failed_job_has_an_error(tmp_path, state, error):
    assert status_of(make_job(state, reason="rank 0: no"), make_run(tmp_path)).error == error


def test_checkpoints_carry_their_metrics(tmp_path):
    run = make_run(tmp_path)
    (run.path / SUBMISSION_FILE).write_text(json.dumps({"epoch_steps": 2, "warnings": []}))
    commit(run, 2, loss=3.0)
    commit(run, 4, loss=2.0, validation_loss=1.0)
    commit(run, 5, loss=2.0, validation_loss=1.0, at=4)
    first, second, third = status_of(make_job(), run).checkpoints
    assert (first.epoch, first.step, first.format) == (1, 2, "training_state")
    assert first.training_metrics.train_loss == 3.0
    assert first.training_metrics.validation_loss is None
    assert first.training_metrics.perplexity == pytest.approx(math.exp(3.0))
    assert (second.epoch, second.training_metrics.validation_loss) == (2, 1.0)
    assert second.training_metrics.perplexity == pytest.approx(math.e)
    assert second.path == str(run.checkpoints / "step-4")
    assert (third.epoch, third.training_metrics.validation_loss) == (2, None)  # what was measured before is not of it


def test_a_preference_loss_is_no_perplexity(tmp_path):
    run = make_run(tmp_path)
    commit(run, 2, loss=0.6)
    (found,) = status_of(make_job(kind="dpo"), run).checkpoints
    assert found.training_metrics.perplexity is None


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_artifacts_are_what_loads_elsewhere(tmp_path, kind):
    run = make_run(tmp_path)
    commit(run, 4, loss=2.0)
    folder = finish(run, kind)
    (found,) = artifacts_of(make_job("completed"), run).checkpoints
    assert (found.path, found.format, found.step) == (str(folder), kind, 4)
    assert found.training_metrics.train_loss == 2.0
    listed = [checkpoint.format for checkpoint in status_of(make_job("completed"), run).checkpoints]
    assert listed == [kind, "training_state"]


@pytest.mark.parametrize("state", ["running", "failed", "cancelled"])
def test_an_unfinished_job_has_no_artifacts(tmp_path, state):
    run = make_run(tmp_path)
    finish(run)  # of an attempt before
    assert artifacts_of(make_job(state), run).checkpoints == []


def test_a_removed_export_is_not_listed(tmp_path):
    run = make_run(tmp_path)
    folder = finish(run)
    (folder / "adapter_config.json").unlink()
    folder.rmdir()
    assert artifacts_of(make_job("completed"), run).checkpoints == []


def test_warnings_of_the_request_and_of_the_run_come_once(tmp_path):
    run = make_run(tmp_path)
    (run.path / SUBMISSION_FILE).write_text(json.dumps({"warnings": ["gamma is not used"]}))
    run.log_event("warning", message="gamma is not used")
    run.log_event("warning", message="3 rows were cut")
    run.log_event("checkpoint", step=1)
    assert status_of(make_job(), run).warnings == ["gamma is not used", "3 rows were cut"]
