"""A job and its run directory, in Llama Stack's words: status, times, resources, checkpoints, artifacts.

Reads only. Must not know how a job is submitted, nor HTTP.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from lockstep.rundir import MANIFEST, RunDir
from lockstep.service.llama_stack.schemas import (
    Checkpoint,
    JobArtifactsResponse,
    JobProgress,
    JobStatus,
    JobStatusResponse,
    TrainingMetrics,
)
from lockstep.service.schemas import JobView

# What was said at submission, beside the run's own files.
SUBMISSION_FILE = "llama_stack.json"
STATES: dict[str, JobStatus] = {
    "queued": "scheduled",
    "preparing": "scheduled",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}


def status_of(job: JobView, run: RunDir) -> JobStatusResponse:
    said = read_submission(run)
    progress = JobProgress(**job.progress.model_dump(), queue_position=job.queue_position)
    return JobStatusResponse(
        job_uuid=job.id,
        status=STATES[job.state],
        scheduled_at=_time(job.created_at),
        started_at=_time(job.started_at),
        completed_at=_time(job.finished_at),
        resources_allocated=_resources(job, run.status()),
        checkpoints=[*list_exports(job, run), *_list_states(job, run)],
        error=(job.reason or "the job failed without a word") if job.state == "failed" else None,
        warnings=_warnings(run, said),
        progress=progress,
        metrics=job.metrics.model_dump(),
    )


def artifacts_of(job: JobView, run: RunDir) -> JobArtifactsResponse:
    """Only what loads elsewhere: training states are not among them."""
    return JobArtifactsResponse(job_uuid=job.id, checkpoints=list_exports(job, run))


def read_submission(run: RunDir) -> dict[str, Any]:
    """Empty for jobs that came in another way."""
    try:
        return json.loads((run.path / SUBMISSION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def list_exports(job: JobView, run: RunDir) -> list[Checkpoint]:
    """The adapter or model as it was after the last step, once the job has completed."""
    status = run.status()
    folder = Path(str(status.get("export")))
    if job.state != "completed" or status.get("export") is None or not folder.is_dir():
        return []
    kind: Literal["adapter", "model"] = "adapter" if (folder / "adapter_config.json").exists() else "model"
    step = int(status.get("step") or 0)
    states = {checkpoint.step: checkpoint.extra for checkpoint in run.list_checkpoints()}
    progress = states.get(step, {}).get("progress", {})
    return [_checkpoint(job, run, f"{job.id}-{kind}", folder, kind, step, progress, folder.stat().st_mtime)]


def _list_states(job: JobView, run: RunDir) -> list[Checkpoint]:
    found = []
    for state in run.list_checkpoints():
        with contextlib.suppress(OSError):  # pruned since it was listed
            created_at = (state.path / MANIFEST).stat().st_mtime
            progress = state.extra.get("progress", {})
            name = f"{job.id}-{state.path.name}"
            found.append(_checkpoint(job, run, name, state.path, "training_state", state.step, progress, created_at))
    return found


def _checkpoint(
    job: JobView,
    run: RunDir,
    identifier: str,
    path: Path,
    kind: Literal["adapter", "model", "training_state"],
    step: int,
    progress: Mapping[str, Any],
    created_at: float,
) -> Checkpoint:
    epoch = _epochs_at(run, step)
    loss = progress.get("loss")
    validation = progress.get("validation_loss") if progress.get("validation_step") == step else None
    metrics = TrainingMetrics(
        epoch=epoch,
        train_loss=loss,
        validation_loss=validation,
        perplexity=_perplexity(validation if validation is not None else loss) if job.kind == "sft" else None,
    )
    return Checkpoint(
        identifier=identifier,
        created_at=datetime.fromtimestamp(created_at, UTC),
        epoch=epoch,
        post_training_job_id=job.id,
        path=str(path),
        training_metrics=metrics,
        format=kind,
        step=step,
    )


def _epochs_at(run: RunDir, step: int) -> int:
    """Whole epochs after a step: of Llama Stack's, or of the rows where it did not say how long one is."""
    epoch_steps = read_submission(run).get("epoch_steps")
    if epoch_steps:
        return step // int(epoch_steps)
    return math.floor(float(run.status().get("epoch") or 0) + 1e-9)


def _perplexity(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < 700 else None


def _resources(job: JobView, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """None while the job waits. Memory is the peak so far: of the first process, and of the fullest one."""
    if job.prepared_at is None:
        return None
    last = job.metrics.train or {}
    own = last.get("memory_gib")
    memory = {"rank_0": own, "largest": last.get("memory_gib_max", own)} if own is not None else None
    known = {"processes": job.procs, "gpus": list(job.devices), "peak_memory_gib": memory}
    return {**known, "device": status.get("device"), "precision": status.get("precision")}


def _warnings(run: RunDir, said: Mapping[str, Any]) -> list[str]:
    """Of the submission and of the run itself, each once."""
    of_run = [str(event.get("message")) for event in run.events() if event.get("event") == "warning"]
    return list(dict.fromkeys([*said.get("warnings", []), *of_run]))


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
