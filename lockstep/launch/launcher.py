"""What every launcher offers: start a run on some resources, poll it, stop it.

A handle is plain JSON: another process can read it, also after a restart, and poll or stop the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from lockstep.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Resources:
    """`devices` are the GPUs a run may use, by the names CUDA_VISIBLE_DEVICES takes; empty: all. `threads` is for each
    process on CPU; None: an equal share of all cores."""

    procs: int = 1
    device: str = "auto"
    devices: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class RunHandle:
    """`started` distinguishes the process from a later one with the same pid; `launch_id` is in the environment of
    every process of the run, so that none is missed when the first one is gone."""

    launcher: str
    run_dir: str
    pid: int
    started: str
    launch_id: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunHandle:
        values = json.loads(text)
        if "mark" in values:  # the name of launch_id in version 0.1
            values["launch_id"] = values.pop("mark")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class RunState:
    """`reason` is one sentence for people, empty unless the run failed or was interrupted; `exit_code` is for the
    command to end with. Interrupted: it was asked to stop, wrote a checkpoint and can go on."""

    state: Literal["running", "completed", "failed", "cancelled", "interrupted"]
    reason: str = ""
    exit_code: int = 0

    @property
    def would_fail_again(self) -> bool:
        """A user's mistake (2) or a diverged training (3): no fault of a machine."""
        return self.state == "failed" and self.exit_code in (2, 3)


def record_stop(run: RunDir) -> None:
    """Once no process of a run is left that somebody has stopped."""
    if run.status().get("state") != "completed":
        run.clear_failures()
        run.write_status(state="cancelled", error=None, phase=None, **logged_progress(run))


def logged_progress(run: RunDir) -> dict[str, float]:
    """What the status of a run that was killed lacks: it is written once a second, and the metrics at every step."""
    status = run.status()
    seen = int(status.get("step") or 0)
    later = [record for record in run.metrics() if record["split"] == "train" and record["step"] > seen]
    if not later:
        return {}
    tokens = int(status.get("tokens") or 0) + sum(int(record.get("tokens") or 0) for record in later)
    return {"step": later[-1]["step"], "loss": later[-1]["loss"], "tokens": tokens}


class LauncherBusy(OSError):
    """Where runs are started gives no answer, or takes no more now: the same request may do later."""


class Launcher(Protocol):
    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        """`launch_id` is for `find`; a new one if None."""
        ...

    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        """The launch with that id, even if the process that began it was killed. None: nothing was started."""
        ...

    def poll(self, handle: RunHandle) -> RunState:
        """Once no process is left, the answer is final and the same as what status.json says."""
        ...

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """Returns when no process of the run is left. A run that had not finished is then 'cancelled'.

        `hurry` is called while waiting: True ends the grace period."""
        ...
