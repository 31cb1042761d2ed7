"""Runs on Slurm: one batch job for each launch, which starts its ranks and goes back to the queue by itself.

The run directory must be on a file system that the nodes share. A job carries the launch id as its comment: it is found
again, whoever submitted it, and never submitted twice.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.config import ConfigError, SlurmLaunch
from lockstep.launch.launcher import Resources, RunHandle, RunState
from lockstep.launch.local import HANDLE_FILE, read_handle
from lockstep.launch.slurm_script import FAILURES_FILE, LOG_FILE, SCRIPT_FILE, batch_script
from lockstep.rundir import EXIT_INTERRUPTED, RunDir, write_atomically

_COMMAND_S = 60.0  # for an answer of one of Slurm's commands
_FIND_S = 10.0
_SILENCE = re.compile(r"[Uu]nable to contact|[Cc]onnection refused|timed out|connection failure|Could not establish")
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ALIVE = _WAITING | {
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
}
# What Slurm says of a job that has ended, for people.
_ENDS = {
    "TIMEOUT": "its time (launch.time) was up before a checkpoint was written: raise launch.notice_s",
    "NODE_FAIL": "Slurm lost a node of the job",
    "OUT_OF_MEMORY": "the job needed more memory than it had: raise launch.memory",
    "PREEMPTED": "the job was preempted",
    "BOOT_FAIL": "a node of the job could not be booted",
    "DEADLINE": "the job's deadline passed",
}


class SlurmSilent(OSError):
    """Slurm gave no answer: what became of the request is not known."""


class SlurmRefused(ConfigError):
    """Slurm's own words for a request that it did not carry out."""


@dataclass(frozen=True)
class QueuedJob:
    """What squeue says of a job; `nodes` is empty while it waits."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE


class SlurmLauncher:
    kind: Literal["slurm"] = "slurm"
    interval_s = 2.0  # between two looks at the queue
    settle_s = 5.0  # from the end of a job to the belief in it

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is what jobs get instead of ours."""
        self._environment = environment
        self._looked: dict[str, tuple[float, QueuedJob | None]] = {}  # by job: when, and what was seen
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
        except (SlurmRefused, SlurmSilent) as error:
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
        job = find_job(launch_id, _FIND_S if is_ours and status.get("state") == "created" else 0.0)
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
        if view.state in _WAITING:  # no rank lives: the directory is ours
            phase = describe_waiting(handle.started, view)
            if run.status().get("phase") != phase:
                run.write_status(state="created", phase=phase)
        elif view.nodes and run.status().get("nodes") != view.nodes and run.status().get("state") == "created":
            run.write_status(phase=f"starting as job {handle.started} on {view.nodes}", nodes=view.nodes)
        return RunState("running")

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """Slurm lets ranks write a checkpoint before it kills them, for as long as its KillWait is."""
        in_hurry = False
        if handle.started:
            _ask(["scancel", handle.started])
        while handle.started and (view := look_at(handle.started)) is not None and view.is_alive:
            if hurry() and not in_hurry:
                in_hurry = True
                _ask(["scancel", "--full", "--signal=KILL", handle.started])
            time.sleep(0.5)
        run = RunDir(handle.run_dir, owner=True)
        if run.status().get("state") != "completed":
            run.clear_failures()
            run.write_status(state="cancelled", error=None, phase=None)

    def _has_settled(self, handle: RunHandle, run: RunDir) -> bool:
        """Slurm shows a job that goes back to the queue as ended for a moment."""
        if run.status().get("state") in ("completed", "cancelled"):
            return True
        seen_at = self._ended_at.setdefault(handle.started, time.monotonic())
        return time.monotonic() - seen_at >= self.settle_s

    def _look(self, job: str) -> QueuedJob | None:
        seen_at, view = self._looked.get(job, (0.0, None))
        if not seen_at or time.monotonic() - seen_at >= self.interval_s:
            view = look_at(job) if job else None
            self._looked[job] = (time.monotonic(), view)
        return view

    def _submit(self, script: Path, launch_id: str) -> str:
        """What the cluster could never give is refused here; sbatch alone would let it wait for ever."""
        try:
            _ask(["sbatch", "--test-only", str(script)], self._environment)
            answer = _ask(["sbatch", "--parsable", str(script)], self._environment)
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


def check_slurm() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"launch.kind slurm needs Slurm's commands, and there is no {', '.join(missing)} here: run this on a login "
            "node of the cluster, or choose another launch.kind"
        )


def is_alive(handle: RunHandle) -> bool:
    """Whether the job waits or runs; also where Slurm does not answer, for then that is not known."""
    try:
        view = look_at(handle.started) if handle.started else None
    except (SlurmSilent, SlurmRefused):
        return True
    return view is not None and view.is_alive


def look_at(job: str) -> QueuedJob | None:
    """None: Slurm has forgotten the job, some minutes after its end."""
    try:
        lines = _ask(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N"]).splitlines()
    except SlurmRefused as refusal:
        if "Invalid job id" in str(refusal):
            return None
        raise
    return QueuedJob(*lines[0].split("|")) if lines else None


def find_job(launch_id: str, patience_s: float = _FIND_S) -> str | None:
    """By its comment, whether it waits, runs or has just ended. `patience_s`: it may be on its way to Slurm."""
    deadline = time.monotonic() + patience_s
    while True:
        for line in _ask(["squeue", "--noheader", "--states=all", "--me", "--format=%i|%k"]).splitlines():
            job, _, comment = line.partition("|")
            if comment == f"lockstep:{launch_id}":
                return job
        if time.monotonic() > deadline:
            return None
        time.sleep(0.5)


def describe_waiting(job: str, view: QueuedJob) -> str:
    why = {
        "Priority": "others are before it",
        "Resources": "for free nodes",
        "BeginTime": "for its time to begin",
        "PartitionDown": "the partition is down",
        "PartitionTimeLimit": "it asks for more time than the partition allows: it would wait for ever",
        "PartitionNodeLimit": "it asks for more nodes than the partition has: it would wait for ever",
        "PartitionConfig": "it asks for more than the partition has: it would wait for ever",
        "ReqNodeNotAvail": "for nodes that are not available",
        "JobHeldUser": "it is held: scontrol release lets it go",
        "JobHeldAdmin": "the operator holds it",
    }.get(view.reason, view.reason if view.reason != "None" else "")
    return f"job {job} waits in Slurm's queue" + (f": {why}" if why else "")


def _ask(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What it prints. Raises what Slurm says, in one sentence."""
    try:
        answered = subprocess.run(
            command,
            env=None if environment is None else {**environment, **_slurm_variables()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )
    except FileNotFoundError:
        check_slurm()
        raise
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"Slurm gave {command[0]} no answer within {_COMMAND_S:.0f} s: try again later") from None
    if answered.returncode == 0:
        return answered.stdout
    words = re.sub(
        r"^(\w+: (error: |fatal: )?|allocation failure: )",
        "",
        (answered.stderr.strip().splitlines() or ["no reason"])[-1],
    )
    if _SILENCE.search(answered.stderr):
        raise SlurmSilent(f"Slurm's controller does not answer ({words}): try again later")
    raise SlurmRefused(f"Slurm's {command[0]} refused: {words}{_hint(answered.stderr)}")


def _slurm_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in ("SLURM_CONF", "PATH")}


def _hint(words: str) -> str:
    hints = {
        "artition": "; set launch.partition to one that sinfo lists",
        "ccount": "; set launch.account to one that you may charge",
        "ime limit": "; lower launch.time, or choose another launch.partition",
        "ode configuration": "; ask for less (launch.nodes, procs_per_node, gpus_per_node, memory)",
        "ubmit limit": "; wait until others of your jobs have ended",
        "gres": "; the nodes have no such GPUs (launch.gpus_per_node, device)",
    }
    return next((hint for part, hint in hints.items() if part in words), "")


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
