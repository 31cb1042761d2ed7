"""What every loop does around a step: count steps, read its numbers late, log them, stop where they are not finite.

Every rank runs this alike. Must not know which loss is learned.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import LoggingConfig, RunConfig
from lockstep.data.order import Batches
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.types import Datum, LossResult, Metrics, OptimResult, OptimStep


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
    run: RunDir, metrics: MetricsLog, checkpoints: Checkpoints, progress: Progress, book: StepLogger, total: int
) -> None:
    """The last status and the last checkpoint, on disk when this returns."""
    if progress.step < total and book.num_settled:
        run.log_event("early_stop", step=progress.step, best_step=progress.best_step)
    speed = {"tokens_per_s": book.mean_tokens_per_s} if book.mean_tokens_per_s else {}
    run.write_status(step=progress.step, loss=progress.loss, tokens=progress.tokens, **speed)
    checkpoints.save(progress)
    checkpoints.wait()
    metrics.close()


class StepLogger:
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


class MetricsLog:
    def __init__(self, run: RunDir, config: LoggingConfig, *, first_step: int) -> None:
        self._run = run
        self._writer = None
        self._status_at = 0.0
        self._stragglers = StragglerWatch()
        if config.tensorboard and run.owner:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step)

    def train(self, step: int, progress: Progress, record: dict[str, Any], *, last: bool) -> None:
        record, busy_s = take_seconds(record)
        self._write(step, "train", record)
        for slow in self._stragglers.note(step, busy_s):
            self._run.log_event("warning", step=step, **slow.as_event())
        # Once a second is enough for eyes; the last step always.
        if last or time.monotonic() - self._status_at > 1.0:
            self._status_at = time.monotonic()
            fields = {k: record[k] for k in ("epoch", "learning_rate", "tokens_per_s", "memory_gib") if k in record}
            self._run.write_status(step=step, loss=progress.loss, tokens=progress.tokens, **fields)

    def validation(self, progress: Progress, record: dict[str, Any], scores: dict[str, float]) -> None:
        self._write(progress.step, "validation", {**record, **scores})
        self._run.write_status(
            validation_loss=progress.validation_loss,
            best_validation_loss=progress.best_validation_loss,
            best_step=progress.best_step,
            **({"validation_scores": scores} if scores else {}),
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, split: str, record: dict[str, Any]) -> None:
        self._run.log_metrics({"step": step, "split": split, "time": time.time(), **record})
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{split}/{name}", value, step)


BUSY = "busy_s/"  # how the metrics of a step name these seconds: this, then peers/rank
WINDOW = 20  # steps that are logged
SLOW = 1.25  # times the median of its peers
QUIET_STEPS = 100  # after a rank was named

Seconds = dict[str, dict[int, float]]
"""Peers -> rank -> seconds. Peers do the same work: only they can be compared."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    times: float
    """Its seconds over the median of its peers', since it is slow."""
    since_step: int

    def as_event(self) -> dict[str, Any]:
        message = (
            f"rank {self.rank} computes {self.times:.2f} times as long as the median of the others, since step "
            f"{self.since_step}: they wait for it; look at what else runs on its machine or device"
        )
        facts = {"rank": self.rank, "times": round(self.times, 3), "since_step": self.since_step}
        return {"kind": "straggler", "message": message, **facts}


def take_seconds(record: Mapping[str, Any]) -> tuple[dict[str, Any], Seconds]:
    """A step's record without every rank's seconds, which would be most of it, and the seconds."""
    rest: dict[str, Any] = {}
    found: Seconds = {}
    for name, value in record.items():
        if name.startswith(BUSY):
            peers, _, rank = name.removeprefix(BUSY).partition("/")
            found.setdefault(peers, {})[int(rank)] = float(value)
        else:
            rest[name] = value
    return rest, found


class StragglerWatch:
    def __init__(self) -> None:
        self._window: deque[tuple[int, dict[int, tuple[float, float]]]] = deque(maxlen=WINDOW)
        self._named_at: dict[int, int] = {}

    def note(self, step: int, seconds: Seconds) -> list[Straggler]:
        """One more step; who is slow and was not named lately."""
        compared = {rank: pair for ranks in seconds.values() for rank, pair in compare_peers(ranks).items()}
        self._window.append((step, compared))
        if len(self._window) < WINDOW:
            return []
        found = []
        for rank in sorted(compared):
            pairs = [ranks[rank] for _, ranks in self._window if rank in ranks]
            is_quiet = step - self._named_at.get(rank, -QUIET_STEPS) < QUIET_STEPS
            if is_quiet or len(pairs) < WINDOW or not is_slow(pairs):
                continue
            first = find_onset(pairs)
            own, others = (sum(side) for side in zip(*pairs[first:], strict=True))
            found.append(Straggler(rank, own / max(others, 1e-9), self._window[first][0]))
            self._named_at[rank] = step
        return found


def compare_peers(seconds: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Rank -> its seconds and the median of the others'. Nothing for one that has no peers."""
    if len(seconds) < 2:
        return {}
    # The higher of the middle two, where there are two: one fast rank makes nobody slow.
    ordered, middle = sorted(seconds.values()), (len(seconds) - 1) // 2
    return {rank: (own, ordered[middle + (own <= ordered[middle])]) for rank, own in seconds.items()}


def is_slow(pairs: Sequence[tuple[float, float]]) -> bool:
    """Over all steps together, and in most of them: one very slow step is a hiccup."""
    own, others = (sum(side) for side in zip(*pairs, strict=True))
    return own > SLOW * others and 2 * sum(mine > SLOW * theirs for mine, theirs in pairs) > len(pairs)


def find_onset(pairs: Sequence[tuple[float, float]]) -> int:
    """The step from which the rank is most clearly slow: from there to the end, the excess adds up to most."""
    best, first, excess = 0.0, len(pairs) - 1, 0.0
    for place in reversed(range(len(pairs))):
        own, others = pairs[place]
        excess += own - SLOW * others
        if excess > best:
            best, first = excess, place
    return first


_SUMS_OVER_PAIRS = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logprob", "rejected_logprob")


def mean_scores(sums: Metrics, num_rows: int) -> Metrics:
    """What losses of preferences give as sums over rows, as means; everything else as it is."""
    if "num_chosen" in sums:
        return _mean_over_labels(sums, num_rows)
    is_sum = {name: name in _SUMS_OVER_PAIRS or name.startswith("loss_") for name in sums}
    return {name: value / num_rows if is_sum[name] else value for name, value in sums.items()}


def _mean_over_labels(sums: Metrics, num_rows: int) -> Metrics:
    """Each side over its own rows; a side that a batch does not have is left out."""
    found = {
        name: value for name, value in sums.items() if name not in (*_SUMS_OVER_PAIRS, "num_chosen", "num_rejected")
    }
    found["kl"] = sums["kl"] / num_rows
    for side in ("chosen", "rejected"):
        count = sums[f"num_{side}"]
        for what in ("reward", "logprob"):
            if count:
                found[f"{side}_{what}"] = sums[f"{side}_{what}"] / count
    if "chosen_reward" in found and "rejected_reward" in found:
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found
