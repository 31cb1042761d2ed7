"""Where a step's groups come from: the processes that train sample by themselves, or one of them has others do it.

Every rank calls a feed alike and gets the same groups. Must not know models, processes or losses.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lockstep.algorithms.advantages import is_flat
from lockstep.config import GrpoConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.data.prompts import PromptRow, Prompts
from lockstep.rollouts.buffer import Buffer, RolloutBatch, StalenessSchedule
from lockstep.rollouts.episode import Group, Rollouts
from lockstep.rollouts.orchestrator import Orchestrator
from lockstep.train.checkpoints import Progress
from lockstep.train.schedule import num_steps
from lockstep.types import Metrics, SamplingParams

ROLLOUTS_FILE = "rollouts.json"


class RolloutSource(Protocol):
    """All ranks, all methods."""

    def start(self) -> None:
        """Sample from the weights as they are now. Once, before anything else."""
        ...

    def take(self) -> RolloutBatch[Group]:
        """What the next step learns from. Waits until it is there."""
        ...

    def advance(self) -> None:
        """The step that was taken is made: sample from what was learned."""
        ...

    def answer(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        """Answers of the weights as they are now, outside the order of training."""
        ...

    def facts(self) -> Metrics:
        """For the record of a step, where metrics are written."""
        ...

    def save(self, folder: Path) -> None:
        """All that is sampled and not learned yet, into a checkpoint. Between two steps, by the owner of the run."""
        ...

    def close(self) -> None: ...


class Task:
    """What is sampled for each key of a run, and what of it is learned."""

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        algorithm = config.algorithm
        assert isinstance(algorithm, GrpoConfig)
        self._batches = Batches(prompts, config.batch, seed=config.seed, shuffle=config.data.shuffle)  # type: ignore[arg-type]
        assert config.batch.samples_per_step is not None
        self._samples = config.batch.samples_per_step
        self._keeps_flat = algorithm.zero_std_groups == "keep"
        self.params = sampling_params(config, algorithm)
        self.schedule = StalenessSchedule(
            self._size_at,
            num_steps(config, self._batches),
            updates=algorithm.updates,
            max_staleness=config.rollouts.max_staleness,
            max_refills=algorithm.max_refills if algorithm.zero_std_groups == "refill" else 0,
        )

    def _size_at(self, cursor: int) -> int:
        return min(self._samples, self._batches.num_rows - cursor % self._batches.num_rows)

    @property
    def most_under_way(self) -> int:
        """Prompts that can be sampled at once."""
        return self._samples * (self.schedule.window + 1)

    def prompt_at(self, key: int) -> PromptRow:
        """Not from several threads at once."""
        return self._batches.batch_at(key)[0][0]  # type: ignore[return-value]

    def is_kept(self, group: Group) -> bool:
        return self._keeps_flat or not is_flat(group.rewards)

    def open_buffer(self, progress: Progress, found: Mapping[str, Any] | None) -> Buffer[Group]:
        """As a checkpoint has it, or at the place where the run is."""
        if found is not None:
            return Buffer.from_json(
                self.schedule, found["buffer"], lambda group: Group.from_json(group, self.prompt_at)
            )
        return Buffer(self.schedule, step=progress.step, cursor=progress.cursor, next_key=progress.cursor)


def sampling_params(config: RunConfig, algorithm: GrpoConfig) -> SamplingParams:
    return SamplingParams(
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


class ColocatedRollouts:
    """Sampled when a step asks for it, by all who train: `rollouts` answer with the weights as they are."""

    def __init__(self, task: Task, buffer: Buffer[Group], rollouts: Rollouts) -> None:
        self._task, self._buffer, self._rollouts = task, buffer, rollouts

    def start(self) -> None:
        """The weights are there already."""

    def take(self) -> RolloutBatch[Group]:
        while (taken := self._buffer.take()) is None:
            keys = self._buffer.admit()
            prompts = [self._task.prompt_at(key) for key in keys]
            for group in self._rollouts.collect(prompts, keys, self._task.params):
                self._buffer.add(group.key, group, group.oldest_version, is_kept=self._task.is_kept(group))
        return taken

    def advance(self) -> None:
        self._buffer.advance()

    def answer(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        return self._rollouts.collect(prompts, range(len(prompts)), params)

    def facts(self) -> Metrics:
        return {}

    def save(self, folder: Path) -> None:
        write_rollouts(folder, {"buffer": self._buffer.to_json(Group.to_json)})

    def close(self) -> None:
        """Nothing was opened."""


class EngineRollouts:
    """One process has the `collector`, and `share` gives all of them what it finds.

    While it waits it says so every `interval_s`, so that nobody waits longer than that for a message.
    """

    def __init__(
        self,
        collector: Orchestrator | None,
        share: Callable[[Any], Any],
        read_weights: Callable[[], Mapping[str, Any]],
        *,
        interval_s: float,
    ) -> None:
        self._collector, self._share = collector, share
        self._read_weights, self._interval_s = read_weights, interval_s

    def start(self) -> None:
        self._publish()

    def take(self) -> RolloutBatch[Group]:
        return self._meet(lambda collector: collector.take(self._interval_s))

    def advance(self) -> None:
        if self._collector is not None:
            self._collector.advance()
        self._publish()

    def answer(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        if self._collector is not None:
            self._collector.begin_answers(prompts, params)
        return self._meet(lambda collector: collector.take_answers(self._interval_s))

    def facts(self) -> Metrics:
        return {} if self._collector is None else self._collector.facts()

    def save(self, folder: Path) -> None:
        assert self._collector is not None, "the owner of the run has the collector"
        write_rollouts(folder, self._collector.to_json())

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()

    def _publish(self) -> None:
        """The copy is made now; it is sent while the ranks go on, at most one at a time."""
        self._meet(lambda collector: collector.wait_published(self._interval_s))
        weights = self._read_weights()
        if self._collector is not None:
            self._collector.publish(weights)

    def _meet(self, poll: Callable[[Orchestrator], Any]) -> Any:
        """What `poll` finds at last, everywhere; what it raises is raised everywhere."""
        while True:
            message: Any = None
            if self._collector is not None:
                try:
                    message = (True, poll(self._collector))
                except Exception as error:
                    message = (False, portable(error))
            is_sound, found = self._share(message)
            if not is_sound:
                raise found
            if found is not None:
                return found


def portable(error: Exception) -> Exception:
    """What cannot travel to other processes as it is goes as its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def write_rollouts(folder: Path, state: Mapping[str, Any]) -> None:
    text = json.dumps(state, separators=(",", ":"))
    (folder / ROLLOUTS_FILE).write_text(text, encoding="utf-8")


def read_rollouts(folder: Path) -> dict[str, Any] | None:
    """None: a checkpoint without them."""
    path = folder / ROLLOUTS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
