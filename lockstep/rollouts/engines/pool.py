"""One call for answers while several engines work on it: who has which part, what there is, what must be asked again.

Not thread-safe: whoever owns it has the lock. Must not know processes, health or time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lockstep.processes.worker import Reply, Worker, WorkerDied, WorkerError, WorkerFailed
from lockstep.rollouts.engines.health import HealthLimits, State
from lockstep.rollouts.engines.publishing import Publication
from lockstep.rollouts.engines.supervision import LONG_S, Engine, EnginesLost, Supervisor
from lockstep.rollouts.engines.wire import pack_request, unpack_answers, unpack_begun
from lockstep.types import PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

ANY_LATER = 2**62
_NUMBERS = itertools.count()

Drafts = list[list[PartialCompletion | None]]


class EngineCall:
    """Some prompts of a call that one engine is asked for: `generation` is of the engine, `engine` its name."""

    def __init__(self, asking: SampleRequest, places: list[int], engine: str, generation: int) -> None:
        self.name = f"call-{next(_NUMBERS)}"
        self.asking, self.places, self.engine, self.generation = asking, places, engine, generation
        self.reply: Reply | None = None
        self.error: BaseException | None = None

    @property
    def num_answers(self) -> int:
        return len(self.places) * self.asking.params.num_samples

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.error is not None

    def add_news(self, news: Sequence[tuple[int, int, Sequence[Any]]]) -> None:
        """(prompt in this part, sample, tokens since the last news)."""
        if not self.ended:
            for place, sample, begun in news:
                self.asking.extend(self.places[place], sample, unpack_begun(begun))


class SampleRequest:
    """`versions`: the lowest and the highest of weights to begin with. `waiting`: prompts that nobody is asked for."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        versions: tuple[int, int],
        begun: PartialCompletions | None,
    ) -> None:
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} keys for {len(prompts)} prompts: each needs one")
        self.prompts, self.params, self.keys, self.versions = prompts, params, keys, versions
        nothing: Drafts = [[None] * params.num_samples for _ in prompts]
        self._given: Drafts = nothing if begun is None else [list(group) for group in begun]
        if [len(group) for group in self._given] != [params.num_samples] * len(prompts):
            raise ValueError(f"begun must have {params.num_samples} entries for each of the {len(prompts)} prompts")
        self._drafts: Drafts = [list(group) for group in self._given]
        self._has_news = False
        self._found: dict[int, list[TextCompletion]] = {}
        self.waiting = list(range(len(prompts)))
        self.parts: list[EngineCall] = []
        self.num_refused = 0

    @property
    def is_answered(self) -> bool:
        return len(self._found) == len(self.prompts)

    @property
    def has_changed(self) -> bool:
        return self._has_news or any(part.ended for part in self.parts)

    def split_off(self, places: list[int], engine: str, generation: int) -> EngineCall:
        part = EngineCall(self, places, engine, generation)
        self.waiting = [place for place in self.waiting if place not in places]
        self.parts.append(part)
        return part

    def request(self, part: EngineCall) -> dict[str, Any]:
        prompts, keys = [self.prompts[place] for place in part.places], [self.keys[place] for place in part.places]
        begun = [self._drafts[place] for place in part.places]
        has_begun = any(draft is not None for group in begun for draft in group)
        body = pack_request(prompts, self.params, keys, begun if has_begun else None)
        return {**body, "call": part.name, "versions": list(self.versions)}

    def take_ended(self) -> list[EngineCall]:
        ended = [part for part in self.parts if part.ended]
        self.parts = [part for part in self.parts if not part.ended]
        return ended

    def take_answers(self, part: EngineCall) -> None:
        assert part.reply is not None
        groups = unpack_answers(part.reply.body, part.reply.tensors)
        for place, answers in zip(part.places, groups, strict=True):
            assert len(answers) == self.params.num_samples, f"{part.engine} gave {len(answers)} answers"
            self._found[place] = answers
            self._drafts[place] = [_as_begun(answer) for answer in answers]
        self._has_news = True

    def ask_again(self, part: EngineCall) -> None:
        self.waiting += part.places

    def note_loss(self, part: EngineCall, *, keeps_partials: bool) -> None:
        """Its engine is gone. Answers go on from the last that was heard of them, also with newer weights; or they
        begin anew, as if nobody had been asked."""
        if keeps_partials:
            self.versions = (self.versions[0], ANY_LATER)
        else:
            for place in part.places:
                self._drafts[place] = list(self._given[place])

    def extend(self, place: int, sample: int, new: PartialCompletion) -> None:
        old = self._drafts[place][sample] or PartialCompletion((), (), ())
        joined = (old.tokens + new.tokens, old.logprobs + new.logprobs, old.versions + new.versions)
        self._drafts[place][sample] = PartialCompletion(*joined)
        self._has_news = True

    def take_drafts(self) -> Drafts | None:
        """What there is of every answer, if that is more than the last time."""
        if not self._has_news:
            return None
        self._has_news = False
        return [list(group) for group in self._drafts]

    def answers(self) -> list[list[TextCompletion]]:
        return [self._found[place] for place in range(len(self.prompts))]


def _as_begun(answer: TextCompletion) -> PartialCompletion:
    count = len(answer.tokens)
    return PartialCompletion(
        answer.tokens, answer.logprobs or (0.0,) * count, answer.versions or (answer.version,) * count
    )


__all__ = ["EnginePool", "EnginesLost"]

_MAX_REFUSED = 100
_REFUSED_PAUSE_S = 0.05  # until the news of an engine's new version is here


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
        stuck_s: float = 300.0,
    ) -> None:
        """`spawn` starts the engine of a name and returns when it is connected. `on_event` gets the kind of an event
        and its fields, from one thread. `keeps_partials`: answers of a lost engine go on elsewhere from where they
        were; otherwise they begin anew. `stuck_s`: how long an engine may work without getting on.
        """
        limits = HealthLimits(check_interval_s, deadline_s, start_timeout_s, stuck_s)
        self._keeps_partials = keeps_partials
        self._parts: dict[str, EngineCall] = {}
        self._publishing = threading.Lock()
        self._engines = Supervisor(spawn, num_engines, limits, max_replacements, on_event, self._on_news, self._on_lost)
        self._engines.wants_news = keeps_partials
        self._changed = self._engines.changed

    @property
    def num_serving(self) -> int:
        with self._changed:
            return sum(engine.health.state is State.SERVING for engine in self._engines.engines)

    @property
    def pids(self) -> dict[str, int | None]:
        """Of the processes that are there now, by the names of the engines."""
        with self._changed:
            return {engine.name: engine.worker.pid for engine in self._engines.engines if engine.worker is not None}

    def close(self) -> None:
        self._engines.close()

    # --- new weights ------------------------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Returns once every engine that was there has verified and taken over these weights, or was taken out; at
        least one has. Tensors must not change until then. An engine that comes later gets them before it serves.
        """
        started, engines = time.monotonic(), self._engines
        publication = Publication.of(version, tensors)
        with self._publishing, self._changed:
            known = engines.publication
            if known is not None and version < known.version:
                raise ValueError(f"version {version} is older than {known.version}, which is published")
            if known is not None and version == known.version and publication.manifest != known.manifest:
                raise ValueError(f"version {version} is published already, with other weights")
            # One that is being started is not waited for, except at the very beginning, when all of them are.
            awaited = {
                engine.name: engine.place.generation
                for engine in engines.engines
                if known is None or engine.health.state is not State.STARTING
            }
            engines.announce(publication)
            engines.wait_for(lambda: self._is_taken_over(awaited, version), f"took over version {version}")
            for engine in engines.engines:
                engine.health.require(version)
            names = [engine.name for engine in engines.engines if engine.health.serves(version, version)]
        seconds = round(time.monotonic() - started, 3)
        engines.tell("weights_published", version=version, engines=names, seconds=seconds)

    def _is_taken_over(self, awaited: Mapping[str, int], version: int) -> bool:
        every = self._engines.engines
        is_open = any(
            engine.is_current(awaited.get(engine.name, -1)) and engine.health.version != version for engine in every
        )
        return not is_open and any(engine.health.serves(version, version) for engine in every)

    # --- answers ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        partial: PartialCompletions | None = None,
        on_progress: Callable[[Drafts], None] | None = None,
    ) -> list[list[TextCompletion]]:
        """From any thread. `versions`: lowest and highest of the weights that an answer is begun with; later tokens
        may come from newer ones. `on_progress` is called on this thread, with what there is of every answer.
        """
        asking = SampleRequest(prompts, params, keys, versions, partial)
        if on_progress is not None:
            self._engines.wants_news = True
        try:
            while not asking.is_answered:
                for part in self._distribute(asking):
                    self._ask(asking, part)
                with self._changed:
                    self._engines.wait_for(lambda: asking.has_changed, "answered", LONG_S)
                    was_refused = self._settle(asking)
                    drafts = asking.take_drafts()
                if drafts is not None and on_progress is not None:
                    on_progress(drafts)
                if was_refused:
                    time.sleep(_REFUSED_PAUSE_S)
        finally:
            with self._changed:
                self._parts = {name: part for name, part in self._parts.items() if part.asking is not asking}
        return asking.answers()

    def _distribute(self, asking: SampleRequest) -> list[EngineCall]:
        """Everything that nobody is asked for: whole groups, each to the engine with the least to do."""
        with self._changed:
            if not asking.waiting:
                return []
            lowest, highest = asking.versions
            serving: list[Engine] = []

            def find() -> bool:
                self._refuse_passed(lowest, highest)
                serving[:] = [engine for engine in self._engines.engines if engine.health.serves(lowest, highest)]
                return bool(serving)

            self._engines.wait_for(find, f"came to serve a version from {lowest} to {highest}")
            shares: dict[str, list[int]] = {}
            for place in asking.waiting:
                engine = min(serving, key=lambda engine: engine.load)
                engine.load += asking.params.num_samples
                shares.setdefault(engine.name, []).append(place)
            generations = {engine.name: engine.place.generation for engine in serving}
            parts = [asking.split_off(places, name, generations[name]) for name, places in shares.items()]
            self._parts.update((part.name, part) for part in parts)
            return parts

    def _refuse_passed(self, lowest: int, highest: int) -> None:
        """Versions never go back: a wait for an older one would not end."""
        published = self._engines.publication
        if published is None or published.version <= highest:
            return
        if not any(engine.health.serves(lowest, highest) for engine in self._engines.engines):
            raise ValueError(
                f"answers of versions {lowest} to {highest} are asked for, and engines have {published.version} by now"
            )

    def _ask(self, asking: SampleRequest, part: EngineCall) -> None:
        with self._changed:
            engine = next(engine for engine in self._engines.engines if engine.name == part.engine)
            worker = engine.worker
            if part.ended or worker is None:  # it was taken out since
                return

        def on_done(future: Future[Reply]) -> None:
            error = future.exception()
            self._end(part, engine, future.result() if error is None else None, error)

        try:
            worker.call("sample", asking.request(part), timeout_s=LONG_S).add_done_callback(on_done)
        except ValueError as error:  # too large for a message
            self._end(part, engine, None, error)

    def _end(self, part: EngineCall, engine: Engine, reply: Reply | None, error: BaseException | None) -> None:
        """What comes from an engine that is lost is not looked at."""
        with self._changed:
            if part.ended:
                return
            if not engine.is_current(part.generation):
                reply, error = None, WorkerDied(engine.name, f"{engine.name} was lost")
            elif isinstance(error, WorkerError) and not isinstance(error, WorkerFailed):
                engine.health.failed(str(error))
            engine.load -= part.num_answers
            part.reply, part.error = reply, error
            self._changed.notify_all()

    def _on_lost(self, engine: str, generation: int) -> None:
        for part in self._parts.values():
            if (part.engine, part.generation) == (engine, generation) and not part.ended:
                part.error = WorkerDied(engine, f"{engine} was taken out")

    def _settle(self, asking: SampleRequest) -> bool:
        """Take what came; what is lost waits to be asked for again. Whether an engine had other weights than asked."""
        before = asking.num_refused
        for part in asking.take_ended():
            del self._parts[part.name]
            error = part.error
            if error is None:
                asking.take_answers(part)
            elif isinstance(error, WorkerFailed) and error.kind == "VersionRefused" and before < _MAX_REFUSED:
                asking.ask_again(part)
                asking.num_refused += 1
            elif isinstance(error, WorkerError) and not isinstance(error, WorkerFailed):
                asking.note_loss(part, keeps_partials=self._keeps_partials)
                asking.ask_again(part)
            else:
                raise error
        return asking.num_refused > before

    def _on_news(self, engine: str, generation: int, news: dict[str, Any]) -> None:
        for name, tokens in news.items():
            part = self._parts.get(name)
            if part is not None and (part.engine, part.generation) == (engine, generation):
                part.add_news(tokens)
