"""The service itself: health, Prometheus metrics, and dry runs of a configuration in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from lockstep.config import RunConfig
from lockstep.service.access import Caller, Manager, Reader, Submitter
from lockstep.service.api.error_responses import documented
from lockstep.service.data_dir import DataDir
from lockstep.service.errors import Busy, ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import Alive, Health, JobState, JobView, PlanRequest, PlanView
from lockstep.service.settings import VERSION

_MAX_RUNNING = 2
_MAX_WAITING = 8
_POLL_INTERVAL_S = 0.5
HasLeft = Callable[[], Awaitable[bool]]
_OF_A_JOB = {
    "loss": ("lockstep_job_loss", "The last training loss."),
    "tokens_per_s": ("lockstep_job_tokens_per_second", "Tokens trained on per second."),
    "memory_gib": ("lockstep_job_memory_gib", "Memory of the largest rank."),
}
router = APIRouter(tags=["service"])


# --- dry runs --------------------------------------------------------------------------------------------------------


class DryRuns:
    """The service never loads torch: what needs a tokenizer or a model is asked of the command, with a deadline."""

    def __init__(self, data_dir: DataDir, environment: Mapping[str, str], timeout_s: float) -> None:
        self._data_dir = data_dir
        self._environment = environment
        self._timeout_s = timeout_s
        self._semaphore = asyncio.Semaphore(_MAX_RUNNING)
        self._waiting = 0

    async def plan(self, config: RunConfig, has_left: HasLeft) -> dict[str, Any]:
        """What `lockstep train --dry-run --json` prints."""
        return await self._ask(config, ["train"], ["--dry-run", "--json"], has_left)

    async def preview(self, config: RunConfig, num_rows: int, has_left: HasLeft) -> dict[str, Any]:
        """What `lockstep data --json` prints."""
        return await self._ask(config, ["data"], ["--json", "--random", str(num_rows)], has_left)

    async def _ask(
        self, config: RunConfig, command: list[str], options: list[str], has_left: HasLeft
    ) -> dict[str, Any]:
        if self._waiting >= _MAX_WAITING:
            raise Busy("too many dry runs are under way: try again in a minute")
        self._waiting += 1
        file = self._data_dir.uploads / f"{uuid.uuid4().hex}.yaml"
        try:
            async with self._semaphore:
                await to_thread.run_sync(_write, file, config.to_yaml())
                return await self._run([*command, str(file), *options], file, has_left)
        finally:
            self._waiting -= 1
            file.unlink(missing_ok=True)

    async def _run(self, arguments: list[str], file: Path, has_left: HasLeft) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lockstep",
            *arguments,
            cwd=self._data_dir.empty,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        printed = asyncio.create_task(process.communicate())
        deadline = time.monotonic() + self._timeout_s
        try:
            while not (await asyncio.wait({printed}, timeout=_POLL_INTERVAL_S))[0]:
                if await has_left():
                    raise Busy("the caller of the dry run has gone")
                if time.monotonic() > deadline:
                    raise Busy(f"the dry run took longer than {self._timeout_s:.0f} s and was ended")
            out, err = printed.result()
        finally:
            printed.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also those that tokenise
            with contextlib.suppress(ProcessLookupError):
                await process.wait()
        if process.returncode != 0:
            raise ServiceError(_sentence(err.decode(errors="replace")).replace(str(file), "the configuration"))
        return json.loads(out, parse_constant=lambda _: None)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sentence(printed: str) -> str:
    """The command's own error, or the last line of a traceback."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["the dry run ended without a message"])[-1]


# --- Prometheus' text format -----------------------------------------------------------------------------------------


def render(manager: JobManager, response_counts: Counter[tuple[str, int]], num_streams: int, owner: str | None) -> str:
    """`owner`: only this one's running jobs are named."""
    return "".join(f"{line}\n" for line in _lines(manager, response_counts, num_streams, owner))


def _lines(
    manager: JobManager, response_counts: Counter[tuple[str, int]], num_streams: int, owner: str | None
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
    for (method, status), count in sorted(response_counts.items()):
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


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    shown = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# --- routes ----------------------------------------------------------------------------------------------------------


@router.get("/health", responses=documented())
async def get_liveness() -> Alive:
    """That the service answers. For probes: it wants no token, and tells nothing else."""
    return Alive()


@router.get("/api/health", responses=documented())
async def get_health(request: Request, manager: Manager, caller: Reader) -> Health:
    """In a thread that no other request can take: whoever watches the service is answered also when it is busy."""
    return await to_thread.run_sync(_health, manager, caller, limiter=request.app.state.health_threads)


def _health(manager: JobManager, caller: Caller) -> Health:
    return Health(
        version=VERSION,
        procs=manager.slots.count,
        free=manager.num_free(),
        devices=list(manager.slots.devices),
        launcher=manager.launcher_kind,
        jobs=manager.store.counts(),
        user=caller.name,
        role=caller.role,
    )


@router.post("/api/plan", responses=documented(400, 408, 413))
async def plan_run(body: PlanRequest, request: Request, manager: Manager, caller: Submitter) -> PlanView:
    """What a configuration would train, and every mistake that can be found without training."""
    admitted = await to_thread.run_sync(lambda: manager.admit(body.config, owner=caller.name, admin=caller.is_admin))
    dry_runs: DryRuns = request.app.state.dry_runs
    printed = await dry_runs.plan(admitted.config, request.is_disconnected)
    return PlanView(config=printed["config"], plan=printed["plan"])


@router.get("/metrics", response_class=PlainTextResponse, responses=documented())
def get_prometheus(request: Request, manager: Manager, caller: Reader) -> PlainTextResponse:
    """In Prometheus' text format."""
    state = request.app.state
    text = render(manager, state.response_counts, state.streams.num_open, caller.sees_owner)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
