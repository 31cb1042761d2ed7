"""Runs on this machine: one worker process, or torchrun with one worker per rank.

torchrun gives each worker a session of its own, so processes are found by a mark in their environment, not by group.
While workers live, rank 0 owns the run directory; once all are gone, the launcher does, and settles the status.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lockstep.launch.launcher import Resources, RunHandle, RunState
from lockstep.rundir import FINISHED_STATES, RunDir, write_atomically

WORKER_MODULE = "lockstep.train.worker"
HANDLE_FILE = "launch.json"
LOCK_FILE = ".launch.lock"
MARK_VARIABLE = "LOCKSTEP_LAUNCH_MARK"
_TORCHRUN = "torch.distributed.run"
_FIND_TIMEOUT_S = 5.0
# The signals that come from outside or from a crash: a rank they end is the cause, other ranks' errors its consequence.
_FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


class LocalLauncher:
    kind = "local"
    patience_s = 5.0  # from a rank's failure to the end of all processes

    def __init__(
        self, worker_module: str | None = None, grace_s: float = 10.0, working_dir: Path | None = None
    ) -> None:
        self.worker_module = worker_module or WORKER_MODULE
        self.grace_s = grace_s
        self.working_dir = working_dir
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._overdue: set[str] = set()  # marks of runs that failed and had to be ended: signals are not their cause
        self._stopped: dict[str, StoppedTimes] = {}  # by mark

    def start(self, run_dir: Path, resources: Resources, *, mark: str | None = None) -> RunHandle:
        run_dir = Path(run_dir).resolve()
        earlier = read_handle(run_dir)
        if earlier is not None:
            if self._is_alive(earlier):
                raise ValueError(f"{run_dir} is still running as process {earlier.pid}: end that process first")
            self._end(earlier)  # workers that outlived a killed torchrun would write into the same run
        self._check_kind(run_dir)
        mark = mark or uuid.uuid4().hex
        with _launch_lock(run_dir) as lock:
            run = RunDir(run_dir, owner=True)
            run.clear_failures()
            run.write_status(state="created", error=None, phase="starting", launch=mark)
            run.logs.mkdir(exist_ok=True)
            _keep_log(run.logs / "launcher.log")
            with (run.logs / "launcher.log").open("wb") as log:
                child = subprocess.Popen(
                    self._command(run_dir, resources.procs),
                    env=self._environment(mark, resources),
                    cwd=self.working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        self._children[child.pid] = child
        return _note_handle(run_dir, child.pid, mark, self.kind)

    def find(self, run_dir: Path, mark: str) -> RunHandle | None:
        """Where start was killed before it could write the handle, the processes themselves tell."""
        run_dir = Path(run_dir).resolve()
        noted = read_handle(run_dir)
        if noted is not None and noted.mark == mark:
            return noted
        deadline = time.monotonic() + _FIND_TIMEOUT_S
        while True:
            locked = _is_locked(run_dir)  # asked first: what holds the lock and has no mark yet is about to have it
            if processes := _marked_processes(mark):
                first = min(processes, key=lambda pid: int(_start_time(pid) or 0))
                return _note_handle(run_dir, first, mark, self.kind)
            if not locked or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        run = RunDir(run_dir)
        status = run.status()
        began = status.get("launch") == mark and (status.get("state") != "created" or bool(run.failures()))
        return RunHandle(self.kind, str(run_dir), 0, "", mark) if began else None

    def poll(self, handle: RunHandle) -> RunState:
        if self._is_alive(handle):
            failures = RunDir(handle.run_dir).failures()
            is_fresh = not failures or time.time() - failures[0]["time"] < self.patience_s
            if is_fresh and not self._note_stopped(handle):
                return RunState("running")
            self._overdue.add(handle.mark)
        # torchrun is gone but not all of its workers, or it waits on one that hangs: nobody else would end them.
        self._end(handle)
        return self._settle(handle)

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        self._end(handle, hurry)
        run = RunDir(handle.run_dir, owner=True)
        if run.status().get("state") != "completed":
            run.clear_failures()
            run.write_status(state="cancelled", error=None, phase=None)

    def _command(self, run_dir: Path, procs: int) -> list[str]:
        worker = ["-m", self.worker_module, str(run_dir)]
        if procs == 1:
            return [sys.executable, *worker]
        torchrun = ["-m", _TORCHRUN, "--standalone", "--nproc-per-node", str(procs)]
        return [sys.executable, *torchrun, *worker]

    def _environment(self, mark: str, resources: Resources) -> dict[str, str]:
        environment = {**os.environ, MARK_VARIABLE: mark, "PYTHONUNBUFFERED": "1"}
        on_cpu = resources.device == "cpu" or (resources.device == "auto" and not Path("/dev/nvidiactl").exists())
        if on_cpu:
            threads = resources.threads or max(_num_cores() // resources.procs, 1)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if resources.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(resources.devices)
        return environment

    def _first_process(self, num_ranks: int) -> str:
        """Who the process that was started is."""
        return "rank 0" if num_ranks == 1 else "torchrun"

    def _check_kind(self, run_dir: Path) -> None:
        wanted = RunDir(run_dir).config().launch.kind
        if wanted != self.kind:
            raise ValueError(f"launch.kind is {wanted}, and runs are started here with kind {self.kind}: set that")

    def _note_stopped(self, handle: RunHandle) -> bool:
        """Whether a rank has been stopped for too long: written down as its failure, since it cannot say so itself."""
        watched = self._watched(handle)
        times = self._stopped.setdefault(handle.mark, StoppedTimes())
        standing = [who for who, (_, pid) in watched.items() if (process_stat(pid) or " ")[0] == "T"]
        overdue = times.look(standing, time.monotonic())
        for who in overdue:
            rank, pid = watched[who]
            RunDir(handle.run_dir).record_failure(rank, say_stopped(who, pid))
        return bool(overdue)

    def _watched(self, handle: RunHandle) -> dict[str, tuple[int, int]]:
        """(rank, process) by name: the one that was started and, where that is torchrun, the ranks it started.

        What ranks start themselves (engines, readers of data) is their own affair.
        """
        if _TORCHRUN not in _read_strings(handle.pid, "cmdline"):
            return {"rank 0": (0, handle.pid)}
        ranks = [(_rank_of(pid), pid) for pid in _child_processes(handle.pid)]
        found = {f"rank {rank}": (rank, pid) for rank, pid in ranks if rank is not None}
        return {"torchrun": (0, handle.pid), **found}

    def _is_alive(self, handle: RunHandle) -> bool:
        child = self._children.get(handle.pid)
        if child is not None:
            return child.poll() is None
        return _is_same_process(handle.pid, handle.started)

    def _end(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """SIGTERM to every process of the run, SIGKILL to those that outlive the grace period."""
        end_gently(self._processes(handle))
        deadline = time.monotonic() + self.grace_s
        while processes := self._processes(handle):
            if time.monotonic() > deadline or hurry():
                _signal_all(processes, signal.SIGKILL)
            time.sleep(0.05)

    def _processes(self, handle: RunHandle) -> list[int]:
        return sorted({*_marked_processes(handle.mark), *([handle.pid] if self._is_alive(handle) else [])})

    def _settle(self, handle: RunHandle) -> RunState:
        """What the run came to. The launcher writes it where the workers could not."""
        run = RunDir(handle.run_dir, owner=True)
        status = run.status()
        state = status.get("state")
        if state in ("completed", "cancelled"):
            return RunState(state)
        failures = run.failures()
        child = self._children.get(handle.pid)
        first = failures[0]["message"] if failures else ""
        first_process = self._first_process(run.config().launch.procs)
        killed = "" if handle.mark in self._overdue else _killed_rank(run, child, first_process)
        reason = killed or first or status.get("error") or _describe_end(child)
        if state not in FINISHED_STATES or status.get("error") != reason:
            run.write_status(state="failed", error=reason, phase=None)
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
    return handle is not None and _is_same_process(handle.pid, handle.started)


def _note_handle(run_dir: Path, pid: int, mark: str, kind: str) -> RunHandle:
    handle = RunHandle(kind, str(run_dir), pid, _start_time(pid), mark)
    write_atomically(run_dir / HANDLE_FILE, handle.to_json())
    return handle


@contextlib.contextmanager
def _launch_lock(run_dir: Path) -> Iterator[int]:
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
        with _launch_lock(run_dir):
            return False
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def _keep_log(path: Path) -> None:
    """What an earlier launch printed stays, under a number."""
    if path.exists() and path.stat().st_size:
        path.rename(path.with_name(f"launcher-{1 + len(list(path.parent.glob('launcher-*.log')))}.log"))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- processes: Linux's /proc where there is one, signal 0 elsewhere -----------------------------------------------


def process_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which the process started."""
    stat = process_stat(pid)
    return stat[19] if stat else ""


def _is_same_process(pid: int, started: str) -> bool:
    if not pid:
        return False
    stat = process_stat(pid)
    if stat is not None:
        return stat[0] not in "ZX" and stat[19] == started  # a zombie has ended
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _marked_processes(mark: str) -> list[int]:
    entry = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                stat = process_stat(int(folder.name))
                if stat is not None and stat[0] not in "ZX":
                    found.append(int(folder.name))
    return found


def _read_strings(pid: int, file: str) -> list[str]:
    """Of /proc/PID/cmdline or environ."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _child_processes(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _rank_of(pid: int) -> int | None:
    for entry in _read_strings(pid, "environ"):
        name, _, value = entry.partition("=")
        if name == "RANK" and value.isdecimal():
            return int(value)
    return None


def end_gently(pids: list[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped hears the first after the second
        _signal_all(pids, number)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# --- why a run ended ------------------------------------------------------------------------------------------------


def _killed_rank(run: RunDir, child: subprocess.Popen[bytes] | None, first_process: str) -> str:
    """A sentence when a signal ended a rank: its peers then report lost connections, which are not the cause."""
    if child is not None and child.returncode is not None and -child.returncode in _FATAL_SIGNALS:
        return say_signal(first_process, -child.returncode)
    try:
        log = (run.logs / "launcher.log").read_text(errors="replace")
    except OSError:
        return ""
    for rank, code in re.findall(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", log, re.MULTILINE):
        if -int(code) in _FATAL_SIGNALS:
            return say_signal(f"rank {rank}", -int(code))
    return ""


def say_signal(who: str, number: int) -> str:
    hint = "; this is often the system running out of memory" if number == signal.SIGKILL else ""
    return f"{who} was ended by signal {number} ({signal.Signals(number).name}){hint}"


def _describe_end(child: subprocess.Popen[bytes] | None) -> str:
    if child is None or child.returncode is None:
        return "the rank processes ended without a result"
    if child.returncode < 0:
        return f"the rank processes ended with signal {-child.returncode}"
    return f"the rank processes ended with exit code {child.returncode} and without a result"


STOPPED_LIMIT_S = 5.0  # a shorter stop changes nothing
_LONGEST_GAP_S = 1.0


class StoppedTimes:
    def __init__(self, limit_s: float = STOPPED_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._looked_at: float | None = None
        self._stopped_s: dict[str, float] = {}

    def look(self, stopped: Collection[str], now: float) -> list[str]:
        """`stopped` are the names of those that stand still now. Returns those that have for too long."""
        gap_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_GAP_S)
        self._looked_at = now
        before = self._stopped_s
        self._stopped_s = {name: before[name] + gap_s if name in before else 0.0 for name in stopped}
        return [name for name, stopped_s in self._stopped_s.items() if stopped_s >= self.limit_s]


def say_stopped(who: str, pid: int) -> str:
    return f"{who} (process {pid}) was stopped by a signal and did not go on within {STOPPED_LIMIT_S:g} s"
