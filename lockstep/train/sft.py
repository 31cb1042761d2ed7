"""Supervised fine-tuning: the whole loop, top to bottom. Every rank runs it alike, with global batches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lockstep.config import RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.evaluation import mean_loss
from lockstep.train.metrics import MetricsLog
from lockstep.train.progress import Checkpoints, Progress
from lockstep.train.schedule import learning_rate_at
from lockstep.types import Datum, LossResult, LossSpec, OptimStep, TrainingBackend


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


def num_steps(config: RunConfig, batches: Batches) -> int:
    steps = batches.num_steps(config.optim.epochs)
    return min(steps, config.optim.max_steps) if config.optim.max_steps else steps


def train(
    config: RunConfig,
    backend: TrainingBackend,
    data: Sequence[Datum],
    validation: Sequence[Datum],
    run: RunDir,
    checkpoints: Checkpoints,
    progress: Progress,
) -> Progress:
    """From `progress` to the end. What must survive a kill is in checkpoints and in `progress`, nowhere else."""
    batches = Batches(data, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    metrics = MetricsLog(run, config.logging, first_step=progress.step)
    run.write_status(state="running", phase="training", step=progress.step, total_steps=total)

    if validation and config.evaluation.at_start and progress.step == 0:
        evaluate(config, backend, validation, metrics, progress)

    while progress.step < total:
        started = time.perf_counter()
        checkpoints.poll()
        batch, cursor = batches.batch_at(progress.cursor)
        result = backend.forward_backward(batch, LossSpec("cross_entropy", scale=1.0 / total_weight(batch)))
        stop_if_not_finite(result, progress.step + 1)
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        optim = backend.optim_step(optim_step(config, rate))
        if not optim.applied:
            raise Diverged(f"the gradient norm is {optim.grad_norm} at step {progress.step + 1}: {describe_rows(batch)}")

        progress.step, progress.cursor, progress.loss = progress.step + 1, cursor, result.loss
        progress.tokens += result.num_tokens
        elapsed = time.perf_counter() - started
        last = progress.step == total
        if last or progress.step % config.logging.every_steps == 0:
            record = {
                "loss": result.loss,
                "learning_rate": rate,
                "grad_norm": optim.grad_norm,
                "epoch": progress.cursor / len(data),
                "tokens": result.num_tokens,
                "supervised_tokens": result.num_supervised,
                "tokens_per_s": result.num_tokens / elapsed,
                "step_time_s": elapsed,
                "memory_gib": optim.peak_memory_gib,
                **result.metrics,
            }
            metrics.train(progress, record, last=last)

        if validation and (last or is_due(progress.step, config.evaluation.every_steps)):
            evaluate(config, backend, validation, metrics, progress)
            if config.checkpoint.keep_best and progress.best_step == progress.step:
                checkpoints.save(progress)
            if is_out_of_patience(config, progress):
                run.log_event("early_stop", step=progress.step, best_step=progress.best_step)
                break
        if is_due(progress.step, config.checkpoint.every_steps):
            checkpoints.save(progress)

    checkpoints.save(progress)
    checkpoints.wait()
    metrics.close()
    return progress


def evaluate(
    config: RunConfig, backend: TrainingBackend, data: Sequence[Datum], metrics: MetricsLog, progress: Progress
) -> None:
    started = time.perf_counter()
    loss = mean_loss(backend, data)
    if not math.isfinite(loss):
        raise Diverged(f"the validation loss is {loss} after step {progress.step}")
    progress.note_validation(loss, config.evaluation.min_delta)
    metrics.validation(progress, {"loss": loss, "rows": len(data), "time_s": time.perf_counter() - started})


def optim_step(config: RunConfig, learning_rate: float) -> OptimStep:
    o = config.optim
    return OptimStep(learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.max_grad_norm)


def total_weight(batch: Sequence[Datum]) -> float:
    return sum(datum.total_weight for datum in batch)


def stop_if_not_finite(result: LossResult, step: int) -> None:
    if not math.isfinite(result.loss):
        rows = ", ".join(result.nonfinite_origins[:5]) or "no single row"
        more = len(result.nonfinite_origins) - 5
        rows += f" and {more} more" if more > 0 else ""
        raise Diverged(
            f"the loss is {result.loss} at step {step}, first in {rows}: lower optim.learning_rate, look at those rows, "
            "or continue from the last checkpoint with --resume"
        )


def describe_rows(batch: Sequence[Datum]) -> str:
    names = [datum.origin for datum in batch[:5] if datum.origin]
    return f"rows {', '.join(names)}" + (f" and {len(batch) - 5} more" if len(batch) > 5 else "")


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_out_of_patience(config: RunConfig, progress: Progress) -> bool:
    patience = config.evaluation.patience
    return patience is not None and progress.evaluations_without_improvement >= patience
