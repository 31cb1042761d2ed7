"""The service in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from lockstep.service.jobs import JobManager
from lockstep.service.schemas import JobState, JobView

_OF_A_JOB = {
    "loss": ("lockstep_job_loss", "The last training loss."),
    "tokens_per_s": ("lockstep_job_tokens_per_second", "Tokens trained on per second."),
    "memory_gib": ("lockstep_job_memory_gib", "Memory of the largest rank."),
}


def render(manager: JobManager, answers: Counter[tuple[str, int]], num_streams: int, owner: str | None) -> str:
    """`owner`: only this one's running jobs are named."""
    return "".join(f"{line}\n" for line in _lines(manager, answers, num_streams, owner))


def _lines(
    manager: JobManager, answers: Counter[tuple[str, int]], num_streams: int, owner: str | None
) -> Iterator[str]:
    counts = manager.store.counts()
    yield from _head("lockstep_jobs", "gauge", "Jobs in each state.")
    for state in get_args(JobState):
        yield _sample("lockstep_jobs", {"state": state}, counts.get(state, 0))
    yield from _head("lockstep_slots", "gauge", "Processes that jobs may have at once.")
    yield _sample("lockstep_slots", {}, manager.slots.count)
    yield from _head("lockstep_slots_free", "gauge", "Of them, those that no job has.")
    yield _sample("lockstep_slots_free", {}, manager.num_free())
    yield from _head("lockstep_streams", "gauge", "Readers that follow a log or metrics.")
    yield _sample("lockstep_streams", {}, num_streams)
    yield from _head("lockstep_http_answers_total", "counter", "Answers by method and status.")
    for (method, status), count in sorted(answers.items()):
        yield _sample("lockstep_http_answers_total", {"method": method, "status": str(status)}, count)
    running, _ = manager.list(state="running", owner=owner, limit=1000)
    yield from _of_jobs(running)


def _of_jobs(running: list[JobView]) -> Iterator[str]:
    yield from _head("lockstep_job_step", "gauge", "Steps done by each running job.")
    for job in running:
        yield _sample("lockstep_job_step", {"job": job.id, "name": job.name}, job.progress.step or 0)
    for key, (name, description) in _OF_A_JOB.items():
        yield from _head(name, "gauge", description)
        for job in running:
            value = (job.metrics.train or {}).get(key)
            if isinstance(value, (int, float)):
                yield _sample(name, {"job": job.id, "name": job.name}, value)


def _head(name: str, kind: str, description: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, Any], value: float) -> str:
    shown = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
