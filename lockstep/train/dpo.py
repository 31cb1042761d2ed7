"""Learning from pairs (dpo) or labels (kto): the whole loop. Every rank runs it with the same global batches."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from lockstep.config import DpoConfig, KtoConfig, RunConfig
from lockstep.config.reference import estimates_kl
from lockstep.data.order import Batches
from lockstep.train.checkpoints import Progress
from lockstep.train.preference_data import (
    count_chosen_tokens,
    count_padded_tokens,
    discount_length,
    label_options,
    pair_options,
)
from lockstep.train.schedule import learning_rate_at, num_steps
from lockstep.train.steps import (
    LoopInputs,
    MetricsLog,
    StepLogger,
    evaluate_and_save,
    finish,
    is_due,
    is_out_of_patience,
    optim_step,
    record_validation,
    starts_with_validation,
)
from lockstep.train.validation import estimate_kl, preference_loss
from lockstep.types import Datum, LossSpec, TrainingBackend


def train(inputs: LoopInputs[Datum]) -> Progress:
    """From `inputs.progress` to the end. Rows bring the reference's log-probs, or the backend computes them."""
    config, backend, progress = inputs.config, inputs.backend, inputs.progress
    algorithm = config.algorithm
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
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
        rows, cursor = batches.batch_at(progress.cursor)
        batch, loss = prepare(config, backend, rows)
        result = backend.forward_backward(batch, loss)
        logger.flush()
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        optim = backend.optim_step(optim_step(config, rate))
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.tokens += result.num_tokens
        logger.record(batch, result, optim, rate, padding_saved=1 - result.num_tokens / count_padded_tokens(batch))
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)
        evaluate_and_save(inputs, logger, validate)

    finish(inputs, metrics, logger)
    return progress


def prepare(config: RunConfig, backend: TrainingBackend, rows: Sequence[Datum]) -> tuple[Sequence[Datum], LossSpec]:
    """The batch with its token weights, and the loss with its options for the whole batch. All ranks."""
    algorithm = config.algorithm
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
    if isinstance(algorithm, DpoConfig):
        batch = discount_length(rows, algorithm.ld_alpha)
        return batch, LossSpec("preference", 1.0 / len(batch), pair_options(algorithm, count_chosen_tokens(rows)))
    kl = estimate_kl(backend, rows, config.data.max_length) if estimates_kl(algorithm) else 0.0
    return rows, LossSpec("kto", 1.0 / len(rows), label_options(algorithm, kl))


def evaluate(inputs: LoopInputs[Datum], metrics: MetricsLog) -> None:
    started = time.perf_counter()
    loss, scores = preference_loss(inputs.config, inputs.backend, inputs.validation)
    record_validation(inputs, metrics, loss, scores, started)
