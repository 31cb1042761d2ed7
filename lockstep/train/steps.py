"""What every loop does around a step: log its numbers, evaluate, save, stop where they are not finite. All ranks."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from lockstep.config import LoggingConfig, RunConfig
from lockstep.rundir import EXIT_INTERRUPTED, RunDir
from lockstep.train.checkpoints import Checkpoints, Progress
from lockstep.train.preference_data import mean_scores
from lockstep.train.validation import AnswerScores
from lockstep.types import Datum, LossResult, Metrics, OptimResult, OptimStep, TrainingBackend

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class LoopInputs(Generic[RowT]):
    """What every loop is given. What must survive a kill is in `checkpoints` and `progress`, nowhere else."""

    config: RunConfig
    backend: TrainingBackend
    rows: Sequence[RowT]
    validation: Sequence[RowT]
    run: RunDir
    checkpoints: Checkpoints
    progress: Progress
    answers: AnswerScores | None = None
    """Where answers to validation rows are generated and scored (evaluation.metrics)."""
    asked_to_stop: Callable[[], bool] = lambda: False
    """Whether this rank was. All ranks agree on the step after which they stop by what the backend returns."""
    long_lived: LongLived | None = None

    def begin_step(self) -> None:
        """Before each: what checkpoints in the background have come to, and what Python need not look at again."""
        self.checkpoints.poll()
        if self.long_lived is not None:
            self.long_lived.set_aside()


class Diverged(RuntimeError):
    """Training must not continue, for example because the loss is not finite. A restart would fail in the same way."""

    exit_code = 3


class RunInterrupted(RuntimeError):
    """The run was asked to stop. Its checkpoint of the last step is on disk, and it can go on from there."""

    exit_code = EXIT_INTERRUPTED


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


def starts_with_validation(inputs: LoopInputs[RowT]) -> bool:
    return bool(inputs.validation) and inputs.config.evaluation.at_start and inputs.progress.step == 0


def note_validation_loss(config: RunConfig, progress: Progress, loss: float) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the validation loss is {loss} after step {progress.step}")
    progress.note_validation(loss, config.evaluation.min_delta)


def record_validation(
    inputs: LoopInputs[Datum], metrics: MetricsLog, loss: float, scores: Metrics, started: float
) -> None:
    """Log the loss and scores of the validation rows, and of generated answers where these are configured. All ranks.

    `started`: time.perf_counter() before they were computed.
    """
    note_validation_loss(inputs.config, inputs.progress, loss)
    if inputs.answers is not None:
        scores = {**scores, **inputs.answers.measure(inputs.progress.step)}
    record = {"loss": loss, "rows": len(inputs.validation), "time_s": time.perf_counter() - started}
    metrics.validation(inputs.progress, record, scores)


def evaluate_and_save(inputs: LoopInputs[Datum], logger: StepLogger, evaluate: Callable[[], None]) -> None:
    """After a step: validation and a checkpoint where they are due. All ranks."""
    config, progress = inputs.config, inputs.progress
    last = progress.step == logger.num_steps
    evaluates = bool(inputs.validation) and (last or is_due(progress.step, config.evaluation.every_steps))
    saves = is_due(progress.step, config.checkpoint.every_steps)
    if evaluates or saves or last:
        logger.flush()
    if evaluates:
        inputs.run.write_status(phase="evaluating")
        evaluate()
        saves |= bool(config.checkpoint.keep_best) and progress.best_step == progress.step
    if saves:
        inputs.run.write_status(phase="checkpointing")
        inputs.checkpoints.save(progress)
    if evaluates or saves:
        inputs.run.write_status(phase="training")
        logger.restart_clock()


def finish(inputs: LoopInputs[Datum], metrics: MetricsLog, logger: StepLogger) -> None:
    """The last status and the last checkpoint, which is still being written when this returns. Raises if the run was
    asked to stop, when it is on disk."""
    progress = inputs.progress
    logger.flush()
    stops = (
        logger.asked_to_stop and progress.step < logger.num_steps and not is_out_of_patience(inputs.config, progress)
    )
    if progress.step < logger.num_steps and logger.num_logged and not stops:
        inputs.run.log_event("early_stop", step=progress.step, best_step=progress.best_step)
    speed = {"tokens_per_s": logger.mean_tokens_per_s} if logger.mean_tokens_per_s else {}
    inputs.run.write_status(
        phase="checkpointing", step=progress.step, loss=progress.loss, tokens=progress.tokens, **speed
    )
    inputs.checkpoints.save(progress)
    metrics.close()
    if stops:
        inputs.checkpoints.wait()
        raise interrupted_after(progress)


def interrupted_after(progress: Progress) -> RunInterrupted:
    return RunInterrupted(f"asked to stop: the checkpoint of step {progress.step} is written, and the run can go on")


class StepLogger:
    """Reads each step's numbers as late as possible: on a GPU the next step is already running by then.

    The time of a step is from the end of the one before to its own, by the clock of the device that computes it.
    """

    def __init__(
        self, config: RunConfig, metrics: MetricsLog, progress: Progress, *, num_rows: int, num_steps: int
    ) -> None:
        self._config, self._metrics, self._progress = config, metrics, progress
        self._num_rows, self.num_steps = num_rows, num_steps
        self._unread: _Unread | None = None
        self._tokens, self._seconds = 0, 0.0
        self.num_logged = 0
        self.asked_to_stop = False
        """Whether a rank was, by the steps that have been read. The same on all ranks."""
        self._ended_at = 0.0
        self.restart_clock()

    def record(
        self, batch: Sequence[Datum], result: LossResult, optim: OptimResult, learning_rate: float, **facts: float
    ) -> None:
        """Keep the results of a step until `flush`. `facts` go into its record."""
        cursor = self._progress.cursor
        known = {
            "step": self._progress.step,
            "learning_rate": learning_rate,
            "epoch": cursor / self._num_rows,
            # [start, end) in the order of rows: shows that each row was consumed exactly once.
            "row_range": [cursor - len(batch), cursor],
            **facts,
        }
        self._unread = _Unread(batch, result, optim, known)
        if not optim.deferred:
            self.flush()

    def flush(self) -> None:
        """Check and log the step that was recorded last, if that has not happened. Raises if it was not finite."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        batch, result, optim, facts = unread.batch, unread.result, unread.optim, unread.facts
        step = int(facts.pop("step"))
        stop_if_not_finite(batch, result, optim, step)
        elapsed = self._end_step(optim)
        self._tokens += result.num_tokens
        self.num_logged += 1
        self.asked_to_stop |= result.asked_to_stop
        self._progress.loss = result.loss
        last = step == self.num_steps
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

    def _end_step(self, optim: OptimResult) -> float:
        """Seconds of the step whose numbers have just been read."""
        ended_at = max(optim.ended_at(), self._ended_at)
        elapsed, self._ended_at = ended_at - self._ended_at, ended_at
        self._seconds += elapsed
        return max(elapsed, 1e-9)

    def restart_clock(self) -> None:
        """Evaluation and checkpoints are not part of a step's time."""
        self._ended_at = time.perf_counter()


@dataclass(frozen=True)
class _Unread:
    """A step whose numbers are not read yet."""

    batch: Sequence[Datum]
    result: LossResult
    optim: OptimResult
    facts: dict[str, Any]


class MetricsLog:
    def __init__(self, run: RunDir, config: LoggingConfig, *, last_step: int) -> None:
        """`last_step`: the step that the run continues from; TensorBoard forgets later ones."""
        self._run = run
        self._writer = None
        self._status_at = 0.0
        self._stragglers = StragglerWatch()
        self._dead: set[tuple[int, int]] = set()
        if config.tensorboard and run.owner:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=last_step + 1 if last_step else 0)

    def train(self, step: int, progress: Progress, record: dict[str, Any], *, last: bool) -> None:
        record, busy_s = take_seconds(record)
        record, dead = take_dead_experts(record)
        self._write(step, "train", record)
        for slow in self._stragglers.add(step, busy_s):
            self._run.log_event("warning", step=step, **slow.as_event())
        if new := [expert for expert in dead if expert not in self._dead]:
            self._dead.update(new)
            self._run.log_event("warning", step=step, kind="dead_experts", experts=new, message=tell_dead_experts(new))
        # At most once a second; the last step always.
        if last or time.monotonic() - self._status_at > 1.0:
            self._status_at = time.monotonic()
            fields = {k: record[k] for k in ("epoch", "learning_rate", "tokens_per_s", "memory_gib") if k in record}
            self._run.write_status(step=step, loss=progress.loss, tokens=progress.tokens, **fields)

    def validation(self, progress: Progress, record: Mapping[str, object], scores: dict[str, float]) -> None:
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

    def _write(self, step: int, split: str, record: Mapping[str, object]) -> None:
        self._run.log_metrics({"step": step, "split": split, "time": time.time(), **record})
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{split}/{name}", value, step)


class CompileWatch:
    """Every compilation of this process becomes an event, and the status says how many there were and how long.

    `note_compilations` calls what it is given with the seconds of each, until what it returns is called. None: nothing
    is compiled, and nothing watched.
    """

    def __init__(
        self, run: RunDir, note_compilations: Callable[[Callable[[float], None]], Callable[[], None]] | None
    ) -> None:
        self._run, self._note_compilations = run, note_compilations
        self.count, self._seconds = 0, 0.0
        self.step: Callable[[], int] = lambda: 0
        """The one that is being computed."""

    def __enter__(self) -> Self:
        self._forget = self._note_compilations(self._note) if self._note_compilations else lambda: None
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def _note(self, seconds: float) -> None:
        self.count, self._seconds = self.count + 1, self._seconds + seconds
        with contextlib.suppress(OSError):  # a full disk must not fail the compiler
            self._run.log_event("compiled", step=self.step(), seconds=round(seconds, 3))
            self._run.write_status(compilations={"count": self.count, "seconds": round(self._seconds, 3)})


class LongLived:
    """What is in memory after the first step, and whenever more code was compiled, is hidden from Python's collector
    until the end: to look through some millions of objects takes up to half a second, in one step of a few dozen.

    `num_compiled` so far. For the one owner of a process: it is about all objects.
    """

    def __init__(self, num_compiled: Callable[[], int]) -> None:
        self._num_compiled = num_compiled
        self._num_begun, self._num_seen = 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()

    def set_aside(self) -> None:
        """Before each step."""
        self._num_begun += 1
        if self._num_begun == 2 or self._num_compiled() != self._num_seen:
            self._num_seen = self._num_compiled()
            gc.collect()
            gc.freeze()


DEAD_EXPERT = "dead_expert/"  # prefix of a metric of a step: dead_expert/layer/expert
BUSY = "busy_s/"  # prefix of these seconds in a step's metrics: busy_s/peers/rank
WINDOW = 20  # logged steps
SLOW_RATIO = 1.25  # times the median of its peers
QUIET_STEPS = 100  # without another warning after a rank was reported

Seconds = dict[str, dict[int, float]]
"""Peers -> rank -> seconds. Peers have the same work: only they can be compared."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    times: float
    """Its seconds over the median of its peers', since `since_step`."""
    since_step: int

    def as_event(self) -> dict[str, str | float]:
        message = (
            f"rank {self.rank} computes {self.times:.2f} times as long as the median of the others, since step "
            f"{self.since_step}: they wait for it; look at what else runs on its machine or device"
        )
        facts = {"rank": self.rank, "times": round(self.times, 3), "since_step": self.since_step}
        return {"kind": "straggler", "message": message, **facts}


def take_seconds(record: Mapping[str, Any]) -> tuple[dict[str, object], Seconds]:
    """(a step's record without every rank's seconds, which would be most of it; the seconds)."""
    rest: dict[str, Any] = {}
    seconds: Seconds = {}
    for name, value in record.items():
        if name.startswith(BUSY):
            peers, _, rank = name.removeprefix(BUSY).partition("/")
            seconds.setdefault(peers, {})[int(rank)] = float(value)
        else:
            rest[name] = value
    return rest, seconds


def take_dead_experts(record: Mapping[str, Any]) -> tuple[dict[str, object], list[tuple[int, int]]]:
    """(a step's record with their number instead of each, (layer, expert) of those that no token chooses)."""
    rest = {name: value for name, value in record.items() if not name.startswith(DEAD_EXPERT)}
    dead = [name.removeprefix(DEAD_EXPERT).split("/") for name in record if name.startswith(DEAD_EXPERT)]
    if "expert_entropy" in rest:
        rest["dead_experts"] = len(dead)
    return rest, [(int(layer), int(expert)) for layer, expert in dead]


def tell_dead_experts(experts: Sequence[tuple[int, int]]) -> str:
    names = ", ".join(f"{expert} of layer {layer}" for layer, expert in experts[:8])
    more = f" and {len(experts) - 8} more" if len(experts) > 8 else ""
    return (
        f"no token chooses expert {names}{more}, where at least 100 would if all were alike: it learns nothing. "
        "model.router_aux_loss, or more of it, spreads tokens more evenly"
    )


class StragglerWatch:
    def __init__(self) -> None:
        self._window: deque[tuple[int, dict[int, tuple[float, float]]]] = deque(maxlen=WINDOW)
        self._reported_at: dict[int, int] = {}

    def add(self, step: int, seconds: Seconds) -> list[Straggler]:
        """One more step; returns ranks that are slow and were not reported in the last `QUIET_STEPS`."""
        compared = {rank: pair for ranks in seconds.values() for rank, pair in compare_peers(ranks).items()}
        self._window.append((step, compared))
        if len(self._window) < WINDOW:
            return []
        stragglers = []
        for rank in sorted(compared):
            pairs = [ranks[rank] for _, ranks in self._window if rank in ranks]
            is_quiet = step - self._reported_at.get(rank, -QUIET_STEPS) < QUIET_STEPS
            if is_quiet or len(pairs) < WINDOW or not is_slow(pairs):
                continue
            first = find_onset(pairs)
            own, others = (sum(side) for side in zip(*pairs[first:], strict=True))
            stragglers.append(Straggler(rank, own / max(others, 1e-9), self._window[first][0]))
            self._reported_at[rank] = step
        return stragglers


def compare_peers(seconds: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Rank -> its seconds and the median of the others'. Empty without peers."""
    if len(seconds) < 2:
        return {}
    # The higher of the middle two, where there are two: one fast rank must not make another look slow.
    ordered, middle = sorted(seconds.values()), (len(seconds) - 1) // 2
    return {rank: (own, ordered[middle + (own <= ordered[middle])]) for rank, own in seconds.items()}


def is_slow(pairs: Sequence[tuple[float, float]]) -> bool:
    """Over all steps together, and in most of them: one very slow step does not count."""
    own, others = (sum(side) for side in zip(*pairs, strict=True))
    return own > SLOW_RATIO * others and 2 * sum(mine > SLOW_RATIO * theirs for mine, theirs in pairs) > len(pairs)


def find_onset(pairs: Sequence[tuple[float, float]]) -> int:
    """The index from which the rank is slow: where the excess, summed from there to the end, is largest."""
    best, first, excess = 0.0, len(pairs) - 1, 0.0
    for place in reversed(range(len(pairs))):
        own, others = pairs[place]
        excess += own - SLOW_RATIO * others
        if excess > best:
            best, first = excess, place
    return first
