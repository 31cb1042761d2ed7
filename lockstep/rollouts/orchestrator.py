"""Has engines sample: threads that each take a prompt from its first token to its rewards, and the buffer they fill.

In one process alone. Waits are bounded by those who are asked: engines and rewards have deadlines of their own.
Must not know models, ranks or how engines are kept alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, Protocol

from lockstep.data.prompts import PromptRow
from lockstep.rollouts.buffer import Buffer, RolloutBatch
from lockstep.rollouts.episode import Episode, FollowUp, Group, Rollouts
from lockstep.types import Metrics, PartialCompletion, Prompt, SamplingParams, TextCompletion

Drafts = list[list[PartialCompletion | None]]


class Engines(Protocol):
    """A pool of engines. Any thread may call it."""

    @property
    def num_serving(self) -> int: ...

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None: ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        versions: tuple[int, int],
        partial: Any = None,
        on_progress: Callable[[Drafts], None] | None = None,
    ) -> list[list[TextCompletion]]:
        """`on_progress` is called on the thread that asks."""
        ...

    def close(self) -> None: ...


class PromptTask(Protocol):
    params: SamplingParams

    def prompt_at(self, key: int) -> PromptRow: ...

    def is_kept(self, group: Group) -> bool: ...


@dataclass
class PartialGroup:
    """What there is of some groups: their episodes up to the last turn that is whole, and the turn after it in pieces.

    Pieces are in the order in which the answers of that turn are asked for.
    """

    episodes: list[list[Episode]] | None = None
    drafts: Drafts | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            name: [[asdict(e) if e else None for e in own] for own in value]
            for name, value in vars(self).items()
            if value
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> PartialGroup:
        episodes = [[Episode(**episode) for episode in own] for own in found.get("episodes", ())]
        drafts = [[_read_draft(draft) for draft in own] for own in found.get("drafts", ())]
        return cls(episodes or None, drafts or None)


def _read_draft(found: Mapping[str, Any] | None) -> PartialCompletion | None:
    return None if found is None else PartialCompletion(**{name: tuple(column) for name, column in found.items()})


@dataclass(frozen=True)
class _Job:
    """`versions`: of the weights to begin with."""

    key: int
    prompt: PromptRow
    versions: tuple[int, int]
    progress: PartialGroup


class Orchestrator:
    """`found`: what a checkpoint has of groups under way. Partial ones are kept only where a step may wait for them."""

    def __init__(
        self,
        task: PromptTask,
        buffer: Buffer[Group],
        rollouts: Rollouts,
        engines: Engines,
        *,
        num_threads: int,
        found: Mapping[str, Any] | None = None,
    ) -> None:
        """`rollouts.sample` is not used: engines are asked."""
        self._task, self._buffer, self._engines = task, buffer, engines
        self._tokenizing = threading.Lock()
        self._rollouts = replace(rollouts, follow_up=self._follow_up(rollouts.follow_up))
        self._runs_ahead = buffer.schedule.window > 0
        self._changed = threading.Condition()
        self._under_way = {int(key): PartialGroup.from_json(own) for key, own in (found or {}).items()}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._published, self._sending = -1, False
        self._answers: list[Group] | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._num_threads = num_threads
        for number in range(num_threads):
            self._start(self._work, f"rollouts-{number}")

    # --- what the loop asks, from one thread -------------------------------------------------------------------------

    def take(self, timeout_s: float) -> RolloutBatch[Group] | None:
        """None: not yet."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                taken = self._buffer.take()
                if taken is None or self._runs_ahead:
                    self._admit()
                if taken is not None or not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    return taken

    def advance(self) -> None:
        with self._changed:
            self._buffer.advance()

    def publish(self, weights: Mapping[str, Any]) -> None:
        """In the background; they are of the version that the buffer is at."""
        with self._changed:
            assert not self._sending, "the publication before is waited for"
            self._sending = True
            version = self._buffer.version
            if self._runs_ahead:
                self._admit()

        def send() -> None:
            self._engines.publish(version, weights)
            with self._changed:
                self._published, self._sending = version, False
                self._changed.notify_all()

        self._start(send, f"publish-{version}")

    def wait_published(self, timeout_s: float) -> bool | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._sending or self._failure is not None, timeout_s)
            self._raise_failure()
            return None if self._sending else True

    def begin_answers(self, prompts: Sequence[PromptRow], params: SamplingParams) -> None:
        """Of the current version and no other. `take_answers` has them when they are complete."""
        with self._changed:
            self._answers, version = None, self._buffer.version

        def answer() -> None:
            found = self._collect(prompts, range(len(prompts)), params, (version, version), PartialGroup())
            with self._changed:
                self._answers = found
                self._changed.notify_all()

        self._start(answer, f"answers-{version}")

    def take_answers(self, timeout_s: float) -> list[Group] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._answers is not None or self._failure is not None, timeout_s)
            self._raise_failure()
            return self._answers

    def facts(self) -> Metrics:
        with self._changed:
            ready = len(self._buffer.ready)
        return {"buffer": float(ready), "engines": float(self._engines.num_serving)}

    def to_json(self) -> dict[str, Any]:
        with self._changed:
            begun = {str(key): own.to_json() for key, own in self._under_way.items()} if self._runs_ahead else {}
            return {"buffer": self._buffer.to_json(Group.to_json), "under_way": begun}

    def close(self) -> None:
        """Nothing more is asked of anybody. Threads end by themselves: what they wait for has a deadline."""
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
            except BaseException as error:  # whoever takes the next step must hear of it
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            (group,) = self._collect([job.prompt], [job.key], self._task.params, job.versions, job.progress)
            with self._changed:
                if self._is_closed:
                    return
                del self._under_way[job.key]
                self._buffer.add(job.key, group, group.oldest_version, is_kept=self._task.is_kept(group))
                if self._runs_ahead:
                    self._admit()
                self._changed.notify_all()

    def _admit(self) -> None:
        """With the lock."""
        buffer = self._buffer
        newest = buffer.schedule.num_steps * buffer.schedule.updates if self._runs_ahead else buffer.version
        for key in buffer.admit():
            known = self._under_way.setdefault(key, PartialGroup())
            self._jobs.put(_Job(key, self._task.prompt_at(key), (buffer.oldest_allowed, newest), known))

    def _collect(
        self,
        prompts: Sequence[PromptRow],
        keys: Sequence[int],
        params: SamplingParams,
        versions: tuple[int, int],
        progress: PartialGroup,
    ) -> list[Group]:
        def on_turn(episodes: Sequence[Sequence[Episode]]) -> None:
            with self._changed:
                progress.episodes, progress.drafts = _copy(episodes), None

        rollouts = replace(self._rollouts, sample=self._sampling(versions, progress))
        begun = None if progress.episodes is None else _copy(progress.episodes)
        return rollouts.collect(prompts, keys, params, begun, on_turn)

    def _sampling(self, versions: tuple[int, int], progress: PartialGroup) -> Callable[..., list[list[TextCompletion]]]:
        """Asks the engines, once one can have the weights. Pieces of answers go into `progress`, for a checkpoint."""

        def sample(prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int]) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: self._published >= versions[0] or self._is_ending)
                if self._is_ending:
                    raise RuntimeError("no more answers are wanted")
                begun = progress.drafts
            on_progress = keep if self._runs_ahead else None
            return self._engines.sample(
                prompts, params, keys, versions=versions, partial=begun, on_progress=on_progress
            )

        def keep(drafts: Drafts) -> None:
            with self._changed:
                progress.drafts = drafts

        return sample

    def _follow_up(self, tokenize: FollowUp) -> FollowUp:
        """Tokenizers do not stand being called by several threads."""

        def one_at_a_time(message: str, last: int) -> list[int]:
            with self._tokenizing:
                return tokenize(message, last)

        return one_at_a_time

    @property
    def _is_ending(self) -> bool:
        return self._is_closed or self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _copy(episodes: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
    """One that does not grow with the original."""
    return [[deepcopy(episode) for episode in own] for own in episodes]
