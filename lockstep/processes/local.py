"""A worker as a process of this machine, over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from lockstep.processes.connected import ConnectedWorker
from lockstep.processes.tree import describe_exit
from lockstep.rundir import open_log


class _Child:
    """A process that this one has started, in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        kill_session(self._process)

    def describe_end(self, name: str) -> tuple[str, int | None]:
        code = self._process.returncode
        return describe_exit(name, code), code


class LocalWorker(ConnectedWorker):
    """Made by `spawn`. `log_path` None: the process shares our stdout and stderr."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], connection: socket.socket, log_path: Path | None
    ) -> None:
        self._pid = process.pid
        super().__init__(name, _Child(process), connection, log_path)

    @classmethod
    def spawn(
        cls,
        name: str,
        entry: str,
        settings: Mapping[str, object],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> LocalWorker:
        """Start a process, in a session of its own, and return once it is connected. `entry`
        ("package.module:function") is then called in it with `settings`, which are JSON; an error there fails every
        call. `env` adds to our environment.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            try:
                starting = _starting_thread(os.getpid()).submit(start_child, name, there, dict(env or {}), log_path)
                process = starting.result()
            except BaseException:
                here.close()
                raise
        worker = cls(name, process, here, log_path)
        worker.start(entry, settings, start_timeout_s)
        return worker

    @property
    def pid(self) -> int:
        return self._pid


@cache
def _starting_thread(pid: int) -> ThreadPoolExecutor:
    """Linux ends a child with the thread that started it, so one thread that stays starts them all.

    One per process: a fork has none of the threads.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="start-workers")


def start_child(
    name: str, connection: socket.socket, env: Mapping[str, str], log_path: Path | None
) -> subprocess.Popen[bytes]:
    """The process of a worker: it serves what comes over the connection, and ends with the thread that called this."""
    command = [sys.executable, "-P", "-m", "lockstep.processes.child", name, str(connection.fileno()), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1", **env}
    with contextlib.ExitStack() as opened:
        output = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            output = opened.enter_context(open_log(log_path))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            pass_fds=[connection.fileno()],
            env=environment,
            start_new_session=True,
        )


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """The process and what it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
