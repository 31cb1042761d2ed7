"""A job as others see it: the row of the store, and what its run directory says about progress and metrics.

Reads only, and little: a metrics file is read from its end. Must not know HTTP.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.rundir import MetricRecord, RunDir
from lockstep.service.schemas import FINISHED, JobMetrics, JobProgress, JobView
from lockstep.service.slots import Slots
from lockstep.service.store import Job

_TAIL_BYTES = 1 << 16
_SAME = [
    field.name for field in fields(Job) if field.name in JobView.model_fields and field.name not in ("state", "reason")
]


def view_job(job: Job, run: RunDir, slots: Slots, queue_position: int | None) -> JobView:
    launched = job.prepared_at is not None
    status = run.status() if launched else {}
    metrics = last_metrics(run.path / "metrics.jsonl") if launched else JobMetrics()
    reason = job.reason
    if job.wish and job.state not in FINISHED:
        reason = "being cancelled"
    uses_gpus = job.device != "cpu"
    return JobView(
        **{name: getattr(job, name) for name in _SAME},
        state=job.state,  # type: ignore[arg-type]
        reason=reason,
        devices=list(slots.devices_of(job.slots)) if uses_gpus else [],
        cancelling=bool(job.wish) and job.state not in FINISHED,
        queue_position=queue_position,
        progress=progress_of(status, metrics, job.state),
        metrics=metrics,
    )


def progress_of(status: dict[str, Any], metrics: JobMetrics, state: str) -> JobProgress:
    record = metrics.train or {}
    total = _whole(status.get("total_steps"))
    step = max((s for s in (_whole(status.get("step")), _whole(record.get("step"))) if s is not None), default=None)
    fraction = 1.0 if state == "completed" else min(step / total, 1.0) if step is not None and total else 0.0
    seconds = record.get("step_time_s")
    eta_s = None
    if state == "running" and step is not None and total and isinstance(seconds, (int, float)):
        age = max(time.time() - float(record.get("time", time.time())), 0.0)
        eta_s = max((total - step) * float(seconds) - age, 0.0)
    phase = status.get("phase") if state not in FINISHED and state != "queued" else None
    return JobProgress(
        phase=phase if isinstance(phase, str) else None, step=step, total_steps=total, fraction=fraction, eta_s=eta_s
    )


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def last_metrics(path: Path) -> JobMetrics:
    found: dict[str, dict[str, Any]] = {}
    for line in reversed(_read_tail(path).split(b"\n")):
        try:
            record = parse_record(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.setdefault(str(record.get("split", "train")), MetricRecord(record))
        if len(found) >= 2:
            break
    return JobMetrics(train=found.get("train"), validation=found.get("validation"))


def parse_record(line: bytes) -> Any:
    """A line of metrics or events; what is not a number for JSON (NaN, Infinity) is null for those who read."""
    return json.loads(line, parse_constant=lambda _: None)


def _read_tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""


def traceback_of(run: RunDir, limit: int = 8000) -> str:
    """What the first rank that failed printed at its end, if it was an exception."""
    failures = run.failures()
    if not failures:
        return ""
    tail = _read_tail(run.logs / f"rank-{failures[0]['rank']}.log").decode(errors="replace")
    start = tail.rfind("Traceback (most recent call last)")
    return tail[start:].strip()[-limit:] if start >= 0 else ""
