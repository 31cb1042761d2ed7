"""Learning from pairs (dpo) or labels (kto): the whole loop. Every rank runs it alike, with global batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.config import DpoConfig, KtoConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.options import label_options, pair_options
from lockstep.train.preference_data import count_chosen_tokens, count_padded_tokens, discount_length
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
from lockstep.train.validation import AnswerScores, estimate_kl, estimates_kl, judge
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
    *,
    asks_backend: bool,
) -> Progress:
    """From `progress` to the end. What must survive a kill is in checkpoints and in `progress`, nowhere else.

    `asks_backend`: the reference is the backend's own; otherwise rows that need one bring its log-probs with them.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
    batches = Batches(data, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    metrics = MetricsLog(run, config.logging, first_step=progress.step + 1 if progress.step else 0)
    run.write_status(state="running", phase="training", step=progress.step, total_steps=total)

    if validation and config.evaluation.at_start and progress.step == 0:
        evaluate(config, backend, validation, metrics, progress, answers, asks_backend)

    book = StepLogger(config, metrics, progress, num_rows=len(data), num_steps=total)
    # Patience is part of the condition: a run resumed from the checkpoint at which it stopped has nothing left to do.
    while progress.step < total and not is_out_of_patience(config, progress):
        checkpoints.poll()
        rows, cursor = batches.batch_at(progress.cursor)
        batch, loss = prepare(config, algorithm, backend, rows, asks_backend)
        result = backend.forward_backward(batch, loss)
        book.settle()
        rate = learning_rate_at(progress.step, peak=config.learning_rate, num_steps=total, config=config.optim)
        optim = backend.optim_step(optim_step(config, rate))
        progress.step, progress.cursor = progress.step + 1, cursor
        progress.tokens += result.num_tokens
        book.note(batch, result, optim, rate, padding_saved=1 - result.num_tokens / count_padded_tokens(batch))
        if is_due(progress.step, algorithm.reference_sync_steps):
            backend.mix_reference(algorithm.reference_mix)

        last = progress.step == total
        evaluates = bool(validation) and (last or is_due(progress.step, config.evaluation.every_steps))
        saves = is_due(progress.step, config.checkpoint.every_steps)
        if evaluates or saves or last:
            book.settle()
        if evaluates:
            evaluate(config, backend, validation, metrics, progress, answers, asks_backend)
            saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
        if saves:
            checkpoints.save(progress)
        if evaluates or saves:
            book.restart_clock()

    finish(run, metrics, checkpoints, progress, book, total)
    return progress


def prepare(
    config: RunConfig,
    algorithm: DpoConfig | KtoConfig,
    backend: TrainingBackend,
    rows: Sequence[Datum],
    asks_backend: bool,
) -> tuple[Sequence[Datum], LossSpec]:
    """The batch with its tokens weighed, and the loss with all that it must know of the whole batch. All ranks."""
    if isinstance(algorithm, DpoConfig):
        batch = discount_length(rows, algorithm.ld_alpha)
        options = pair_options(algorithm, count_chosen_tokens(rows))
        return batch, LossSpec("preference", 1.0 / len(batch), options, asks_backend)
    kl = estimate_kl(backend, rows, config.data.max_length) if estimates_kl(algorithm) else 0.0
    return rows, LossSpec("kto", 1.0 / len(rows), label_options(algorithm, kl), asks_backend)


def evaluate(
    config: RunConfig,
    backend: TrainingBackend,
    data: Sequence[Datum],
    metrics: MetricsLog,
    progress: Progress,
    answers: AnswerScores | None,
    asks_backend: bool,
) -> None:
    algorithm, started = config.algorithm, time.perf_counter()
    assert isinstance(algorithm, (DpoConfig, KtoConfig))
    loss, scores = judge(
        backend,
        data,
        algorithm,
        asks_backend=asks_backend,
        rows_at_once=config.batch.samples_per_step or 16,
        max_length=config.data.max_length,
    )
    note_validation_loss(config, progress, loss)
    scores |= answers.measure(progress.step) if answers is not None else {}
    record = {"loss": loss, "rows": len(data), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)
