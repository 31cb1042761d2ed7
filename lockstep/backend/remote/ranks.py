"""Where the ranks of a training service run: processes of this machine, or actors of a Ray cluster.

One function for each place; a caller sees workers either way. Must not know what the ranks do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import PoolConfig
from lockstep.config.launch import Strategy
from lockstep.launch.ray_cluster import reserve
from lockstep.processes.local import LocalWorker
from lockstep.processes.ray_worker import RayWorker, import_ray
from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerError, WorkerTimedOut

if TYPE_CHECKING:
    from torch import Tensor


ENTRY = "lockstep.backend.remote.worker:start"


@dataclass(frozen=True)
class RemoteReservation:
    """What each rank needs. `address` and the numbers are for Ray; `log_dir` is for processes of this machine."""

    procs: int
    start_timeout_s: float
    log_dir: Path | None = None
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Strategy = "PACK"


Spawned = tuple[list[Worker], Callable[[], None]]


def spawn_locally(room: RemoteReservation, settings: Mapping[str, Any]) -> Spawned:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(max(num_cores // room.procs, 1)))

    def spawn(rank: int) -> Worker:
        return LocalWorker.spawn(
            f"rank {rank}",
            ENTRY,
            settings,
            env={"OMP_NUM_THREADS": threads},
            log_path=room.log_dir / f"rank-{rank}.log" if room.log_dir else None,
            start_timeout_s=room.start_timeout_s,
        )

    return _spawn_all(spawn, room.procs), lambda: None


def spawn_on_ray(room: RemoteReservation, settings: Mapping[str, Any]) -> Spawned:
    """All ranks have room on the cluster before the first is started. Joins the cluster unless this process has."""
    ray = import_ray()
    if not ray.is_initialized():
        # Without an address Ray would join whatever cluster this machine happens to belong to.
        ray.init(address=room.address or "local", include_dashboard=False)
    resources = dict(room.resources)
    pool = PoolConfig(
        pool="training", procs=room.procs, cpus=room.cpus, gpus=room.gpus, resources=resources, strategy=room.strategy
    )
    reserved = reserve(pool, room.start_timeout_s, interrupted=lambda: False)

    def release() -> None:
        with suppress(Exception):  # the cluster may be gone, and the room with it
            reserved.release()

    def spawn(rank: int) -> Worker:
        return RayWorker.spawn(
            f"rank {rank}",
            ENTRY,
            settings,
            num_cpus=room.cpus,
            num_gpus=room.gpus,
            resources=resources,
            placement=(reserved.group, rank),
            start_timeout_s=room.start_timeout_s,
        )

    try:
        return _spawn_all(spawn, room.procs), release
    except BaseException:
        release()
        raise


SPAWN: dict[str, Callable[[RemoteReservation, Mapping[str, Any]], Spawned]] = {
    "local": spawn_locally,
    "ray": spawn_on_ray,
}


def _spawn_all(spawn: Callable[[int], Worker], procs: int) -> list[Worker]:
    """At the same time; when one does not start, those that did are ended."""
    with ThreadPoolExecutor(procs, thread_name_prefix="spawn-ranks") as threads:
        futures = [threads.submit(spawn, rank) for rank in range(procs)]
    problem = next((error for error in (future.exception() for future in futures) if error is not None), None)
    if problem is None:
        return [future.result() for future in futures]
    for future in futures:
        if future.exception() is None:
            future.result().kill()
    raise problem


_TICK_S = 0.5
# A rank that has failed leaves the others waiting for it in a collective: time for them to say the same, or to end.
_PATIENCE_S = 3.0


class TrainingFailed(RuntimeError):
    """The ranks cannot go on; the message names the one at fault. All of them have been ended."""


@dataclass
class _Question:
    method: str
    outcomes: list[Reply | BaseException | None]
    answer: Future[Reply] = field(default_factory=Future)
    troubled_at: float | None = None

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
        self._order = threading.Lock()  # all ranks are asked in the same order
        self._lock = threading.Lock()
        self._open: dict[int, _Question] = {}
        self._reason: Exception | None = None
        self._pings: dict[int, Future[Reply]] = {}
        self._pinging = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="training-health", daemon=True).start()

    def start_pings(self) -> None:
        """From when the workers can answer: one that is stopped, or whose machine is, does not."""
        self._pinging = True

    def ask(
        self,
        method: str,
        body: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        """The same to every rank. Ends with rank 0's reply, a ValueError that all ranks agree on, or TrainingFailed."""
        return self.ask_each(method, [dict(body or {})] * len(self.workers), tensors, timeout_s=timeout_s)

    def ask_each(
        self,
        method: str,
        bodies: Sequence[Mapping[str, Any]],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
        gather: bool = False,
    ) -> Future[Reply]:
        """`gather`: the reply holds every rank's body, under "ranks"."""
        question = _Question(method, [None] * len(self.workers))
        question.answer.set_running_or_notify_cancel()
        with self._lock:
            reason = self._reason
            if reason is None:
                self._open[id(question)] = question
        if reason is not None:
            question.answer.set_exception(reason)
            return question.answer
        try:
            with self._order:
                asked = zip(self.workers, bodies, strict=True)
                futures = [worker.call(method, body, tensors, timeout_s=timeout_s) for worker, body in asked]
        except ValueError:  # it does not fit into a message, so no rank has got it
            with self._lock:
                self._open.pop(id(question), None)
            raise
        for rank, future in enumerate(futures):
            future.add_done_callback(functools.partial(self._note, question, rank, gather))
        return question.answer

    def shut(self, grace_s: float = 5.0) -> None:
        self._end(TrainingFailed("the training service has been shut down"), grace_s)

    def kill(self) -> None:
        self._end(TrainingFailed("the training service has been ended"), None)

    # --- what comes back --------------------------------------------------------------------------------------------

    def _note(self, question: _Question, rank: int, gather: bool, done: Future[Reply]) -> None:
        error = done.exception()
        with self._lock:
            question.outcomes[rank] = error or done.result()
            troubled = error is not None or question.mistake_of(rank) is not None
            if troubled and question.troubled_at is None:
                question.troubled_at = time.monotonic()
            complete = None not in question.outcomes
        if isinstance(error, WorkerDied):
            self._break(str(error))
        elif complete:
            self._settle(question, gather)

    def _settle(self, question: _Question, gather: bool) -> None:
        problem = _contradiction(question)
        if problem is not None:
            self._break(problem)
            return
        with self._lock:
            if self._open.pop(id(question), None) is None:
                return
        mistake = question.mistake_of(0)
        if mistake is not None:
            question.answer.set_exception(ValueError(mistake))
            return
        replies = [outcome for outcome in question.outcomes if isinstance(outcome, Reply)]
        question.answer.set_result(Reply({"ranks": [reply.body for reply in replies]}) if gather else replies[0])

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                waiting = [q for q in self._open.values() if q.troubled_at is not None]
            for question in waiting:
                assert question.troubled_at is not None
                if now - question.troubled_at > _PATIENCE_S:
                    self._break(_contradiction(question) or f"{question.method} failed")
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
        """In a thread of its own: this is called from those that the workers' end waits for."""
        reason = TrainingFailed(message)
        threading.Thread(target=self._end, args=(reason, None), name="training-end", daemon=True).start()

    def _end(self, reason: Exception, grace_s: float | None) -> None:
        with self._lock:
            first, self._reason = self._reason is None, self._reason or reason
            questions, self._open = list(self._open.values()), {}
        for question in questions:
            question.answer.set_exception(self._reason)
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


def _contradiction(question: _Question) -> str | None:
    """Why the ranks cannot go on together after this, or None. A question that not all have answered counts too."""
    outcomes = question.outcomes
    quiet = [rank for rank, found in enumerate(outcomes) if found is None or isinstance(found, WorkerTimedOut)]
    refusing = [rank for rank in range(len(outcomes)) if question.mistake_of(rank) is not None]
    failed = [found for found in outcomes if isinstance(found, BaseException) and not isinstance(found, WorkerTimedOut)]
    silence = f"{_name(quiet)} gave no answer to {question.method}" if quiet else ""
    if failed:  # none of these has died: that would have been told already
        return f"{failed[0]}; {silence}" if silence else str(failed[0])
    if refusing and len(refusing) < len(outcomes):
        said = f"{_name(refusing)} refused {question.method}: {question.mistake_of(refusing[0])}"
        return f"{said}; {silence or 'the others did not'}"
    return f"{silence} in time" if quiet else None


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
