"""What every launcher offers: start a run on some resources, ask about it, end it.

A handle is plain JSON: whoever reads it back, in another process and after a restart, can poll and stop the run.
Must not know how any one launcher starts processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol


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
    """`started` tells the process from a later one with the same pid; `mark` is in the environment of every
    process of the run, so that none is missed when the first one is gone."""

    launcher: str
    run_dir: str
    pid: int
    started: str
    mark: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunHandle:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class RunState:
    """`reason` is one sentence for people, empty unless the run failed; `exit_code` is for the command to end with."""

    state: Literal["running", "completed", "failed", "cancelled"]
    reason: str = ""
    exit_code: int = 0

    @property
    def would_fail_again(self) -> bool:
        """What its user has to put right (2), and what training came to by itself (3): no fault of a machine."""
        return self.state == "failed" and self.exit_code in (2, 3)


class Launcher(Protocol):
    def start(self, run_dir: Path, resources: Resources, *, mark: str | None = None) -> RunHandle:
        """`mark` is the name of this launch, for `find`; a new one if None."""
        ...

    def find(self, run_dir: Path, mark: str) -> RunHandle | None:
        """The launch of that name, also when whoever began it was killed meanwhile. None: nothing was started."""
        ...

    def poll(self, handle: RunHandle) -> RunState:
        """Once no process is left, the answer is final and the same as what status.json says."""
        ...

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """Returns when no process of the run is left. A run that had not finished is then 'cancelled'.

        `hurry` is asked while waiting: yes ends the grace period."""
        ...
