"""What every loop does around a step: count steps, read its numbers late, log them, stop where they are not finite.

Every rank runs this alike. Must not know which loss is learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from lockstep.config import RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.metrics import MetricsLog
from lockstep.train.progress import Checkpoints, Progress
from lockstep.train.scores import mean_scores
from lockstep.types import Datum, LossResult, OptimResult, OptimStep


class Diverged(RuntimeError):
    """Training has come to something that must not go on, such as a loss that is no number. Again it would be alike."""

    exit_code = 3


def num_steps(config: RunConfig, batches: Batches) -> int:
    steps = batches.num_steps(config.optim.epochs)
    return min(steps, config.optim.max_steps) if config.optim.max_steps else steps


def optim_step(config: RunConfig, learning_rate: float) -> OptimStep:
    o = config.optim
    return OptimStep(learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.max_grad_norm)


def is_due(step: int, every: int | None) -> bool:
    return bool(every) and step % every == 0  # type: ignore[operator]


def is_out_of_patience(config: RunConfig, progress: Progress) -> bool:
    patience = config.evaluation.patience
    return patience is not None and progress.evaluations_without_improvement >= patience


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


def note_validation_loss(config: RunConfig, progress: Progress, loss: float) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the validation loss is {loss} after step {progress.step}")
    progress.note_validation(loss, config.evaluation.min_delta)


def finish(
    run: RunDir, metrics: MetricsLog, checkpoints: Checkpoints, progress: Progress, book: StepBook, total: int
) -> None:
    """The last status and the last checkpoint, on disk when this returns."""
    if progress.step < total and book.num_settled:
        run.log_event("early_stop", step=progress.step, best_step=progress.best_step)
    speed = {"tokens_per_s": book.mean_tokens_per_s} if book.mean_tokens_per_s else {}
    run.write_status(step=progress.step, loss=progress.loss, tokens=progress.tokens, **speed)
    checkpoints.save(progress)
    checkpoints.wait()
    metrics.close()


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

    def note(
        self, batch: Sequence[Datum], result: LossResult, optim: OptimResult, learning_rate: float, **facts: float
    ) -> None:
        """`facts` are of this step alone, and go into its record."""
        cursor = self._progress.cursor
        known = {
            "step": self._progress.step,
            "learning_rate": learning_rate,
            "epoch": cursor / self._num_rows,
            # From this place in the order of rows up to that one: what tells that each was consumed exactly once.
            "row_range": [cursor - len(batch), cursor],
            **facts,
        }
        self._open = (batch, result, optim, known)
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
                **mean_scores(result.metrics, len(batch)),
            }
            self._metrics.train(step, self._progress, record, last=last)

    @property
    def mean_tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Evaluation and checkpoints are not part of a step's time."""
        self._settled_at = time.perf_counter()
