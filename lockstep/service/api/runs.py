"""What a job's run has written: logs, metrics, events, checkpoints, artifacts, samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import FileResponse, PlainTextResponse, StreamingResponse

from lockstep.rundir import RunDir
from lockstep.service.access import Caller, Manager, Reader, seen_job
from lockstep.service.api.answers import documented
from lockstep.service.api.jobs import JobId
from lockstep.service.jobs import JobManager
from lockstep.service.reading import (
    PIECE_BYTES,
    find_artifact,
    list_artifacts,
    list_checkpoints,
    list_records,
    log_path,
    read_piece,
    read_whole_lines,
    start_of_tail,
)
from lockstep.service.schemas import ArtifactList, CheckpointList, EventList, MetricsPage, SampleList
from lockstep.service.streams import Streams, split_log, split_metrics, start_from

router = APIRouter(prefix="/api/jobs/{job_id}", tags=["runs"])
Rank = Annotated[str | None, Query(pattern=r"^(launcher|\d{1,5})$")]
Offset = Annotated[int, Query(ge=0, lt=2**62)]
_SSE = {"content": {"text/event-stream": {}}, "description": "Server-sent events; the last one is called end."}
_MAX_PAGE_BYTES = 8 << 20


def _run(manager: JobManager, caller: Caller, job_id: str) -> RunDir:
    return RunDir(manager.data_dir.jobs / seen_job(manager, caller, job_id).id)


def _streams(request: Request) -> Streams:
    streams: Streams = request.app.state.streams
    return streams


@router.get("/logs", response_class=PlainTextResponse, responses=documented())
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


@router.get("/logs/stream", response_class=StreamingResponse, responses={**documented(), 200: _SSE})
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


@router.get("/metrics", responses=documented())
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


@router.get("/metrics/stream", response_class=StreamingResponse, responses={**documented(), 200: _SSE})
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


@router.get("/events", responses=documented())
def get_events(
    job_id: JobId, manager: Manager, caller: Reader, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
) -> EventList:
    """What happened: warnings, checkpoints, resumes. The last ones, oldest first."""
    return EventList(events=list_records(_run(manager, caller, job_id).path / "events.jsonl", limit))


@router.get("/samples", responses=documented())
def get_samples(
    job_id: JobId, manager: Manager, caller: Reader, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> SampleList:
    """Answers that the model gave in validation, if the run writes some."""
    return SampleList(samples=list_records(_run(manager, caller, job_id).path / "samples.jsonl", limit))


@router.get("/checkpoints", responses=documented())
def get_checkpoints(job_id: JobId, manager: Manager, caller: Reader) -> CheckpointList:
    return CheckpointList(checkpoints=list_checkpoints(_run(manager, caller, job_id)))


@router.get("/artifacts", responses=documented())
def get_artifacts(job_id: JobId, manager: Manager, caller: Reader) -> ArtifactList:
    """Every file of the run: exports, checkpoints, logs, metrics."""
    return ArtifactList(artifacts=list_artifacts(_run(manager, caller, job_id)))


@router.get(
    "/artifacts/{path:path}",
    response_class=FileResponse,
    responses={
        **documented(400, 416),
        200: {"content": {"application/octet-stream": {}}, "description": "The file."},
        206: {"content": {"application/octet-stream": {}}, "description": "The part that the Range header names."},
    },
)
def download_artifact(job_id: JobId, path: str, manager: Manager, caller: Reader) -> FileResponse:
    """One file, or with a Range header a part of it."""
    found = find_artifact(_run(manager, caller, job_id), path)
    return FileResponse(found, media_type="application/octet-stream", filename=found.name)
