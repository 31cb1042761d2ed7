"""The ranks of a training service as one: each call goes to all of them and ends with one answer or one reason."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerError, WorkerTimedOut

if TYPE_CHECKING:
    from torch import Tensor

_TICK_S = 0.5
# A rank that has failed leaves the others waiting in a collective: time for them to report the same, or to end.
_PATIENCE_S = 3.0


class TrainingFailed(RuntimeError):
    """The ranks cannot go on; the message names the one at fault. All of them have been ended."""


@dataclass
class _RankCall:
    method: str
    outcomes: list[Reply | BaseException | None]
    answer: Future[Reply] = field(default_factory=Future)
    failed_at: float | None = None

    def mistake_of(self, rank: int) -> str | None:
        outcome = self.outcomes[rank]
        return outcome.body.get("mistake") if isinstance(outcome, Reply) else None


class RemoteRanks:
    """`release` is called once, when the workers are gone. `health_timeout_s`: for the answer to a ping."""

    def __init__(
        self, workers: Sequence[Worker], *, health_timeout_s: float, release: Callable[[], None] = lambda: None
    ) -> None:
        self.workers = list(workers)
        self._health_timeout_s, self._release = health_timeout_s, release
        self._order = threading.Lock()  # all ranks get calls in the same order
        self._lock = threading.Lock()
        self._open: dict[int, _RankCall] = {}
        self._reason: Exception | None = None
        self._pings: dict[int, Future[Reply]] = {}
        self._pinging = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="training-health", daemon=True).start()

    def start_pings(self) -> None:
        """Once the workers can answer: a stopped one does not, nor one whose machine is lost."""
        self._pinging = True

    def call(
        self,
        method: str,
        body: Mapping[str, object] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        """The same for every rank. Ends with rank 0's reply, a ValueError that all ranks raise, or TrainingFailed."""
        return self.call_each(method, [dict(body or {})] * len(self.workers), tensors, timeout_s=timeout_s)

    def call_each(
        self,
        method: str,
        bodies: Sequence[Mapping[str, object]],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
        gather: bool = False,
    ) -> Future[Reply]:
        """`gather`: the reply holds every rank's body, under "ranks"."""
        call = _RankCall(method, [None] * len(self.workers))
        call.answer.set_running_or_notify_cancel()
        with self._lock:
            reason = self._reason
            if reason is None:
                self._open[id(call)] = call
        if reason is not None:
            call.answer.set_exception(reason)
            return call.answer
        try:
            with self._order:
                futures = [
                    worker.call(method, body, tensors, timeout_s=timeout_s)
                    for worker, body in zip(self.workers, bodies, strict=True)
                ]
        except ValueError:  # it does not fit into a message, so no rank has received it
            with self._lock:
                self._open.pop(id(call), None)
            raise
        for rank, future in enumerate(futures):
            future.add_done_callback(functools.partial(self._record, call, rank, gather))
        return call.answer

    def shut(self, grace_s: float = 5.0) -> None:
        self._end(TrainingFailed("the training service has been shut down"), grace_s)

    def kill(self) -> None:
        self._end(TrainingFailed("the training service has been ended"), None)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _record(self, call: _RankCall, rank: int, gather: bool, done: Future[Reply]) -> None:
        error = done.exception()
        with self._lock:
            call.outcomes[rank] = error or done.result()
            failed = error is not None or call.mistake_of(rank) is not None
            if failed and call.failed_at is None:
                call.failed_at = time.monotonic()
            complete = None not in call.outcomes
        if isinstance(error, WorkerDied):
            self._break(str(error))
        elif complete:
            self._finish(call, gather)

    def _finish(self, call: _RankCall, gather: bool) -> None:
        problem = _contradiction(call)
        if problem is not None:
            self._break(problem)
            return
        with self._lock:
            if self._open.pop(id(call), None) is None:
                return
        mistake = call.mistake_of(0)
        if mistake is not None:
            call.answer.set_exception(ValueError(mistake))
            return
        replies = [outcome for outcome in call.outcomes if isinstance(outcome, Reply)]
        call.answer.set_result(Reply({"ranks": [reply.body for reply in replies]}) if gather else replies[0])

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                waiting = [call for call in self._open.values() if call.failed_at is not None]
            for call in waiting:
                assert call.failed_at is not None
                if now - call.failed_at > _PATIENCE_S:
                    self._break(_contradiction(call) or f"{call.method} failed")
            if self._pinging:
                self._ping()

    def _ping(self) -> None:
        for rank, worker in enumerate(self.workers):
            ping = self._pings.get(rank)
            if ping is None or (ping.done() and ping.exception() is None):
                self._pings[rank] = worker.call("ping", timeout_s=self._health_timeout_s)
            elif ping.done():
                error = ping.exception()
                if isinstance(error, WorkerTimedOut):
                    self._break(f"{worker.name} gave no sign of life for {self._health_timeout_s:g} s: is it stopped?")
                else:
                    self._break(str(error))

    # --- the end ----------------------------------------------------------------------------------------------------

    def _break(self, message: str) -> None:
        """In a thread of its own: the end of the workers waits for the threads that call this."""
        reason = TrainingFailed(message)
        threading.Thread(target=self._end, args=(reason, None), name="training-end", daemon=True).start()

    def _end(self, reason: Exception, grace_s: float | None) -> None:
        with self._lock:
            first, self._reason = self._reason is None, self._reason or reason
            calls, self._open = list(self._open.values()), {}
        for call in calls:
            call.answer.set_exception(self._reason)
        if not first:
            self._ended.wait()
            return
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(lambda worker: _end_worker(worker, grace_s), self.workers))
        self._release()
        self._ended.set()


def _end_worker(worker: Worker, grace_s: float | None) -> None:
    with contextlib.suppress(WorkerError):
        worker.kill() if grace_s is None else worker.close(grace_s)


def _contradiction(call: _RankCall) -> str | None:
    """Why the ranks cannot go on together after this, or None. A call that not all have answered counts too."""
    outcomes = call.outcomes
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None or isinstance(outcome, WorkerTimedOut)]
    refusing = [rank for rank in range(len(outcomes)) if call.mistake_of(rank) is not None]
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    failed = [error for error in errors if not isinstance(error, WorkerTimedOut)]
    silence = f"{_name(silent)} gave no answer to {call.method}" if silent else ""
    if failed:  # none of these has died: that would have been reported already
        return f"{failed[0]}; {silence}" if silence else str(failed[0])
    if refusing and len(refusing) < len(outcomes):
        refusal = f"{_name(refusing)} refused {call.method}: {call.mistake_of(refusing[0])}"
        return f"{refusal}; {silence or 'the others did not'}"
    return f"{silence} in time" if silent else None


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
