"""What Slurm's commands are asked and what they answer: the state of jobs, their place in the queue, refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config import ConfigError
from lockstep.launch.launcher import LauncherBusy

_COMMAND_S = 60.0  # for an answer of one of Slurm's commands
FIND_S = 10.0
_SILENCE = re.compile(r"[Uu]nable to contact|[Cc]onnection refused|timed out|connection failure|Could not establish")
# sbatch waits and tries again by itself where the whole queue is full; limits of users and accounts it refuses.
_FULL = re.compile(r"queue full|temporarily unable to accept|Resource temporarily unavailable|ubmit limit|MaxSubmitJob")
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ALIVE = WAITING | {
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
}
_FORMAT = "%i|%T|%r|%N|%P|%S|%k"


class SlurmSilent(LauncherBusy):
    """Slurm gave no answer: what became of the request is not known."""


class SlurmRefused(ConfigError):
    """Slurm's own words for a request that it did not carry out."""


class SlurmFull(LauncherBusy):
    """No job can be submitted now: there are as many as there may be."""


@dataclass(frozen=True)
class QueuedJob:
    """What squeue says of a job; `nodes` is empty while it waits. Of a heterogeneous job it is what the part says that
    still waits or runs. `starts_at`: when Slurm expects to start it, in the cluster's own time."""

    state: str
    reason: str = ""
    nodes: str = ""
    partition: str = ""
    starts_at: str = ""
    comment: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


def check_slurm() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"launch.kind slurm needs Slurm's commands, and there is no {', '.join(missing)} here: run this on a login "
            "node of the cluster, or choose another launch.kind"
        )


def look_at(job: str) -> QueuedJob | None:
    """None: Slurm has forgotten the job, some minutes after its end."""
    try:
        answer = ask(["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={_FORMAT}"])
    except SlurmRefused as refusal:
        if "Invalid job id" in str(refusal):
            return None
        raise
    return _read_jobs(answer).get(job)


def list_jobs() -> dict[str, QueuedJob]:
    """All that this user has, by number: those that wait, run, or have just ended."""
    return _read_jobs(ask(["squeue", "--noheader", "--states=all", "--me", f"--format={_FORMAT}"]))


def find_job(launch_id: str, patience_s: float = FIND_S) -> str | None:
    """By its comment, whether it waits, runs or has just ended. `patience_s`: it may be on its way to Slurm."""
    deadline = time.monotonic() + patience_s
    while True:
        for job, view in list_jobs().items():
            if view.comment == f"lockstep:{launch_id}":
                return job
        if time.monotonic() > deadline:
            return None
        time.sleep(0.5)


def place_in_queue(job: str, partition: str) -> tuple[int, int] | None:
    """(place, how many wait in its partition): in order of priority, 1 is next. None: it does not wait for its turn."""
    answer = ask(
        ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i", "--format=%i|%Q"]
    )
    waiting: dict[str, None] = {}  # in order
    for line in answer.splitlines():
        name, _, priority = line.partition("|")
        if priority.strip() != "0":  # held: others pass it by
            waiting[_leader(name)] = None
    order = list(waiting)
    return (order.index(job) + 1, len(order)) if job in waiting else None


def describe_waiting(job: str, view: QueuedJob, place: tuple[int, int] | None = None) -> str:
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
    sentence = f"job {job} waits in Slurm's queue" + (f": {why}" if why else "")
    if place is not None:
        sentence += f", place {place[0]} of {place[1]} in {view.partition}"
    if re.match(r"\d{4}-", view.starts_at):
        sentence += f", expected to start at {view.starts_at.replace('T', ' ')}"
    return sentence


def _read_jobs(answer: str) -> dict[str, QueuedJob]:
    """The lines of a heterogeneous job, one for each component, are one job."""
    jobs: dict[str, QueuedJob] = {}
    for line in answer.splitlines():
        name, state, reason, nodes, partition, starts_at, comment = line.split("|", 6)
        job, view = _leader(name), QueuedJob(state, reason, nodes, partition, starts_at, comment)
        known = jobs.get(job)
        if known is not None:
            nodes = ",".join(filter(None, (known.nodes, nodes)))
            view = replace(known if known.is_alive or not view.is_alive else view, nodes=nodes)
        jobs[job] = view
    return jobs


def _leader(name: str) -> str:
    return name.split("+")[0].split("_")[0]


def ask(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """What it prints. Raises what Slurm says, in one sentence."""
    try:
        answered = subprocess.run(
            command,
            env=None if environment is None else {**environment, **_slurm_variables()},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )
    except FileNotFoundError:
        check_slurm()
        raise
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")
        if _FULL.search(said):
            raise SlurmFull("Slurm's queue is full: try again when other jobs have ended") from None
        raise SlurmSilent(f"Slurm gave {command[0]} no answer within {_COMMAND_S:.0f} s: try again later") from None
    if answered.returncode == 0:
        return answered.stdout
    lines = [line for line in answered.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    words = re.sub(r"^(\w+: (error: |fatal: )?|allocation failure: )", "", lines[-1] if lines else "no reason")
    if _SILENCE.search(answered.stderr):
        raise SlurmSilent(f"Slurm's controller does not answer ({words}): try again later")
    if _FULL.search(answered.stderr):
        raise SlurmFull(f"Slurm takes no more jobs now ({words}): wait until others of your jobs have ended")
    raise SlurmRefused(f"Slurm's {command[0]} refused: {words}{_hint(answered.stderr)}")


def _slurm_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in ("SLURM_CONF", "PATH")}


def _hint(words: str) -> str:
    hints = {
        "artition": "; set launch.partition to one that sinfo lists",
        "ccount": "; set launch.account to one that you may charge",
        "ime limit": "; lower launch.time, or choose another launch.partition",
        "qos": "; set launch.qos to one that you may use",
        "ode configuration": "; ask for less (launch.nodes, procs_per_node, gpus_per_node, memory)",
        "rocessors requested": "; ask for less (launch.nodes, procs_per_node, cpus_per_proc)",
        "gres": "; the nodes have no such GPUs (launch.gpus_per_node, device)",
        "ermission": "; ask the operator of the cluster for leave",
    }
    return next((hint for part, hint in hints.items() if part in words), "")
