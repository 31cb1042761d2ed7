"""Where a step's groups come from: sampled by the processes that train, or by engines that one of them directs.

Every rank calls a source alike and gets the same groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lockstep.config import ConfigError, GrpoConfig, RunConfig
from lockstep.config.data import SourceConfig
from lockstep.data.prompts import PromptReader, PromptRow, Prompts
from lockstep.data.sources.rows import Row
from lockstep.inference.engine import CausalLM, LocalEngine
from lockstep.rollouts.buffer import Buffer, RolloutBatch
from lockstep.rollouts.environments.reasoning import is_task, make_rows
from lockstep.rollouts.episode import EpisodeRunner, Group
from lockstep.rollouts.orchestrator import Engines, Orchestrator, PromptStream
from lockstep.rollouts.rewards import Attempt, Outcome, Scorer, Turn
from lockstep.rollouts.rewards.scoring import (
    ENVIRONMENT,
    NamedReward,
    RewardPool,
    RewardSpec,
    load_environment,
    load_reward,
)
from lockstep.rundir import RunDir, read_json_object
from lockstep.types import Metrics, NamedTensors, PartialCompletions, Prompt, SamplingParams, TextCompletion, Tokenizer

ROLLOUTS_FILE = "rollouts.json"
T = TypeVar("T")
Broadcast = Callable[[Any], Any]
"""Returns on every rank what the owner of the run passed. All ranks."""


class RolloutSource(Protocol):
    """All ranks, all methods."""

    def start(self) -> None:
        """Sample from the weights as they are now. Once, before anything else."""
        ...

    def take(self, asked_to_stop: Callable[[], bool] = lambda: False) -> RolloutBatch[Group] | None:
        """The next step's batch. Waits until it is complete; None: engines sample, and the owner was asked to stop."""
        ...

    def advance(self) -> None:
        """The step on the batch that was taken is done: sample from the new weights."""
        ...

    def evaluate(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        """Groups from the weights as they are now, outside the order of training."""
        ...

    def probe(self, prompts: Sequence[PromptRow], max_tokens: int) -> list[TextCompletion]:
        """A completion of each from the weights as they are now, sampled as for training, and not scored."""
        ...

    def metrics(self) -> Metrics:
        """For a step's record; nothing on ranks that do not write it."""
        ...

    def save(self, folder: Path) -> None:
        """All that is sampled and not trained on yet, into a checkpoint. Between two steps, by the owner of the run."""
        ...

    def close(self) -> None: ...


@contextlib.contextmanager
def open_rollouts(
    config: RunConfig,
    data: PromptData,
    run: RunDir,
    *,
    num_steps: int,
    step: int,
    cursor: int,
    broadcast: Broadcast,
    read_weights: Callable[[], NamedTensors],
    colocated_engine: Callable[[], ColocatedEngine],
    start_engines: Callable[[], Engines],
) -> Iterator[RolloutSource]:
    """The source of a run that is at `step` and `cursor`. Its owner computes rewards and directs engines. All ranks."""
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    stream = PromptStream(config, data.train, num_steps)
    folder = run.checkpoints / f"step-{step}"
    state = broadcast(read_rollouts(folder) if run.owner and step else None)
    buffer = open_buffer(stream, state, step=step, cursor=cursor)
    max_turns = algorithm.max_turns if algorithm.environment else 1

    def runner(scorer: Scorer) -> EpisodeRunner:
        return EpisodeRunner(scorer, data.reader.follow_up, max_turns, config.data.max_length)

    with contextlib.ExitStack() as closing:
        pool = open_rewards(algorithm, run.log_event) if run.owner else None
        if pool is not None:
            closing.callback(pool.close)
        on_all_ranks(broadcast, None if pool is None else pool.start)  # what cannot be loaded shows now, everywhere
        if not config.rollouts.samples_elsewhere:
            yield ColocatedRollouts(stream, buffer, runner(SharedScorer(pool, broadcast)), colocated_engine())
            return

        orchestrator = None

        def open_engines() -> None:
            nonlocal orchestrator
            assert pool is not None
            engines = start_engines()
            closing.callback(engines.close)
            num_threads = config.rollouts.threads or stream.max_in_flight
            orchestrator = Orchestrator(stream, buffer, runner(pool), engines, num_threads=num_threads, state=state)

        on_all_ranks(broadcast, open_engines if run.owner else None)
        # Other ranks must hear from the owner much more often than the deadline of a collective.
        interval_s = min(5.0, config.launch.timeout_s / 4)
        source = EngineRollouts(orchestrator, broadcast, read_weights, interval_s=interval_s)
        closing.callback(source.close)
        yield source


def on_all_ranks(broadcast: Broadcast, compute: Callable[[], T] | None) -> T:
    """What `compute` returns or raises in the one process that passes it, on every rank. All ranks."""
    message: tuple[bool, Any] | None = None
    if compute is not None:
        try:
            message = (True, compute())
        except Exception as error:  # the other ranks wait for the broadcast: they must get it too
            message = (False, _portable(error))
    succeeded, value = broadcast(message)
    if not succeeded:
        raise value
    return value


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, otherwise its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# --- prompts and rewards --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptData:
    """`reader` also turns an environment's messages into tokens."""

    train: Prompts
    validation: Prompts
    digest: str
    reader: PromptReader

    def longest_text(self, algorithm: GrpoConfig, max_length: int) -> int:
        """Tokens of the longest prompt and all that may follow it."""
        prompts = (*self.train, *self.validation)
        if algorithm.environment is not None and algorithm.max_turns > 1:
            return max_length
        return max((prompt.num_tokens for prompt in prompts), default=0) + algorithm.max_tokens

    def warnings(self) -> list[str]:
        num_dropped = self.train.num_dropped + self.validation.num_dropped
        if not num_dropped:
            return []
        return [f"{num_dropped:,} prompts are left out: they leave no room for an answer in data.max_length"]


def read_prompt_data(config: RunConfig, tokenizer: Tokenizer) -> PromptData:
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    check_rewards(algorithm)
    if config.data.validation_fraction or config.data.test_fraction:
        raise ConfigError("data.validation_fraction is not for grpo: name a file in data.validation")
    reader = PromptReader(config.data, tokenizer, max_tokens=config.data.max_length - algorithm.max_tokens)

    def rows_of_task(source: SourceConfig) -> Iterable[Row] | None:
        if not is_task(source.path):
            return None
        rows = make_rows(source.path, source.options, seed=config.seed)
        return [Row(f"{source.path}:{number}", fields) for number, fields in enumerate(rows, start=1)]

    train, validation = (reader.read(part, rows_of_task) for part in ("train", "validation"))
    digest = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()
    return PromptData(train, validation, digest, reader)


def check_rewards(algorithm: GrpoConfig) -> None:
    """Names and options of built-in rewards. A user's own are loaded where they run."""
    for reward in algorithm.reward:
        if ":" not in reward.name and reward.name not in (ENVIRONMENT, "reasoning_gym"):
            load_reward(reward.name, reward.options)
    if algorithm.environment is not None and ":" not in algorithm.environment:
        load_environment(algorithm.environment)


def open_rewards(algorithm: GrpoConfig, on_event: Callable[..., None] = lambda kind, **fields: None) -> RewardPool:
    rewards = [NamedReward(reward.name, reward.weight, reward.options) for reward in algorithm.reward]
    spec = RewardSpec(rewards, algorithm.environment)
    return RewardPool(spec, algorithm.reward_procs, timeout_s=algorithm.reward_timeout_s, on_event=on_event)


class SharedScorer:
    """Rewards are computed once, in the process that has the `scorer`, and broadcast. All ranks."""

    def __init__(self, scorer: Scorer | None, broadcast: Broadcast) -> None:
        self._scorer, self._broadcast = scorer, broadcast

    def score(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        scorer = self._scorer
        return on_all_ranks(self._broadcast, None if scorer is None else lambda: scorer.score(attempts))

    def play(self, attempts: Sequence[Attempt]) -> list[Turn]:
        scorer = self._scorer
        return on_all_ranks(self._broadcast, None if scorer is None else lambda: scorer.play(attempts))


# --- sampled by the processes that train ----------------------------------------------------------------------------


class ColocatedEngine:
    """A sampler over the model in training: borrows it for each call, and splits the prompts over its replicas.

    Every rank calls it alike and gets all completions. `version`: of the model's weights; completions carry it.
    """

    def __init__(
        self,
        borrow: Callable[[], AbstractContextManager[CausalLM]],
        tokenizer: Tokenizer,
        gather: Callable[[list[list[TextCompletion]]], list[list[list[TextCompletion]]]],
        *,
        rank: int = 0,
        replicas: int = 1,
        shards: int = 1,
        batch_size: int | None = None,
        max_kept_bytes: int = 0,
        longest: int = 0,
        compiles: bool = False,
        records_routing: bool = False,
        report: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Ranks of one replica are adjacent: `rank // shards` is the replica.

        `max_kept_bytes`: a KV cache of at most this size is kept between calls. Training then has less memory, and
        CUDA graphs need no second capture. `longest`: of the texts to come, in tokens: it is made for them at once, if
        it can be kept. A resumed run has the same cache, and rounds alike.
        `compiles`, `records_routing` and `report`: see LocalEngine.
        """
        self._borrow, self._tokenizer, self._gather = borrow, tokenizer, gather
        self._replica, self._replicas, self._shards = rank // shards, replicas, shards
        self._batch_size, self._max_kept_bytes, self._longest = batch_size, max_kept_bytes, longest
        self._compiles, self._records_routing, self._report = compiles, records_routing, report
        self._engine: LocalEngine | None = None
        self.version = 0

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
    ) -> list[list[TextCompletion]]:
        mine = slice(self._replica, None, self._replicas)
        keys = range(len(prompts)) if keys is None else keys
        with self._borrow() as model:
            engine = self._engine_of(model)
            try:
                local = engine.sample(prompts[mine], params, keys[mine], None if partial is None else partial[mine])
            finally:
                if engine.cache_bytes > self._max_kept_bytes:
                    engine.release_cache()
        completions: list[list[TextCompletion]] = [[] for _ in prompts]
        for replica, own in enumerate(self._gather(local)[:: self._shards]):
            completions[replica :: self._replicas] = own
        return completions

    def _engine_of(self, model: CausalLM) -> LocalEngine:
        """Kept between calls, with what it found out about the model."""
        if self._engine is None or self._engine.model is not model:
            self._engine = LocalEngine(
                model,
                self._tokenizer,
                self._batch_size,
                sharded=self._shards > 1,
                min_length=self._longest,
                min_length_bytes=self._max_kept_bytes,
                compiles=self._compiles,
                records_routing=self._records_routing,
                report=self._report,
            )
        self._engine.version = self.version
        return self._engine


class ColocatedRollouts:
    """Sampled when a step needs it, by all ranks together, from the weights as they are."""

    def __init__(
        self, stream: PromptStream, buffer: Buffer[Group], runner: EpisodeRunner, engine: ColocatedEngine
    ) -> None:
        self._stream, self._buffer, self._runner, self._engine = stream, buffer, runner, engine

    def start(self) -> None:
        """The weights are here already."""

    def take(self, asked_to_stop: Callable[[], bool] = lambda: False) -> RolloutBatch[Group]:
        """To its end: ranks that share a model sample in step, and one alone cannot stop."""
        while (batch := self._buffer.take()) is None:
            keys = self._buffer.admit()
            prompts = [self._stream.prompt_at(key) for key in keys]
            for group in self._run(prompts, keys, self._stream.params):
                self._buffer.add(group.key, group, group.oldest_version, is_kept=self._stream.is_kept(group))
        return batch

    def advance(self) -> None:
        self._buffer.advance()

    def evaluate(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        return self._run(prompts, range(len(prompts)), params)

    def probe(self, prompts: Sequence[PromptRow], max_tokens: int) -> list[TextCompletion]:
        raise AssertionError("every step's own tokens are fresh")

    def metrics(self) -> Metrics:
        return {}

    def save(self, folder: Path) -> None:
        write_rollouts(folder, {"buffer": self._buffer.to_json(Group.to_json)})

    def close(self) -> None:
        """Nothing was opened."""

    def _run(self, prompts: Sequence[PromptRow], keys: Sequence[int], params: SamplingParams) -> list[Group]:
        self._engine.version = self._buffer.version
        return self._runner.run(self._engine.sample, prompts, keys, params)


# --- sampled by engines ---------------------------------------------------------------------------------------------


class EngineRollouts:
    """One process has the `orchestrator`; all ranks get what it collects.

    While it waits, it broadcasts "not yet" every `interval_s`, so that no collective reaches its deadline.
    """

    def __init__(
        self,
        orchestrator: Orchestrator | None,
        broadcast: Broadcast,
        read_weights: Callable[[], NamedTensors],
        *,
        interval_s: float,
    ) -> None:
        self._orchestrator, self._broadcast = orchestrator, broadcast
        self._read_weights, self._interval_s = read_weights, interval_s

    def start(self) -> None:
        self._publish()

    def take(self, asked_to_stop: Callable[[], bool] = lambda: False) -> RolloutBatch[Group] | None:
        def poll(orchestrator: Orchestrator) -> tuple[RolloutBatch[Group] | None] | None:
            batch = orchestrator.take(self._interval_s)
            return (batch,) if batch is not None or asked_to_stop() else None

        (batch,) = self._wait_for(poll)
        return batch

    def advance(self) -> None:
        if self._orchestrator is not None:
            self._orchestrator.advance()
        self._publish()

    def evaluate(self, prompts: Sequence[PromptRow], params: SamplingParams) -> list[Group]:
        if self._orchestrator is not None:
            self._orchestrator.start_evaluation(prompts, params)
        return self._wait_for(lambda orchestrator: orchestrator.take_evaluation(self._interval_s))

    def probe(self, prompts: Sequence[PromptRow], max_tokens: int) -> list[TextCompletion]:
        if self._orchestrator is not None:
            self._orchestrator.start_probe([prompt.tokens for prompt in prompts], max_tokens)
        return self._wait_for(lambda orchestrator: orchestrator.take_evaluation(self._interval_s))

    def metrics(self) -> Metrics:
        return {} if self._orchestrator is None else self._orchestrator.metrics()

    def save(self, folder: Path) -> None:
        assert self._orchestrator is not None, "the owner of the run has the orchestrator"
        write_rollouts(folder, self._orchestrator.to_json())

    def close(self) -> None:
        if self._orchestrator is not None:
            self._orchestrator.close()

    def _publish(self) -> None:
        """Weights are copied now and sent in the background, one version at a time."""
        self._wait_for(lambda orchestrator: orchestrator.wait_published(self._interval_s))
        weights = self._read_weights()
        if self._orchestrator is not None:
            self._orchestrator.publish(weights)

    def _wait_for(self, poll: Callable[[Orchestrator], T | None]) -> T:
        """The first result of `poll` that is not None, on every rank; so is what it raises."""
        orchestrator = self._orchestrator
        compute = None if orchestrator is None else lambda: poll(orchestrator)
        while (value := on_all_ranks(self._broadcast, compute)) is None:
            pass
        return value


# --- in checkpoints -------------------------------------------------------------------------------------------------


def open_buffer(stream: PromptStream, state: Mapping[str, Any] | None, *, step: int, cursor: int) -> Buffer[Group]:
    """As a checkpoint has it, or empty at the place where the run is."""
    if state is None:
        return Buffer(stream.schedule, step=step, cursor=cursor, next_key=cursor)
    return Buffer.from_json(stream.schedule, state["buffer"], lambda group: Group.from_json(group, stream.prompt_at))


def write_rollouts(folder: Path, state: Mapping[str, object]) -> None:
    text = json.dumps(state, separators=(",", ":"))
    (folder / ROLLOUTS_FILE).write_text(text, encoding="utf-8")


def read_rollouts(folder: Path) -> dict[str, object] | None:
    """None: a checkpoint without rollouts."""
    path = folder / ROLLOUTS_FILE
    return read_json_object(path) if path.exists() else None
