"""A worker as its owner sees it: calls that always end, with an answer or with a reason."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

TICK_S = 0.1  # how late a deadline may be noticed


Body: TypeAlias = dict[str, Any]
"""Of a call or its reply: JSON, but that its values may be bytes, which arrive as a memoryview."""


@dataclass(frozen=True)
class Reply:
    """Tensors travel beside the body."""

    body: Body = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class WorkerError(RuntimeError):
    """`worker` is the name of the worker it is about."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDied(WorkerError):
    """The process or its connection has ended. `exit_code`, where known, is negative for a signal."""

    def __init__(self, worker: str, message: str, exit_code: int | None = None) -> None:
        super().__init__(worker, message)
        self.exit_code = exit_code


class WorkerTimedOut(WorkerError):
    """No answer before the deadline. The worker may still be alive, and its late answer is dropped."""


class WorkerFailed(WorkerError):
    """The method raised in the worker, which goes on. `kind` and `traceback` are those of its exception."""

    def __init__(self, worker: str, method: str, kind: str, reason: str, traceback: str) -> None:
        super().__init__(worker, f"{worker}: {method} failed: {reason}")
        self.method, self.kind, self.reason, self.traceback = method, kind, reason, traceback


class Worker(Protocol):
    name: str

    @property
    def pid(self) -> int | None:
        """None where the process is on another machine, or not known."""
        ...

    def call(
        self,
        method: str,
        body: Mapping[str, object] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        """From any thread; methods run in the order of the calls. What does not fit into a message is a ValueError
        here; everything else ends the future: Reply, WorkerFailed, WorkerTimedOut or WorkerDied.

        `tensors` must not change before the future ends. Its callbacks must be short: they delay other answers.
        """
        ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """At once, with all it has started in its session. Returns when it is gone; open calls end with WorkerDied."""
        ...

    def close(self, grace_s: float = 5.0) -> None:
        """Ask it to end, and kill it if it has not after `grace_s`."""
        ...


@dataclass
class _Call:
    method: str
    timeout_s: float
    deadline: float
    future: Future[Reply] = field(default_factory=Future)


class PendingCalls:
    """Thread-safe. Futures are ended outside of the lock, because their callbacks may call again."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._end: WorkerError | None = None

    def number(self) -> int:
        """Unique among the calls of this worker."""
        return next(self._numbers)

    def begin(self, number: int, method: str, timeout_s: float) -> Future[Reply]:
        """Its deadline runs from now. Where the worker is gone, the future has failed already."""
        call = _Call(method, timeout_s, time.monotonic() + timeout_s)
        call.future.set_running_or_notify_cancel()  # what was sent cannot be cancelled
        with self._lock:
            end = self._end
            if end is None:
                self._calls[number] = call
        if end is not None:
            call.future.set_exception(end)
        return call.future

    def is_waiting(self, number: int) -> bool:
        with self._lock:
            return number in self._calls

    def method_of(self, number: int) -> str:
        with self._lock:
            return self._calls[number].method if number in self._calls else "a call"

    def finish(self, number: int, result: Reply | Exception) -> None:
        """An answer after its deadline is dropped."""
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return
        if isinstance(result, Reply):
            call.future.set_result(result)
        else:
            call.future.set_exception(result)

    def fail_all(self, error: WorkerError) -> None:
        """Open calls and all later ones. The first reason stays."""
        with self._lock:
            self._end = self._end or error
            error, calls, self._calls = self._end, self._calls, {}
        for call in calls.values():
            call.future.set_exception(error)

    def expire(self) -> None:
        """End the calls whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            overdue = [number for number, call in self._calls.items() if call.deadline <= now]
            calls = [self._calls.pop(number) for number in overdue]
        for call in calls:
            message = f"{self._worker} gave no answer to {call.method} within {call.timeout_s:g} s"
            call.future.set_exception(WorkerTimedOut(self._worker, message))
