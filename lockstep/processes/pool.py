"""A pool of local workers that run one task: results in order, little of it in flight, a deadline for each item."""

from __future__ import annotations

import itertools
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from lockstep.processes.child import Method
from lockstep.processes.local import LocalWorker
from lockstep.processes.tree import describe_stop, is_stopped
from lockstep.processes.worker import Reply, WorkerDied, WorkerError, WorkerTimedOut

_IN_FLIGHT_PER_PROCESS = 2
MAX_DEATHS = 3
"""Processes that one item may cost. After so many it is taken for the cause."""
# The processes themselves fill the cores.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class PoolTask(Protocol[In, Out]):
    """Prepared once in each process, then called with each item. Pickled, as are items and results."""

    def prepare(self) -> Callable[[In], Out]: ...


class PoolStartFailed(WorkerError):
    """A process did not start, or its task could not be prepared. `cause` is what happened to the worker."""

    def __init__(self, cause: WorkerError) -> None:
        super().__init__(cause.worker, str(cause))
        self.cause = cause


def _ignore_death(item: object, death: WorkerDied) -> None: ...


class WorkerPool(Generic[In, Out]):
    """Processes are started when they are needed. What a lost one had to do, another does: whoever kills a process must
    not change a result. An item that costs several of them fails alone.

    `name` is for messages; `timeout_s` is for one item, `start_timeout_s` for the start and the task's `prepare`.
    `on_death` gets the item and how its process ended, each time, from any thread; None is the start of the pool.
    Leaving the `with` block ends them all.
    """

    def __init__(
        self,
        name: str,
        task: PoolTask[In, Out],
        num_processes: int,
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        on_death: Callable[[Any, WorkerDied], None] = _ignore_death,
    ) -> None:
        pickled = pickle.dumps(task)
        self.timeout_s = timeout_s
        self.is_closed = False
        self._on_death = on_death
        self._slots = [_Slot(f"{name} {n}", pickled, start_timeout_s) for n in range(num_processes)]
        self._idle: SimpleQueue[_Slot] = SimpleQueue()
        for slot in self._slots:
            self._idle.put(slot)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix=name)

    def __enter__(self) -> WorkerPool[In, Out]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a first process: what is wrong with the task shows now, as PoolStartFailed."""
        self._survive(self._slots[0], self._slots[0].start, None, MAX_DEATHS)

    def submit(self, item: In, max_deaths: int = MAX_DEATHS) -> Future[Out]:
        """The future fails with WorkerFailed, WorkerTimedOut, WorkerDied or PoolStartFailed."""
        return self._threads.submit(self._run, item, max_deaths)

    def map(self, items: Iterable[In]) -> Iterator[Out]:
        """Results in order. An error of `items` itself comes after the results of all items before it."""
        source, in_flight = iter(items), deque[Future[Out]]()
        failure: Exception | None = None
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            in_flight.append(self.submit(item))
            if len(in_flight) >= len(self._slots) * _IN_FLIGHT_PER_PROCESS:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """At once; items in flight fail."""
        self.is_closed = True
        for slot in self._slots:
            slot.close()  # also wakes the thread that waits for its answer
        self._threads.shutdown(cancel_futures=True)

    def _run(self, item: In, max_deaths: int) -> Out:
        slot = self._idle.get()
        try:
            result: Out = self._survive(slot, lambda: slot.run(item, self.timeout_s), item, max_deaths)
            return result
        finally:
            self._idle.put(slot)

    def _survive(self, slot: _Slot, work: Callable[[], Any], item: In | None, max_deaths: int) -> Any:
        """What `work` returns, asked again of a new process where one dies, also while it starts."""
        for deaths in itertools.count(1):
            try:
                return work()
            except (WorkerDied, PoolStartFailed) as error:
                death = error.cause if isinstance(error, PoolStartFailed) else error
                if slot.is_closed or not isinstance(death, WorkerDied):
                    raise
                self._on_death(item, death)
                if deaths >= max_deaths:
                    raise
        raise AssertionError("unreachable")


class _Slot:
    """One process of the pool, or the place for it. Used by one thread at a time, but for `close`."""

    def __init__(self, name: str, task: bytes, start_timeout_s: float) -> None:
        self._name, self._task, self._start_timeout_s = name, task, start_timeout_s
        self._worker: LocalWorker | None = None
        self.is_closed = False

    def start(self) -> LocalWorker:
        if self._worker is not None:
            return self._worker
        if self.is_closed:
            raise WorkerDied(self._name, f"{self._name} has been closed")
        entry, timeout_s = "lockstep.processes.pool:serve_task", self._start_timeout_s
        try:
            self._worker = LocalWorker.spawn(self._name, entry, {}, env=_ONE_THREAD, start_timeout_s=timeout_s)
            if self.is_closed:  # while it started
                self._worker.kill()
            self._worker.call("prepare", {"task": self._task}, timeout_s=timeout_s).result()
        except WorkerError as error:
            self._end()
            raise PoolStartFailed(error) from error
        return self._worker

    def run(self, item: object, timeout_s: float) -> Any:
        body, worker = {"item": pickle.dumps(item, protocol=5)}, self.start()
        try:
            return pickle.loads(worker.call("run", body, timeout_s=timeout_s).result().body["result"])
        except WorkerTimedOut:
            stopped = is_stopped(worker.pid)
            self._end()
            if stopped:  # from outside: the item is not to blame
                raise WorkerDied(self._name, describe_stop(self._name, worker.pid, timeout_s)) from None
            raise
        except WorkerDied:
            self._end()
            raise

    def close(self) -> None:
        self.is_closed = True
        if self._worker is not None:
            self._worker.kill()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


class TaskServer:
    """Inside the process."""

    def __init__(self) -> None:
        self._call: Callable[[object], object] | None = None
        self.methods: Mapping[str, Method] = {"prepare": self._prepare, "run": self._run}
        self.immediate: Mapping[str, Method] = {}

    def has_work(self) -> bool:
        return False

    def work(self) -> None:
        raise AssertionError("there is no other work")

    def close(self) -> None: ...

    def _prepare(self, body: dict[str, Any], tensors: Mapping[str, object]) -> None:
        self._call = pickle.loads(body["task"]).prepare()

    def _run(self, body: dict[str, Any], tensors: Mapping[str, object]) -> Reply:
        assert self._call is not None, "prepare comes first"
        result = self._call(pickle.loads(body["item"]))
        return Reply({"result": pickle.dumps(result, protocol=5)})


def serve_task(settings: dict[str, object]) -> TaskServer:
    """The entry of every process. What a task prints must not mix with the output of the command: it goes to stderr."""
    os.dup2(2, 1)
    return TaskServer()
