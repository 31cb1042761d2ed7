"""Supervised fine-tuning: the whole loop, top to bottom. Every rank runs it alike, with global batches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lockstep.config import RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.evaluation import AnswerScores, mean_loss
from lockstep.train.metrics import MetricsLog
from lockstep.train.progress import Checkpoints, Progress
from lockstep.train.schedule import learning_rate_at
from lockstep.types import Datum, LossResult, LossSpec, OptimResult, OptimStep, TrainingBackend


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
    answers: AnswerScores | None = None,
) -> Progress:
    """From `progress` to the end. What must survive a kill is in checkpoints and in `progress`, nowhere else."""
    batches = Batches(data, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    metrics = MetricsLog(run, config.logging, first_step=progress.step + 1 if progress.step else 0)
    run.write_status(state="running", phase="training", step=progress.step, total_steps=total)

    if validation and config.evaluation.at_start and progress.step == 0:
        evaluate(config, backend, validation, metrics, progress, answers)

    book = StepBook(config, metrics, progress, num_rows=len(data), num_steps=total)
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

    if progress.step < total and book.num_settled:
        run.log_event("early_stop", step=progress.step, best_step=progress.best_step)
    speed = {"tokens_per_s": book.mean_tokens_per_s} if book.mean_tokens_per_s else {}
    run.write_status(step=progress.step, loss=progress.loss, tokens=progress.tokens, **speed)
    checkpoints.save(progress)
    checkpoints.wait()
    metrics.close()
    return progress


class StepBook:
    """Reads each step's numbers as late as it may: on a GPU the next step is already under way by then."""

    def __init__(
        self, config: RunConfig, metrics: MetricsLog, progress: Progress, *, num_rows: int, num_steps: int
    ) -> None:
        self._config, self._metrics, self._progress = config, metrics, progress
        self._num_rows, self._num_steps = num_rows, num_steps
        self._open: tuple[Sequence[Datum], LossResult, OptimResult, dict[str, Any]] | None = None
        self._settled_at = time.perf_counter()
        self._tokens, self._seconds = 0, 0.0
        self.num_settled = 0

    def note(self, batch: Sequence[Datum], result: LossResult, optim: OptimResult, learning_rate: float) -> None:
        cursor = self._progress.cursor
        facts = {
            "step": self._progress.step,
            "learning_rate": learning_rate,
            "epoch": cursor / self._num_rows,
            # From this place in the order of rows up to that one: what tells that each was consumed exactly once.
            "row_range": [cursor - len(batch), cursor],
        }
        self._open = (batch, result, optim, facts)
        if not optim.deferred:
            self.settle()

    def settle(self) -> None:
        """Check and log the step that was noted last, if that has not happened. Raises if it was not finite."""
        if self._open is None:
            return
        (batch, result, optim, facts), self._open = self._open, None
        step = int(facts.pop("step"))
        stop_if_not_finite(batch, result, optim, step)
        elapsed = time.perf_counter() - self._settled_at
        self._settled_at = time.perf_counter()
        self._tokens, self._seconds = self._tokens + result.num_tokens, self._seconds + elapsed
        self.num_settled += 1
        self._progress.loss = result.loss
        last = step == self._num_steps
        if last or step % self._config.logging.every_steps == 0:
            record = {
                "loss": result.loss,
                "grad_norm": optim.grad_norm if optim.applied else None,
                **facts,
                "tokens": result.num_tokens,
                "supervised_tokens": result.num_supervised,
                "tokens_per_s": result.num_tokens / elapsed,
                "step_time_s": elapsed,
                "memory_gib": optim.peak_memory_gib,
                **({"loss_scale": optim.loss_scale} if optim.loss_scale is not None else {}),
                **result.metrics,
            }
            self._metrics.train(step, self._progress, record, last=last)

    @property
    def mean_tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Evaluation and checkpoints are not part of a step's time."""
        self._settled_at = time.perf_counter()


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
    if not math.isfinite(loss):
        raise Diverged(f"the validation loss is {loss} after step {progress.step}")
    progress.note_validation(loss, config.evaluation.min_delta)
    scores = answers.measure() if answers is not None else {}
    record = {"loss": loss, "rows": len(data), "time_s": time.perf_counter() - started}
    metrics.validation(progress, record, scores)


def optim_step(config: RunConfig, learning_rate: float) -> OptimStep:
    o = config.optim
    return OptimStep(learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.max_grad_norm)


def total_weight(batch: Sequence[Datum]) -> float:
    weight = sum(datum.total_weight for datum in batch)
    if weight == 0:
        raise ValueError(f"nothing to learn in a batch of {len(batch)} rows: their weights add up to zero")
    return weight


def stop_if_not_finite(batch: Sequence[Datum], result: LossResult, optim: OptimResult, step: int) -> None:
    """Name the step and the rows. The step itself was not applied."""
    if math.isfinite(result.loss) and (optim.applied or optim.overflowed):
        return
    what = f"the loss is {result.loss}" if not math.isfinite(result.loss) else f"the gradient norm is {optim.grad_norm}"
    names = result.nonfinite_origins or [datum.origin for datum in batch if datum.origin]
    rows = (", ".join(names[:5]) or "without a name") + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise Diverged(
        f"{what} at step {step}, in rows {rows}: lower optim.learning_rate, look at those rows, "
        "or continue from the last checkpoint with --resume"
    )


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_out_of_patience(config: RunConfig, progress: Progress) -> bool:
    patience = config.evaluation.patience
    return patience is not None and progress.evaluations_without_improvement >= patience
