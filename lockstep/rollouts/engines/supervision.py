"""Keeps engines alive: does what the state machine says, and tells it what happened.

One thread looks at all engines; each engine has another, which starts it and brings it weights, and may wait for it.
What an engine says after it was taken out is not heard. Must not know answers or who asks for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerFailed
from lockstep.rollouts.engines.health import Action, EngineHealth, Fleet, HealthLimits, PatientClock, Place, State
from lockstep.rollouts.engines.publishing import Publication

LONG_S = 24 * 3600.0  # whether an engine gets on is found out by asking it, not by the length of a call
_CLOSE_S = 3.0
_MESSAGES_AT_ONCE = 2


class EnginesLost(RuntimeError):
    """No engine is left, and none may be started any more."""


class Engine:
    """What runs under a name, one after the other. `load`: answers that it is asked for."""

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self.worker: Worker | None = None
        self.load = 0
        self.tasks: SimpleQueue[tuple[Action, int] | None] = SimpleQueue()

    @property
    def health(self) -> EngineHealth:
        return self.place.health

    def is_current(self, generation: int) -> bool:
        return self.place.generation == generation and self.health.state is not State.LOST


class Supervisor:
    """`changed` guards everything here, and is notified of every change. It is held in `on_news`, for what an engine
    tells of the answers that it has under way, and in `on_lost`: both get the engine's name and generation."""

    def __init__(
        self,
        spawn: Callable[[str], Worker],
        num_engines: int,
        limits: HealthLimits,
        max_replacements: int,
        on_event: Callable[..., None],
        on_news: Callable[[str, int, dict[str, Any]], None],
        on_lost: Callable[[str, int], None],
    ) -> None:
        self._spawn, self._limits = spawn, limits
        self._on_event, self._on_news, self._on_lost = on_event, on_news, on_lost
        self.changed = threading.Condition()
        self._clock = PatientClock(limits.deadline_s / 2)
        names = [f"engine-{number}" for number in range(num_engines)]
        self._fleet = Fleet(names, limits, max_replacements, self._now())
        self.engines = [Engine(name, place) for name, place in self._fleet.places.items()]
        self._by_name = {engine.name: engine for engine in self.engines}
        self.publication: Publication | None = None
        self.wants_news = False
        self._events: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._threads = [threading.Thread(target=self._supervise, name="engines", daemon=True)]
        for engine in self.engines:
            engine.tasks.put((Action.START, engine.place.generation))
            keep, name = self._keep, f"{engine.name}-keeper"
            self._threads.append(threading.Thread(target=keep, args=(engine,), name=name, daemon=True))
        for thread in list(self._threads):  # the first of them may add to it
            thread.start()

    def tell(self, kind: str, **fields: Any) -> None:
        """An event, from any thread; passed on by the one that supervises."""
        self._events.put((kind, fields))

    def announce(self, publication: Publication) -> None:
        """Every engine is to have these weights. With the lock."""
        self.publication = publication
        self._fleet.announce(publication.version)
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Until the condition holds. Raises when no engine is left, when this is closed, and after a while. With the
        lock; `what` an engine was to do, for the message."""
        timeout_s = timeout_s or 2 * self._limits.start_timeout_s + self._limits.deadline_s
        deadline = time.monotonic() + timeout_s
        while True:
            if self._failure is not None:
                raise RuntimeError(f"nobody looks after the engines any more: {self._failure}") from self._failure
            if self._is_closed:
                raise RuntimeError("the engines have been closed")
            if condition():
                return
            if self._fleet.is_lost:
                raise EnginesLost(f"no engine is left: {self._fleet.describe_losses()}")
            if time.monotonic() >= deadline:
                states = ", ".join(f"{engine.name} is {engine.health.state.value}" for engine in self.engines)
                raise EnginesLost(f"no engine {what} within {timeout_s:g} s: {states}")
            self.changed.wait(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Ends every engine. Leaves no process."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
            workers = [engine.worker for engine in self.engines if engine.worker is not None]
        for engine in self.engines:
            engine.tasks.put(None)
        ends = [threading.Thread(target=worker.close, args=(_CLOSE_S,), daemon=True) for worker in workers]
        for thread in ends:
            thread.start()
        for thread in (*ends, *self._threads):
            thread.join(self._limits.start_timeout_s + _CLOSE_S)
        if self._failure is None:
            self._pass_on_events()

    def _now(self) -> float:
        return self._clock.look(time.monotonic())

    # --- the thread that supervises ---------------------------------------------------------------------------------

    def _supervise(self) -> None:
        pause_s = min(max(self._limits.check_interval_s / 4, 0.02), 0.5)
        try:
            while not self._is_closed:
                self._pass_on_events()
                with self.changed:
                    for name, action in self._fleet.tick(self._now()):
                        self._act(self._by_name[name], action)
                    self.changed.notify_all()
                    if not self._is_closed:
                        self.changed.wait(pause_s)
        except BaseException as error:  # whoever waits for an engine must hear of it
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def _pass_on_events(self) -> None:
        while not self._events.empty():
            kind, fields = self._events.get()
            self._on_event(kind, **fields)

    def _act(self, engine: Engine, action: Action) -> None:
        if action is Action.PING:
            self._ping(engine)
        elif action is Action.TAKE_OUT:
            self.tell("engine_lost", engine=engine.name, reason=engine.health.reason)
            worker, engine.worker, engine.load = engine.worker, None, 0
            self._on_lost(engine.name, engine.place.generation)
            end, name = self._take_out, f"{engine.name}-end"
            self._threads.append(threading.Thread(target=end, args=(engine, worker), name=name, daemon=True))
            self._threads[-1].start()
        else:
            engine.tasks.put((action, engine.place.generation))

    def _ping(self, engine: Engine) -> None:
        generation, worker = engine.place.generation, engine.worker
        assert worker is not None, f"{engine.name} is {engine.health.state.value} without a process"

        def on_done(future: Future[Reply]) -> None:
            error = future.exception()
            with self.changed:
                if not engine.is_current(generation):
                    return
                if error is None:
                    body = future.result().body
                    engine.health.answered(self._now(), progress=body["progress"], busy=body["busy"])
                    self._on_news(engine.name, generation, body["news"])
                elif isinstance(error, WorkerDied):
                    engine.health.failed(str(error))
                self.changed.notify_all()

        worker.call("ping", {"news": self.wants_news}, timeout_s=LONG_S).add_done_callback(on_done)

    def _take_out(self, engine: Engine, worker: Worker | None) -> None:
        if worker is not None:
            worker.kill()
        with self.changed:
            for name, action in self._fleet.taken_out(engine.name, self._now()):
                self._by_name[name].tasks.put((action, engine.place.generation))
            self.changed.notify_all()

    # --- the thread of each engine ----------------------------------------------------------------------------------

    def _keep(self, engine: Engine) -> None:
        while (task := engine.tasks.get()) is not None:
            action, generation = task
            try:
                if action is Action.START:
                    self._start(engine, generation)
                else:
                    self._send_weights(engine, generation)
            except Exception as error:
                self.failed(engine, generation, str(error) or type(error).__name__)

    def failed(self, engine: Engine, generation: int, reason: str) -> None:
        with self.changed:
            if engine.is_current(generation):
                engine.health.failed(reason)
                self.changed.notify_all()

    def _start(self, engine: Engine, generation: int) -> None:
        worker = self._spawn(engine.name)
        with self.changed:
            is_wanted = engine.is_current(generation) and not self._is_closed
            if is_wanted:
                engine.worker = worker
        if not is_wanted:
            worker.kill()
            return
        worker.call("ping", timeout_s=self._limits.start_timeout_s).result()
        with self.changed:
            if engine.is_current(generation):
                engine.health.started(self._now())
                self.changed.notify_all()
                self.tell("engine_started", engine=engine.name, pid=worker.pid)

    def _send_weights(self, engine: Engine, generation: int) -> None:
        with self.changed:
            worker, publication = engine.worker, self.publication
            assert publication is not None
            if worker is None or not engine.is_current(generation) or engine.health.version == publication.version:
                return
        try:
            send_publication(worker, publication, self._limits.start_timeout_s)
        except WorkerFailed as error:
            with self.changed:
                if engine.is_current(generation):
                    engine.health.rejected(error.reason)
                    self.tell("bucket_rejected", engine=engine.name, version=publication.version, reason=error.reason)
        else:
            with self.changed:
                if engine.is_current(generation):
                    engine.health.acknowledged(publication.version)
                    self.changed.notify_all()


def send_publication(worker: Worker, publication: Publication, timeout_s: float) -> None:
    """All of it, a few messages at once, and wait until it is committed there."""
    version = publication.version
    under_way = deque([worker.call("begin_weights", publication.manifest.to_json(), timeout_s=timeout_s)])
    for number, content in enumerate(publication.buckets):
        while len(under_way) >= _MESSAGES_AT_ONCE:
            under_way.popleft().result()
        body = {"version": version, "number": number}
        under_way.append(worker.call("bucket", body, {"content": content}, timeout_s=timeout_s))
    under_way.append(worker.call("commit_weights", {"version": version}, timeout_s=timeout_s))
    while under_way:
        under_way.popleft().result()
