"""Supervised fine-tuning: the whole loop, top to bottom. Every rank runs it with the same global batches."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from lockstep.data.order import Batches
from lockstep.train.checkpoints import Progress
from lockstep.train.schedule import learning_rate_at, num_steps
from lockstep.train.steps import (
    LoopInputs,
    MetricsLog,
    StepLogger,
    evaluate_and_save,
    finish,
    is_out_of_patience,
    optim_step,
    record_validation,
    starts_with_validation,
)
from lockstep.train.validation import mean_loss
from lockstep.types import Datum, LossSpec


def train(inputs: LoopInputs[Datum]) -> Progress:
    """From `inputs.progress` to the end."""
    config, backend, progress = inputs.config, inputs.backend, inputs.progress
    batches = Batches(inputs.rows, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    metrics = MetricsLog(inputs.run, config.logging, last_step=progress.step)
    validate = functools.partial(evaluate, inputs, metrics)
    inputs.run.write_status(state="running", phase="training", step=progress.step, total_steps=total)
    if starts_with_validation(inputs):
        validate()

    logger = StepLogger(config, metrics, progress, num_rows=len(inputs.rows), num_steps=total)
    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress) and not logger.asked_to_stop:
        inputs.begin_step()
        batch, cursor = batches.batch_at(progress.cursor)
        result = backend.forward_backward(batch, LossSpec("cross_entropy", scale=1.0 / total_weight(batch)))
        logger.flush()
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        optim = backend.optim_step(optim_step(config, rate))
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.tokens += result.num_tokens
        logger.record(batch, result, optim, rate)
        evaluate_and_save(inputs, logger, validate)

    finish(inputs, metrics, logger)
    return progress


def evaluate(inputs: LoopInputs[Datum], metrics: MetricsLog) -> None:
    started = time.perf_counter()
    loss = mean_loss(inputs.backend, inputs.validation)
    record_validation(inputs, metrics, loss, {}, started)


def total_weight(batch: Sequence[Datum]) -> float:
    weight = sum(datum.total_weight for datum in batch)
    if weight == 0:
        raise ValueError(f"nothing to learn in a batch of {len(batch)} rows: their weights add up to zero")
    return weight
