"""Rewards in processes of their own, each answer under a deadline: one that hangs is killed, and so is its process.

Processes are plain interpreters that talk over pipes, so nothing is forked under running threads. An attempt that
fails, dies or runs out of time comes back tainted; the pool itself goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Literal

from lockstep.config import ConfigError
from lockstep.rollouts.rewards.reward import Attempt, Outcome, Turn
from lockstep.rollouts.rewards.scoring import Judging

_SERVE = "from lockstep.rollouts.rewards.pool import serve; serve()"
_SIZE = struct.Struct("<Q")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Request = Literal["score", "play"]


class _Lost(Exception):
    """A process did not answer; the text says why, for whoever reads the sample."""


class RewardPool:
    """`timeout_s`: for one attempt. `start_timeout_s`: for importing what rewards need."""

    def __init__(self, judging: Judging, procs: int, *, timeout_s: float, start_timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._workers = [_Worker(judging, start_timeout_s) for _ in range(procs)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(procs, thread_name_prefix="rewards")

    def start(self) -> None:
        """Start a first process: what cannot be imported shows now, as a ConfigError."""
        self._workers[0].start()

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        return list(self._threads.map(lambda attempt: self._ask("score", attempt, Outcome.tainted), attempts))

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        def lost(problem: str) -> Turn:
            return Turn(problem=problem)

        return list(self._threads.map(lambda attempt: self._ask("play", attempt, lost), attempts))

    def close(self) -> None:
        for worker in self._workers:
            worker.end()  # also wakes a thread that waits for its answer
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, request: Request, attempt: Attempt, otherwise: Callable[[str], Any]) -> Any:
        worker = self._idle.get()
        try:
            worker.start()
            return worker.ask((request, attempt, self._timeout_s), self._timeout_s)
        except _Lost as error:
            return otherwise(str(error))
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, started when it is needed and again after it was lost."""

    def __init__(self, judging: Judging, start_timeout_s: float) -> None:
        self._judging, self._start_timeout_s = pickle.dumps(judging), start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            problem = self._exchange(self._judging, self._start_timeout_s)
        except _Lost as error:
            raise ConfigError(f"algorithm.reward: the process that scores answers did not start: {error}") from error
        if problem is not None:
            self.end()
            raise ConfigError(problem)

    def ask(self, item: Any, timeout_s: float) -> Any:
        return self._exchange(pickle.dumps(item, protocol=5), timeout_s)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if os.getpgid(process.pid) == process.pid else process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _exchange(self, message: bytes, timeout_s: float) -> Any:
        assert self._process is not None
        items, answers = self._process.stdin, self._process.stdout
        assert items is not None
        assert answers is not None
        deadline = time.monotonic() + timeout_s
        try:
            items.write(_SIZE.pack(len(message)) + message)
            items.flush()
            (size,) = _SIZE.unpack(_read(answers.fileno(), _SIZE.size, deadline))
            return pickle.loads(_read(answers.fileno(), size, deadline))
        except TimeoutError:
            self.end()
            raise _Lost(f"no reward within {timeout_s:g} s (algorithm.reward_timeout_s)") from None
        except (OSError, EOFError):
            code = self._process.wait() if self._process is not None else "closed"
            self.end()
            raise _Lost(f"the process that computed the reward ended ({code})") from None


def _read(fd: int, size: int, deadline: float) -> bytes:
    parts, missing = [], size
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while missing:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise TimeoutError
            part = os.read(fd, missing)
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
    return b"".join(parts)


def serve() -> None:
    """What each process runs: answer until the other side is gone."""
    os.setsid()  # what a reward starts itself goes with this process; Ctrl-C is for whoever started it
    items, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever a reward prints must not get among the answers

    def receive() -> Any:
        head = items.read(_SIZE.size)
        if len(head) < _SIZE.size:
            os._exit(0)
        return pickle.loads(items.read(_SIZE.unpack(head)[0]))

    def send(answer: Any) -> None:
        message = pickle.dumps(answer, protocol=5)
        answers.write(_SIZE.pack(len(message)) + message)
        answers.flush()

    with contextlib.suppress(BrokenPipeError):
        try:
            scorer = receive().prepare()
        except ConfigError as error:
            send(str(error))
            return
        send(None)
        while True:
            request, attempt, timeout_s = receive()
            # Were the other side killed meanwhile, nobody else would end an attempt that hangs.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 1)
            answer = scorer.score(attempt) if request == "score" else scorer.play(attempt)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(answer)
