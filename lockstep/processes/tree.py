"""Processes of this machine as the kernel shows them: find those of a tree, see how they are, end them all.

Linux's /proc where there is one, signal 0 elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

STOPPED_LIMIT_S = 4.0  # a shorter stop changes nothing
# Of the time between two looks, as much is counted: the watcher itself may have been stopped. Three looks on a busy
# machine, three seconds apart, must still name a stopped rank within the ten seconds that are promised.
_MAX_GAP_S = 2.5
_PR_SET_PDEATHSIG = 1
# Signals that come from outside or from a crash: a process they end is the cause, errors of its peers the consequence.
FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str = "") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


# --- what the kernel says --------------------------------------------------------------------------------------------


def process_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> str:
    """Clock ticks after boot at which the process started; empty when it does not exist or has ended."""
    stat = process_stat(pid)
    return stat[19] if stat is not None and stat[0] not in "ZX" else ""


def is_same_process(pid: int, started: str) -> bool:
    """Whether the process still runs: `started` is its start_time, which a later one with the same pid has not."""
    if not pid:
        return False
    if Path("/proc/self/stat").exists():
        return start_time(pid) == started != ""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, SIGTSTP or a debugger."""
    return (process_stat(pid) or " ")[0] == "T"


def read_command(pid: int) -> list[str]:
    return _read_strings(pid, "cmdline")


def read_environment(pid: int) -> dict[str, str]:
    """As the process was started; empty when it has ended or belongs to another user."""
    pairs = (entry.partition("=") for entry in _read_strings(pid, "environ"))
    return {name: value for name, _, value in pairs if name}


def find_processes(variables: Iterable[str], value: str) -> list[int]:
    """Those started with `value` in one of these environment variables, which children inherit."""
    entries = {f"{name}={value}".encode() for name in variables}
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if entries.intersection((folder / "environ").read_bytes().split(b"\0")) and start_time(int(folder.name)):
                pids.append(int(folder.name))
    return pids


def child_processes(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return children


def _read_strings(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


# --- the end ---------------------------------------------------------------------------------------------------------


def end_gently(pids: Sequence[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped gets the first after the second
        signal_all(pids, number)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(
    list_processes: Callable[[], Sequence[int]], grace_s: float, hurry: Callable[[], bool] = lambda: False
) -> None:
    """SIGTERM to each, SIGKILL to those that outlive the grace period; returns when none is left.

    `list_processes` is called again and again, since processes start others; `hurry` ends the grace period.
    """
    end_gently(list_processes())
    deadline = time.monotonic() + grace_s
    while processes := list_processes():
        if time.monotonic() > deadline or hurry():
            signal_all(processes, signal.SIGKILL)
        time.sleep(0.05)


def die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process when the thread that started it ends. False: `parent` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """The numbers of the signals that asked this process to end, in order of arrival. Main thread only."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- sentences -------------------------------------------------------------------------------------------------------


def describe_exit(name: str, code: int | None) -> str:
    if code is None or code >= 0:
        return f"{name} ended with exit code {code}"
    hint = "; this is often the system running out of memory" if -code == signal.SIGKILL else ""
    return f"{name} was ended by signal {-code} ({signal.Signals(-code).name}){hint}"


def describe_stop(name: str, pid: int, limit_s: float) -> str:
    return f"{name} (process {pid}) was stopped by a signal and did not go on within {limit_s:g} s"


class StoppedTimes:
    """For how long processes have been stopped, counted only while they are watched."""

    def __init__(self, limit_s: float = STOPPED_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._updated_at: float | None = None
        self._stopped_s: dict[str, float] = {}

    def update(self, stopped: Collection[str], now: float) -> list[str]:
        """`stopped` are the names of those that are stopped now. Returns those stopped for longer than the limit."""
        gap_s = 0.0 if self._updated_at is None else min(now - self._updated_at, _MAX_GAP_S)
        self._updated_at = now
        before = self._stopped_s
        self._stopped_s = {name: before[name] + gap_s if name in before else 0.0 for name in stopped}
        return [name for name, stopped_s in self._stopped_s.items() if stopped_s >= self.limit_s]
