"""Keeps engines sampling: threads that each take one prompt from its first token to its rewards, and fill the buffer.

In one process only. Waits are bounded by the deadlines of engines and rewards.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.algorithms.advantages import has_zero_std
from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.buffer import Buffer, RolloutBatch, StalenessSchedule
from lockstep.rollouts.episode import Episode, EpisodeGroups, EpisodeRunner, Group, as_bytes, as_text
from lockstep.types import Metrics, PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

if TYPE_CHECKING:
    from torch import Tensor

_PROBE_KEY = 1 << 50  # far from the keys of any prompt and turn: their random streams never meet


class Engines(Protocol):
    """Samplers in other processes. Any thread may call them."""

    @property
    def num_serving(self) -> int: ...

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

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
        """`versions`: lowest and highest of the weights to start with. `on_progress` runs on the calling thread."""
        ...

    def close(self) -> None: ...


class PromptStream:
    """A run's prompts by key, how each is sampled, and which of their groups are trained on."""

    def __init__(self, config: RunConfig, prompts: Prompts, num_steps: int) -> None:
        algorithm = config.algorithm
        assert isinstance(algorithm, GrpoConfig)
        assert config.batch.samples_per_step is not None
        self._batches = Batches(prompts, config.batch, seed=config.seed, shuffle=config.data.shuffle)  # type: ignore[arg-type]
        self._samples = config.batch.samples_per_step
        self._keeps_zero_std = algorithm.zero_std_groups == "keep"
        self.params = SamplingParams(
            max_tokens=algorithm.max_tokens,
            temperature=algorithm.temperature,
            top_p=algorithm.top_p,
            top_k=algorithm.top_k,
            min_p=algorithm.min_p,
            stop=algorithm.stop,
            seed=config.seed,
            num_samples=algorithm.group_size,
            logprobs=True,
        )
        self.schedule = StalenessSchedule(
            self._size_at,
            num_steps,
            updates=algorithm.updates,
            max_staleness=config.rollouts.max_staleness,
            max_refills=algorithm.max_refills if algorithm.zero_std_groups == "refill" else 0,
        )

    def _size_at(self, cursor: int) -> int:
        return min(self._samples, self._batches.num_rows - cursor % self._batches.num_rows)

    @property
    def max_in_flight(self) -> int:
        """Prompts that can be sampled at once."""
        return self._samples * (self.schedule.window + 1)

    def prompt_at(self, key: int) -> PromptRow:
        """Not from several threads at once."""
        return self._batches.batch_at(key)[0][0]  # type: ignore[return-value]

    def is_kept(self, group: Group) -> bool:
        return self._keeps_zero_std or not has_zero_std(group.rewards)


@dataclass
class PartialGroup:
    """A group in flight: its episodes up to the last complete turn, and the completions of the turn after it so far.

    Completions are in the order in which that turn is sampled.
    """

    episodes: EpisodeGroups | None = None
    completions: PartialCompletions | None = None

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if self.episodes:
            found["episodes"] = [[episode.to_json() for episode in group] for group in self.episodes]
        if self.completions:
            found["completions"] = [[entry and _write_partial(entry) for entry in group] for group in self.completions]
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PartialGroup:
        """`drafts` is the name that earlier releases wrote."""
        episodes = [[Episode.from_json(episode) for episode in group] for group in values.get("episodes", ())]
        completions = values.get("completions") or values.get("drafts") or ()
        return cls(episodes or None, [[_read_partial(entry) for entry in group] for group in completions] or None)


def _write_partial(partial: PartialCompletion) -> dict[str, object]:
    return asdict(partial) | {"routing": as_text(partial.routing)}


def _read_partial(values: Mapping[str, Any] | None) -> PartialCompletion | None:
    if values is None:
        return None
    tokens, logprobs, versions = (tuple(values[name]) for name in ("tokens", "logprobs", "versions"))
    return PartialCompletion(tokens, logprobs, versions, as_bytes(values.get("routing", "")))


@dataclass(frozen=True)
class _Job:
    """`versions`: of the weights to start with."""

    key: int
    prompt: PromptRow
    versions: tuple[int, int]
    partial: PartialGroup


class Orchestrator:
    """`state`: what a checkpoint has of groups in flight. They are saved only where steps run ahead."""

    def __init__(
        self,
        stream: PromptStream,
        buffer: Buffer[Group],
        runner: EpisodeRunner,
        engines: Engines,
        *,
        num_threads: int,
        state: Mapping[str, object] | None = None,
    ) -> None:
        self._stream, self._buffer, self._runner, self._engines = stream, buffer, runner, engines
        self._runs_ahead = buffer.schedule.window > 0
        self._changed = threading.Condition()
        self._partial = {int(key): PartialGroup.from_json(values) for key, values in _partial_groups(state).items()}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._published, self._is_publishing = -1, False
        self._evaluated: list[Any] | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._num_threads = num_threads
        for number in range(num_threads):
            self._start(self._work, f"rollouts-{number}")

    # --- called by the training loop, from one thread ----------------------------------------------------------------

    def take(self, timeout_s: float) -> RolloutBatch[Group] | None:
        """None: not yet."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                batch = self._buffer.take()
                if batch is None or self._runs_ahead:
                    self._admit()
                if batch is not None or not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    return batch

    def advance(self) -> None:
        with self._changed:
            self._buffer.advance()

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """In the background, as the version that the buffer is at."""
        with self._changed:
            assert not self._is_publishing, "wait_published comes first"
            self._is_publishing = True
            version = self._buffer.version
            if self._runs_ahead:
                self._admit()

        def send() -> None:
            self._engines.publish(version, weights)
            with self._changed:
                self._published, self._is_publishing = version, False
                self._changed.notify_all()

        self._start(send, f"publish-{version}")

    def wait_published(self, timeout_s: float) -> bool | None:
        """None: not yet."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_publishing or self._failure is not None, timeout_s)
            self._raise_failure()
            return None if self._is_publishing else True

    def start_evaluation(self, prompts: Sequence[PromptRow], params: SamplingParams) -> None:
        """With the current version and no other. `take_evaluation` returns the groups when all are complete."""

        def evaluate(versions: tuple[int, int]) -> list[Group]:
            return self._run(prompts, range(len(prompts)), params, versions, PartialGroup())

        self._start_evaluation(evaluate)

    def start_probe(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """A completion of each, as it is sampled for training, with the current version and no other, and not scored.
        `take_evaluation` returns them."""
        params = replace(self._stream.params, num_samples=1, max_tokens=max_tokens)

        def probe(versions: tuple[int, int]) -> list[TextCompletion]:
            keys = range(_PROBE_KEY, _PROBE_KEY + len(prompts))
            return [first for (first,) in self._sample(versions, PartialGroup(), prompts, params, keys)]

        self._start_evaluation(probe)

    def _start_evaluation(self, compute: Callable[[tuple[int, int]], list[Any]]) -> None:
        with self._changed:
            self._evaluated, version = None, self._buffer.version

        def evaluate() -> None:
            found = compute((version, version))
            with self._changed:
                self._evaluated = found
                self._changed.notify_all()

        self._start(evaluate, f"evaluate-{version}")

    def take_evaluation(self, timeout_s: float) -> list[Any] | None:
        """Of `start_evaluation` or `start_probe`. None: not yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._evaluated is not None or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._evaluated

    def metrics(self) -> Metrics:
        with self._changed:
            num_ready = len(self._buffer.ready)
        return {"buffer": float(num_ready), "engines": float(self._engines.num_serving)}

    def to_json(self) -> dict[str, object]:
        with self._changed:
            groups = {str(key): group.to_json() for key, group in self._partial.items()} if self._runs_ahead else {}
            return {"buffer": self._buffer.to_json(Group.to_json), "partial": groups}

    def close(self) -> None:
        """Starts nothing more. Threads end by themselves: everything they wait for has a deadline."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for _ in range(self._num_threads):
            self._jobs.put(None)

    # --- threads -----------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # raised again where the next step is taken
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            (group,) = self._run([job.prompt], [job.key], self._stream.params, job.versions, job.partial)
            with self._changed:
                if self._is_closed:
                    return
                del self._partial[job.key]
                self._buffer.add(job.key, group, group.oldest_version, is_kept=self._stream.is_kept(group))
                if self._runs_ahead:
                    self._admit()
                self._changed.notify_all()

    def _admit(self) -> None:
        """With the lock."""
        buffer = self._buffer
        newest = buffer.schedule.num_steps * buffer.schedule.updates if self._runs_ahead else buffer.version
        for key in buffer.admit():
            group = self._partial.setdefault(key, PartialGroup())
            self._jobs.put(_Job(key, self._stream.prompt_at(key), (buffer.oldest_allowed, newest), group))

    def _run(
        self,
        prompts: Sequence[PromptRow],
        keys: Sequence[int],
        params: SamplingParams,
        versions: tuple[int, int],
        group: PartialGroup,
    ) -> list[Group]:
        """Progress is kept in `group`, for checkpoints."""

        def on_turn(episodes: EpisodeGroups) -> None:
            with self._changed:
                group.episodes, group.completions = deepcopy(episodes), None

        sample, episodes = functools.partial(self._sample, versions, group), deepcopy(group.episodes)
        return self._runner.run(sample, prompts, keys, params, episodes, on_turn)

    def _sample(
        self,
        versions: tuple[int, int],
        group: PartialGroup,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
    ) -> list[list[TextCompletion]]:
        """Calls the engines as soon as one can have the weights."""

        def keep(completions: PartialCompletions) -> None:
            with self._changed:
                group.completions = completions

        with self._changed:
            self._changed.wait_for(lambda: self._published >= versions[0] or self._is_ending)
            if self._is_ending:
                raise RuntimeError("sampling was closed, or failed in another thread")
            partial = group.completions
        on_progress = keep if self._runs_ahead else None
        return self._engines.sample(prompts, params, keys, versions=versions, partial=partial, on_progress=on_progress)

    @property
    def _is_ending(self) -> bool:
        return self._is_closed or self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _partial_groups(state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Groups in flight in a checkpoint; `under_way` is the name that earlier releases wrote."""
    return (state or {}).get("partial") or (state or {}).get("under_way") or {}
