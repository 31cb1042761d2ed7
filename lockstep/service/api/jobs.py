"""Jobs: submit, list, look at, cancel, delete."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import yaml
from anyio import to_thread
from fastapi import APIRouter, Path, Query, Response

from lockstep.service.access import Manager, Reader, Submitter, own_job, seen_job
from lockstep.service.api.answers import documented
from lockstep.service.errors import Busy
from lockstep.service.schemas import ID_PATTERN, ConfigView, JobList, JobRequest, JobState, JobView

router = APIRouter(prefix="/api/jobs", tags=["jobs"])
JobId = Annotated[str, Path(pattern=ID_PATTERN)]
_DELETE_TIMEOUT_S = 30.0


@router.post("", status_code=201, responses=documented(400, 408, 409, 413))
def submit_job(request: JobRequest, manager: Manager, caller: Submitter) -> JobView:
    """Queue a run. The same id with the same content gives the job back instead of a second one."""
    return manager.submit(request, owner=caller.name, admin=caller.is_admin)


@router.get("", responses=documented())
def list_jobs(
    manager: Manager,
    caller: Reader,
    state: JobState | None = None,
    owner: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> JobList:
    """Newest first."""
    jobs, total = manager.list(state, owner if caller.sees_owner is None else caller.sees_owner, limit, offset)
    return JobList(jobs=jobs, total=total)


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
