"""Real engines on threads, so that each can be stopped, killed or spoiled at a chosen place; and a pool of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from tiny import build_model, build_tokenizer

from lockstep.inference.engine import LocalEngine
from lockstep.processes.worker import Reply, WorkerDied, WorkerFailed
from lockstep.rollouts.engines.pool import EnginePool
from lockstep.rollouts.engines.worker import EngineHandler
from lockstep.types import SamplingParams, TextCompletion

PROMPTS = [[10, 20, 30], [11], [12, 13], [9, 8, 7, 6], [15, 12]]
KEYS = list(range(len(PROMPTS)))
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, num_samples=2, logprobs=True)
PATIENCE_S = 60.0  # against hanging only
# Made before there are threads, which would draw from the same random numbers.
MODELS = [build_model(seed=version) for version in range(4)]


class ThreadEngine:
    """A worker whose process is a thread. `gate` closed: it does and says nothing. `seen`: the requests for answers.

    `spoil` may change what is sent to it. A `zombie` cannot be killed: it goes on, and its answers arrive.
    """

    pid = None

    def __init__(self, name: str, *, step_pause_s: float = 0.0) -> None:
        self.name, self.step_pause_s = name, step_pause_s
        self.gate = threading.Event()
        self.gate.set()
        self.spoil: Callable[[str, dict[str, Any]], None] = lambda method, tensors: None
        self.spoil_answers = False
        self.is_zombie = self.is_ended = False
        self.seen: list[dict[str, Any]] = []
        self.num_works = 0
        self.slow: list[str] = []
        self.compiled: list[float] = []
        engine = LocalEngine(deepcopy(MODELS[0]), build_tokenizer(), batch_size=4)
        self._handler = EngineHandler(engine, self.slow, self.compiled)
        self._inbox: SimpleQueue[tuple[str, dict[str, Any], dict[str, Any], Future[Reply]]] = SimpleQueue()
        self._pings: SimpleQueue[tuple[dict[str, Any], Future[Reply]]] = SimpleQueue()
        self._pending: set[Future[Reply]] = set()
        for work in (self._serve, self._answer_pings):
            threading.Thread(target=work, daemon=True).start()

    def call(
        self,
        method: str,
        body: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        future: Future[Reply] = Future()
        if self.is_ended:
            future.set_exception(WorkerDied(self.name, f"{self.name} is dead"))
            return future
        self._pending.add(future)
        if method == "ping":
            self._pings.put((dict(body or {}), future))
        else:
            self._inbox.put((method, dict(body or {}), dict(tensors or {}), future))
        return future

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def is_alive(self) -> bool:
        return not self.is_ended

    def kill(self) -> None:
        if self.is_zombie:
            return
        self.is_ended = True
        self.gate.set()
        for future in list(self._pending):
            self._finish(future, WorkerDied(self.name, f"{self.name} was killed"))

    def close(self, grace_s: float = 5.0) -> None:
        self.is_zombie = False
        self.kill()

    def _serve(self) -> None:
        while not self.is_ended:
            self.gate.wait()
            try:
                method, body, tensors, future = self._inbox.get(timeout=0.0 if self._handler.has_work() else 0.01)
            except Empty:
                if self._handler.has_work():
                    self._handler.work()
                    self.num_works += 1
                    time.sleep(self.step_pause_s)
                continue
            if method == "sample":
                self.seen.append(body)
            self.spoil(method, tensors)
            try:
                result = self._handler.methods[method](body, tensors)
            except Exception as error:
                failure = WorkerFailed(self.name, method, type(error).__name__, str(error), "")
                self._finish(future, failure)
                continue
            if isinstance(result, Future):
                result.add_done_callback(lambda done, future=future: self._finish(future, done))
            else:
                self._finish(future, Reply(result or {}))

    def _answer_pings(self) -> None:
        while not self.is_ended:
            self.gate.wait()
            try:
                body, future = self._pings.get(timeout=0.01)
            except Empty:
                continue
            self.gate.wait()
            self._finish(future, Reply(self._handler.immediate["ping"](body, {})))

    def _finish(self, future: Future[Reply], result: Reply | Exception | Future[Reply]) -> None:
        if future not in self._pending:
            return
        self._pending.discard(future)
        if isinstance(result, Future):
            error = result.exception()
            result = (
                WorkerFailed(self.name, "sample", type(error).__name__, str(error), "") if error else result.result()
            )
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            if self.spoil_answers and "tokens" in result.tensors:
                result.tensors["tokens"].fill_(1)
            future.set_result(result)


class Town:
    """A pool, its engines in the order of their starts, and what happened."""

    def __init__(self, num_engines: int = 2, *, step_pause_s: float = 0.0, **options: Any) -> None:
        self.engines: list[ThreadEngine] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.step_pause_s = step_pause_s
        self.spoils: list[Callable[[str, dict[str, Any]], None]] = []
        settings: dict[str, Any] = {
            "check_interval_s": 0.05,
            "deadline_s": 0.6,
            "start_timeout_s": PATIENCE_S,
            "max_replacements": 3,
            "on_event": lambda kind, **fields: self.events.append((kind, fields)),
            "keeps_partials": False,
        }
        self.pool = EnginePool(self.spawn, num_engines, **{**settings, **options})

    def spawn(self, name: str) -> ThreadEngine:
        engine = ThreadEngine(name, step_pause_s=self.step_pause_s)
        if self.spoils:
            engine.spoil = self.spoils.pop(0)
        self.engines.append(engine)
        return engine

    def publish(self, version: int) -> None:
        self.pool.publish(version, weights_of(version))

    def sample(self, version: int, **options: Any) -> list[list[TextCompletion]]:
        return self.pool.sample(PROMPTS, PARAMS, KEYS, versions=(version, version), **options)

    def fields_of(self, kind: str, num: int = 0) -> list[dict[str, Any]]:
        """Of the events of that kind, as soon as there are `num`: a thread passes them on after they happened."""

        def find() -> list[dict[str, Any]]:
            return [fields for found, fields in list(self.events) if found == kind]

        self.wait_until(lambda: len(find()) >= num)
        return find()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"this took too long: {self.events}"
            time.sleep(0.005)

    def in_background(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begins it, and gives what waits for its result."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return lambda: future.result(PATIENCE_S)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return MODELS[version].state_dict()


@cache
def expected_of(version: int) -> list[list[TextCompletion]]:
    engine = LocalEngine(deepcopy(MODELS[version]), build_tokenizer())
    engine.version = version
    return engine.sample(PROMPTS, PARAMS, KEYS)


def assert_alike(found: list[list[TextCompletion]], expected: list[list[TextCompletion]]) -> None:
    for answers, others in zip(found, expected, strict=True):
        for answer, other in zip(answers, others, strict=True):
            assert (answer.tokens, answer.text, answer.finish_reason) == (other.tokens, other.text, other.finish_reason)
            assert (answer.version, answer.versions) == (other.version, other.versions)
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
