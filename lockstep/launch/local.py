"""Runs on this machine: one worker process, or torchrun with one worker per rank.

torchrun gives each worker a session of its own, so processes are found by the launch id in their environment. While
workers live, rank 0 owns the run directory; once all are gone, the launcher does, and writes the final status.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lockstep.launch.launcher import Resources, RunHandle, RunState, logged_progress, record_stop
from lockstep.processes.rank_environment import RankPlace, without_place
from lockstep.processes.tree import (
    FATAL_SIGNALS,
    STOPPED_LIMIT_S,
    StoppedTimes,
    child_processes,
    describe_exit,
    describe_stop,
    end_all,
    find_processes,
    is_same_process,
    is_stopped,
    num_cores,
    read_command,
    read_environment,
    signal_all,
    start_time,
)
from lockstep.rundir import EXIT_INTERRUPTED, FINISHED_STATES, RunDir, open_log, write_atomically

WORKER_MODULE = "lockstep.train.worker"
HANDLE_FILE = "launch.json"
LOCK_FILE = ".launch.lock"
LAUNCH_ID_VARIABLE = "LOCKSTEP_LAUNCH_ID"
_OLD_LAUNCH_ID_VARIABLE = "LOCKSTEP_LAUNCH_MARK"  # of runs that version 0.1 has started
_TORCHRUN = "torch.distributed.run"
_TORCHRUN_FILES = "torchrun"  # in the folder of logs, while it runs
_FIND_TIMEOUT_S = 5.0


class LocalLauncher:
    kind = "local"
    patience_s = 5.0  # from a rank's failure to the end of all processes
    stopped_limit_s = STOPPED_LIMIT_S
    meets_others = False  # whether the ranks that are started here are some of those of a run

    def __init__(
        self,
        worker_module: str | None = None,
        grace_s: float = 10.0,
        working_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is what runs get instead of ours."""
        self.worker_module = worker_module or WORKER_MODULE
        self.grace_s = grace_s
        self.working_dir = working_dir
        self._inherited = environment
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[str] = set()  # ids of launches that failed and that we ended: signals are not their cause
        self._stopped: dict[str, StoppedTimes] = {}  # by launch id
        self._failed_at: dict[str, float] = {}  # by launch id: when a failure was first seen, by the monotonic clock

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        run_dir = Path(run_dir).resolve()
        earlier = read_handle(run_dir)
        if earlier is not None:
            if self._is_alive(earlier):
                raise ValueError(
                    f"{run_dir} is still running as process {earlier.pid}: follow it with lockstep attach {run_dir}, "
                    "or end that process first"
                )
            self._end(earlier)  # workers that outlived a killed torchrun would write into the same run
        self._check_kind(run_dir)
        launch_id = launch_id or uuid.uuid4().hex
        with launch_lock(run_dir) as lock:
            run = RunDir(run_dir, owner=True)
            run.clear_failures()
            run.write_status(state="created", error=None, phase="starting", launch=launch_id)
            run.logs.mkdir(exist_ok=True)
            _remove_torchrun_files(run)  # what a killed one left
            _keep_log(run.logs / "launcher.log")
            with open_log(run.logs / "launcher.log") as log, _stop_notice_blocked():
                child = subprocess.Popen(
                    self._command(run_dir, resources.procs),
                    env=self._environment(launch_id, resources),
                    cwd=self.working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        self._children[child.pid] = child
        return _write_handle(run_dir, child.pid, launch_id, self.kind)

    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        """If start was killed before it could write the handle, the processes themselves show it."""
        run_dir = Path(run_dir).resolve()
        written = read_handle(run_dir)
        if written is not None and written.launch_id == launch_id:
            return written
        deadline = time.monotonic() + _FIND_TIMEOUT_S
        while True:
            locked = _is_locked(run_dir)  # first: a process that holds the lock without the id is about to have it
            if processes := launched_processes(launch_id):
                first = min(processes, key=lambda pid: int(start_time(pid) or 0))
                return _write_handle(run_dir, first, launch_id, self.kind)
            if not locked or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        run = RunDir(run_dir)
        status = run.status()
        began = status.get("launch") == launch_id and (status.get("state") != "created" or bool(run.failures()))
        return RunHandle(self.kind, str(run_dir), 0, "", launch_id) if began else None

    def poll(self, handle: RunHandle) -> RunState:
        if self._is_alive(handle):
            if not self._is_overdue(handle) and not self._record_stopped(handle):
                return RunState("running")
            self._ended.add(handle.launch_id)
        # torchrun is gone but not all of its workers, or it waits for one that hangs: nothing else would end them.
        self._end(handle)
        return self._finish(handle)

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        self._end(handle, hurry)
        record_stop(RunDir(handle.run_dir, owner=True))

    def _command(self, run_dir: Path, procs: int) -> list[str]:
        worker = ["-m", self.worker_module, str(run_dir)]
        if procs == 1 and not self.meets_others:
            return [sys.executable, *worker]
        torchrun = ["-m", _TORCHRUN, *self._meeting(), "--nproc-per-node", str(procs)]
        # Its own files, which it never removes, go where a launcher will: not into the system's temporary folder.
        log_dir = ["--log-dir", str(RunDir(run_dir).logs / _TORCHRUN_FILES)]
        return [sys.executable, *torchrun, *log_dir, *worker]

    def _meeting(self) -> list[str]:
        """torchrun's options about where the ranks meet."""
        return ["--standalone"]

    def _environment(self, launch_id: str, resources: Resources) -> dict[str, str]:
        inherited = os.environ if self._inherited is None else self._inherited
        environment = {**without_place(inherited), LAUNCH_ID_VARIABLE: launch_id, "PYTHONUNBUFFERED": "1"}
        if resources.procs == 1:  # torchrun tells the others
            environment |= RankPlace().variables()
        on_cpu = resources.device == "cpu" or (resources.device == "auto" and not Path("/dev/nvidiactl").exists())
        if on_cpu:
            threads = resources.threads or max(num_cores() // resources.procs, 1)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if resources.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(resources.devices)
        return environment

    def _first_process(self, num_ranks: int) -> str:
        """The name of the process that was started."""
        return "rank 0" if num_ranks == 1 else "torchrun"

    def _check_kind(self, run_dir: Path) -> None:
        kind = RunDir(run_dir).config().launch.kind
        if kind != self.kind:
            raise ValueError(f"launch.kind is {kind}, and runs are started here with kind {self.kind}: set that")

    def _is_overdue(self, handle: RunHandle) -> bool:
        """Whether a rank failed a while ago, and the others have not ended. By our own clock: that of the record may
        have been set since."""
        if not RunDir(handle.run_dir).failures():
            return False
        seen_at = self._failed_at.setdefault(handle.launch_id, time.monotonic())
        return time.monotonic() - seen_at >= self.patience_s

    def _record_stopped(self, handle: RunHandle) -> bool:
        """Whether a rank has been stopped for too long: recorded as its failure, since it cannot do so itself."""
        watched = watched_processes(handle)
        times = self._stopped.setdefault(handle.launch_id, StoppedTimes(self.stopped_limit_s))
        stopped = [name for name, (_, pid) in watched.items() if is_stopped(pid)]
        overdue = times.update(stopped, time.monotonic())
        for name in overdue:
            rank, pid = watched[name]
            reason = describe_stop(name, pid, times.limit_s)
            # Appended to beside rank 0, if that is another: ending all of them can take longer than may be waited.
            RunDir(handle.run_dir, owner=True).log_event("rank_stopped", rank=rank, pid=pid, reason=reason)
            RunDir(handle.run_dir).record_failure(rank, reason)
        return bool(overdue)

    def _is_alive(self, handle: RunHandle) -> bool:
        child = self._children.get(handle.pid)
        if child is not None:
            return child.poll() is None
        return is_same_process(handle.pid, handle.started)

    def _end(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        end_all(lambda: self._processes(handle), self.grace_s, hurry)
        _remove_torchrun_files(RunDir(handle.run_dir))

    def _processes(self, handle: RunHandle) -> list[int]:
        return sorted({*launched_processes(handle.launch_id), *([handle.pid] if self._is_alive(handle) else [])})

    def _finish(self, handle: RunHandle) -> RunState:
        """The final state, written here if the workers could not."""
        run = RunDir(handle.run_dir, owner=True)
        status = run.status()
        state = status.get("state")
        if state in ("completed", "cancelled"):
            return RunState(state)
        if state == "interrupted":
            reason = f"asked to stop after step {status.get('step')}, where it wrote a checkpoint"
            return RunState("interrupted", reason, EXIT_INTERRUPTED)
        failures = run.failures()
        child = self._children.get(handle.pid)
        first = failures[0]["message"] if failures else ""
        first_process = self._first_process(run.config().launch.procs)
        killed = "" if handle.launch_id in self._ended else _killed_rank(run, child, first_process)
        reason = killed or first or status.get("error") or _describe_end(child)
        if state not in FINISHED_STATES or status.get("error") != reason:
            run.write_status(state="failed", error=reason, phase=None, **logged_progress(run))
        return RunState("failed", reason, int(failures[0].get("exit_code", 1)) if failures else 1)


def read_handle(run_dir: str | Path) -> RunHandle | None:
    """The handle that the last start left in the run directory, if there is one."""
    try:
        return RunHandle.from_json((Path(run_dir) / HANDLE_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, TypeError, ValueError):
        return None


def is_running(run_dir: str | Path) -> bool:
    """Whether a process that a launcher started here is alive on this machine."""
    handle = read_handle(run_dir)
    return handle is not None and is_same_process(handle.pid, handle.started)


def watched_processes(handle: RunHandle) -> dict[str, tuple[int, int]]:
    """(rank, pid) by name: the process that was started and, if that is torchrun, the ranks it started.

    What ranks start themselves (engines, readers of data) they watch themselves.
    """
    if _TORCHRUN not in read_command(handle.pid):
        return {"rank 0": (0, handle.pid)}
    ranks = [(read_environment(pid).get("RANK", ""), pid) for pid in child_processes(handle.pid)]
    workers = {f"rank {rank}": (int(rank), pid) for rank, pid in ranks if rank.isdecimal()}
    return {"torchrun": (0, handle.pid), **workers}


def ask_to_stop(run_dir: str | Path) -> None:
    """The ranks on this machine: they finish the step, save and end, as `processes.stop_notice` has it."""
    handle = read_handle(run_dir)
    if handle is not None and is_same_process(handle.pid, handle.started):
        pids = [pid for name, (_, pid) in watched_processes(handle).items() if name != "torchrun"]
        signal_all(pids, signal.SIGUSR1)


@contextlib.contextmanager
def _stop_notice_blocked() -> Iterator[None]:
    """Processes inherit what is blocked: a rank that is asked to stop before it listens is not ended by the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def visible_devices(run_dir: str | Path) -> list[str]:
    """The GPUs that the process of a run may see; empty when it has ended, or was not told any."""
    handle = read_handle(run_dir)
    visible = read_environment(handle.pid).get("CUDA_VISIBLE_DEVICES", "") if handle is not None else ""
    return [name for name in visible.split(",") if name]


def launched_processes(launch_id: str) -> list[int]:
    """Every process of a launch on this machine, also those that ranks have started: the id is inherited."""
    return find_processes((LAUNCH_ID_VARIABLE, _OLD_LAUNCH_ID_VARIABLE), launch_id)


def _write_handle(run_dir: Path, pid: int, launch_id: str, kind: str) -> RunHandle:
    handle = RunHandle(kind, str(run_dir), pid, start_time(pid), launch_id)
    write_atomically(run_dir / HANDLE_FILE, handle.to_json())
    return handle


@contextlib.contextmanager
def launch_lock(run_dir: Path) -> Iterator[int]:
    """Held by the launcher from before the first process to after it, and by that process for as long as it lives."""
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run_dir} is still running: end its processes first") from None
        yield descriptor
    finally:
        os.close(descriptor)


def _is_locked(run_dir: Path) -> bool:
    try:
        with launch_lock(run_dir):
            return False
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def _remove_torchrun_files(run: RunDir) -> None:
    shutil.rmtree(run.logs / _TORCHRUN_FILES, ignore_errors=True)


def _keep_log(path: Path) -> None:
    """The output of an earlier launch stays, under a number."""
    if path.exists() and path.stat().st_size:
        path.rename(path.with_name(f"launcher-{1 + len(list(path.parent.glob('launcher-*.log')))}.log"))


# --- why a run ended ------------------------------------------------------------------------------------------------


def _killed_rank(run: RunDir, child: subprocess.Popen[bytes] | None, first_process: str) -> str:
    """A sentence when a signal ended a rank: its peers then report lost connections, which are not the cause."""
    if child is not None and child.returncode is not None and -child.returncode in FATAL_SIGNALS:
        return describe_exit(first_process, child.returncode)
    for rank, code in exit_codes(run):
        if -code in FATAL_SIGNALS:
            return describe_exit(f"rank {rank}", code)
    return ""


def exit_codes(run: RunDir) -> list[tuple[int, int]]:
    """(rank, exit code) of those that torchrun names: ranks that failed or were interrupted."""
    try:
        log = (run.logs / "launcher.log").read_text(errors="replace")
    except OSError:
        return []
    found = re.findall(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", log, re.MULTILINE)
    return [(int(rank), int(code)) for rank, code in found]


def _describe_end(child: subprocess.Popen[bytes] | None) -> str:
    if child is None or child.returncode is None:
        return "the rank processes ended without a result"
    if child.returncode < 0:
        return f"the rank processes ended with signal {-child.returncode}"
    return f"the rank processes ended with exit code {child.returncode} and without a result"
