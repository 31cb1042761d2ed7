"""Work in other processes, with results in the order of the work and little of it under way at once.

Processes are started as plain interpreters that talk over pipes: nothing is forked under running threads, and the
user's script is not imported a second time. Must not know what the work is.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_UNDER_WAY_PER_PROCESS = 2
_SERVE = "from lockstep.data.pool import serve; serve()"
# The processes themselves fill the cores.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class WorkerError(RuntimeError):
    """A process of the pool ended, or gave no answer in time, or met an error of ours."""


class Work(Protocol):
    """Made ready once in each process, then called with each item. Pickled, as are items and results."""

    def prepare(self) -> Callable[[Any], Any]: ...


class Pool:
    """Some processes. Leaving the `with` block ends them all, whatever happened inside."""

    def __init__(self, work: Work, num_processes: int, *, timeout_s: float) -> None:
        self._work = pickle.dumps(work)
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        try:
            self._workers = [_Worker(self._work) for _ in range(self._num_processes)]
        except BaseException:
            self.__exit__()
            raise
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # A thread per process: pipes are small, so whoever writes to one must not be who reads another.
        self._threads = ThreadPoolExecutor(self._num_processes, thread_name_prefix="data-pool")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()  # also wakes the thread that waits for its answer
        if hasattr(self, "_threads"):
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def map(self, items: Iterable[Item]) -> Iterator[Any]:
        """Results in order. An error of `items` itself comes after the results of all items before it."""
        source, under_way = iter(items), deque[Future[Any]]()
        failure: Exception | None = None
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            under_way.append(self._threads.submit(self._ask, item))
            if len(under_way) >= self._num_processes * _UNDER_WAY_PER_PROCESS:
                yield self._answer(under_way.popleft())
        while under_way:
            yield self._answer(under_way.popleft())
        if failure is not None:
            raise failure

    def _ask(self, item: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(item)
        finally:
            self._idle.put(worker)

    def _answer(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=self._timeout_s)
        except FutureTimeoutError as error:
            raise WorkerError(
                f"a process that compiles rows has given no answer for {self._timeout_s:g} s: if a converter of yours "
                "waits for something, let it not; data.procs 1 compiles without processes"
            ) from error


class _Worker:
    def __init__(self, work: bytes) -> None:
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            # -P: the current folder is searched only if it is searched here.
            [sys.executable, "-P", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._work: bytes | None = work

    def ask(self, item: Any) -> Any:
        items, answers = self._process.stdin, self._process.stdout
        assert items
        assert answers
        try:
            if self._work is not None:
                pickle.dump(self._work, items)
                self._work = None
            pickle.dump(item, items, protocol=5)
            items.flush()
            is_result, answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkerError(_how_it_ended(self._process)) from error
        if not is_result:
            raise WorkerError(f"a process that compiles rows failed: {answer}")
        return answer

    def end(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was still to be written has no reader any more
                    continue


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        how = "was killed, most likely for want of memory: use fewer data.procs, or free some memory"
    elif code < 0:
        how = f"ended by {signal.Signals(-code).name}: data.procs 1 compiles without processes"
    else:
        how = f"ended with code {code}; what it wrote is above: data.procs 1 compiles without processes"
    return f"a process that compiles rows {how}"


def serve() -> None:
    """What each process runs: answer items until the other side is gone."""
    # Ctrl-C reaches the whole group; the process that started this one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    items = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever else reads or prints must not get among items and answers
    try:
        call = pickle.loads(pickle.load(items)).prepare()
        while True:
            item = pickle.load(items)
            try:
                answer = (True, call(item))
            except Exception as error:
                answer = (False, f"{type(error).__name__}: {error}")
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)
