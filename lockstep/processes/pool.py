"""A pool of local workers that run one task: results in order, little of it in flight, a deadline for each item.

Items that take a millisecond travel together; what goes wrong concerns one of them alone all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lockstep.processes.child import Method
from lockstep.processes.frames import describe_failure
from lockstep.processes.local import LocalWorker
from lockstep.processes.tree import describe_stop, is_stopped
from lockstep.processes.worker import Body, Reply, WorkerDied, WorkerError, WorkerFailed, WorkerTimedOut

_TOGETHER_S = 0.01  # items that are expected to take no longer than this together are asked for together
_PLACE = struct.Struct("<I")
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
        self._waiting: deque[_Entry] = deque()
        self._lock = threading.Lock()  # for `_waiting`, and what is decided by `is_closed`
        self._item_s = _TOGETHER_S  # what the last items took, each

    def __enter__(self) -> WorkerPool[In, Out]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a first process: what is wrong with the task shows now, as PoolStartFailed."""
        slot = self._slots[0]
        for deaths in itertools.count(1):
            try:
                slot.start()
                return
            except (WorkerDied, PoolStartFailed) as error:
                if not self._is_asked_again(slot, error, None, deaths, MAX_DEATHS):
                    raise

    def submit(self, item: In, max_deaths: int = MAX_DEATHS) -> Future[Out]:
        """The future fails with WorkerFailed, WorkerTimedOut, WorkerDied or PoolStartFailed."""
        (future,) = self.submit_all([item], max_deaths)
        return future

    def submit_all(self, items: Iterable[In], max_deaths: int = MAX_DEATHS) -> list[Future[Out]]:
        """As `submit`, of each."""
        entries = [_Entry(item, max_deaths) for item in items]
        with self._lock:
            self._waiting += entries
            for _ in entries[: len(self._slots)]:
                self._threads.submit(self._work)
        return [entry.future for entry in entries]

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
        with self._lock:
            self.is_closed = True
        for slot in self._slots:
            slot.close()  # also wakes the thread that waits for its answer
        self._threads.shutdown(cancel_futures=True)
        for entry in self._waiting:
            entry.future.cancel()

    # --- threads, one for each process -------------------------------------------------------------------------------

    def _work(self) -> None:
        slot = self._idle.get()
        entries: list[_Entry] = []
        try:
            while entries := self._take():
                self._ask(slot, entries)
        except BaseException as error:  # nobody may wait for what this thread had taken
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(error)
            raise
        finally:
            self._idle.put(slot)

    def _take(self) -> list[_Entry]:
        """What to ask a process for next: together only what is quick, and never what one was lost with before."""
        taken: list[_Entry] = []
        with self._lock:
            num_together = max(1, int(_TOGETHER_S / max(self._item_s, 1e-6)))
            num_together = min(num_together, -(-len(self._waiting) // len(self._slots)))
            while self._waiting and len(taken) < num_together and not self.is_closed:
                if taken and (self._waiting[0].deaths or taken[0].deaths):
                    break
                entry = self._waiting.popleft()
                if entry.is_running or entry.future.set_running_or_notify_cancel():
                    entry.is_running = True
                    taken.append(entry)
        return taken

    def _ask(self, slot: _Slot, entries: Sequence[_Entry]) -> None:
        began = time.monotonic()
        try:
            results = slot.run([entry.item for entry in entries], self.timeout_s)
        except _Unanswered as unanswered:
            entry, error = entries[unanswered.place], unanswered.error
            entry.deaths += isinstance(error, (WorkerDied, PoolStartFailed))
            again = [e for e in entries if e is not entry]
            if self._is_asked_again(slot, error, entry.item, entry.deaths, entry.max_deaths):
                again.insert(0, entry)
            else:
                entry.future.set_exception(error)
            self._put_back(again)
            return
        self._item_s = (time.monotonic() - began) / len(results)
        for entry, result in zip(entries, results, strict=False):
            result.end(entry.future)
        self._put_back(entries[len(results) :])

    def _is_asked_again(self, slot: _Slot, error: WorkerError, item: Any, deaths: int, max_deaths: int) -> bool:
        """Whether another process should do what this one was lost with, perhaps while it started."""
        death = error.cause if isinstance(error, PoolStartFailed) else error
        if slot.is_closed or not isinstance(death, WorkerDied):
            return False
        self._on_death(item, death)
        return deaths < max_deaths

    def _put_back(self, entries: Sequence[_Entry]) -> None:
        with self._lock:
            if not self.is_closed:
                self._waiting.extendleft(reversed(entries))
                for _ in entries[1 : len(self._slots)]:  # this thread goes on too
                    self._threads.submit(self._work)
                return
        for entry in entries:
            entry.future.set_exception(WorkerDied(self._slots[0].name, "the pool has been closed"))


@dataclass(eq=False)
class _Entry:
    """An item on its way. `deaths`: processes that it has cost."""

    item: Any
    max_deaths: int
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0
    is_running: bool = False


class _Result(NamedTuple):
    """Of one item: what came back, or why nothing did."""

    value: Any = None
    error: Exception | None = None

    def end(self, future: Future[object]) -> None:
        if self.error is None:
            future.set_result(self.value)
        else:
            future.set_exception(self.error)


class _Unanswered(Exception):
    """`place`: of the item among those that were asked for together. The others may be asked for again."""

    def __init__(self, place: int, error: WorkerError) -> None:
        super().__init__(str(error))
        self.place, self.error = place, error


class _Slot:
    """One process of the pool, or the place for it. Used by one thread at a time, but for `close`."""

    def __init__(self, name: str, task: bytes, start_timeout_s: float) -> None:
        self.name, self._task, self._start_timeout_s = name, task, start_timeout_s
        self._worker: LocalWorker | None = None
        self._progress: int | None = None  # a descriptor: which item the process is at
        self.is_closed = False

    def start(self) -> LocalWorker:
        if self._worker is not None:
            return self._worker
        if self.is_closed:
            raise WorkerDied(self.name, f"{self.name} has been closed")
        entry, timeout_s = "lockstep.processes.pool:serve_task", self._start_timeout_s
        try:
            self._worker = LocalWorker.spawn(self.name, entry, {}, env=_ONE_THREAD, start_timeout_s=timeout_s)
            if self.is_closed:  # while it started
                self._worker.kill()
            prepared = self._worker.call("prepare", {"task": self._task}, timeout_s=timeout_s).result().body
            self._progress = _open_progress(self._worker.pid, prepared["progress"])
        except WorkerError as error:
            self._end()
            raise PoolStartFailed(error) from error
        return self._worker

    def run(self, items: Sequence[object], timeout_s: float) -> list[_Result]:
        """Of the first items, at least one. Raises _Unanswered."""
        try:
            worker = self.start()
        except (WorkerDied, PoolStartFailed) as error:
            raise _Unanswered(0, error) from error
        body = _pack_items(items if self._progress is not None else items[:1])
        if isinstance(body, Exception):
            return [_Result(error=body)]
        # Items before the one that takes too long take no longer than _TOGETHER_S.
        allowed_s = timeout_s + _TOGETHER_S * (len(body) > 1)
        try:
            reply = worker.call("run", body, timeout_s=allowed_s).result()
        except WorkerFailed as failed:  # its results do not fit into a message
            raise _Unanswered(self._place(len(body)), failed) from failed
        except WorkerDied as died:
            place = self._place(len(body))
            self._end()
            raise _Unanswered(place, died) from died
        except WorkerTimedOut:
            place, stopped = self._place(len(body)), is_stopped(worker.pid)
            self._end()
            late: WorkerError = WorkerTimedOut(self.name, f"{self.name} gave no answer to run within {timeout_s:g} s")
            if stopped:  # from outside: the item is not to blame
                late = WorkerDied(self.name, describe_stop(self.name, worker.pid, timeout_s))
            raise _Unanswered(place, late) from None
        return [self._read(result, reply.body) for result in reply.body["results"]]

    def _read(self, result: dict[str, str] | str, parts: Mapping[str, Any]) -> _Result:
        if isinstance(result, dict):
            return _Result(error=WorkerFailed(self.name, "run", **result))
        try:
            return _Result(pickle.loads(parts[result]))
        except Exception as error:
            return _Result(error=error)

    def _place(self, count: int) -> int:
        """Of the item that the process is or was at, among those it was asked for last."""
        if count == 1 or self._progress is None:
            return 0
        place: int = _PLACE.unpack(os.pread(self._progress, _PLACE.size, 0))[0]
        return min(place, count - 1)

    def close(self) -> None:
        self.is_closed = True
        if self._worker is not None:
            self._worker.kill()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        progress, self._progress = self._progress, None
        if progress is not None:
            os.close(progress)
        if worker is not None:
            worker.kill()


def _pack_items(items: Sequence[object]) -> dict[str, bytes] | Exception:
    """Up to the first that cannot be pickled; why, where that is the very first."""
    packed: dict[str, bytes] = {}
    for number, item in enumerate(items):
        try:
            packed[str(number)] = pickle.dumps(item, protocol=5)
        except Exception as error:
            return packed or error
    return packed


def _open_progress(pid: int, descriptor: int | None) -> int | None:
    """The memory in which a process notes which item it is at: readable after its death. None: items go one by one."""
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    return None


class TaskServer:
    """Inside the process."""

    def __init__(self) -> None:
        self._call: Callable[[object], object] | None = None
        self._progress: int | None = None
        self.methods: Mapping[str, Method] = {"prepare": self._prepare, "run": self._run}
        self.immediate: Mapping[str, Method] = {}

    def has_work(self) -> bool:
        return False

    def work(self) -> None:
        raise AssertionError("there is no other work")

    def close(self) -> None: ...

    def _prepare(self, body: Body, tensors: Mapping[str, object]) -> Reply:
        self._call = pickle.loads(body["task"]).prepare()
        with contextlib.suppress(AttributeError, OSError):  # of Linux alone
            self._progress = os.memfd_create("progress")
            os.pwrite(self._progress, _PLACE.pack(0), 0)
        return Reply({"progress": self._progress})

    def _run(self, body: Body, tensors: Mapping[str, object]) -> Reply:
        """As many of the items as are quick: the owner gives the others to whoever is free."""
        assert self._call is not None, "prepare comes first"
        began, parts = time.monotonic(), dict[str, bytes]()
        results: list[str | dict[str, str]] = []
        for name, item in body.items():
            if results and time.monotonic() - began > _TOGETHER_S:
                break
            if self._progress is not None:
                with contextlib.suppress(OSError):  # the task may have closed descriptors that it does not know
                    os.pwrite(self._progress, _PLACE.pack(int(name)), 0)
            try:
                parts[name] = pickle.dumps(self._call(pickle.loads(item)), protocol=5)
                results.append(name)
            except Exception as error:
                results.append(describe_failure(error))
        return Reply({"results": results, **parts})


def serve_task(settings: dict[str, object]) -> TaskServer:
    """The entry of every process. What a task prints must not mix with the output of the command: it goes to stderr."""
    os.dup2(2, 1)
    return TaskServer()
