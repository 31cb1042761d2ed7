"""Composes what a run of reinforcement learning learns from: who samples, who scores, and where both meet the loop.

Called by `train.run` on every rank. Engines and rewards are processes of rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import GrpoConfig, RunConfig
from lockstep.inference.openai.rollout_endpoint import RolloutEndpoint, connect
from lockstep.model.export import save_weights
from lockstep.model.load import load_run_tokenizer
from lockstep.parallel.group import ProcessGroup as Ranks
from lockstep.parallel.group import choose_device
from lockstep.processes.local import LocalWorker
from lockstep.processes.ray import Reservation
from lockstep.processes.worker import Worker
from lockstep.rollouts.engines.colocated import ColocatedEngine
from lockstep.rollouts.engines.pool import EnginePool
from lockstep.rollouts.engines.worker import ENTRY, settings_of
from lockstep.rollouts.episode import Rollouts
from lockstep.rollouts.orchestrator import Orchestrator
from lockstep.rollouts.parts import PromptData, make_judge
from lockstep.rollouts.source import ColocatedRollouts, EngineRollouts, RolloutSource, Task, portable, read_rollouts
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Progress
from lockstep.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend

T = TypeVar("T")


@contextlib.contextmanager
def feeding(
    config: RunConfig,
    backend: TorchBackend | DeepSpeedBackend,
    data: PromptData,
    tokenizer: Any,
    run: RunDir,
    progress: Progress,
) -> Iterator[tuple[RolloutSource, int]]:
    """(groups of scored answers, the number of steps that learn from them). Rank 0 has rewards computed. All ranks."""
    algorithm, group = config.algorithm, backend.group
    assert isinstance(algorithm, GrpoConfig)
    task, folder = Task(config, data.train), run.checkpoints / f"step-{progress.step}"
    found = group.broadcast_object(read_rollouts(folder) if group.rank == 0 and progress.step else None)
    buffer = task.open_buffer(progress, found)
    judge = make_judge(algorithm, computes=group.rank == 0, share=group.broadcast_object)
    max_turns = algorithm.max_turns if algorithm.environment else 1
    rollouts = Rollouts(_ask_nobody, judge, data.reader.follow_up, max_turns, config.data.max_length)
    with contextlib.ExitStack() as closing:
        closing.callback(judge.close)
        judge.start()
        feed: RolloutSource
        if not config.rollouts.samples_elsewhere:
            engine = borrow_engine(backend, tokenizer, compiles=config.model.compile is not False)

            def sample(prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[int]) -> Any:
                engine.version = buffer.version
                return engine.sample(prompts, params, keys)

            feed = ColocatedRollouts(task, buffer, replace(rollouts, sample=sample))
        else:
            elsewhere = connect_endpoint if config.rollouts.endpoint is not None else start_engines
            engines, collector = _on_first(group, lambda: elsewhere(config, backend, run)), None
            if engines is not None:
                closing.callback(engines.close)
                own, begun = replace(rollouts, judge=judge.pool), (found or {}).get("under_way")
                num_threads = config.rollouts.threads or task.most_under_way
                collector = Orchestrator(task, buffer, own, engines, num_threads=num_threads, found=begun)
            # Others hear of rank 0 much more often than the deadline of a collective.
            interval_s = min(5.0, config.launch.timeout_s / 4)
            feed = EngineRollouts(collector, group.broadcast_object, backend.read_weights, interval_s=interval_s)
            closing.callback(feed.close)
        yield feed, task.schedule.num_steps


def _on_first(group: Ranks, make: Callable[[], T]) -> T | None:
    """What rank 0 makes, there; what goes wrong with it, everywhere. All ranks."""
    made, problem = None, None
    if group.rank == 0:
        try:
            made = make()
        except Exception as error:  # the others wait for rank 0: they must hear of it
            problem = portable(error)
    problem = group.broadcast_object(problem)
    if problem is not None:
        raise problem
    return made


def _ask_nobody(*_: Any) -> Any:
    raise AssertionError("who answers is decided by the feed")


def start_engines(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir) -> EnginePool:
    """Processes that sample. Rank 0 only."""
    wanted = config.rollouts
    reservation = Reservation.of_this_process()
    device: str = config.launch.device if wanted.device == "auto" else wanted.device
    if reservation is None:  # otherwise what this node has says nothing about theirs
        device = choose_device(device).type
    settings = settings_of(config, precision=backend.precision, device=device)

    def spawn(name: str) -> Worker:
        if reservation is not None:
            return reservation.spawn(name, ENTRY, settings, start_timeout_s=wanted.start_timeout_s)
        env = _own_gpu(int(name.rpartition("-")[2]), config.launch.procs) if device == "cuda" else None
        return LocalWorker.spawn(
            name,
            ENTRY,
            settings,
            env=env,
            log_path=run.logs / f"{name}.log",
            start_timeout_s=wanted.start_timeout_s,
        )

    return EnginePool(
        spawn,
        wanted.engines,
        check_interval_s=wanted.check_interval_s,
        deadline_s=wanted.deadline_s,
        start_timeout_s=wanted.start_timeout_s,
        max_replacements=wanted.max_replacements,
        on_event=run.log_event,
        keeps_partials=wanted.max_staleness > 0,
    )


def connect_endpoint(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir) -> RolloutEndpoint:
    """A server of somebody's that samples. Rank 0 only."""
    assert config.rollouts.endpoint is not None
    tokenizer = load_run_tokenizer(config)

    def write(tensors: Mapping[str, Any], folder: Path) -> None:
        save_weights(backend.policy.model, tensors, folder)
        if config.lora is None:
            tokenizer.save_pretrained(folder)

    return connect(
        config.rollouts.endpoint,
        config.rollouts.kind,
        write,
        run.path / "published",
        adapters=config.lora is not None,
        api_key=os.environ.get("OPENAI_API_KEY"),
        timeout_s=config.launch.timeout_s,
    )


def _own_gpu(number: int, num_taken: int) -> dict[str, str]:
    """GPUs after those of the ranks, one for each engine; where there are too few, the first ones are shared."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": names[(num_taken + number) % len(names)]}


def borrow_engine(
    backend: TorchBackend | DeepSpeedBackend, tokenizer: Any, *, compiles: bool | None = None
) -> ColocatedEngine:
    """`compiles` is for one that is asked in every step; on a GPU, what its steps stand on is then kept in between."""
    degrees, device = backend.group.degrees, backend.group.device
    keeps = compiles is not None and device.type == "cuda"
    return ColocatedEngine(
        functools.partial(backend.lend_model, stable=keeps),
        tokenizer,
        backend.group.gather_objects,
        rank=backend.group.rank,
        replicas=degrees.replicate,
        shards=degrees.shard * degrees.context * degrees.tensor,
        max_kept_bytes=torch.cuda.get_device_properties(device).total_memory // 20 if keeps else 0,
        compiles=bool(compiles),
    )
