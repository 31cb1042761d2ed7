"""Composes a run from its directory: data, reference, backend, loop, export. Every rank calls `run`.

Rows are tokenised before the ranks join: none waits for another's tokenizer inside a collective.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.router_balance import RouterLosses
from lockstep.backend.torch_backend import TorchBackend, agree_on_precision, join_group
from lockstep.config import ConfigError, GrpoConfig, RunConfig
from lockstep.config.reference import ReferenceChoice
from lockstep.data.cache import cache_folder
from lockstep.data.dataset import CompiledData
from lockstep.evaluation import metrics
from lockstep.inference.image_answers import answer_with_images
from lockstep.inference.openai.rollout_endpoint import RolloutEndpoint, connect
from lockstep.model.compiled_code import note_compilations
from lockstep.model.export import export_run, save_weights
from lockstep.model.load import (
    build_model,
    check_trainable,
    keep_freed_memory,
    load_hf_config,
    load_run_tokenizer,
)
from lockstep.model.parts import describe_parts, sizes_of
from lockstep.model.vision import copy_processor
from lockstep.parallel import host_files
from lockstep.parallel.group import ProcessGroup, choose_device, find_nccl
from lockstep.rollouts.engines.pool import start_engines
from lockstep.rollouts.orchestrator import Engines
from lockstep.rollouts.source import ColocatedEngine, PromptData, RolloutSource, open_rollouts
from lockstep.rundir import Checkpoint, PhaseClock, RunDir
from lockstep.train import dpo, grpo, sft
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.describe import check_positions, describe_cost
from lockstep.train.foresee import foresee, record_shrunk, settle_layout
from lockstep.train.preference_data import (
    RowsToLearn,
)
from lockstep.train.prepare import check_reference_model, prepare_rows, reference_config
from lockstep.train.reference import (
    Forward,
    PrecomputeSettings,
    add_reference,
    describe_files,
    has_all,
    plan_reference,
)
from lockstep.train.steps import CompileWatch, Diverged, LongLived, LoopInputs, RunInterrupted
from lockstep.train.validation import AnswerScores, last_answer
from lockstep.types import Datum, ImageProcessor, Prompt, SamplingParams, TextCompletion, Tokenizer

if TYPE_CHECKING:
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend


NUM_SAMPLES_KEPT = 4  # answers to validation rows that each evaluation writes to samples.jsonl


def run(run_dir: Path, asked_to_stop: Callable[[], bool] = lambda: False) -> None:
    """Train to the end, or until a rank was asked to stop; from the newest intact checkpoint, if any. All ranks."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = RunDir(run_dir, owner=rank == 0)
    config = run.config()
    config.parallel.degrees(num_ranks)
    started, run.clock = time.monotonic(), PhaseClock()
    forgotten = dict.fromkeys(("error", "duration_s", "compilations", "engine_compilations"))  # of an earlier turn
    run.write_status(
        state="preparing", phase="reading data", slow=[], started_at=time.time(), ranks=num_ranks, **forgotten
    )
    run.sweep()
    check_trainable(config.model)
    tokenizer = load_run_tokenizer(config)
    check_reference_model(config, tokenizer)
    data, rows, images = prepare_rows(config, tokenizer, run, num_ranks)
    config = settle_layout(config, run, rows.train, has_images=images is not None)
    reference = plan_reference(config, rows.train)
    if config.algorithm.kind != "sft":
        run.log_event("reference", kind=reference.kind, why=reference.why)

    run.write_status(phase="joining the other ranks" if num_ranks > 1 else "loading the model")
    group = join_ranks(config, run)
    config = foresee(config, group, run, rows.train)
    keep_freed_memory()
    compiles = group.device.type == "cuda" if config.model.compile == "auto" else config.model.compile
    with (
        CompileWatch(run, note_compilations if compiles else None) as watch,
        LongLived(lambda: watch.count) as long_lived,
    ):
        backend, rows = build(config, group, run, rows, reference, images)
        backend.asked_to_stop = asked_to_stop
        if isinstance(backend, TorchBackend):
            backend.on_shrunk = lambda now: record_shrunk(config, run, now.before, now.after, now.reason)
        check_positions(config, backend, rows)
        for message in describe_cost(config, backend, rows):
            run.log_event("warning", message=message)
        progress = resume(run, backend, group, data.digest)
        watch.step = functools.partial(current_step, config, run.clock, progress)
        checkpoints = Checkpoints(
            run,
            backend,
            config.checkpoint,
            data_digest=data.digest,
            timeout_s=config.launch.timeout_s,
            last_step=progress.step or None,
        )
        parts = (rows.train, rows.validation)
        inputs = LoopInputs(config, backend, *parts, run, checkpoints, progress, None, asked_to_stop, long_lived)
        try:
            progress = run_loop(inputs, backend, data, tokenizer)
        except Diverged:
            checkpoints.wait()  # one still being written is of an earlier step, and intact
            raise
        except RunInterrupted:
            record_interruption(run, group, progress.step)
            raise
        exported = export(config, backend, run, checkpoints)
        backend.close()
    if run.owner and config.checkpoint.export == "merged":
        exported = merge(run)
    # By a clock that nobody sets: the difference of the two times may be anything.
    ending = {"completed_at": time.time(), "duration_s": time.monotonic() - started}
    run.write_status(state="completed", phase="done", export=exported, step=progress.step, **ending)


def join_ranks(config: RunConfig, run: RunDir) -> ProcessGroup:
    """All ranks."""
    group = join_group(config.launch.device, config.parallel, config.launch.timeout_s)
    group = host_files.find_remote_ranks(run.path, group)
    if group.num_ranks > 1 and group.device.type == "cuda":
        run.log_event("nccl", message=find_nccl().describe())
    return group


def run_loop(
    inputs: LoopInputs, backend: TorchBackend | DeepSpeedBackend, data: CompiledData | PromptData, tokenizer: Any
) -> Progress:
    """The loop of the configured algorithm, with what this algorithm alone needs. All ranks."""
    config, run = inputs.config, inputs.run
    if isinstance(data, PromptData):
        total = grpo.count_steps(config, data.train)
        with compose_rollouts(config, backend, data, tokenizer, run, inputs.progress, total) as rollouts:
            return grpo.train(inputs, rollouts, total)
    inputs = replace(inputs, answers=answer_scores(config, backend, data, tokenizer, run))
    return sft.train(inputs) if config.algorithm.kind == "sft" else dpo.train(inputs)


def record_interruption(run: RunDir, group: ProcessGroup, step: int) -> None:
    """None leaves before this is written: launchers end all ranks when one has left. All ranks."""
    run.log_event("interrupted", step=step)
    run.write_status(state="interrupted", phase=None, step=step)
    group.barrier()


def current_step(config: RunConfig, clock: PhaseClock, progress: Progress) -> int:
    """The one that is being computed: GRPO counts a step when it has its samples, the others when it is done."""
    return progress.step + (config.algorithm.kind != "grpo" or clock.current == "sampling")


# --- the reference ----------------------------------------------------------------------------------------------------


def _precompute_settings(config: RunConfig, group: ProcessGroup, run: RunDir, precision: str) -> PrecomputeSettings:
    model = reference_config(config).model

    def describe_weights() -> Mapping[str, str | None]:
        run.write_status(phase="reading the reference's files")
        if Path(model.path).exists():
            return describe_files(Path(model.path))
        commit = getattr(load_hf_config(model), "_commit_hash", None)
        return {"hub": model.path, "commit": commit or model.revision}

    # Under LoRA the reference is the run's own base, as it is held.
    held = model.base_format if reference_config(config).lora is not None else None
    return PrecomputeSettings(
        cache_folder(config.data.cache_dir) / "reference",
        group.broadcast_object({**describe_weights(), **({"base": held} if held else {})} if group.rank == 0 else None),
        precision,
        writes=int(os.environ.get("LOCAL_RANK", "0")) == 0,
        gather=group.gather_objects,
        report=lambda phase: run.write_status(phase=phase),
        warn=lambda message: run.log_event("warning", message=message),
    )


def _precompute_with_other_model(
    config: RunConfig, group: ProcessGroup, run: RunDir, rows: RowsToLearn, settings: PrecomputeSettings
) -> RowsToLearn:
    """The other model is freed before the policy is built: the two are never in memory together. All ranks."""
    if has_all(settings, [rows.train, rows.validation]):
        return _with_reference(rows, None, settings)
    run.write_status(phase="loading the reference model")
    other = reference_config(config)
    model = build_model(other.model, None, settings.precision, with_weights=group.rank == 0)
    backend = _choose_backend(other, model, group, settings.precision, "none")
    rows = _with_reference(rows, backend.forward, settings)
    backend.policy.stop_packing()
    del backend, model
    gc.collect()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _with_reference(rows: RowsToLearn, forward: Forward | None, settings: PrecomputeSettings) -> RowsToLearn:
    train = add_reference(rows.train, "train", forward, settings)
    return RowsToLearn(train, add_reference(rows.validation, "validation", forward, settings))


# --- the backend ------------------------------------------------------------------------------------------------------


def build(
    config: RunConfig,
    group: ProcessGroup,
    run: RunDir,
    rows: RowsToLearn,
    reference: ReferenceChoice,
    images: ImageProcessor | None = None,
) -> tuple[TorchBackend | DeepSpeedBackend, RowsToLearn]:
    """The backend before its first step, and the rows, with the reference's log-probs if precomputed. All ranks."""
    precision = agree_on_precision(config.model.precision, group)
    run.write_status(phase="loading the model")
    if reference.kind != "precomputed":
        return make_backend(config, group, run, precision, reference.kind, images), rows
    settings = _precompute_settings(config, group, run, precision)
    if reference_config(config) is not config:
        rows = _precompute_with_other_model(config, group, run, rows, settings)
        return make_backend(config, group, run, precision, "none"), rows
    # Before a checkpoint is loaded the policy is the reference; under LoRA without its new adapters.
    has_adapter = config.lora is not None and config.lora.init != "pissa"  # which begins as the base
    backend = make_backend(config, group, run, precision, "adapter_off" if has_adapter else "none")
    forward = functools.partial(backend.forward, reference=has_adapter)
    return backend, _with_reference(rows, forward, settings)


def make_backend(
    config: RunConfig,
    group: ProcessGroup,
    run: RunDir,
    precision: str,
    reference: str,
    images: ImageProcessor | None = None,
) -> TorchBackend | DeepSpeedBackend:
    """`images`: of a vision-language model, where rows have some."""
    run.write_status(phase="loading the model", precision=precision, device=str(group.device))
    torch.manual_seed(config.seed)  # new adapters start the same in every run and layout
    model = build_model(config.model, config.lora, precision, with_weights=group.rank == 0)
    backend = _choose_backend(config, model, group, precision, reference, images)
    for message in backend.warnings:
        run.log_event("warning", message=message)
    for message in backend.slow:
        run.report_slow(message)
    trained = sum(p.numel() for p in backend.parameters().values())
    counts = {"trained": trained, "all": sum(sizes_of(backend.policy).values())}
    described = describe_parts(backend.parts)
    parts = {kind: part._asdict() for kind, part in backend.parts.items()}
    about = {"precision": precision, "device": str(group.device)}
    if config.model.base_format is not None:
        about["base"] = config.model.base_format
    run.log_event("model", **about, parameters=counts, parts=parts, trained=described)
    run.write_status(trained=described)
    return backend


def _choose_backend(
    config: RunConfig,
    model: nn.Module,
    group: ProcessGroup,
    precision: str,
    reference: str,
    images: ImageProcessor | None = None,
) -> TorchBackend | DeepSpeedBackend:
    options: dict[str, Any] = {
        "reference": reference,
        "micro_batch_tokens": config.batch.micro_batch_tokens,
        "precision": precision,
        "activation_checkpointing": config.model.activation_checkpointing,
        "activation_offload": config.model.activation_offload,
        "compile": config.model.compile,
        "logits_gib": config.model.logits_gib,
        "temperature": getattr(config.algorithm, "temperature", 1.0),
        "seed": config.seed,
        "group": group,
    }
    parallel = config.parallel
    if parallel.backend == "torch":
        return TorchBackend(
            model,
            parallel=parallel,
            router_losses=RouterLosses.of(config.model),
            optimizer=OptimizerSettings.of(config),
            stages_saves=config.checkpoint.asynchronous,
            deterministic=config.deterministic,
            on_out_of_memory=config.batch.on_out_of_memory,
            images=images,
            router_replay=config.router_replay,
            **options,
        )
    from lockstep.backend.deepspeed.backend import DeepSpeedBackend
    from lockstep.backend.deepspeed.config import read_config

    return DeepSpeedBackend(
        model,
        zero_stage=parallel.zero_stage,
        offload=parallel.offload,
        ds_config=read_config(Path(parallel.deepspeed_config)) if parallel.deepspeed_config else None,
        max_grad_norm=config.optim.max_grad_norm,
        **options,
    )


def resume(run: RunDir, backend: TorchBackend | DeepSpeedBackend, group: ProcessGroup, data_digest: str) -> Progress:
    """Load the newest intact checkpoint, which rank 0 finds. All ranks."""
    checkpoint: Checkpoint | None = group.broadcast_object(run.resume_point() if group.rank == 0 else None)
    if checkpoint is None:
        return Progress()
    try:
        progress, digest = Progress(**checkpoint.extra["progress"]), checkpoint.extra["data_digest"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint.path} is no checkpoint of a run: {error}") from error
    if digest != data_digest:
        raise ConfigError(
            f"the data is not what step {checkpoint.step} was trained on: rows or tokenizer have changed since. "
            "Start a new run, or put the data back"
        )
    run.write_status(phase=f"resuming from step {checkpoint.step}")
    path = run.checkpoints / checkpoint.path.name  # rank 0's path may be another one on this host
    with host_files.local_copy(path, group):
        backend.load_state(path, with_optimizer=True)
    run.log_event("resumed", step=checkpoint.step)
    return progress


# --- during training --------------------------------------------------------------------------------------------------


def compose_rollouts(
    config: RunConfig,
    backend: TorchBackend | DeepSpeedBackend,
    data: PromptData,
    tokenizer: Tokenizer,
    run: RunDir,
    progress: Progress,
    num_steps: int,
) -> AbstractContextManager[RolloutSource]:
    """Who samples: this process, engines of the run, or a server. All ranks."""
    algorithm = config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    shares_gpu = False

    def start() -> Engines:
        nonlocal shares_gpu
        if config.rollouts.endpoint is not None:
            return connect_endpoint(config, backend, run)
        precision = backend.precision
        pool = start_engines(config, run, precision=precision, choose_device=lambda name: choose_device(name).type)
        shares_gpu = pool.shares_gpu
        return pool

    return open_rollouts(
        config,
        data,
        run,
        num_steps=num_steps,
        step=progress.step,
        cursor=progress.cursor,
        broadcast=backend.group.broadcast_object,
        read_weights=lambda: backend.read_weights(on_device=shares_gpu),
        colocated_engine=lambda: colocated_engine(
            backend,
            tokenizer,
            run,
            compiles=config.model.compile is not False,
            longest=data.longest_text(algorithm, config.data.max_length),
            records_routing=config.router_replay,
        ),
        start_engines=start,
    )


def connect_endpoint(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir) -> RolloutEndpoint:
    """A server that the user runs. Rank 0 only."""
    assert config.rollouts.endpoint is not None
    tokenizer = load_run_tokenizer(config)
    if config.model.base_format is not None:
        message = f"{config.rollouts.endpoint} samples with base weights of its own, and this run trains with them in"
        message += f" {config.model.base_format}: watch sampler_trainer_logprob_diff"
        run.log_event("warning", message=message)

    def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
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


def colocated_engine(
    backend: TorchBackend | DeepSpeedBackend,
    tokenizer: Tokenizer,
    run: RunDir,
    *,
    compiles: bool | None = None,
    longest: int = 0,
    records_routing: bool = False,
) -> ColocatedEngine:
    """`compiles`: for an engine that samples in every step; on a GPU its cache is then kept between calls, and made for
    the `longest` text."""
    degrees, device = backend.group.degrees, backend.group.device
    keeps_cache = compiles is not None and device.type == "cuda"
    return ColocatedEngine(
        functools.partial(backend.lend_model, stable=keeps_cache),
        tokenizer,
        backend.group.gather_objects,
        rank=backend.group.rank,
        replicas=degrees.replicas,
        shards=degrees.data // degrees.replicas * degrees.context * degrees.tensor,
        max_kept_bytes=torch.cuda.get_device_properties(device).total_memory // 20 if keeps_cache else 0,
        longest=longest,
        compiles=bool(compiles),
        records_routing=records_routing,
        report=run.report_slow,
    )


def answer_scores(
    config: RunConfig, backend: TorchBackend | DeepSpeedBackend, data: CompiledData, tokenizer: Tokenizer, run: RunDir
) -> AnswerScores | None:
    """For evaluation.metrics: the first validation rows as prompts for the model in training."""
    evaluation = config.evaluation
    if not evaluation.metrics or not data.validation:
        return None
    rows = data.validation[: evaluation.rows]
    questions = [last_answer(datum) for datum in rows]
    prompts = [prompt for prompt, _ in questions]
    references = [tokenizer.decode(answer, skip_special_tokens=True) for _, answer in questions]
    metrics.check_references(evaluation.metrics, references, [datum.origin for datum in rows])
    if backend.group.degrees.pipeline > 1:
        raise ConfigError("evaluation.metrics needs the whole model on every rank: set parallel.pipeline to 1")
    sample = colocated_engine(backend, tokenizer, run).sample
    if data.has_images:
        assert isinstance(backend, TorchBackend), "the others take no images"
        sample = functools.partial(sample_about_images, backend, rows, tokenizer)

    def score(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        scores: dict[str, float] = {}
        for name in evaluation.metrics if run.owner else ():  # only the owner writes them: the others need no encoder
            settings = {"encoder": evaluation.encoder} if name == "bertscore" and evaluation.encoder else {}
            scores |= metrics.mean_scores(metrics.METRICS[name](answers, references, **settings))
        return scores

    def keep(step: int, answers: Sequence[str]) -> None:
        for prompt, answer, reference in list(zip(prompts, answers, references))[:NUM_SAMPLES_KEPT]:
            run.log_sample(step=step, prompt=tokenizer.decode(prompt), answer=answer, reference=reference)

    return AnswerScores(prompts, references, sample, score, evaluation.max_tokens, keep)


def sample_about_images(
    backend: TorchBackend,
    rows: Sequence[Datum],
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> list[list[TextCompletion]]:
    """Of one prompt for each row. Every rank answers all of them. All ranks."""
    with backend.lend_model() as model:
        inputs = [backend.image_inputs(datum, prompt) for datum, prompt in zip(rows, prompts, strict=True)]
        sharded = backend.group.degrees.sharded
        return answer_with_images(model, tokenizer, prompts, inputs, params, sharded=sharded)


# --- after training ---------------------------------------------------------------------------------------------------


def export(
    config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir, checkpoints: Checkpoints
) -> str | None:
    """The adapter or the model as trained, while the last checkpoint is written. `merge` comes later, on one rank. All
    ranks."""
    try:
        return None if config.checkpoint.export == "none" else _export(config, backend, run)
    finally:
        run.write_status(phase="checkpointing")
        checkpoints.wait()
        checkpoints.close()


def _export(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir) -> str:
    run.write_status(phase="exporting")
    path = run.export / ("adapter" if config.lora is not None else "model")
    if run.owner:
        path.parent.mkdir(exist_ok=True)
    backend.export_weights(path)
    if run.owner:
        load_run_tokenizer(config).save_pretrained(path)
        copy_processor(config.model, path)
    return str(path)


def merge(run: RunDir) -> str:
    result = export_run(run.path)
    run.log_event("export", **result)
    run.write_status(merge_drift=result["drift"])
    return result["path"]
