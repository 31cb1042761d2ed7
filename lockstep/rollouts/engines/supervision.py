"""Keeps engines alive: carries out the actions of the state machine in `health`, and reports events to it.

One thread watches all engines; each engine has another, which starts it and sends it weights, and may wait for it.
Replies of an engine that was removed are ignored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerFailed
from lockstep.rollouts.engines import device_memory
from lockstep.rollouts.engines.health import Action, EngineHealth, EngineSlot, Fleet, HealthLimits, PatientClock, State
from lockstep.rollouts.engines.publishing import Publication

NO_DEADLINE_S = 24 * 3600.0  # pings show whether an engine makes progress, not the duration of a call
_CLOSE_S = 3.0
_MESSAGES_AT_ONCE = 2


class EnginesLost(RuntimeError):
    """No engine is left, and no more replacements are allowed."""


class Engine:
    """The process that has a name now. `load`: completions that it works on."""

    def __init__(self, name: str, slot: EngineSlot) -> None:
        self.name, self.slot = name, slot
        self.worker: Worker | None = None
        self.load = 0
        self.slow: set[str] = set()  # what it has said about ways that are slow
        self.num_compiled = 0  # compilations of this process that were passed on
        self.device_id = ""
        self.opens_memory = True  # until it has failed to
        self.tasks: SimpleQueue[tuple[Action, int] | None] = SimpleQueue()

    @property
    def health(self) -> EngineHealth:
        return self.slot.health

    def is_current(self, generation: int) -> bool:
        return self.slot.generation == generation and self.health.state is not State.LOST


class Supervisor:
    """`changed` guards everything here, and is notified of every change. It is held during `on_partial`, which gets an
    engine's new tokens by call, and `on_lost`; both get the engine's name and generation first."""

    def __init__(
        self,
        spawn: Callable[[str], Worker],
        num_engines: int,
        limits: HealthLimits,
        max_replacements: int,
        on_event: Callable[..., None],
        on_partial: Callable[[str, int, Mapping[str, object]], None],
        on_lost: Callable[[str, int], None],
    ) -> None:
        self._spawn, self._limits = spawn, limits
        self._on_event, self._on_partial, self._on_lost = on_event, on_partial, on_lost
        self.changed = threading.Condition()
        self._clock = PatientClock(limits.deadline_s / 2)
        names = [f"engine-{number}" for number in range(num_engines)]
        self._fleet = Fleet(names, limits, max_replacements, self._now())
        self.engines = [Engine(name, slot) for name, slot in self._fleet.slots.items()]
        self._by_name = {engine.name: engine for engine in self.engines}
        self.publication: Publication | None = None
        self.wants_partial = False
        self._events: SimpleQueue[tuple[str, dict[str, object]]] = SimpleQueue()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._threads = [threading.Thread(target=self._supervise, name="engines", daemon=True)]
        for engine in self.engines:
            engine.tasks.put((Action.START, engine.slot.generation))
            run, name = self._run_tasks, f"{engine.name}-tasks"
            self._threads.append(threading.Thread(target=run, args=(engine,), name=name, daemon=True))
        for thread in list(self._threads):  # the first of them may add to it
            thread.start()

    def log_event(self, kind: str, **fields: object) -> None:
        """From any thread; passed on by the one that supervises."""
        self._events.put((kind, fields))

    def announce(self, publication: Publication) -> None:
        """Every engine is to load these weights. With the lock."""
        self.publication = publication
        self._fleet.announce(publication.version)
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Until the condition holds. Raises when no engine is left, when this is closed, and after `timeout_s`. With
        the lock. `what`: for the message, what no engine did."""
        timeout_s = timeout_s or 2 * self._limits.start_timeout_s + self._limits.deadline_s
        deadline = time.monotonic() + timeout_s
        while True:
            if self._failure is not None:
                raise RuntimeError(f"the supervision of engines failed: {self._failure}") from self._failure
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
            self._deliver_events()

    def _now(self) -> float:
        return self._clock.read(time.monotonic())

    # --- the thread that supervises ---------------------------------------------------------------------------------

    def _supervise(self) -> None:
        pause_s = min(max(self._limits.check_interval_s / 4, 0.02), 0.5)
        try:
            while not self._is_closed:
                self._deliver_events()
                with self.changed:
                    for name, action in self._fleet.tick(self._now()):
                        self._act(self._by_name[name], action)
                    self.changed.notify_all()
                    if not self._is_closed:
                        self.changed.wait(pause_s)
        except BaseException as error:  # raised again in `wait_for`
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def _deliver_events(self) -> None:
        while not self._events.empty():
            kind, fields = self._events.get()
            self._on_event(kind, **fields)

    def _act(self, engine: Engine, action: Action) -> None:
        if action is Action.PING:
            self._ping(engine)
        elif action is Action.REMOVE:
            self.log_event("engine_lost", engine=engine.name, reason=engine.health.reason)
            worker, engine.worker, engine.load = engine.worker, None, 0
            self._on_lost(engine.name, engine.slot.generation)
            end, name = self._remove, f"{engine.name}-end"
            self._threads.append(threading.Thread(target=end, args=(engine, worker), name=name, daemon=True))
            self._threads[-1].start()
        else:
            engine.tasks.put((action, engine.slot.generation))

    def _ping(self, engine: Engine) -> None:
        generation, worker = engine.slot.generation, engine.worker
        assert worker is not None, f"{engine.name} is {engine.health.state.value} without a process"

        def on_done(future: Future[Reply]) -> None:
            error = future.exception()
            with self.changed:
                if not engine.is_current(generation):
                    return
                if error is None:
                    body = future.result().body
                    engine.health.replied(self._now(), progress=body["progress"], busy=body["busy"])
                    self._on_partial(engine.name, generation, body["partial"])
                    self._pass_on(engine, body["slow"])
                    for seconds in body["compiled"][engine.num_compiled :]:
                        self.log_event("engine_compiled", engine=engine.name, seconds=round(seconds, 3))
                    engine.num_compiled = len(body["compiled"])
                elif isinstance(error, WorkerDied):
                    engine.health.failed(str(error))
                self.changed.notify_all()

        worker.call("ping", {"partial": self.wants_partial}, timeout_s=NO_DEADLINE_S).add_done_callback(on_done)

    def _pass_on(self, engine: Engine, slow: Sequence[str]) -> None:
        """Each message once, also of its replacements."""
        for message in slow:
            if message not in engine.slow:
                engine.slow.add(message)
                self.log_event("engine_slow", engine=engine.name, message=message)

    def _remove(self, engine: Engine, worker: Worker | None) -> None:
        if worker is not None:
            worker.kill()
        with self.changed:
            for name, action in self._fleet.removed(engine.name, self._now()):
                self._by_name[name].tasks.put((action, engine.slot.generation))
            self.changed.notify_all()

    # --- the thread of each engine ----------------------------------------------------------------------------------

    def _run_tasks(self, engine: Engine) -> None:
        while (task := engine.tasks.get()) is not None:
            action, generation = task
            try:
                if action is Action.START:
                    self._start(engine, generation)
                else:
                    self._send_weights(engine, generation)
            except Exception as error:
                self._fail(engine, generation, str(error) or type(error).__name__)

    def _fail(self, engine: Engine, generation: int, reason: str) -> None:
        with self.changed:
            if engine.is_current(generation):
                engine.health.failed(reason)
                self.changed.notify_all()

    def _start(self, engine: Engine, generation: int) -> None:
        worker = self._spawn(engine.name)
        with self.changed:
            is_current = engine.is_current(generation) and not self._is_closed
            if is_current:
                engine.worker = worker
        if not is_current:
            worker.kill()
            return
        answer = worker.call("ping", timeout_s=self._limits.start_timeout_s).result().body
        with self.changed:
            if engine.is_current(generation):
                engine.device_id, engine.num_compiled = answer["device_id"], 0
                engine.health.started(self._now())
                self.changed.notify_all()
                self.log_event("engine_started", engine=engine.name, pid=worker.pid)

    def _send_weights(self, engine: Engine, generation: int) -> None:
        with self.changed:
            worker, publication = engine.worker, self.publication
            assert publication is not None
            if worker is None or not engine.is_current(generation) or engine.health.version == publication.version:
                return
        try:
            if not self._shares(engine, worker, publication):
                send_publication(worker, publication.on_host, self._limits.start_timeout_s)
        except WorkerFailed as error:
            with self.changed:
                if engine.is_current(generation):
                    engine.health.rejected(error.reason)
                    self.log_event(
                        "bucket_rejected", engine=engine.name, version=publication.version, reason=error.reason
                    )
        else:
            with self.changed:
                if engine.is_current(generation):
                    engine.health.acknowledged(publication.version)
                    self.changed.notify_all()

    def _shares(self, engine: Engine, worker: Worker, publication: Publication) -> bool:
        """Whether the engine has read the weights where they are. What it cannot open it gets as a copy, and so
        do its replacements."""
        if not engine.opens_memory or not publication.device_id or publication.device_id != engine.device_id:
            return False
        try:
            share_publication(worker, publication, self._limits.start_timeout_s)
        except (device_memory.NotShared, WorkerFailed) as error:
            if isinstance(error, WorkerFailed) and error.kind != device_memory.NotShared.__name__:
                raise
            reason = error.reason if isinstance(error, WorkerFailed) else str(error)
            engine.opens_memory = False
            with self.changed:
                self._pass_on(engine, [f"new weights pass through the host's memory: {reason}"])
            return False
        return True


def share_publication(worker: Worker, publication: Publication, timeout_s: float) -> None:
    """Sends the addresses of all of it, and waits for the commit."""
    version = publication.version
    addresses = [device_memory.share(content) for content in publication.buckets]
    worker.call("begin_weights", publication.manifest.to_json(), timeout_s=timeout_s).result()
    worker.call("shared_buckets", {"version": version, "addresses": addresses}, timeout_s=timeout_s).result()
    worker.call("commit_weights", {"version": version}, timeout_s=timeout_s).result()


def send_publication(worker: Worker, publication: Publication, timeout_s: float) -> None:
    """Sends all of it, a few messages at once, and waits for the commit."""
    version = publication.version
    pending = deque([worker.call("begin_weights", publication.manifest.to_json(), timeout_s=timeout_s)])
    for number, content in enumerate(publication.buckets):
        while len(pending) >= _MESSAGES_AT_ONCE:
            pending.popleft().result()
        body = {"version": version, "number": number}
        pending.append(worker.call("bucket", body, {"content": content}, timeout_s=timeout_s))
    pending.append(worker.call("commit_weights", {"version": version}, timeout_s=timeout_s))
    while pending:
        pending.popleft().result()
