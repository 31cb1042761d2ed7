"""The one path of metrics: a record into metrics.jsonl, status.json and TensorBoard, and warnings that follow from it.

Only the run directory's owner writes. Must not know models or this process's rank.
"""

from __future__ import annotations

import time
from typing import Any

from lockstep.config import LoggingConfig
from lockstep.rundir import RunDir
from lockstep.train.progress import Progress
from lockstep.train.stragglers import StragglerWatch, take_seconds


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
