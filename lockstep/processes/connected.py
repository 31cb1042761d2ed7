"""A worker behind a socket, wherever its process is.

Each has three threads: one sends, one receives, one watches deadlines and the process, so that neither a full socket
nor a stopped process can block the caller.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from lockstep.processes.frames import FrameError, pack, pack_message, read_frame, read_result, receive_into, send_all
from lockstep.processes.worker import TICK_S, PendingCalls, Reply, WorkerDied, WorkerTimedOut

if TYPE_CHECKING:
    from torch import Tensor

REAP_S = 3.0  # a process whose connection has ended is about to end itself
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 12

_Packed = tuple[int, list[bytes | memoryview]]


class WorkerProcess(Protocol):
    """The process at the other end, as far as it can be seen and ended from here."""

    def has_ended(self) -> bool: ...

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or for so long."""
        ...

    def kill(self) -> None:
        """With all it has started. Returns when it is gone, or will be without us."""
        ...

    def describe_end(self, name: str) -> tuple[str, int | None]:
        """(a sentence, its exit code where that is known)."""
        ...


class ConnectedWorker:
    """`log_path` None: what the process prints is not kept where this one could read it."""

    def __init__(
        self, name: str, process: WorkerProcess, connection: socket.socket, log_path: Path | None = None
    ) -> None:
        self.name = name
        self._worker_process, self._connection, self._log_path = process, connection, log_path
        self._pending = PendingCalls(name)
        self._outbox: SimpleQueue[_Packed | None] = SimpleQueue()
        self._gone = threading.Event()
        for work in (self._send, self._receive, self._watch):
            threading.Thread(target=work, name=f"{name}{work.__name__}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return None

    def start(self, entry: str, settings: Mapping[str, object], timeout_s: float) -> None:
        """Returns once the process is connected; it calls the entry with the settings afterwards."""
        try:
            self._post("start", {"entry": entry, "settings": dict(settings)}, None, timeout_s).result()
        except WorkerTimedOut:
            self.kill()
            raise WorkerTimedOut(self.name, f"{self.name} did not start within {timeout_s:g} s") from None
        except BaseException:
            self.kill()
            raise

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
        return not self._gone.is_set() and not self._worker_process.has_ended()

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
            self._worker_process.wait(grace_s)
        self._worker_process.kill()
        self._gone.wait(REAP_S)  # the threads have let go of the connection

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
            self._worker_process.kill()
        self._settle(reason)

    def _watch(self) -> None:
        while not self._gone.wait(TICK_S):
            self._pending.expire()
            if self._worker_process.has_ended():
                # A child of it may hold the other end open; what has arrived can still be read.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _settle(self, reason: str) -> None:
        """The connection has ended: end the process too, and fail every call with the reason."""
        self._worker_process.wait(REAP_S)
        self._worker_process.kill()
        ended, code = self._worker_process.describe_end(self.name)
        self._pending.fail_all(WorkerDied(self.name, (reason or ended) + self._log_tail(), code))
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
