"""A run from its start, or its resumption, to its end: the one path of the command and of Python.

When a rank is lost, the run goes on from its last checkpoint, within limits. One process supervises a run; when that is
killed, the ranks go on, and another process can take its place. The job service restarts jobs itself, through its
queue.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig, check_config, load_config, resolve_config
from lockstep.launch.kubernetes import KubernetesLauncher
from lockstep.launch.launcher import Launcher, Resources, RunHandle, RunState
from lockstep.launch.local import LocalLauncher, read_handle
from lockstep.launch.local import is_running as is_running_here
from lockstep.launch.ray_driver import RayLauncher
from lockstep.launch.slurm import SlurmLauncher
from lockstep.launch.slurm import is_alive as is_alive_on_slurm
from lockstep.rundir import FINISHED_STATES, RunDir, write_atomically

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
# Runs go on there without the process that started them, and are started again there, not here.
_CLUSTERS = frozenset({"kubernetes", "slurm"})
_SUPERVISOR_FILE, _SUPERVISOR_LOCK = "supervisor.json", ".supervisor.lock"
_MEMORY = ("batch.micro_batch_tokens", "batch.fit_memory", "batch.on_out_of_memory")
_MAY_CHANGE = ("parallel.", "launch.", "cluster", *_MEMORY, "rollouts.")
# The settings there that change the numbers, or how old samples may be.
_MAY_NOT = ("parallel.compression", "rollouts.endpoint", "rollouts.kind", "rollouts.max_staleness")


class RunFailed(RuntimeError):
    """The run ended without completing. The message is the first failing rank's sentence."""


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    start_over: bool = False,
) -> dict[str, Any]:
    """Train in `launch.procs` worker processes and wait. Returns what `lockstep train --json` prints.

    `resume` goes on with a run from its last checkpoint; `overrides` may then say how the work is shared out, and
    `start_over` lets it begin at step 0, with its checkpoints kept aside.
    """
    if (config is None) == (resume is None) or (start_over and resume is None):
        raise ValueError("give either a configuration or a run to resume; only the latter can start over")
    if resume is not None:
        if run_dir is not None:
            raise ValueError(f"a resumed run stays where it is, in {resume}: give no run_dir")
        run, settings = reopen(resume, overrides, start_over=start_over)
    else:
        assert config is not None
        settings = _resolve(config, overrides)
        run = RunDir.create(run_dir or new_run_dir(settings.name), settings)
    processes = start(run, settings)
    try:
        while (outcome := processes.poll()).state == "running":
            time.sleep(0.2)
    except BaseException:
        processes.give_up()
        raise
    if outcome.state != "completed":
        raise RunFailed(f"{outcome.reason} (logs in {run.logs})")
    return result_of(run)


def start(
    run: RunDir,
    settings: RunConfig,
    say: Callable[[str], None] = lambda line: None,
    where: tuple[Launcher, Resources] | None = None,
) -> RestartingRun:
    """Start the processes of a run, by default where launch.kind says. `say` gets a line at every restart."""
    supervision = Supervision.take(run.path)
    if supervision is None:
        raise ValueError(f"{run.path} is supervised by another process: end that, or follow it with lockstep attach")
    before = supervision.read()
    try:
        launcher, resources = where or _launcher_of(settings)
        supervision.record(Restarts())
        handle = launcher.start(run.path, resources)
    except BaseException:
        if before is None:
            supervision.end()
        else:  # it runs already, and can still be taken over
            supervision.record(before)
            supervision.release()
        raise
    return RestartingRun(launcher, handle, run, resources, _max_restarts(settings), say, supervision)


def attach(path: str | Path, say: Callable[[str], None] = lambda line: None) -> RestartingRun | None:
    """Take the place of a supervisor that is gone: with its restarts counted on, and what it had planned.

    None: another process supervises the run, which is the job service where it is one of its jobs.
    """
    run = RunDir(Path(path).resolve())
    settings = run.config()
    try:
        supervision = Supervision.take(run.path)
    except PermissionError:  # another user's run
        return None
    if supervision is None:
        return None
    try:
        restarts = supervision.read()
        if restarts is None:
            supervision.release()
            return None
        launcher, resources = _launcher_of(settings)
        # The last one that was begun: whoever began it may have been killed before it could write the handle.
        launch_id = run.status().get("launch")
        handle = launcher.find(run.path, launch_id) if launch_id else read_handle(run.path)
        if handle is None:
            raise ValueError(f"no process of {path} was started: start it with lockstep train --resume {path}")
        supervision.record(restarts)
        RunDir(run.path, owner=True).log_event("attached", pid=os.getpid())  # rank 0 may live: appending is safe
    except BaseException:
        supervision.release()
        raise
    return RestartingRun(launcher, handle, run, resources, _max_restarts(settings), say, supervision, restarts)


def stop(path: str | Path) -> None:
    """End a run of a cluster, whoever follows it. Returns when none of its processes is left."""
    run = RunDir(Path(path).resolve(), owner=True)
    settings = run.config()
    if settings.launch.kind not in _CLUSTERS:
        if (state := run.status().get("state")) in ("completed", "failed", "cancelled", "interrupted"):
            raise ValueError(f"{path} is {state}: there is nothing to stop")
        raise ValueError(
            f"{path} runs on this machine: end it with Ctrl-C where it was started, or lockstep attach {path}"
        )
    launch_id, state = run.status().get("launch"), run.status().get("state")
    launcher, _ = _launcher_of(settings)
    handle = launcher.find(run.path, launch_id) if launch_id else None
    if handle is None:
        raise ValueError(f"nothing of {path} was started")
    if state in FINISHED_STATES and not is_running(run.path):
        raise ValueError(f"{path} has ended: it is {state}")
    launcher.stop(handle)


def has_ended(run: RunDir) -> bool:
    """Finished, and no supervisor was killed before it could decide whether to start it again."""
    return run.status().get("state") in FINISHED_STATES and not (run.path / _SUPERVISOR_FILE).exists()


def is_running(run_dir: str | Path) -> bool:
    """Whether a process that a launcher started is alive on this machine, or its job waits or runs on a cluster."""
    handle = read_handle(run_dir)
    if handle is not None and handle.launcher == "slurm":
        return is_alive_on_slurm(handle)
    return is_running_here(run_dir)


def _max_restarts(settings: RunConfig) -> int:
    """By this process."""
    return 0 if settings.launch.kind in _CLUSTERS else settings.launch.max_restarts


def _launcher_of(settings: RunConfig) -> tuple[Launcher, Resources]:
    launch = settings.launch
    launchers: dict[str, Callable[[], Launcher]] = {
        "ray": RayLauncher,
        "kubernetes": KubernetesLauncher,
        "slurm": SlurmLauncher,
    }
    return launchers.get(launch.kind, LocalLauncher)(), Resources(launch.procs, launch.device)


def new_run_dir(name: str) -> Path:
    stem = f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


def result_of(run: RunDir) -> dict[str, object]:
    """The state of a run, with the names of the public interface."""
    status = run.status()
    renamed = {"step": "steps", "loss": "final_loss", "validation_loss": "final_validation_loss"}
    same = ("best_validation_loss", "best_step", "tokens", "tokens_per_s", "export", "error")
    result: dict[str, object] = {"run_dir": str(run.path), "state": status.get("state")}
    return result | {new: status.get(old) for old, new in renamed.items()} | {key: status.get(key) for key in same}


def _resolve(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, (str, Path)):
        settings = load_config(config, overrides)
    else:
        tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else dict(config)
        settings = resolve_config(tree, overrides=overrides)
    return check_config(settings)


# --- restarts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """How far a run has come: the step of its last checkpoint, and the furthest step."""

    checkpoint: int = 0
    step: int = 0

    def is_beyond(self, other: Reached) -> bool:
        return self.checkpoint > other.checkpoint or self.step > other.step


def reached_by(run: RunDir) -> Reached:
    saved = run.list_checkpoints()
    checkpoint = saved[-1].step if saved else 0
    return Reached(checkpoint, max(checkpoint, int(run.status().get("step") or 0)))


def why_not_again(outcome: RunState, num_restarts: int, max_restarts: int, reached: Reached, before: Reached) -> str:
    """Why a failed run is not restarted, to append to its reason; empty: it is. `before` is of the last restart."""
    if num_restarts and not reached.is_beyond(before):
        return f"it was started again and got no further than step {before.step} before, so this was the last time"
    if num_restarts >= max_restarts:
        return f"it was started again {num_restarts} times, as often as launch.max_restarts allows"
    return ""


def pause_before(restart: int) -> float:
    """Seconds to wait before a restart; the first is number 1."""
    return min(_FIRST_PAUSE_S * 2 ** (restart - 1), _MAX_PAUSE_S)


@dataclass(frozen=True)
class Restarts:
    """How often a run was started again, how far it had come the last time, and which launch had then failed."""

    count: int = 0
    reached: Reached = field(default_factory=Reached)
    failed_launch: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Restarts:
        return cls(int(values["count"]), Reached(**values["reached"]), str(values["failed_launch"]))


class Supervision:
    """Of one run, by one process at a time: its lock is free when that ends, however it ends.

    What the next one must know is in supervisor.json, until the run has ended. A job of the service has none: the
    service supervises it.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder, self._lock = folder, lock

    @classmethod
    def take(cls, run_dir: Path) -> Supervision | None:
        """None: another process has it."""
        lock = os.open(run_dir / _SUPERVISOR_LOCK, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by what we start
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(run_dir, lock)

    def record(self, restarts: Restarts) -> None:
        text = json.dumps({"pid": os.getpid(), **restarts.to_json()})
        write_atomically(self._folder / _SUPERVISOR_FILE, text)

    def read(self) -> Restarts | None:
        try:
            return Restarts.from_json(json.loads((self._folder / _SUPERVISOR_FILE).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # damaged
            return Restarts()

    def end(self) -> None:
        """The run has ended, and nobody needs to take over."""
        if self._lock >= 0:
            (self._folder / _SUPERVISOR_FILE).unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def lacks_supervisor(run: RunDir) -> bool:
    """Its processes live here, and the one that would start it again does not. A cluster does that itself."""
    return is_running_here(run.path) and (run.path / _SUPERVISOR_FILE).exists() and not is_supervised(run.path)


def is_supervised(run_dir: Path) -> bool:
    """Whether a command or a Python program watches the run and would start it again."""
    try:
        lock = os.open(run_dir / _SUPERVISOR_LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


class RestartingRun:
    """A run that `launcher` has started, as `handle` says. Poll it often: restarts happen in `poll`."""

    def __init__(
        self,
        launcher: Launcher,
        handle: RunHandle,
        run: RunDir,
        resources: Resources,
        max_restarts: int,
        say: Callable[[str], None] = lambda line: None,
        supervision: Supervision | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        """`supervision` is given up when the run has ended. `restarts`: of a supervisor before this one."""
        self._launcher, self._handle = launcher, handle
        self._run = RunDir(run.path, owner=True)
        self._resources = resources
        self._max_restarts = max_restarts
        self._say = say
        self._supervision = supervision
        self._restarts = restarts or Restarts()
        # When the next start is due, between two starts.
        self._due_at = time.monotonic() if self._restarts.failed_launch == handle.launch_id else None

    def poll(self) -> RunState:
        outcome = self._poll()
        if outcome.state != "running":
            self._end_supervision()
        return outcome

    def _poll(self) -> RunState:
        if self._due_at is not None:
            if time.monotonic() < self._due_at:
                return RunState("running")
            self._due_at = None
            self._handle = self._launcher.start(self._run.path, self._resources)
        outcome = self._launcher.poll(self._handle)
        if outcome.state != "failed" or outcome.would_fail_again or not self._max_restarts:
            return outcome
        reached = reached_by(self._run)
        before = self._restarts
        refusal = why_not_again(outcome, before.count, self._max_restarts, reached, before.reached)
        if refusal:
            outcome = replace(outcome, reason=f"{outcome.reason}; {refusal}")
            self._run.write_status(error=outcome.reason)
            self._max_restarts = 0  # this state is final
            return outcome
        self._plan_restart(outcome.reason, reached)
        return RunState("running")

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Returns when no process of the run is left, and none will be started."""
        self._due_at, self._max_restarts = None, 0
        self._launcher.stop(self._handle, hurry)
        self._end_supervision()

    @property
    def outlives_us(self) -> bool:
        return self._handle.launcher in _CLUSTERS

    def leave(self) -> None:
        """The run goes on, and another process can follow it."""
        assert self.outlives_us
        if self._supervision is not None:
            self._supervision.release()

    def give_up(self) -> None:
        """This process ends: so do the run's, if they would not do well without it."""
        if self.outlives_us:
            self.leave()
        else:
            self.stop()

    def _end_supervision(self) -> None:
        if self._supervision is not None:
            self._supervision.end()

    def _plan_restart(self, reason: str, reached: Reached) -> None:
        number = self._restarts.count + 1
        self._restarts = Restarts(number, reached, self._handle.launch_id)
        if self._supervision is not None:
            self._supervision.record(self._restarts)
        pause_s = pause_before(number)
        self._due_at = time.monotonic() + pause_s
        self._run.log_event(
            "restarted",
            reason=reason,
            step=reached.checkpoint,
            restart=number,
            max_restarts=self._max_restarts,
            pause_s=pause_s,
        )
        self._run.write_status(state="created", error=None, phase=f"starting again in {pause_s:g} s")
        start = f"from step {reached.checkpoint}" if reached.checkpoint else "from the start"
        self._say(f"{reason}; starting again {start} (restart {number} of {self._max_restarts})")


# --- resuming --------------------------------------------------------------------------------------------------------


def reopen(
    path: str | Path, overrides: Sequence[str] = (), *, settings: RunConfig | None = None, start_over: bool = False
) -> tuple[RunDir, RunConfig]:
    """The run and the configuration it goes on with: recorded in the run directory where it is another one.

    `settings` is all of that configuration, instead of overrides. Not while the run's processes are alive: until they
    are started again, the caller owns the directory.
    """
    run = RunDir(path, owner=True)
    before = run.config()
    if start_over:
        if is_running(run.path):
            raise ConfigError(f"{run.path} is still running: stop it before it starts over")
        run.start_over()
    if not overrides and settings is None:
        return run, check_config(before)
    after = settings or load_config(run.newest_config_path, overrides)
    changes = _changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    for key, (old, new) in changes.items():
        if key in _MAY_NOT or not key.startswith(_MAY_CHANGE):
            raise ConfigError(
                f"--resume cannot change {key} from {old} to {new}: only parallel.*, launch.*, cluster, "
                "batch.micro_batch_tokens and the engines of rollouts can change within a run, because they do not "
                "change its numbers. To train its model otherwise, start a run with its export as model.path"
            )
    check_config(after)
    if "launch.device" in changes:
        after = _keep_precision(run, after)
    if changes:
        if is_running(run.path):
            raise ConfigError(f"{run.path} is still running: stop it before you change it")
        _record(run, after, changes)
    return run, after


def _keep_precision(run: RunDir, config: RunConfig) -> RunConfig:
    """Another device must not make `auto` choose again."""
    chosen = run.status().get("precision")
    if config.model.precision != "auto" or chosen is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"precision": chosen})})


def _record(run: RunDir, config: RunConfig, changes: Mapping[str, tuple[object, object]]) -> None:
    file = run.add_config(config)
    run.log_event("reconfigured", file=file.name, changes={key: list(pair) for key, pair in changes.items()})
    shares_otherwise = any(key == "launch.procs" or not key.startswith(("launch.", "rollouts.")) for key in changes)
    if shares_otherwise and config.lora is not None and config.lora.dropout:
        run.log_event(
            "warning",
            message="lora.dropout draws other numbers from here on: they depend on how the work is shared out, "
            "so this run will not equal one that was never stopped",
        )


def _changes(
    before: Mapping[str, object], after: Mapping[str, object], prefix: str = ""
) -> dict[str, tuple[object, object]]:
    """Every key whose value is another: (old, new)."""
    changes: dict[str, tuple[object, object]] = {}
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[prefix + key] = (old, new)
    return changes
