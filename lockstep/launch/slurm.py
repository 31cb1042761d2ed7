"""Runs on Slurm: one batch job for each launch, which starts its ranks and goes back to the queue by itself.

The run directory must be on a file system that the nodes share. A job carries the launch id as its comment: it is found
again, whoever submitted it, and never submitted twice.
"""

from __future__ import annotations

import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from lockstep.config import SlurmLaunch
from lockstep.launch.launcher import Resources, RunHandle, RunState, record_stop
from lockstep.launch.local import HANDLE_FILE, read_handle
from lockstep.launch.slurm_queue import (
    FIND_S,
    QueuedJob,
    SlurmFull,
    SlurmRefused,
    SlurmSilent,
    ask,
    check_slurm,
    describe_waiting,
    find_job,
    list_jobs,
    look_at,
    place_in_queue,
)
from lockstep.launch.slurm_script import FAILURES_FILE, LOG_FILE, SCRIPT_FILE, batch_script
from lockstep.rundir import EXIT_INTERRUPTED, RunDir, write_atomically

_PLACE_S = 15.0  # between two looks at the place in the queue, which takes the list of all that wait
# What Slurm says of a job that has ended, for people.
_ENDS = {
    "TIMEOUT": "its time (launch.time) was up before a checkpoint was written: raise launch.notice_s",
    "NODE_FAIL": "Slurm lost a node of the job",
    "OUT_OF_MEMORY": "the job needed more memory than it had: raise launch.memory",
    "PREEMPTED": "the job was preempted",
    "BOOT_FAIL": "a node of the job could not be booted",
    "DEADLINE": "the job's deadline passed",
}


class SlurmLauncher:
    kind: Literal["slurm"] = "slurm"
    interval_s = 2.0  # between two looks at the queue
    settle_s = 5.0  # from the end of a job to the belief in it

    def __init__(self, environment: Mapping[str, str] | None = None, working_dir: Path | None = None) -> None:
        """`environment` is what jobs get instead of ours, `working_dir` where they begin."""
        self._environment, self._working_dir = environment, working_dir
        self._looking = threading.Lock()
        self._seen: dict[str, QueuedJob] = {}
        self._seen_at = -math.inf
        self._places: dict[str, tuple[float, tuple[int, int] | None]] = {}  # by job: when, and what was seen
        self._ended_at: dict[str, float] = {}  # by job: when its end was first seen

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        """Nothing is left in the queue when this raises."""
        run = RunDir(Path(run_dir).resolve(), owner=True)
        config = run.config()
        if not isinstance(config.launch, SlurmLaunch):
            raise ValueError(
                f"launch.kind is {config.launch.kind}, and runs are started here with kind slurm: set that"
            )
        check_slurm()
        self._refuse_if_alive(run)
        launch_id = launch_id or uuid.uuid4().hex
        run.clear_failures()
        run.logs.mkdir(exist_ok=True)
        (run.path / FAILURES_FILE).unlink(missing_ok=True)
        script = run.path / SCRIPT_FILE
        write_atomically(script, batch_script(config, run.path, launch_id))
        run.write_status(state="created", error=None, phase="submitting to Slurm", launch=launch_id)
        try:
            job = self._submit(script, launch_id)
        except (SlurmRefused, SlurmSilent, SlurmFull) as error:
            run.write_status(state="failed", error=str(error), phase=None)
            raise
        run.log_event("submitted", job=job)
        return _write_handle(run.path, job, launch_id)

    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        run_dir = Path(run_dir).resolve()
        written = read_handle(run_dir)
        if written is not None and written.launch_id == launch_id:
            return written
        run = RunDir(run_dir)
        status = run.status()
        is_ours = status.get("launch") == launch_id
        job = find_job(launch_id, FIND_S if is_ours and status.get("state") == "created" else 0.0)
        if job is not None:
            return _write_handle(run_dir, job, launch_id)
        began = is_ours and (status.get("state") != "created" or bool(run.failures()))
        return RunHandle(self.kind, str(run_dir), 0, "", launch_id) if began else None

    def poll(self, handle: RunHandle) -> RunState:
        try:
            view = self._look(handle.started)
        except SlurmSilent:
            return RunState("running")  # as far as is known: the job does not need us
        run = RunDir(handle.run_dir, owner=True)
        if view is None or not view.is_alive:
            return _finish(run, handle.started, view) if self._has_settled(handle, run) else RunState("running")
        self._ended_at.pop(handle.started, None)
        if view.is_waiting:  # no rank lives: the directory is ours
            phase = describe_waiting(handle.started, view, self._place(handle.started, view))
            if run.status().get("phase") != phase:
                run.write_status(state="created", phase=phase)
        elif view.nodes and run.status().get("nodes") != view.nodes and run.status().get("state") == "created":
            run.write_status(phase=f"starting as job {handle.started} on {view.nodes}", nodes=view.nodes)
        return RunState("running")

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """Slurm lets ranks write a checkpoint before it kills them, for as long as its KillWait is."""
        in_hurry = False
        if handle.started:
            ask(["scancel", handle.started])
        while handle.started and (view := look_at(handle.started)) is not None and view.is_alive:
            if hurry() and not in_hurry:
                in_hurry = True
                ask(["scancel", "--full", "--signal=KILL", handle.started])
            time.sleep(0.5)
        record_stop(RunDir(handle.run_dir, owner=True))

    def _has_settled(self, handle: RunHandle, run: RunDir) -> bool:
        """Slurm shows a job that goes back to the queue as ended for a moment."""
        if run.status().get("state") in ("completed", "cancelled"):
            return True
        seen_at = self._ended_at.setdefault(handle.started, time.monotonic())
        return time.monotonic() - seen_at >= self.settle_s

    def _look(self, job: str) -> QueuedJob | None:
        """One question for all jobs: a service may have hundreds of them."""
        with self._looking:
            if time.monotonic() - self._seen_at >= self.interval_s:
                self._seen = list_jobs()
                self._seen_at = time.monotonic()
            view = self._seen.get(job)
        return view if view is not None or not job else look_at(job)

    def _place(self, job: str, view: QueuedJob) -> tuple[int, int] | None:
        if view.reason not in ("Priority", "Resources"):
            return None
        asked_at, place = self._places.get(job, (-math.inf, None))
        if time.monotonic() - asked_at >= _PLACE_S:
            place = place_in_queue(job, view.partition)
            self._places[job] = (time.monotonic(), place)
        return place

    def _submit(self, script: Path, launch_id: str) -> str:
        """What the cluster could never give is refused here; sbatch alone would let it wait for ever."""
        try:
            ask(["sbatch", "--test-only", str(script)], self._environment, self._working_dir)
            answer = ask(["sbatch", "--parsable", str(script)], self._environment, self._working_dir)
        except SlurmSilent:
            job = find_job(launch_id)  # it may have been taken all the same
            if job is None:
                raise
            return job
        return answer.strip().split(";")[0]

    def _refuse_if_alive(self, run: RunDir) -> None:
        """Also where sbatch gave no answer the last time: the job may have been taken."""
        last = str(run.status().get("launch") or "")
        earlier = self.find(run.path, last) if last else read_handle(run.path)
        if earlier is None or earlier.launcher != self.kind or not earlier.started:
            return
        view = look_at(earlier.started)
        if view is not None and view.is_alive:
            raise ValueError(
                f"{run.path} is still running as job {earlier.started}: follow it with lockstep attach {run.path}, or "
                f"end it with lockstep stop {run.path}"
            )


def is_alive(handle: RunHandle) -> bool:
    """Whether the job waits or runs; also where Slurm does not answer, for then that is not known."""
    try:
        view = look_at(handle.started) if handle.started else None
    except (SlurmSilent, SlurmRefused):
        return True
    return view is not None and view.is_alive


def describe_queue(handle: RunHandle) -> str:
    """Why the job waits, and its place in the queue; empty where it does not wait, or Slurm does not say."""
    try:
        view = look_at(handle.started) if handle.started else None
        if view is None or not view.is_waiting:
            return ""
        waits_its_turn = view.reason in ("Priority", "Resources")
        place = place_in_queue(handle.started, view.partition) if waits_its_turn else None
        return describe_waiting(handle.started, view, place)
    except (SlurmSilent, SlurmRefused):
        return ""


def _write_handle(run_dir: Path, job: str, launch_id: str) -> RunHandle:
    """`started` is the number of the job; it has no process here."""
    handle = RunHandle("slurm", str(run_dir), 0, job, launch_id)
    write_atomically(run_dir / HANDLE_FILE, handle.to_json())
    return handle


def _finish(run: RunDir, job: str, view: QueuedJob | None) -> RunState:
    """The final state, written here if no rank could."""
    status = run.status()
    state = status.get("state")
    if state in ("completed", "cancelled"):
        return RunState(state)
    if view is not None and view.state == "CANCELLED":
        run.write_status(state="cancelled", error=None, phase=None)
        return RunState("cancelled")
    if state == "interrupted":
        reason = f"job {job} was asked to stop after step {status.get('step')}, where it wrote a checkpoint"
        return RunState("interrupted", reason, EXIT_INTERRUPTED)
    failures = run.failures()
    reason = _reason(run, job, view, failures[0]["message"] if failures else str(status.get("error") or ""))
    if state != "failed" or status.get("error") != reason:
        run.write_status(state="failed", error=reason, phase=None)
    return RunState("failed", reason, int(failures[0].get("exit_code", 1)) if failures else 1)


def _reason(run: RunDir, job: str, view: QueuedJob | None, said: str) -> str:
    if view is not None and view.state in _ENDS:
        return f"job {job} ended: {_ENDS[view.state]}"
    if killed := _killed_rank(run):
        return killed
    if said:
        return said
    log = run.logs / LOG_FILE
    if view is None:
        return f"Slurm no longer knows job {job}, and it ended without a result: see {log}"
    if not log.exists():
        return (
            f"job {job} ended ({view.state}) and wrote nothing into {run.path}: is that on a file system that the "
            "nodes share? Choose another --run-dir"
        )
    return f"job {job} ended ({view.state}) without a result: see {log}"


def _killed_rank(run: RunDir) -> str:
    """srun names the task that a signal ended; what the others report of it is not the cause."""
    try:
        turns = (run.logs / LOG_FILE).read_text(errors="replace").rpartition("\njob ")
    except OSError:
        return ""
    found = re.search(r"srun: error: (\S+): task (\d+): (Killed|Segmentation fault|Bus error)", turns[2])
    return f"rank {found[2]} on {found[1]} was ended by a signal ({found[3]})" if found else ""
