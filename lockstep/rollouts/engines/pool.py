"""A pool of engine processes as one sampler: splits a request over engines, and repeats what a lost engine had."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lockstep.config import RunConfig
from lockstep.processes.hosts import HOSTS_FILE, SECRET_VARIABLE, HostListener
from lockstep.processes.local import LocalWorker
from lockstep.processes.ray import Reservation
from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerError, WorkerFailed
from lockstep.rollouts.engines import device_memory
from lockstep.rollouts.engines.health import HealthLimits, State
from lockstep.rollouts.engines.publishing import Publication
from lockstep.rollouts.engines.supervision import NO_DEADLINE_S, Engine, EnginesLost, Supervisor
from lockstep.rollouts.engines.worker import ENTRY, engine_settings, pack_request, unpack_completions, unpack_partial
from lockstep.rundir import RunDir
from lockstep.types import PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

__all__ = ["EnginePool", "EnginesLost", "start_engines"]

ANY_LATER = 2**62
_MAX_REFUSED = 100
_REFUSED_PAUSE_S = 0.05  # until an engine's new version is known here
_CALL_NUMBERS = itertools.count()


def start_engines(config: RunConfig, run: RunDir, *, precision: str, choose_device: Callable[[str], str]) -> EnginePool:
    """The engines of a run: on this machine, on hosts of theirs or where Ray reserved room. By the run's owner."""
    rollouts = config.rollouts
    reservation, hosts = Reservation.of_this_process(), _listen_for_hosts(run)
    device: str = config.launch.device if rollouts.device == "auto" else rollouts.device
    if reservation is None and hosts is None:  # otherwise this node's devices say nothing about theirs
        device = choose_device(device)
    settings = engine_settings(config, precision=precision, device=device)
    num_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", config.launch.procs))
    gpus = [_gpu_of(num_ranks_here + number) for number in range(rollouts.engines)] if device == "cuda" else []

    def spawn(name: str) -> Worker:
        if reservation is not None:
            return reservation.spawn(name, ENTRY, settings, start_timeout_s=rollouts.start_timeout_s)
        if hosts is not None:
            log_path, timeout_s = run.logs / f"{name}.log", rollouts.start_timeout_s
            return hosts.spawn(name, ENTRY, settings, log_path=log_path, start_timeout_s=timeout_s)
        number = int(name.rpartition("-")[2])
        return LocalWorker.spawn(
            name,
            ENTRY,
            settings,
            env={"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else None,
            log_path=run.logs / f"{name}.log",
            start_timeout_s=rollouts.start_timeout_s,
        )

    compiled: dict[str, list[float]] = defaultdict(list)

    def tell(kind: str, **fields: Any) -> None:
        if kind == "engine_slow":
            run.report_slow(f"{fields['engine']}: {fields['message']}")
        elif kind == "engine_compiled":
            compiled[fields["engine"]].append(fields["seconds"])
            run.log_event("compiled", **fields)
            run.write_status(engine_compilations={name: _count(seconds) for name, seconds in compiled.items()})
        else:
            run.log_event(kind, **fields)

    return EnginePool(
        spawn,
        rollouts.engines,
        check_interval_s=rollouts.check_interval_s,
        deadline_s=rollouts.deadline_s,
        start_timeout_s=rollouts.start_timeout_s,
        max_replacements=rollouts.max_replacements,
        on_event=tell,
        keeps_partials=rollouts.max_staleness > 0,
        shares_gpu=reservation is None and hosts is None and _gpu_of(0) in gpus,
        on_close=hosts.close if hosts is not None else lambda: None,
    )


def _count(seconds: Sequence[float]) -> dict[str, float]:
    return {"count": len(seconds), "seconds": round(sum(seconds), 3)}


def _listen_for_hosts(run: RunDir) -> HostListener | None:
    """Where the launcher has started some on nodes for engines. Rank 0 is at MASTER_ADDR."""
    secret = os.environ.pop(SECRET_VARIABLE, "")  # not for the processes that we start
    return HostListener(secret, os.environ["MASTER_ADDR"], run.path / HOSTS_FILE) if secret else None


def _gpu_of(number: int) -> str:
    """The name of one GPU for each process, ranks first; where there are too few, the first ones are shared."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[number % len(names)] if names else ""


def _device_of(tensors: Collection[Tensor]) -> str:
    """The GPU that has all of them, if one does."""
    devices = {tensor.device for tensor in tensors}
    return device_memory.device_id(devices.pop()) if len(devices) == 1 else ""


class EngineCall:
    """Some prompts of a request, sent to one engine. `generation` tells the engine from its replacements."""

    def __init__(self, request: SampleRequest, places: list[int], engine: str, generation: int) -> None:
        self.name = f"call-{next(_CALL_NUMBERS)}"
        self.request, self.places, self.engine, self.generation = request, places, engine, generation
        self.reply: Reply | None = None
        self.error: BaseException | None = None

    @property
    def num_completions(self) -> int:
        return len(self.places) * self.request.params.num_samples

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.error is not None

    def body(self) -> dict[str, object]:
        request = self.request
        prompts, keys = [request.prompts[i] for i in self.places], [request.keys[i] for i in self.places]
        partial = [request.partial[i] for i in self.places]
        has_partial = any(entry is not None for group in partial for entry in group)
        body = pack_request(prompts, request.params, keys, partial if has_partial else None)
        return {**body, "call": self.name, "versions": list(request.versions)}

    def add_tokens(self, new: Sequence[tuple[int, int, Sequence[Any]]]) -> None:
        """(prompt of this call, sample, its tokens since the last time)."""
        if not self.ended:
            for place, sample, partial in new:
                self.request.extend(self.places[place], sample, unpack_partial(partial))


class SampleRequest:
    """One call of `EnginePool.sample`: what each engine has of it, what is complete, what must be sent again.

    `versions`: the lowest and highest of the weights to start with. `waiting`: prompts that no engine has. With the
    pool's lock.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        versions: tuple[int, int],
        partial: PartialCompletions | None,
    ) -> None:
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: each needs one")
        self.prompts, self.params, self.keys, self.versions = prompts, params, keys, versions
        self._initial = [[None] * params.num_samples for _ in prompts] if partial is None else partial
        if [len(group) for group in self._initial] != [params.num_samples] * len(prompts):
            raise ValueError(f"partial must have {params.num_samples} entries for each of the {len(prompts)} prompts")
        self.partial: list[list[PartialCompletion | None]] = [list(group) for group in self._initial]
        self._has_new_tokens = False
        self._completions: dict[int, list[TextCompletion]] = {}
        self.waiting = list(range(len(prompts)))
        self.calls: list[EngineCall] = []
        self.num_refused = 0

    @property
    def is_complete(self) -> bool:
        return len(self._completions) == len(self.prompts)

    @property
    def has_changed(self) -> bool:
        return self._has_new_tokens or any(call.ended for call in self.calls)

    def add_call(self, places: list[int], engine: str, generation: int) -> EngineCall:
        call = EngineCall(self, places, engine, generation)
        self.waiting = [place for place in self.waiting if place not in places]
        self.calls.append(call)
        return call

    def take_ended(self) -> list[EngineCall]:
        ended = [call for call in self.calls if call.ended]
        self.calls = [call for call in self.calls if not call.ended]
        return ended

    def add_completions(self, call: EngineCall) -> None:
        assert call.reply is not None
        groups = unpack_completions(call.reply.body, call.reply.tensors)
        for place, completions in zip(call.places, groups, strict=True):
            assert len(completions) == self.params.num_samples, f"{call.engine} gave {len(completions)} completions"
            self._completions[place] = completions
            self.partial[place] = [_as_partial(completion) for completion in completions]
        self._has_new_tokens = True

    def retry(self, call: EngineCall) -> None:
        self.waiting += call.places

    def retry_lost(self, call: EngineCall, *, keeps_partials: bool) -> None:
        """The call's engine is lost. Completions continue from their last known token, possibly with newer weights; or
        they start again."""
        if keeps_partials:
            self.versions = (self.versions[0], ANY_LATER)
        else:
            for place in call.places:
                self.partial[place] = list(self._initial[place])
        self.retry(call)

    def extend(self, place: int, sample: int, new: PartialCompletion) -> None:
        old = self.partial[place][sample] or PartialCompletion((), (), ())
        self.partial[place][sample] = PartialCompletion(
            old.tokens + new.tokens,
            old.logprobs + new.logprobs,
            old.versions + new.versions,
            old.routing + new.routing,
        )
        self._has_new_tokens = True

    def take_partial(self) -> PartialCompletions | None:
        """All completions so far, if they have grown since the last time."""
        if not self._has_new_tokens:
            return None
        self._has_new_tokens = False
        return [list(group) for group in self.partial]

    def completions(self) -> list[list[TextCompletion]]:
        return [self._completions[place] for place in range(len(self.prompts))]


def _as_partial(completion: TextCompletion) -> PartialCompletion:
    count = len(completion.tokens)
    return PartialCompletion(
        completion.tokens,
        completion.logprobs or (0.0,) * count,
        completion.versions or (completion.version,) * count,
        completion.routing,
    )


class EnginePool:
    """Thread-safe. Engines are started at once; the first `publish` waits for them."""

    def __init__(
        self,
        spawn: Callable[[str], Worker],
        num_engines: int,
        *,
        check_interval_s: float,
        deadline_s: float,
        start_timeout_s: float,
        max_replacements: int,
        on_event: Callable[..., None],
        keeps_partials: bool,
        shares_gpu: bool = False,
        stuck_s: float = 300.0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`spawn` starts the engine of that name and returns when it is connected. `on_event` gets the kind of an event
        and its fields, from one thread. `keeps_partials`: completions of a lost engine continue on another; otherwise
        they start again. `shares_gpu`: an engine is on the GPU of this process, so that weights are best left there.
        `stuck_s`: how long an engine may be busy without progress.
        """
        limits = HealthLimits(check_interval_s, deadline_s, start_timeout_s, stuck_s)
        self._keeps_partials, self._on_close, self.shares_gpu = keeps_partials, on_close, shares_gpu
        self.calls: dict[str, EngineCall] = {}
        self._publishing = threading.Lock()
        self._told_of_copies = False
        self.supervisor = Supervisor(
            spawn, num_engines, limits, max_replacements, on_event, self._on_partial, self._on_lost
        )
        self.supervisor.wants_partial = keeps_partials
        self._changed = self.supervisor.changed

    @property
    def num_serving(self) -> int:
        with self._changed:
            return sum(engine.health.state is State.SERVING for engine in self.supervisor.engines)

    @property
    def loads(self) -> dict[str, int]:
        """Completions that each engine is working on."""
        with self._changed:
            return {engine.name: engine.load for engine in self.supervisor.engines}

    @property
    def pids(self) -> dict[str, int | None]:
        """Of the processes that run now, by engine."""
        with self._changed:
            return {engine.name: engine.worker.pid for engine in self.supervisor.engines if engine.worker is not None}

    def close(self) -> None:
        self.supervisor.close()
        self._on_close()

    # --- new weights ------------------------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Returns once every running engine has verified and loaded these weights, or was removed; at least one has
        them. Tensors must not change until then, nor later where they are on a GPU. An engine that is started later
        gets them before it serves.
        """
        started, supervisor = time.monotonic(), self.supervisor
        device_id = _device_of(tensors.values())
        publication = (
            Publication.of_device(version, tensors, device_id) if device_id else Publication.of(version, tensors)
        )
        if self.shares_gpu and not publication.device_id:
            self._tell_of_copies()
        with self._publishing, self._changed:
            previous = supervisor.publication
            if previous is not None and version < previous.version:
                raise ValueError(f"version {version} is older than {previous.version}, which is published")
            if previous is not None and version == previous.version and publication.manifest != previous.manifest:
                raise ValueError(f"version {version} is published already, with other weights")
            # An engine that is starting is not waited for, except for the first weights, when all are.
            awaited = {
                engine.name: engine.slot.generation
                for engine in supervisor.engines
                if previous is None or engine.health.state is not State.STARTING
            }
            supervisor.announce(publication)
            supervisor.wait_for(lambda: self._is_loaded(awaited, version), f"loaded version {version}")
            for engine in supervisor.engines:
                engine.health.require(version)
            names = [engine.name for engine in supervisor.engines if engine.health.serves(version, version)]
        seconds = round(time.monotonic() - started, 3)
        supervisor.log_event("weights_published", version=version, engines=names, seconds=seconds)

    def _tell_of_copies(self) -> None:
        if not self._told_of_copies:
            self._told_of_copies = True
            message = "new weights pass through the host's memory: their GPU has no room for a copy"
            self.supervisor.log_event("engine_slow", engine="engines", message=message)

    def _is_loaded(self, awaited: Mapping[str, int], version: int) -> bool:
        engines = self.supervisor.engines
        is_open = any(
            engine.is_current(awaited.get(engine.name, -1)) and engine.health.version != version for engine in engines
        )
        return not is_open and any(engine.health.serves(version, version) for engine in engines)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        partial: PartialCompletions | None = None,
        on_progress: Callable[[PartialCompletions], None] | None = None,
    ) -> list[list[TextCompletion]]:
        """From any thread. `versions`: lowest and highest of the weights that a completion starts with; later tokens
        may come from newer ones. `on_progress` is called on this thread, with all completions so far.
        """
        request = SampleRequest(prompts, params, keys, versions, partial)
        if on_progress is not None:
            self.supervisor.wants_partial = True
        try:
            while not request.is_complete:
                for call in self._distribute(request):
                    self._send(call)
                with self._changed:
                    self.supervisor.wait_for(lambda: request.has_changed, "replied", NO_DEADLINE_S)
                    was_refused = self._collect(request)
                    progress = request.take_partial()
                if progress is not None and on_progress is not None:
                    on_progress(progress)
                if was_refused:
                    time.sleep(_REFUSED_PAUSE_S)
        finally:
            with self._changed:
                self.calls = {name: call for name, call in self.calls.items() if call.request is not request}
        return request.completions()

    def _distribute(self, request: SampleRequest) -> list[EngineCall]:
        """Every waiting prompt, with all its samples, to the engine with the least load."""
        with self._changed:
            if not request.waiting:
                return []
            lowest, highest = request.versions
            serving: list[Engine] = []

            def find() -> bool:
                serving[:] = [engine for engine in self.supervisor.engines if engine.health.serves(lowest, highest)]
                published = self.supervisor.publication
                # Versions never go back: a wait for an older one would not end.
                if not serving and published is not None and published.version > highest:
                    raise ValueError(
                        f"versions {lowest} to {highest} are requested, and engines have {published.version} already"
                    )
                return bool(serving)

            self.supervisor.wait_for(find, f"served a version from {lowest} to {highest}")
            places: dict[str, list[int]] = {}
            for place in request.waiting:
                engine = min(serving, key=lambda engine: engine.load)
                engine.load += request.params.num_samples
                places.setdefault(engine.name, []).append(place)
            generations = {engine.name: engine.slot.generation for engine in serving}
            calls = [request.add_call(own, name, generations[name]) for name, own in places.items()]
            self.calls.update((call.name, call) for call in calls)
            return calls

    def _send(self, call: EngineCall) -> None:
        with self._changed:
            engine = next(engine for engine in self.supervisor.engines if engine.name == call.engine)
            worker = engine.worker
            if call.ended or worker is None:  # it was removed meanwhile
                return

        def on_done(future: Future[Reply]) -> None:
            error = future.exception()
            self.end_call(call, engine, future.result() if error is None else None, error)

        try:
            worker.call("sample", call.body(), timeout_s=NO_DEADLINE_S).add_done_callback(on_done)
        except ValueError as error:  # too large for a message
            self.end_call(call, engine, None, error)

    def end_call(self, call: EngineCall, engine: Engine, reply: Reply | None, error: BaseException | None) -> None:
        """A reply from an engine that was removed is ignored."""
        with self._changed:
            if call.ended:
                return
            if not engine.is_current(call.generation):
                reply, error = None, WorkerDied(engine.name, f"{engine.name} was lost")
            elif isinstance(error, WorkerError) and not isinstance(error, WorkerFailed):
                engine.health.failed(str(error))
            engine.load -= call.num_completions
            call.reply, call.error = reply, error
            self._changed.notify_all()

    def _collect(self, request: SampleRequest) -> bool:
        """Takes replies; what was lost waits to be sent again. Whether an engine refused because of its version."""
        before = request.num_refused
        for call in request.take_ended():
            del self.calls[call.name]
            error = call.error
            if error is None:
                request.add_completions(call)
            elif isinstance(error, WorkerFailed) and error.kind == "VersionRefused" and before < _MAX_REFUSED:
                request.retry(call)
                request.num_refused += 1
            elif isinstance(error, WorkerError) and not isinstance(error, WorkerFailed):
                request.retry_lost(call, keeps_partials=self._keeps_partials)
            else:
                raise error
        return request.num_refused > before

    def _on_lost(self, engine: str, generation: int) -> None:
        for call in self.calls.values():
            if (call.engine, call.generation) == (engine, generation) and not call.ended:
                call.error = WorkerDied(engine, f"{engine} was removed")

    def _on_partial(self, engine: str, generation: int, partial: Mapping[str, Any]) -> None:
        for name, tokens in partial.items():
            call = self.calls.get(name)
            if call is not None and (call.engine, call.generation) == (engine, generation):
                call.add_tokens(tokens)
