"""Jobs: submit, list, cancel, delete; and what their runs have written: logs, metrics, events, artifacts."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated

import yaml
from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from starlette.responses import FileResponse, PlainTextResponse, StreamingResponse

from lockstep.rundir import RunDir
from lockstep.service.access import Caller, Manager, Reader, Submitter, own_job, seen_job
from lockstep.service.api.error_responses import documented
from lockstep.service.errors import Busy
from lockstep.service.jobs import JobManager
from lockstep.service.run_files import (
    PIECE_BYTES,
    Streams,
    find_artifact,
    is_about_the_run,
    list_artifacts,
    list_checkpoints,
    list_records,
    log_path,
    read_piece,
    read_pieces,
    read_whole_lines,
    split_log,
    split_metrics,
    start_from,
    start_of_tail,
)
from lockstep.service.schemas import (
    ID_PATTERN,
    ArtifactList,
    CheckpointList,
    ConfigView,
    EventList,
    JobList,
    JobRequest,
    JobState,
    JobView,
    MetricsPage,
    SampleList,
)

router = APIRouter(prefix="/api/jobs", tags=["jobs"])
JobId = Annotated[str, Path(pattern=ID_PATTERN)]
_DELETE_TIMEOUT_S = 30.0
run_router = APIRouter(prefix="/api/jobs/{job_id}", tags=["runs"])
Rank = Annotated[str | None, Query(pattern=r"^(launcher|\d{1,5})$")]
Offset = Annotated[int, Query(ge=0, lt=2**62)]
_SSE = {"content": {"text/event-stream": {}}, "description": "Server-sent events; the last one is called end."}
_MAX_PAGE_BYTES = 8 << 20


@router.post("", status_code=201, responses=documented(400, 408, 409, 413, 429))
async def submit_job(wanted: JobRequest, request: Request, manager: Manager, caller: Submitter) -> JobView:
    """Queue a run. The same id with the same content gives the job back instead of a second one."""
    submit = partial(manager.submit, wanted, owner=caller.name, admin=caller.is_admin)
    return await to_thread.run_sync(submit, limiter=request.app.state.submission_threads)


@router.get("", responses=documented())
def list_jobs(
    manager: Manager,
    caller: Reader,
    state: JobState | None = None,
    owner: Annotated[str | None, Query(max_length=64)] = None,
    search: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> JobList:
    """Newest first. `search`: each of its words is in the name, id, owner or model. `counts` are of every state."""
    seen = owner if caller.sees_owner is None else caller.sees_owner
    jobs, total = manager.list(state, seen, limit, offset, search)
    return JobList(jobs=jobs, total=total, counts=manager.store.counts(seen, search))


@router.get("/{job_id}", responses=documented())
def get_job(job_id: JobId, manager: Manager, caller: Reader) -> JobView:
    return manager.view(seen_job(manager, caller, job_id))


@router.post("/{job_id}/cancel", responses=documented(400, 408, 413))
def cancel_job(job_id: JobId, manager: Manager, caller: Submitter) -> JobView:
    """A job that waits is cancelled at once, one that runs within seconds. One that has ended stays what it is."""
    own_job(manager, caller, job_id)
    return manager.cancel(job_id)


@router.delete("/{job_id}", status_code=204, response_class=Response, responses=documented())
async def delete_job(job_id: JobId, manager: Manager, caller: Submitter) -> None:
    """With all its files. One that runs is cancelled first."""
    await to_thread.run_sync(own_job, manager, caller, job_id)
    job = await to_thread.run_sync(manager.request_delete, job_id)
    deadline = time.monotonic() + _DELETE_TIMEOUT_S
    while not await to_thread.run_sync(manager.is_gone, job):
        if time.monotonic() > deadline:
            raise Busy(f"job {job_id} is still being ended, and will be deleted then")
        await asyncio.sleep(0.05)


@router.get("/{job_id}/config", responses=documented())
def get_job_config(job_id: JobId, manager: Manager, caller: Reader) -> ConfigView:
    """Resolved, every default written out."""
    text = seen_job(manager, caller, job_id).config
    return ConfigView(yaml=text, config=yaml.safe_load(text))


# --- what a run has written ------------------------------------------------------------------------------------------


def _run(manager: JobManager, caller: Caller, job_id: str) -> RunDir:
    return RunDir(manager.data_dir.jobs / seen_job(manager, caller, job_id).id)


def _streams(request: Request) -> Streams:
    streams: Streams = request.app.state.streams
    return streams


@run_router.get("/logs", response_class=PlainTextResponse, responses=documented())
def get_logs(
    job_id: JobId,
    manager: Manager,
    caller: Reader,
    tail: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    rank: Rank = None,
) -> str:
    """The last lines of a rank's log; `rank=launcher` is what the launcher printed. The whole file is an artifact."""
    path = log_path(_run(manager, caller, job_id), rank)
    return read_piece(path, start_of_tail(path, tail), _MAX_PAGE_BYTES).decode(errors="replace")


@run_router.get("/logs/stream", response_class=StreamingResponse, responses={**documented(), 200: _SSE})
def stream_logs(
    request: Request,
    job_id: JobId,
    manager: Manager,
    caller: Reader,
    tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
    rank: Rank = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Messages of `{"text": ...}` until the job has ended; `tail` begins with the last lines instead of the first."""
    run = _run(manager, caller, job_id)
    path = log_path(run, rank or "0")  # one file throughout: offsets are of one file
    begin = start_of_tail(path, tail) if tail is not None else 0
    return _streams(request).respond(
        path,
        lambda: manager.store.state(job_id),
        split_log,
        start_from(last_event_id, begin),
    )


@run_router.get("/metrics", responses=documented())
def get_metrics(job_id: JobId, manager: Manager, caller: Reader, after: Offset = 0) -> MetricsPage:
    """Records in the order written, from an offset on: give `next` as the next `after`. At most some megabytes at
    once. Where a job went on from a checkpoint, the later record of a step counts."""
    path = _run(manager, caller, job_id).path / "metrics.jsonl"
    records, offset = [], after
    while offset - after < _MAX_PAGE_BYTES:
        piece = read_whole_lines(path, offset, to_the_end=False)
        if not piece:
            break
        records += [record for record, _ in split_metrics(piece, offset)]
        offset += len(piece)
        if len(piece) < PIECE_BYTES // 2:
            break
    return MetricsPage(records=records, next=offset)


@run_router.get("/metrics/stream", response_class=StreamingResponse, responses={**documented(), 200: _SSE})
def stream_metrics(
    request: Request,
    job_id: JobId,
    manager: Manager,
    caller: Reader,
    after: Offset = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Each message is a record, until the job has ended."""
    path = _run(manager, caller, job_id).path / "metrics.jsonl"
    return _streams(request).respond(
        path, lambda: manager.store.state(job_id), split_metrics, start_from(last_event_id, after)
    )


@run_router.get("/events", responses=documented())
def get_events(
    job_id: JobId, manager: Manager, caller: Reader, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
) -> EventList:
    """What happened: warnings, checkpoints, resumes. The last ones, oldest first."""
    return EventList(events=list_records(_run(manager, caller, job_id).path / "events.jsonl", limit))


@run_router.get("/samples", responses=documented())
def get_samples(
    job_id: JobId, manager: Manager, caller: Reader, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> SampleList:
    """Answers that the model gave in validation, if the run writes some."""
    return SampleList(samples=list_records(_run(manager, caller, job_id).path / "samples.jsonl", limit))


@run_router.get("/checkpoints", responses=documented())
def get_checkpoints(job_id: JobId, manager: Manager, caller: Reader) -> CheckpointList:
    return CheckpointList(checkpoints=list_checkpoints(_run(manager, caller, job_id)))


@run_router.get("/artifacts", responses=documented())
def get_artifacts(job_id: JobId, manager: Manager, caller: Reader) -> ArtifactList:
    """Every file of the run: exports, checkpoints, logs, metrics."""
    return ArtifactList(artifacts=list_artifacts(_run(manager, caller, job_id)))


@run_router.get(
    "/artifacts/{path:path}",
    response_class=FileResponse,
    responses={
        **documented(400, 416),
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        206: {"content": {"application/octet-stream": {}}, "description": "The part that the Range header names."},
    },
)
def download_artifact(job_id: JobId, path: str, manager: Manager, caller: Reader) -> Response:
    """One file, or with a Range header a part of it. Texts about the run itself come whole, with files named as in
    requests."""
    file = find_artifact(_run(manager, caller, job_id), path)
    if not is_about_the_run(path):
        return FileResponse(file, media_type="application/octet-stream", filename=file.name)
    pieces = (manager.admission.places.hide(piece) for piece in read_pieces(file))
    headers = {"content-disposition": f'attachment; filename="{file.name}"'}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)
