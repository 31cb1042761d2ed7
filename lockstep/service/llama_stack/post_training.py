"""Llama Stack's six calls on a JobManager: what the HTTP routes and the inline provider have in common.

Blocking: callers in an event loop use a thread. Must not know HTTP or the llama-stack package.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.rundir import RunDir, write_atomically
from lockstep.service.access import Caller, own_job, seen_job
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack.mapping import MappedJob, TrainingData, map_fine_tune, map_preference
from lockstep.service.llama_stack.rows import RequestError, check_format, convert_rows, is_foreign
from lockstep.service.llama_stack.schemas import (
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    ListedJob,
    PostTrainingJob,
    PreferenceRequest,
    TrainingConfig,
)
from lockstep.service.llama_stack.views import STATES, SUBMISSION_FILE, artifacts_of, status_of
from lockstep.service.schemas import ID_PATTERN, DatasetView, JobRequest, JobView

Submission = FineTuneRequest | PreferenceRequest
_DATASET = "dataset:"
_JOB = "job:"
_NOWHERE = ("", "null")  # what callers write for a checkpoint_dir that they do not want
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
        except (RecursionError, UnicodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            raise RequestError("the request holds what no job can be made of: a name, a text or a nesting") from error
        run = self._manager.run_dir(job.id)
        _note_submission(run, mapped)
        if place is not None:
            _point(place, run.export)
        return PostTrainingJob(job_uuid=job.id)

    def _map(self, request: Submission, caller: Caller) -> MappedJob:
        data = self._find_data(request.training_config, caller)
        if isinstance(request, FineTuneRequest):
            return map_fine_tune(request, self._find_model(request.model, "model", caller), data)
        return map_preference(request, self._find_model(request.finetuned_model, "finetuned_model", caller), data)

    def jobs(self, caller: Caller) -> JobList:
        found: list[ListedJob] = []
        while True:
            page, total = self._manager.store.select(
                state=None, owner=caller.sees_owner, limit=_PAGE, offset=len(found)
            )
            found += [ListedJob(job_uuid=job.id, status=STATES[job.state]) for job in page]
            if not page or len(found) >= total:
                return JobList(data=found)

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
        """A name of the Hub, a folder, or `job:ID` for what an earlier job made."""
        if not name:
            raise RequestError(f"{field} is missing: name a model of the Hub or a folder")
        if not name.startswith(_JOB):
            return name
        job_id = name.removeprefix(_JOB)
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
        """Where the caller wants the result: below one folder of the data directory."""
        wanted = getattr(request, "checkpoint_dir", None)
        if wanted is None or wanted in _NOWHERE:
            return None
        root = self._manager.data_dir.path / "checkpoints"
        name = wanted.removeprefix(f"{root}/")
        if not re.fullmatch(ID_PATTERN, name):
            raise RequestError(
                f"checkpoint_dir: {wanted} is not a folder right below {root}: give a plain name, or leave it out and "
                "ask for the job's artifacts"
            )
        place = root / name
        if place.is_symlink() and os.readlink(place) != str(self._manager.data_dir.jobs / request.job_uuid / "export"):
            raise RequestError(f"checkpoint_dir: {wanted} already belongs to another job: choose another name")
        return place

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _find_data(self, config: TrainingConfig, caller: Caller) -> TrainingData:
        given = config.data_config
        if given is None:
            raise RequestError("training_config.data_config is missing: it names the rows to train on")
        train = self._find_rows(given.dataset_id, "dataset_id", given.data_format, caller)
        if not given.validation_dataset_id:
            return TrainingData(_DATASET + train.name, train.rows)
        validation = self._find_rows(
            given.validation_dataset_id,
            "validation_dataset_id",
            given.data_format,
            caller,
            limit=given.batch_size * config.max_validation_steps if config.max_validation_steps else None,
        )
        return TrainingData(_DATASET + train.name, train.rows, _DATASET + validation.name)

    def _find_rows(
        self, dataset_id: str, field: str, data_format: str, caller: Caller, limit: int | None = None
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
        check_format(convert_rows([first], name)[0], data_format, name)
        if not converts and (limit is None or dataset.rows <= limit):
            return dataset
        limit = None if limit is None else min(limit, dataset.rows)
        rows = islice(_read_rows(path), limit)
        # Named by content, so that the same request finds it again.
        derived = f"{name[:32]}-{dataset.sha256[:16]}" + (f"-first-{limit}" if limit else "")
        return self._manager.datasets.add_rows(derived, convert_rows(rows, name), owner=dataset.owner)


def _read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _note_submission(run: RunDir, mapped: MappedJob) -> None:
    """Beside the run's own files, once: warnings also as events, where every view of the job shows them."""
    path = run.path / SUBMISSION_FILE
    if path.exists():
        return
    run.path.mkdir(parents=True, exist_ok=True)
    owned = RunDir(run.path, owner=True)
    for warning in mapped.warnings:
        owned.log_event("warning", message=warning)
    write_atomically(path, json.dumps({"warnings": mapped.warnings, "epoch_steps": mapped.epoch_steps}, indent=1))


def _point(place: Path, export: Path) -> None:
    """A link: the run directory stays the one place of a job's files."""
    place.parent.mkdir(exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(export, target_is_directory=True)
