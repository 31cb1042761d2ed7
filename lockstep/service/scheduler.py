"""Starts queued jobs, watches running ones, ends unwanted ones: one thread decides, others carry out.

A launch is recorded in the store before its processes start, under a launch id that they carry: after a kill at any
moment the next service asks the launcher for that id, and neither loses nor doubles the run.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from lockstep.config import ConfigError, RunConfig, parse_config
from lockstep.launch import Launcher, LauncherBusy, Resources, RunState
from lockstep.launch.start import reopen
from lockstep.rundir import RunDir
from lockstep.service.data_dir import DataDir
from lockstep.service.run_files import traceback_of
from lockstep.service.schemas import FINISHED
from lockstep.service.store import ACTIVE, MAX_RESTART_DELAY_S, Job, Store

_NVIDIA_SMI_TIMEOUT_S = 20.0
_SHORTEST_PERIOD_S = 0.05  # a hundred submissions are looked at together
_BUSY_PERIOD_S = 0.25
_IDLE_PERIOD_S = 5.0
RESTART_DELAY_S = 5.0  # before the first restart of a job
_BUSY_LAUNCHER_S = 15.0  # before a launcher that could not start a job now is asked again
_MAX_TASKS = 64  # a job that has to be ended may take its grace period: the others must not wait for it
log = logging.getLogger(__name__)


# --- slots: one for each GPU, or for each process on CPU -------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """What jobs share on this machine. `devices` names the GPU of each slot; empty on CPU."""

    count: int
    devices: tuple[str, ...] = ()

    def free(self, taken: Iterable[int]) -> list[int]:
        held = set(taken)
        return [slot for slot in range(self.count) if slot not in held]

    def devices_of(self, slots: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.devices[slot] for slot in slots) if self.devices else ()

    @property
    def threads(self) -> int | None:
        """For each process on CPU, so that a machine full of jobs has one thread per core."""
        return None if self.devices else max(_num_cores() // self.count, 1)


def find_slots(procs: int | None) -> Slots:
    devices = find_gpus()
    if procs is not None and procs < 1:
        raise ConfigError(f"--procs {procs}: there must be at least one")
    if not devices:
        return Slots(procs or _num_cores())
    if procs is not None and procs > len(devices):
        raise ConfigError(
            f"--procs {procs} is more than the {len(devices)} GPUs here, and no two jobs may share one: ask for fewer, "
            "or set CUDA_VISIBLE_DEVICES to nothing to train on CPU"
        )
    return Slots(procs or len(devices), devices[:procs])


def find_gpus() -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves us, else all that the driver knows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
        return tuple(re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):
        nodes = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
        return tuple(sorted((name for name in nodes if name.isdecimal()), key=int))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- the queue -------------------------------------------------------------------------------------------------------


def restart_delay(first_s: float, num_restarts: int) -> float:
    """Seconds before the next restart of a job that has had so many."""
    return min(first_s * 2**num_restarts, MAX_RESTART_DELAY_S)


class Scheduler:
    def __init__(
        self,
        store: Store,
        data_dir: DataDir,
        launcher: Launcher,
        slots: Slots,
        max_jobs: int | None = None,
        check: Callable[[Job, RunConfig], None] = lambda job, config: None,
        *,
        place: Callable[[RunConfig], RunConfig] = lambda config: config,
        max_running_each: int | None = None,
        restart_delay_s: float = RESTART_DELAY_S,
        forget: Callable[[str], None] = lambda job_id: None,
    ) -> None:
        """`check` raises ValueError for what may not be started, though it was once admitted; `place` gives the
        configuration that is run. `forget` is told of a job whose files are gone, before its row is. `restart_delay_s`
        doubles with every restart of a job."""
        self._store = store
        self._data_dir = data_dir
        self._launcher = launcher
        self._slots = slots
        self._max_jobs = max_jobs or slots.count
        self._check, self._place = check, place
        self._max_running_each = max_running_each
        self._restart_delay_s = restart_delay_s
        self._forget = forget
        self._tasks: dict[int, Future[None]] = {}
        self._failing: set[int] = set()
        self._launch_after: dict[int, float] = {}  # by job, where the launcher was busy
        self._pool = ThreadPoolExecutor(_MAX_TASKS, thread_name_prefix="job")
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Jobs run on; what is being done to one is finished first."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        failing = False
        while not self._closing:
            self._wake.clear()
            if self._closing:
                return
            try:
                busy = self._step()
                failing = False
            except Exception:
                if not failing:
                    log.exception("the queue cannot be read: trying again and again")
                busy = failing = True
            time.sleep(_SHORTEST_PERIOD_S)
            self._wake.wait(_BUSY_PERIOD_S if busy else self._idle_period_s())

    def _idle_period_s(self) -> float:
        """No longer than until the next restart is due."""
        try:
            due = self._store.next_restart()
        except SQLAlchemyError:
            return _BUSY_PERIOD_S
        return _IDLE_PERIOD_S if due is None else min(max(due - time.time(), _BUSY_PERIOD_S), _IDLE_PERIOD_S)

    def _step(self) -> bool:
        self._tasks = {number: task for number, task in self._tasks.items() if not task.done()}
        active, to_delete = self._store.active(), self._store.to_delete()
        for job in active:
            self._do(job, self._advance)
        for job in to_delete:
            self._do(job, self._remove)
        started = self._start_next(active)
        return bool(active or to_delete or started or self._tasks)

    def _do(self, job: Job, action: Callable[[Job], bool]) -> None:
        """One action at a time for a job, and never in the thread that decides."""
        if job.number not in self._tasks:
            self._tasks[job.number] = self._pool.submit(self._carry_out, job, action)

    def _carry_out(self, job: Job, action: Callable[[Job], bool]) -> None:
        try:
            # Its last action may have ended after the decision: only the present row counts.
            present = self._store.find(job.id)
            if present is not None and present.number == job.number and action(present):
                self._wake.set()
            self._failing.discard(job.number)
        except Exception:
            if job.number not in self._failing:
                log.exception("job %s could not be advanced: trying again", job.id)
            self._failing.add(job.number)

    def _start_next(self, active: list[Job]) -> bool:
        """In strict order of priority, then age: one that does not fit yet keeps those behind it waiting, so that
        small jobs cannot hold a large one up for ever. Jobs of users who have as many as they may, and those that
        failed a moment ago, are passed over."""
        free = self._slots.free(slot for job in active for slot in job.slots)
        num_more = self._max_jobs - len(active)
        running = Counter(job.owner for job in active)
        started = False
        for job in self._store.queue(
            max(min(num_more, len(free)), 0),
            due_by=time.time(),
            without_owners=[owner for owner, number in running.items() if self._has_all(owner, number)],
        ):
            if self._has_all(job.owner, running[job.owner]):
                continue
            if job.num_slots > len(free):
                break
            taken, free = free[: job.num_slots], free[job.num_slots :]
            intent: dict[str, Any] = {"state": "preparing", "launch_id": uuid.uuid4().hex, "slots": taken}
            intent |= {"prepared_at": time.time(), "started_at": None, "restart_at": None}
            if self._store.change(job, **intent):
                started = True
                running[job.owner] += 1
                self._do(replace(job, **intent), self._advance)
        return started

    def _has_all(self, owner: str, num_running: int) -> bool:
        """Whether this user may have no more running. Without tokens nobody has a name."""
        return bool(owner) and self._max_running_each is not None and num_running >= self._max_running_each

    # --- actions on one job; each returns whether the store was changed ------------------------------------------

    def _advance(self, job: Job) -> bool:
        if job.state not in ACTIVE:
            return False
        run = RunDir(self._data_dir.jobs / job.id, owner=True)
        handle = self._launcher.find(run.path, job.launch_id)
        if job.requested_action:
            if handle is not None:
                self._launcher.stop(handle)
                return self._finish(job, run, self._launcher.poll(handle))
            if run.path.exists():
                run.write_status(state="cancelled", phase=None)
            return self._finish(job, run, RunState("cancelled"))
        if handle is None:
            is_early = time.monotonic() < self._launch_after.get(job.number, 0.0)
            return False if is_early else self._launch(job, run)
        outcome = self._launcher.poll(handle)
        if outcome.state != "running":
            return self._finish(job, run, outcome)
        if job.state == "preparing" and run.status().get("state") == "running":
            return self._store.change(job, state="running", started_at=time.time())
        return False

    def _launch(self, job: Job, run: RunDir) -> bool:
        try:
            config = parse_config(job.config, directory=self._data_dir.empty)
            self._check(job, config)
            placed = self._place(config)
            if not run.config_path.exists():
                RunDir.create(run.path, placed)
            elif run.config().launch.kind != placed.launch.kind:  # the operator has chosen another place since
                reopen(run.path, settings=placed)
            devices = self._slots.devices_of(job.slots) if job.device != "cpu" else ()
            resources = Resources(job.procs, job.device, devices, self._slots.threads)
            self._launcher.start(run.path, resources, launch_id=job.launch_id)
        except LauncherBusy as busy:  # not the job's fault: it waits, and is asked for again under the same id
            if job.number not in self._launch_after:
                log.warning("job %s cannot be started yet: %s", job.id, busy)
            self._launch_after[job.number] = time.monotonic() + _BUSY_LAUNCHER_S
            run.write_status(state="created", error=None, phase=str(busy), launch=job.launch_id)
            return False
        except (OSError, ValueError) as error:
            log.warning("job %s could not be started: %s", job.id, error)
            return self._finish(job, run, RunState("failed", f"could not be started: {error}", 1))
        self._launch_after.pop(job.number, None)
        log.info("job %s started", job.id)
        return False

    def _finish(self, job: Job, run: RunDir, outcome: RunState) -> bool:
        self._launch_after.pop(job.number, None)
        reason = outcome.reason
        if outcome.state == "interrupted":
            if job.requested_action:
                run.write_status(state="cancelled", phase=None)
                return self._finish(job, run, RunState("cancelled"))
            log.info("job %s goes back to the queue: %s", job.id, reason)
            again = {"queued_at": time.time(), "slots": [], "restart_at": time.time() + self._restart_delay_s}
            return self._store.change(job, states=ACTIVE, state="queued", reason=f"goes on: {reason}", **again)
        if outcome.state == "failed" and not outcome.would_fail_again:
            reason = "\n".join(filter(None, (reason, traceback_of(run))))
            if job.restarts < job.max_restarts and not job.requested_action:
                delay_s = restart_delay(self._restart_delay_s, job.restarts)
                log.info("job %s is started again in %.0f s: %s", job.id, delay_s, outcome.reason)
                again = {"restarts": job.restarts + 1, "queued_at": time.time(), "slots": []}
                again["restart_at"] = time.time() + delay_s
                return self._store.change(
                    job, states=ACTIVE, state="queued", reason=f"started again: {reason}", **again
                )
        log.info("job %s %s", job.id, outcome.state)
        status = run.status()
        ended_at = min(float(status.get("updated_at") or time.time()), time.time())
        began_at = job.started_at or (status.get("started_at") if status.get("total_steps") else None)
        return self._store.change(
            job, states=ACTIVE, state=outcome.state, reason=reason, slots=[], started_at=began_at, finished_at=ended_at
        )

    def _remove(self, job: Job) -> bool:
        if job.requested_action != "delete" or job.state not in FINISHED:
            return False
        self._data_dir.discard(self._data_dir.jobs / job.id)
        self._forget(job.id)
        log.info("job %s deleted", job.id)
        return self._store.remove(job)
