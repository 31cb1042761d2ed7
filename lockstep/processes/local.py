"""A worker as a process of this machine, over a Unix socket.

Each has three threads: one sends, one receives, one watches deadlines and the process, so that neither a full socket
nor a stopped process can block the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from lockstep.processes.frames import FrameError, pack, pack_message, read_frame, read_result, receive_into, send_all
from lockstep.processes.tree import describe_exit
from lockstep.processes.worker import TICK_S, PendingCalls, Reply, WorkerDied, WorkerTimedOut
from lockstep.rundir import open_log

if TYPE_CHECKING:
    from torch import Tensor

_REAP_S = 3.0  # a process whose connection has ended is about to end itself
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 12

_Packed = tuple[int, list[bytes | memoryview]]


class LocalWorker:
    """Made by `spawn`. `log_path` None: the process shares our stdout and stderr."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], connection: socket.socket, log_path: Path | None
    ) -> None:
        self.name = name
        self._process, self._connection, self._log_path = process, connection, log_path
        self._pending = PendingCalls(name)
        self._outbox: SimpleQueue[_Packed | None] = SimpleQueue()
        self._gone = threading.Event()
        for work in (self._send, self._receive, self._watch):
            threading.Thread(target=work, name=f"{name}{work.__name__}", daemon=True).start()

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
                process = _starting_thread(os.getpid()).submit(_start, name, there, dict(env or {}), log_path).result()
            except BaseException:
                here.close()
                raise
        worker = cls(name, process, here, log_path)
        try:
            header = {"entry": entry, "settings": dict(settings)}
            worker._post("start", header, None, start_timeout_s).result()
        except WorkerTimedOut:
            worker.kill()
            raise WorkerTimedOut(name, f"{name} did not start within {start_timeout_s:g} s") from None
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(
        self,
        method: str,
        body: Mapping[str, object] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        return self._post(method, {"method": method, "body": dict(body or {})}, tensors, timeout_s)

    def is_alive(self) -> bool:
        return not self._gone.is_set() and self._process.poll() is None

    def kill(self) -> None:
        self._end("was killed by its owner", grace_s=None)

    def close(self, grace_s: float = 5.0) -> None:
        self._end("has been closed", grace_s)

    def _post(
        self, what: str, header: Mapping[str, object], tensors: Mapping[str, Tensor] | None, timeout_s: float
    ) -> Future[Reply]:
        number = self._pending.number()
        packed = pack_message({"number": number, **header}, tensors)
        future = self._pending.begin(number, what, timeout_s)
        self._outbox.put((number, packed))
        return future

    def _end(self, why: str, grace_s: float | None) -> None:
        self._pending.fail_all(WorkerDied(self.name, f"{self.name} {why}"))
        if grace_s is not None and self.is_alive():
            self._outbox.put((-1, pack({"end": True})))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._kill_session()
        self._gone.wait(_REAP_S)  # the threads have let go of the connection

    def _kill_session(self) -> None:
        """The process and what it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    # --- the three threads ------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while (item := self._outbox.get()) is not None:
            number, packed = item
            if number >= 0 and not self._pending.is_waiting(number):
                continue  # its deadline passed while others were being sent
            try:
                send_all(self._connection, packed)
            except OSError:
                return  # the process is gone, which the other threads have noticed

    def _receive(self) -> None:
        reason = ""
        try:
            while True:
                frame = read_frame(lambda buffer: receive_into(self._connection, buffer))
                number = frame.header["number"]
                self._pending.finish(number, read_result(frame, self.name, self._pending.method_of(number)))
        except (EOFError, OSError):
            pass
        except (FrameError, LookupError, TypeError) as error:
            reason = f"{self.name} sent what cannot be read, and was killed: {error}"
            self._kill_session()
        self._settle(reason)

    def _watch(self) -> None:
        while not self._gone.wait(TICK_S):
            self._pending.expire()
            if self._process.poll() is not None:
                # A child of it may hold the other end open; what has arrived can still be read.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _settle(self, reason: str) -> None:
        """The connection has ended: end the process too, and fail every call with the reason."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        self._kill_session()
        code = self._process.returncode
        message = (reason or describe_exit(self.name, code)) + self._log_tail()
        self._pending.fail_all(WorkerDied(self.name, message, code))
        self._outbox.put(None)
        self._connection.close()
        self._gone.set()

    def _log_tail(self) -> str:
        if self._log_path is None:
            return ""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
                lines = log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  {line}" for line in (f"the last lines of {self._log_path}:", *lines)) if lines else ""


@cache
def _starting_thread(pid: int) -> ThreadPoolExecutor:
    """Linux ends a child with the thread that started it, so one thread that stays starts them all.

    One per process: a fork has none of the threads.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="start-workers")


def _start(name: str, connection: socket.socket, env: dict[str, str], log_path: Path | None) -> subprocess.Popen[bytes]:
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
