"""A run over as many starts as it takes: when a rank is lost, it goes on from the last checkpoint, within limits.

For whoever follows a run from its start to its end. The job service does not: it puts a job back into its queue.
Must not know how processes are started, nor what a checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.launch.launcher import Launcher, Resources, RunHandle, RunState
from lockstep.rundir import RunDir

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Reached:
    """How far a run has come: the step it would go on from, and the furthest it has been at."""

    checkpoint: int = 0
    step: int = 0

    def is_beyond(self, other: Reached) -> bool:
        return self.checkpoint > other.checkpoint or self.step > other.step


def reached_by(run: RunDir) -> Reached:
    saved = run.list_checkpoints()
    checkpoint = saved[-1].step if saved else 0
    return Reached(checkpoint, max(checkpoint, int(run.status().get("step") or 0)))


def why_not_again(outcome: RunState, num_restarts: int, max_restarts: int, reached: Reached, before: Reached) -> str:
    """Why a failed run is not started again, to follow its reason; empty: it is. `before` is of the last restart."""
    if num_restarts and not reached.is_beyond(before):
        return f"it was started again and got no further than step {before.step} before, so this was the last time"
    if num_restarts >= max_restarts:
        return f"it was started again {num_restarts} times, as often as launch.max_restarts allows"
    return ""


def pause_before(restart: int) -> float:
    """Seconds before the restart of that number, the first being 1."""
    return min(_FIRST_PAUSE_S * 2 ** (restart - 1), _LONGEST_PAUSE_S)


class RestartingRun:
    """Poll it often. `say` gets a line for people whenever the run is started again."""

    def __init__(
        self,
        launcher: Launcher,
        run: RunDir,
        resources: Resources,
        max_restarts: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._launcher = launcher
        self._run = RunDir(run.path, owner=True)
        self._resources = resources
        self._max_restarts = max_restarts
        self._say = say
        self._num_restarts = 0
        self._reached = Reached()
        self._due_at: float | None = None  # when the next start is, while none is under way
        self._handle: RunHandle = launcher.start(run.path, resources)

    def poll(self) -> RunState:
        if self._due_at is not None:
            if time.monotonic() < self._due_at:
                return RunState("running")
            self._due_at = None
            self._handle = self._launcher.start(self._run.path, self._resources)
        outcome = self._launcher.poll(self._handle)
        if outcome.state != "failed" or outcome.would_fail_again or not self._max_restarts:
            return outcome
        reached = reached_by(self._run)
        refusal = why_not_again(outcome, self._num_restarts, self._max_restarts, reached, self._reached)
        if refusal:
            outcome = replace(outcome, reason=f"{outcome.reason}; {refusal}")
            self._run.write_status(error=outcome.reason)
            self._max_restarts = 0  # the answer is final
            return outcome
        self._plan_restart(outcome.reason, reached)
        return RunState("running")

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Returns when no process of the run is left, and none will be started."""
        self._due_at, self._max_restarts = None, 0
        self._launcher.stop(self._handle, hurry)

    def _plan_restart(self, reason: str, reached: Reached) -> None:
        self._num_restarts += 1
        self._reached = reached
        pause_s = pause_before(self._num_restarts)
        self._due_at = time.monotonic() + pause_s
        self._run.log_event(
            "restarted",
            reason=reason,
            step=reached.checkpoint,
            restart=self._num_restarts,
            max_restarts=self._max_restarts,
            pause_s=pause_s,
        )
        self._run.write_status(state="created", error=None, phase=f"starting again in {pause_s:g} s")
        start = f"from step {reached.checkpoint}" if reached.checkpoint else "from the start"
        self._say(f"{reason}; starting again {start} (restart {self._num_restarts} of {self._max_restarts})")
