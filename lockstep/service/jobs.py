"""JobManager: submit, look at, cancel and delete jobs. Works without HTTP; a thread of its own schedules.

What the store holds is intent and ownership; the truth about a run is in its run directory.
"""

from __future__ import annotations

import builtins
import logging
import math
import os
import secrets
import time
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lockstep.config import RunConfig, parse_config
from lockstep.config.text import find_invisible
from lockstep.launch import Launcher, LocalLauncher
from lockstep.launch.local import read_handle
from lockstep.launch.slurm import SlurmLauncher
from lockstep.launch.slurm_queue import check_slurm
from lockstep.plan.beside import beside_plan
from lockstep.rundir import RunDir
from lockstep.service.admission import NOTHING_MORE, Admission, Admitted, Allowed, digest_of
from lockstep.service.data_dir import DataDir
from lockstep.service.datasets import DatasetStore
from lockstep.service.errors import Conflict, JobConflict, NotFound, ServiceError
from lockstep.service.job_environment import job_environment
from lockstep.service.limits import DEFAULT_LIMITS, UserLimits, check_user, count_slots
from lockstep.service.memory_door import MemoryDoor
from lockstep.service.placement import MAX_JOBS, SLOTS, JobPlacement
from lockstep.service.records import Records
from lockstep.service.run_files import last_metrics
from lockstep.service.scheduler import RESTART_DELAY_S, Scheduler, Slots, find_slots
from lockstep.service.schemas import FINISHED, Compilations, JobMetrics, JobRequest, JobState, JobView, RunProgress
from lockstep.service.store import ACTIVE, Job, Store

__all__ = ["JobConflict", "JobManager", "NotFound", "ServiceError"]
log = logging.getLogger(__name__)
_GRACE_S = 8.0  # from SIGTERM to SIGKILL
_DELETE_TIMEOUT_S = 30.0
_SAME = [
    field.name for field in fields(Job) if field.name in JobView.model_fields and field.name not in ("state", "reason")
]


class JobManager:
    def __init__(
        self,
        data_dir: Path,
        *,
        database: str | None = None,
        procs: int | None = None,
        max_jobs: int | None = None,
        launcher: Launcher | None = None,
        cluster: JobPlacement | None = None,
        allowed: Allowed = NOTHING_MORE,
        job_env: Collection[str] = (),
        max_upload_mb: int = 1024,
        max_datasets: int = 1000,
        max_helpers: int | None = None,
        user_limits: UserLimits = DEFAULT_LIMITS,
        restart_delay_s: float = RESTART_DELAY_S,
        rebuild: bool = False,
        gpu: str | None = None,
    ) -> None:
        """`gpu`: the device of jobs, for plans. `rebuild`: add the jobs and data sets to the database that it has lost.
        `cluster`: jobs run there, and the data directory must be on a file system that its nodes share."""
        if cluster is not None:
            check_slurm()
        self.data_dir = DataDir(data_dir)
        self._cluster = cluster
        self.slots = find_slots(procs) if cluster is None else Slots(procs or SLOTS)
        self._max_helpers = max_helpers or max(2 * (os.cpu_count() or 1), 8)
        self._limits = user_limits
        identity = self.data_dir.open()
        try:
            self.admission = Admission(self.data_dir, allowed)
            self._records = Records(self.data_dir)
            self.store = Store(
                database or self.data_dir.database, identity=identity, prepare=partial(self._prepare, rebuild=rebuild)
            )
            if rebuild:
                self._rebuild(self.store)
            self.datasets = DatasetStore(
                self.data_dir,
                self.store,
                self._records,
                max_bytes=max_upload_mb << 20,
                max_datasets=max_datasets,
                max_user_bytes=user_limits.max_upload_mb << 20,
            )
            self._records.sync(self.store)
            self._check_launcher()
        except BaseException:
            self.data_dir.close()
            raise
        self.environment = job_environment(job_env)
        self.door = MemoryDoor(
            gpu,
            here=cluster is None and bool(self.slots.devices),
            environment=self.environment,
            folder=self.data_dir.empty,
        )
        self._scheduler = Scheduler(
            self.store,
            self.data_dir,
            launcher or self._make_launcher(),
            self.slots,
            max_jobs if cluster is None else max_jobs or MAX_JOBS,
            self._check_again,
            place=cluster.place if cluster is not None else lambda config: config,
            max_running_each=user_limits.max_running,
            restart_delay_s=restart_delay_s,
            forget=self._records.drop_job,
        )

    def _make_launcher(self) -> Launcher:
        if self._cluster is not None:
            return SlurmLauncher(self.environment, self.data_dir.empty)
        return LocalLauncher(grace_s=_GRACE_S, working_dir=self.data_dir.empty, environment=self.environment)

    def _prepare(self, store: Store, *, rebuild: bool) -> None:
        """An empty database beside job folders is a lost one, not that of a new service."""
        if rebuild:
            self._rebuild(store)
        elif self._records.any():
            raise ServiceError(
                f"the database is empty, but {self.data_dir.path} holds jobs or data sets: restore the database, or "
                "start with --rebuild, which makes the list anew from the job folders"
            )

    def _rebuild(self, store: Store) -> None:
        num_jobs, num_datasets = self._records.rebuild(store, self.slots, self.admission.places.hide_text)
        log.info("added %d jobs and %d data sets to the database", num_jobs, num_datasets)

    def _check_launcher(self) -> None:
        """Jobs that were started elsewhere than this service would look for them are neither lost nor ended."""
        here = self.launcher_kind
        for job in self.store.active():
            handle = read_handle(self.data_dir.jobs / job.id)
            if handle is None or handle.launch_id != job.launch_id or handle.launcher == here:
                continue
            if here == "slurm" or handle.launcher == "slurm":
                option = "with the --launch file" if handle.launcher == "slurm" else "without --launch"
                raise ServiceError(
                    f"job {job.id} was started by launcher {handle.launcher} and has not ended: start the service "
                    f"{option}, as before, until it has"
                )

    @property
    def launcher_kind(self) -> Literal["local", "slurm"]:
        return "local" if self._cluster is None else "slurm"

    def start(self) -> None:
        self._scheduler.start()

    def close(self) -> None:
        """Jobs run on: the next JobManager on this data directory finds them."""
        self._scheduler.close()
        self.store.close()
        self.data_dir.close()

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, *, owner: str = "", admin: bool = False) -> JobView:
        """The same id with the same content gives the job back; with other content it is a JobConflict.

        A request without an owner ("") may use every data set and job, and so may an admin's.
        """
        digest = digest_of(request)
        present = None if request.id is None else self.store.find(request.id)
        if present is None:
            admitted = self.admit(request.config, owner=owner, admin=admin)
            _check_name(request.name or admitted.config.name)
            num_slots = count_slots(admitted.config, self.slots, self._max_helpers)
            placed = self._place(admitted.config)  # what would not fit is refused now
            if owner and not admin:
                check_user(request, owner, self._limits, self.store)
            self.door.check(placed)
            job_id = request.id or f"{admitted.config.algorithm.kind}-{secrets.token_hex(5)}"
            model = self.admission.places.hide_text(admitted.config.model.path)  # lists are also searched by it
            row = _row(request, admitted, job_id, owner, digest) | {"model": model, "num_slots": num_slots}
            if self.store.add(**row):
                job = self.store.get(job_id)
                self._records.keep_job(job)
                self._scheduler.wake()
                return self.view(job)
            present = self.store.get(job_id)
        if present.digest != digest or present.owner != owner:
            raise JobConflict(f"there is already a job {present.id} with another content: choose another id")
        return self.view(present)

    def _place(self, config: RunConfig) -> RunConfig:
        return config if self._cluster is None else self._cluster.place(config)

    def admit(self, config: dict[str, Any] | str, *, owner: str = "", admin: bool = False) -> Admitted:
        """A configuration that this owner may run here, or an error that says why not."""
        sees_all = admin or not owner

        def find_dataset(name: str) -> Path:
            dataset = self.store.find_dataset(name)
            if dataset is None or not (sees_all or dataset.owner == owner):
                raise ServiceError(f"there is no data set {name}: upload it first")
            return self.datasets.path(name)

        def may_use_job(job_id: str) -> bool:
            job = self.store.find(job_id)
            return job is not None and (sees_all or job.owner == owner)

        return self.admission.admit(config, find_dataset=find_dataset, may_use_job=may_use_job)

    def cancel(self, job_id: str) -> JobView:
        """At once if it waits; if it runs, within seconds. A job that has ended stays what it is."""
        while True:
            job = self.store.get(job_id)
            if job.state in FINISHED or job.requested_action:
                return self.view(job)
            if self._request(job, "cancel"):
                return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """With all its files. One that runs is cancelled first. Returns when it is gone."""
        job = self.request_delete(job_id)
        deadline = time.monotonic() + _DELETE_TIMEOUT_S
        while not self.is_gone(job):
            if time.monotonic() > deadline:
                raise Conflict(f"job {job_id} is still being ended: it will be deleted then")
            time.sleep(0.05)

    def request_delete(self, job_id: str) -> Job:
        """The scheduler deletes it as soon as it has ended."""
        while True:
            job = self.store.get(job_id)
            if job.requested_action == "delete" or self._request(job, "delete"):
                return job

    def is_gone(self, job: Job) -> bool:
        present = self.store.find(job.id)
        return present is None or present.number != job.number

    def _check_again(self, job: Job, config: RunConfig) -> None:
        self.admission.check_again(config, [self.datasets.path(name) for name in job.datasets])

    def _request(self, job: Job, action: str) -> bool:
        changes: dict[str, object] = {"requested_action": action}
        if job.state == "queued":
            changes |= {"state": "cancelled", "finished_at": time.time()}
        changed = self.store.change(job, states=ACTIVE if job.state in ACTIVE else None, **changes)
        if changed and job.state == "queued":
            self._records.keep_job(replace(job, state="cancelled"))
        self._scheduler.wake()
        return changed

    # --- reading -----------------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> JobView:
        return self.view(self.store.get(job_id))

    def list(
        self,
        state: JobState | None = None,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        search: str | None = None,
    ) -> tuple[builtins.list[JobView], int]:
        """Newest first, and how many there are in all."""
        jobs, total = self.store.select(state=state, owner=owner, limit=limit, offset=offset, search=search)
        waits = any(job.state == "queued" for job in jobs)
        places = {name: number for number, name in enumerate(self.store.queue_order(), start=1)} if waits else {}
        return [self.view(job, places.get(job.id)) for job in jobs], total

    def run_dir(self, job_id: str) -> RunDir:
        """Made when the job is first started: until then there is nothing in it."""
        return RunDir(self.data_dir.jobs / self.store.get(job_id).id)

    def num_free(self) -> int:
        return len(self.slots.free(slot for job in self.store.active() for slot in job.slots))

    def view(self, job: Job, place: int | None = None) -> JobView:
        if job.state == "queued" and place is None:
            place = self.store.queue_position(job)
        view = view_job(job, RunDir(self.data_dir.jobs / job.id), self.slots, place)
        return view if view.plan else view.model_copy(update={"plan": self._warning_of(job)})

    def _warning_of(self, job: Job) -> str:
        """What was said at the door, as long as this service remembers."""
        if job.state != "queued" or not self.door.remembers:
            return ""
        return self.door.known(self._place(parse_config(job.config, directory=self.data_dir.empty))).said


def _check_name(name: str) -> None:
    """Lists of jobs are read by others: what is there must be what they see."""
    hidden = find_invisible(name)
    if hidden is not None:
        raise ServiceError(f"name: it holds the letter {hidden!a}, which nobody sees: leave it out")


def _row(request: JobRequest, admitted: Admitted, job_id: str, owner: str, digest: str) -> dict[str, object]:
    config = admitted.config
    return {
        "id": job_id,
        "name": request.name or config.name,
        "owner": owner,
        "priority": request.priority,
        "max_restarts": request.max_restarts,
        "kind": config.algorithm.kind,
        "procs": config.launch.procs,
        "device": config.launch.device,
        "config": config.to_yaml(),
        "datasets": admitted.datasets,
        "digest": digest,
    }


# --- what others see of a job ----------------------------------------------------------------------------------------


def view_job(job: Job, run: RunDir, slots: Slots, queue_position: int | None) -> JobView:
    launched = job.prepared_at is not None
    status = run.status() if launched else {}
    metrics = last_metrics(run.path / "metrics.jsonl") if launched else JobMetrics()
    reason = job.reason
    if job.requested_action and job.state not in FINISHED:
        reason = "being cancelled"
    uses_gpus = job.device != "cpu"
    return JobView(
        **{name: getattr(job, name) for name in _SAME},
        state=job.state,  # type: ignore[arg-type]
        reason=reason,
        devices=list(slots.devices_of(job.slots)) if uses_gpus else [],
        cancelling=bool(job.requested_action) and job.state not in FINISHED,
        queue_position=queue_position,
        progress=progress_of(status, metrics, job.state),
        metrics=metrics,
        seconds=numbers_of(status.get("seconds")),
        compilations=_compilations_of(status),
        layout=str(status.get("layout") or "")[:200],
        plan=beside_plan(status.get("planned"), _measured(metrics)),
    )


def _measured(metrics: JobMetrics) -> dict[str, object]:
    record = metrics.train or {}
    return {"memory_gib": record.get("memory_gib_max", record.get("memory_gib")), "step_s": record.get("step_time_s")}


def progress_of(status: dict[str, Any], metrics: JobMetrics, state: str) -> RunProgress:
    record = metrics.train or {}
    total = _whole(status.get("total_steps"))
    step = max((s for s in (_whole(status.get("step")), _whole(record.get("step"))) if s is not None), default=None)
    fraction = 1.0 if state == "completed" else min(step / total, 1.0) if step is not None and total else 0.0
    seconds = record.get("step_time_s")
    eta_s = None
    if state == "running" and step is not None and total and isinstance(seconds, (int, float)):
        age = max(time.time() - float(record.get("time", time.time())), 0.0)
        eta_s = max((total - step) * float(seconds) - age, 0.0)
    phase = status.get("phase") if state not in FINISHED and state != "queued" else None
    return RunProgress(
        phase=phase if isinstance(phase, str) else None, step=step, total_steps=total, fraction=fraction, eta_s=eta_s
    )


def numbers_of(value: object) -> dict[str, float]:
    """What a run has written may be anything."""
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(name): float(n) for name, n in pairs if isinstance(n, (int, float)) and math.isfinite(n)}


def _compilations_of(status: dict[str, Any]) -> Compilations:
    own, engines = numbers_of(status.get("compilations")), status.get("engine_compilations")
    of_engines = (
        [numbers_of(counted).get("seconds", 0.0) for counted in engines.values()] if isinstance(engines, dict) else []
    )
    return Compilations(
        count=int(own.get("count", 0)), seconds=own.get("seconds", 0.0), engine_seconds=max(of_engines, default=0.0)
    )


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
