"""The calls of one worker that have no answer yet: each ends once, by an answer, a failure or its deadline.

Must not know how messages travel.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from lockstep.workers.worker import Reply, WorkerError, WorkerTimedOut


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
        """One that no other call of this worker has."""
        return next(self._numbers)

    def begin(self, number: int, method: str, timeout_s: float) -> Future[Reply]:
        """Its deadline runs from now. Where the worker is gone, the future has failed already."""
        call = _Call(method, timeout_s, time.monotonic() + timeout_s)
        call.future.set_running_or_notify_cancel()  # nobody can take back what was sent
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
        """An answer that comes after its deadline is dropped."""
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return
        if isinstance(result, Reply):
            call.future.set_result(result)
        else:
            call.future.set_exception(result)

    def fail_all(self, error: WorkerError) -> None:
        """Those under way, and all that are begun later. The first reason stays."""
        with self._lock:
            self._end = self._end or error
            error, calls, self._calls = self._end, self._calls, {}
        for call in calls.values():
            call.future.set_exception(error)

    def expire(self) -> None:
        """End those whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            overdue = [number for number, call in self._calls.items() if call.deadline <= now]
            calls = [self._calls.pop(number) for number in overdue]
        for call in calls:
            message = f"{self._worker} gave no answer to {call.method} within {call.timeout_s:g} s"
            call.future.set_exception(WorkerTimedOut(self._worker, message))
