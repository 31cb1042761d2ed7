"""Llama Stack's six calls on a JobManager: what the HTTP routes and the inline provider share.

Blocking: callers in an event loop use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lockstep.config import ConfigError
from lockstep.rundir import MANIFEST, RunDir, read_json_object, write_atomically
from lockstep.service.access import Caller, own_job, seen_job
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack.mapping import (
    JOB,
    MappedJob,
    RequestError,
    TrainingData,
    base_model,
    check_format,
    convert_rows,
    is_foreign,
    map_fine_tune,
    map_preference,
)
from lockstep.service.llama_stack.schemas import (
    Checkpoint,
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobProgress,
    JobStatus,
    JobStatusResponse,
    ListedJob,
    PostTrainingJob,
    PreferenceRequest,
    TrainingConfig,
    TrainingMetrics,
)
from lockstep.service.schemas import ID_PATTERN, DatasetView, JobRequest, JobView

# Warnings and epochs of the submission, beside the run's own files.
SUBMISSION_FILE = "llama_stack.json"
STATES: dict[str, JobStatus] = {
    "queued": "scheduled",
    "preparing": "scheduled",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}
Submission = FineTuneRequest | PreferenceRequest
_DATASET = "dataset:"
_NO_FOLDER = ("", "null")  # what callers write for a checkpoint_dir that they do not want
_PAGE = 500


class PostTraining:
    def __init__(self, manager: JobManager) -> None:
        self._manager = manager

    def submit(self, request: Submission, caller: Caller) -> PostTrainingJob:
        """The same request again gives the same job; another one under its name is a JobConflict."""
        try:
            place = self._checkpoint_place(request)
            mapped = self._map(request, caller)
            self._refuse_adapter(mapped, caller)
            wanted = JobRequest(
                id=request.job_uuid, config=mapped.config, priority=mapped.priority, max_restarts=mapped.max_restarts
            )
            job = self._manager.submit(wanted, owner=caller.name, admin=caller.is_admin)
        except ConfigError as error:
            raise RequestError(f"the job cannot run as asked: {error}") from error
        except (RecursionError, UnicodeError, OverflowError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            raise RequestError(
                "the request holds what no job can be made of: a name, a text, a number or a nesting"
            ) from error
        run = self._manager.run_dir(job.id)
        _record_submission(run, mapped)
        if place is not None:
            _link(place, run.export)
        return PostTrainingJob(job_uuid=job.id)

    def _map(self, request: Submission, caller: Caller) -> MappedJob:
        data = self._find_data(request.training_config, caller)
        field, name = base_model(request)
        model = self._find_model(name, field, caller)
        if isinstance(request, FineTuneRequest):
            return map_fine_tune(request, model, data)
        return map_preference(request, model, data)

    def jobs(self, caller: Caller) -> JobList:
        listed: list[ListedJob] = []
        while True:
            page, total = self._manager.store.select(
                state=None, owner=caller.sees_owner, limit=_PAGE, offset=len(listed)
            )
            listed += [ListedJob(job_uuid=job.id, status=STATES[job.state]) for job in page]
            if not page or len(listed) >= total:
                return JobList(data=listed)

    def status(self, job_uuid: str, caller: Caller) -> JobStatusResponse:
        job = self._find(job_uuid, caller)
        return status_of(job, self._manager.run_dir(job.id))

    def artifacts(self, job_uuid: str, caller: Caller) -> JobArtifactsResponse:
        job = self._find(job_uuid, caller)
        return artifacts_of(job, self._manager.run_dir(job.id))

    def cancel(self, job_uuid: str, caller: Caller) -> None:
        self._manager.cancel(own_job(self._manager, caller, job_uuid).id)

    def _find(self, job_uuid: str, caller: Caller) -> JobView:
        return self._manager.get(seen_job(self._manager, caller, job_uuid).id)

    # --- models and folders -------------------------------------------------------------------------------------------

    def _find_model(self, name: str | None, field: str, caller: Caller) -> str:
        """A name of the Hub, a folder, or `job:ID` for what an earlier job made; answers name folders `job:ID/...`."""
        if not name:
            raise RequestError(f"{field} is missing: name a model of the Hub or a folder")
        if not name.startswith(JOB) or "/" in name:
            return name
        job_id = name.removeprefix(JOB)
        if "/" in job_id:
            return name  # one of its files, as answers name them
        if not re.fullmatch(ID_PATTERN, job_id):
            raise RequestError(f"{field}: {job_id!r} is no name of a job")
        job = self._find(job_id, caller)
        exported = self._manager.run_dir(job.id).status().get("export")
        if job.state != "completed" or exported is None:
            raise RequestError(f"{field}: job {job.id} has no model yet: it is {job.state}")
        return str(exported)

    def _refuse_adapter(self, mapped: MappedJob, caller: Caller) -> None:
        """Only once the path is known to be one that this caller may read."""
        model = self._manager.admit(mapped.config, owner=caller.name, admin=caller.is_admin).config.model.path
        with contextlib.suppress(OSError):
            if (Path(model) / "adapter_config.json").exists():
                raise RequestError(
                    f"{model} holds an adapter and not a whole model: train it again with provider_config "
                    '{"checkpoint": {"export": "merged"}}, or merge it with lockstep export'
                )

    def _checkpoint_place(self, request: Submission) -> Path | None:
        """Where the caller wants the result: below one folder of the data directory, or where jobs may write."""
        wanted = request.checkpoint_dir
        if wanted is None or wanted in _NO_FOLDER:
            return None
        place = self._locate_folder(wanted)
        export = self._manager.data_dir.jobs / request.job_uuid / "export"
        if place.is_symlink() and os.readlink(place) != str(export):
            raise RequestError(f"checkpoint_dir: {wanted} already belongs to another job: choose another name")
        if not place.is_symlink() and place.exists():
            raise RequestError(f"checkpoint_dir: {wanted} is already there: choose a name that is not")
        return place

    def _locate_folder(self, wanted: str) -> Path:
        own, places = self._manager.data_dir.path / "checkpoints", self._manager.admission.places
        asked = places.locate(wanted) or own / wanted  # an absolute path stays what it is
        folder = asked.parent.resolve() / asked.name  # the last part itself may be a link of ours
        if folder.parent == own.resolve() and re.fullmatch(ID_PATTERN, folder.name):
            return folder
        if ".." not in asked.parts and folder.name and places.may_write(folder):
            return folder
        raise RequestError(
            f"checkpoint_dir: {wanted} is not in a folder that jobs may write to: give a plain name, ask the operator "
            "for --allow-write, or leave it out and ask for the job's artifacts"
        )

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _find_data(self, config: TrainingConfig, caller: Caller) -> TrainingData:
        data_config = config.data_config
        if data_config is None:
            raise RequestError("training_config.data_config is missing: it names the rows to train on")
        train = self._find_rows(data_config.dataset_id, "dataset_id", data_config.data_format, caller)
        if not data_config.validation_dataset_id:
            return TrainingData(_DATASET + train.name, train.rows)
        validation = self._find_rows(
            data_config.validation_dataset_id,
            "validation_dataset_id",
            data_config.data_format,
            caller,
            limit=data_config.batch_size * config.max_validation_steps if config.max_validation_steps else None,
        )
        return TrainingData(_DATASET + train.name, train.rows, _DATASET + validation.name)

    def _find_rows(
        self, dataset_id: str, field: str, data_format: str | None, caller: Caller, limit: int | None = None
    ) -> DatasetView:
        """A data set in Lockstep's formats with at most `limit` rows: the one named, or one made from it."""
        name = dataset_id.removeprefix(_DATASET)
        place = f"training_config.data_config.{field}"
        known = self._manager.store.find_dataset(name) if re.fullmatch(ID_PATTERN, name) else None
        if known is None or not caller.may_see(known.owner):
            raise RequestError(f"{place}: there is no data set {name}: upload it to /api/datasets/{name}")
        dataset, path = self._manager.datasets.get(name), self._manager.datasets.path(name)
        first = next(_read_rows(path))
        converts = is_foreign(first)
        check_format(next(convert_rows([first], name)), data_format, name)
        if not converts and (limit is None or dataset.rows <= limit):
            return dataset
        limit = None if limit is None else min(limit, dataset.rows)
        rows = islice(_read_rows(path), limit)
        # Named by content, so that the same request finds it again.
        derived = f"{name[:32]}-{dataset.sha256[:16]}" + (f"-first-{limit}" if limit else "")
        return self._manager.datasets.add_rows(derived, convert_rows(rows, name), owner=dataset.owner)


def _read_rows(path: Path) -> Iterator[Mapping[str, object]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _record_submission(run: RunDir, mapped: MappedJob) -> None:
    """Beside the run's own files, once: warnings also as events, where every view of the job shows them."""
    path = run.path / SUBMISSION_FILE
    if path.exists():
        return
    run.path.mkdir(parents=True, exist_ok=True)
    owned = RunDir(run.path, owner=True)
    for warning in mapped.warnings:
        owned.log_event("warning", message=warning)
    write_atomically(path, json.dumps({"warnings": mapped.warnings, "epoch_steps": mapped.epoch_steps}, indent=1))


def _link(place: Path, export: Path) -> None:
    """A link: the run directory stays the one place of a job's files."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(export, target_is_directory=True)


# --- a job in Llama Stack's words: status, times, resources, checkpoints, artifacts ----------------------------------


def status_of(job: JobView, run: RunDir) -> JobStatusResponse:
    submission = read_submission(run)
    progress = JobProgress(**job.progress.model_dump(), queue_position=job.queue_position)
    return JobStatusResponse(
        job_uuid=job.id,
        status=STATES[job.state],
        scheduled_at=_time(job.created_at),
        started_at=_time(job.started_at),
        completed_at=_time(job.finished_at),
        resources_allocated=_resources(job, run.status()),
        checkpoints=[*list_exports(job, run), *_list_states(job, run)],
        error=(job.reason or "the job failed without a message") if job.state == "failed" else None,
        warnings=_warnings(run, submission),
        progress=progress,
        metrics=job.metrics.model_dump(),
    )


def artifacts_of(job: JobView, run: RunDir) -> JobArtifactsResponse:
    """Only what loads elsewhere: training states are not among them."""
    return JobArtifactsResponse(job_uuid=job.id, checkpoints=list_exports(job, run))


def read_submission(run: RunDir) -> dict[str, Any]:
    """Empty for jobs that came in another way."""
    try:
        return read_json_object(run.path / SUBMISSION_FILE)
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
    checkpoints = []
    for state in run.list_checkpoints():
        with contextlib.suppress(OSError):  # pruned since it was listed
            created_at = (state.path / MANIFEST).stat().st_mtime
            progress = state.extra.get("progress", {})
            name = f"{job.id}-{state.path.name}"
            checkpoints.append(
                _checkpoint(job, run, name, state.path, "training_state", state.step, progress, created_at)
            )
    return checkpoints


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


def _resources(job: JobView, status: Mapping[str, Any]) -> dict[str, object] | None:
    """None while the job waits. Memory is the peak so far: of the first process, and of the fullest one."""
    if job.prepared_at is None:
        return None
    last = job.metrics.train or {}
    own = last.get("memory_gib")
    memory = {"rank_0": own, "largest": last.get("memory_gib_max", own)} if own is not None else None
    known = {"processes": job.procs, "gpus": list(job.devices), "peak_memory_gib": memory}
    return {**known, "device": status.get("device"), "precision": status.get("precision")}


def _warnings(run: RunDir, submission: Mapping[str, Any]) -> list[str]:
    """Of the submission and of the run itself, each once."""
    of_run = [str(event.get("message")) for event in run.events() if event.get("event") == "warning"]
    return list(dict.fromkeys([*submission.get("warnings", []), *of_run]))


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
