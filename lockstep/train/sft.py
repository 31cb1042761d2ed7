"""Supervised fine-tuning: the whole loop, top to bottom. Every rank runs it alike, with global batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.config import RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.schedule import learning_rate_at
from lockstep.train.steps import (
    MetricsLog,
    StepLogger,
    finish,
    is_due,
    is_out_of_patience,
    note_validation_loss,
    num_steps,
    optim_step,
)
from lockstep.train.validation import AnswerScores, mean_loss
from lockstep.types import Datum, LossSpec, TrainingBackend


def train(
    config: RunConfig,
    backend: TrainingBackend,
    data: Sequence[Datum],
    validation: Sequence[Datum],
    run: RunDir,
    checkpoints: Checkpoints,
    progress: Progress,
    answers: AnswerScores | None = None,
) -> Progress:
    """From `progress` to the end. What must survive a kill is in checkpoints and in `progress`, nowhere else."""
    batches = Batches(data, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    metrics = MetricsLog(run, config.logging, first_step=progress.step + 1 if progress.step else 0)
    run.write_status(state="running", phase="training", step=progress.step, total_steps=total)

    if validation and config.evaluation.at_start and progress.step == 0:
        evaluate(config, backend, validation, metrics, progress, answers)

    book = StepLogger(config, metrics, progress, num_rows=len(data), num_steps=total)
    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.poll()
        batch, cursor = batches.batch_at(progress.cursor)
        result = backend.forward_backward(batch, LossSpec("cross_entropy", scale=1.0 / total_weight(batch)))
        book.settle()
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        optim = backend.optim_step(optim_step(config, rate))
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.tokens += result.num_tokens
        book.note(batch, result, optim, rate)

        last = progress.step == total
        evaluates = bool(validation) and (last or is_due(progress.step, config.evaluation.every_steps))
        saves = is_due(progress.step, config.checkpoint.every_steps)
        if evaluates or saves or last:
            book.settle()
        if evaluates:
            evaluate(config, backend, validation, metrics, progress, answers)
            saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
        if saves:
            checkpoints.save(progress)
        if evaluates or saves:
            book.restart_clock()

    finish(run, metrics, checkpoints, progress, book, total)
    return progress


def evaluate(
    config: RunConfig,
    backend: TrainingBackend,
    data: Sequence[Datum],
    metrics: MetricsLog,
    progress: Progress,
    answers: AnswerScores | None,
) -> None:
    started = time.perf_counter()
    loss = mean_loss(backend, data)
    note_validation_loss(config, progress, loss)
    scores = answers.measure(progress.step) if answers is not None else {}
    record = {"loss": loss, "rows": len(data), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)


def total_weight(batch: Sequence[Datum]) -> float:
    weight = sum(datum.total_weight for datum in batch)
    if weight == 0:
        raise ValueError(f"nothing to learn in a batch of {len(batch)} rows: their weights add up to zero")
    return weight
