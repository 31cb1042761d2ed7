"""Composes a run from its directory: data, model, backend, loop, export. The one place that names them all.

Called by the worker entry on every rank. Tokenising happens before the processes meet, so that no rank
waits on another's tokenizer inside a collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.backend.torch_backend import TorchBackend, agree_on_precision, join_group
from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataset import Compiled, compile_data
from lockstep.data.order import Batches
from lockstep.data.packing import partition
from lockstep.evaluation import metrics
from lockstep.model.export import export_run
from lockstep.model.load import (
    build_model,
    check_model_source,
    choose_precision,
    load_hf_config,
    load_run_tokenizer,
)
from lockstep.parallel.group import Group, choose_device
from lockstep.rundir import RunDir
from lockstep.sampling.borrowed import BorrowedEngine
from lockstep.train import sft
from lockstep.train.evaluation import AnswerScores, last_answer
from lockstep.train.progress import Checkpoints, Progress

if TYPE_CHECKING:
    from lockstep.backend.deepspeed_backend import DeepSpeedBackend


def run(run_dir: Path) -> None:
    """Train until the end, or from the newest sound checkpoint if there is one. Every rank."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = RunDir(run_dir, owner=rank == 0)
    config = run.config()
    config.parallel.degrees(num_ranks)
    run.write_status(state="preparing", phase="reading data", error=None, started_at=time.time(), ranks=num_ranks)
    run.sweep()
    tokenizer = load_run_tokenizer(config)
    data = prepare_data(config, tokenizer, run, num_ranks)

    run.write_status(phase="joining the other ranks" if num_ranks > 1 else "loading the model")
    group = join_group(config.launch.device, config.parallel, config.launch.timeout_s)
    run.write_status(phase="loading the model")
    backend = make_backend(config, group, run)
    progress = resume(run, backend, group, data.digest)
    checkpoints = Checkpoints(
        run,
        backend,
        config.checkpoint,
        data_digest=data.digest,
        timeout_s=config.launch.timeout_s,
        last_step=progress.step or None,
    )
    try:
        answers = answer_scores(config, backend, data, tokenizer, run)
        progress = sft.train(config, backend, data.train, data.validation, run, checkpoints, progress, answers)
    except sft.Diverged:
        checkpoints.wait()  # one that is being written was made before, and is sound
        raise
    exported = export(config, backend, run)
    checkpoints.close()
    backend.close()
    if run.owner and config.checkpoint.export == "merged":
        exported = merge(run)
    run.write_status(state="completed", phase="done", export=exported, completed_at=time.time(), step=progress.step)


def prepare_data(config: RunConfig, tokenizer: Any, run: RunDir, num_ranks: int) -> Compiled:
    def show(progress: Any) -> None:
        run.write_status(phase=f"{progress.phase} {progress.part}: {progress.rows:,} rows")

    data = compile_data(config.data, tokenizer, seed=config.seed, timeout_s=config.launch.timeout_s, on_progress=show)
    for message in data.report.warnings():
        run.log_event("warning", message=message)
    run.log_event("data", **asdict(data.report))
    if run.owner and data.report.skipped_files:
        rows = [Path(file).read_text(encoding="utf-8") for file in data.report.skipped_files]
        (run.path / "skipped.jsonl").write_text("".join(rows), encoding="utf-8")
    check_data(config, data, num_ranks)
    if config.evaluation.metrics:
        metrics.check_metrics(config.evaluation.metrics)  # a missing package shows before the model is loaded
    return data


def answer_scores(
    config: RunConfig, backend: TorchBackend | DeepSpeedBackend, data: Compiled, tokenizer: Any, run: RunDir
) -> AnswerScores | None:
    """For evaluation.metrics: the first validation rows as questions to the model in training."""
    wanted = config.evaluation
    if not wanted.metrics or not data.validation:
        return None
    questions = [last_answer(datum) for datum in data.validation[: wanted.rows]]
    references = [tokenizer.decode(answer, skip_special_tokens=True) for _, answer in questions]
    metrics.check_references(wanted.metrics, references, [datum.origin for datum in data.validation[: wanted.rows]])
    degrees = backend.group.degrees
    if degrees.pipeline > 1:
        raise ConfigError("evaluation.metrics needs the whole model on every rank: set parallel.pipeline to 1")
    engine = BorrowedEngine(
        backend.lend_model,
        tokenizer,
        backend.group.gather_objects,
        rank=backend.group.rank,
        replicas=degrees.replicate,
        shards=degrees.shard * degrees.context * degrees.tensor,
    )

    def score(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in wanted.metrics if run.owner else ():  # only the owner writes: the others need no encoder
            settings = {"encoder": wanted.encoder} if name == "bertscore" and wanted.encoder else {}
            found |= metrics.mean_scores(metrics.METRICS[name](answers, references, **settings))
        return found

    prompts = [prompt for prompt, _ in questions]
    return AnswerScores(prompts, references, engine.sample, score, wanted.max_tokens)


def check_data(config: RunConfig, data: Compiled, num_ranks: int) -> None:
    if data.kind != "answers":
        what = {"pairs": "preference pairs", "labelled": "answers with a label (unpaired preferences)"}[data.kind]
        raise ConfigError(
            f"data.train holds {what}, and algorithm.kind sft learns answers: to learn only the preferred ones, set "
            "data.format to prompt_completion and data.columns to {completion: chosen}"
        )
    rows = config.batch.samples_per_step
    if rows is not None and rows < num_ranks:
        raise ConfigError(f"batch.samples {rows} is less than the {num_ranks} ranks: some would never have a row")
    if len(data.train) < num_ranks:
        raise ConfigError(f"{num_ranks} ranks for {len(data.train)} training rows: use at most one rank per row")


def _choose_backend(config: RunConfig, model: Any, group: Group, precision: str) -> TorchBackend | DeepSpeedBackend:
    options: dict[str, Any] = {
        "micro_batch_tokens": config.batch.micro_batch_tokens,
        "precision": precision,
        "activation_checkpointing": config.model.activation_checkpointing,
        "activation_offload": config.model.activation_offload,
        "compile": config.model.compile,
        "seed": config.seed,
        "group": group,
    }
    parallel = config.parallel
    if parallel.backend == "torch":
        return TorchBackend(model, parallel=parallel, **options)
    from lockstep.backend.deepspeed_backend import DeepSpeedBackend
    from lockstep.backend.deepspeed_config import read_config

    return DeepSpeedBackend(
        model,
        zero_stage=parallel.zero_stage,
        offload=parallel.offload,
        given=read_config(Path(parallel.deepspeed_config)) if parallel.deepspeed_config else None,
        max_grad_norm=config.optim.max_grad_norm,
        **options,
    )


def make_backend(config: RunConfig, group: Group, run: RunDir) -> TorchBackend | DeepSpeedBackend:
    precision = agree_on_precision(config.model.precision, group)
    run.write_status(precision=precision, device=str(group.device))
    torch.manual_seed(config.seed)  # new adapters begin alike in every run and layout
    model = build_model(config.model, config.lora, precision, with_weights=group.rank == 0)
    backend = _choose_backend(config, model, group, precision)
    for message in backend.warnings:
        run.log_event("warning", message=message)
    trained = backend.parameters().values()
    counts = {"trained": sum(p.numel() for p in trained), "all": sum(p.numel() for p in backend.policy.parameters())}
    run.log_event("model", precision=precision, device=str(group.device), parameters=counts)
    return backend


def resume(run: RunDir, backend: TorchBackend | DeepSpeedBackend, group: Group, data_digest: str) -> Progress:
    """Rank 0 looks for the newest sound checkpoint; all load it."""
    found = run.latest_checkpoint() if group.rank == 0 else None
    found = group.broadcast_object(found)
    if found is None:
        return Progress()
    if found.extra["data_digest"] != data_digest:
        raise ConfigError(
            f"the data is not what step {found.step} was trained on: rows or tokenizer have changed since. "
            "Start a new run, or put the data back"
        )
    run.write_status(phase=f"resuming from step {found.step}")
    backend.load_state(found.path, with_optimizer=True)
    run.log_event("resumed", step=found.step)
    return Progress(**found.extra["progress"])


def export(config: RunConfig, backend: TorchBackend | DeepSpeedBackend, run: RunDir) -> str | None:
    """The adapter or the model as trained. Merging is done later, by one process alone. All ranks."""
    if config.checkpoint.export == "none":
        return None
    run.write_status(phase="exporting")
    path = run.export / ("adapter" if config.lora is not None else "model")
    if run.owner:
        path.parent.mkdir(exist_ok=True)
    backend.export_weights(path)
    if run.owner:
        load_run_tokenizer(config).save_pretrained(path)
    return str(path)


def merge(run: RunDir) -> str:
    result = export_run(run.path)
    run.log_event("export", **result)
    run.write_status(merge_drift=result["drift"])
    return result["path"]


def describe(config: RunConfig, on_progress: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Everything that can be checked and said without training: the effective batch, steps, data, model."""
    check_model_source(config.model)
    choose_device(config.launch.device)
    num_ranks = config.launch.procs
    degrees = config.parallel.degrees(num_ranks)
    architecture = load_hf_config(config.model)
    data = compile_data(
        config.data,
        load_run_tokenizer(config),
        seed=config.seed,
        timeout_s=config.launch.timeout_s,
        on_progress=on_progress,
    )
    check_data(config, data, num_ranks)
    batches = Batches(data.train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    batch, _ = batches.batch_at(0)
    lengths = [datum.num_tokens for datum in batch]
    steps = partition(lengths, num_ranks=num_ranks, budget_tokens=config.batch.micro_batch_tokens)
    return {
        "model": f"{(architecture.architectures or [type(architecture).__name__])[0]} from {config.model.path}",
        "training": "LoRA" if config.lora is not None else "full",
        "precision": choose_precision(config.model.precision, choose_device(config.launch.device)),
        "ranks": num_ranks,
        "layout": " x ".join(f"{axis} {size}" for axis, size in degrees._asdict().items() if size > 1) or "one rank",
        "steps": sft.num_steps(config, batches),
        "samples": len(batch),
        "tokens": sum(lengths),
        "supervised_tokens": sum(datum.num_supervised for datum in batch),
        "micro_batches": len(steps) * num_ranks,
        "micro_batches_per_rank": len(steps),
        "learning_rate": config.learning_rate,
        "train_rows": len(data.train),
        "validation_rows": len(data.validation),
        "train_tokens": int(data.train.lengths.sum()),
        "prompts_cut": data.report.prompts_cut,
        "answers_cut": data.report.answers_cut,
        "warnings": data.report.warnings(),
    }
