"""Data sets: upload, list, preview, delete."""

from __future__ import annotations

import uuid
from collections import Counter
from functools import partial
from typing import Annotated, BinaryIO

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request, Response

from lockstep.service.access import Caller, Manager, Reader, Submitter
from lockstep.service.api.error_responses import documented
from lockstep.service.api.system import DryRuns
from lockstep.service.errors import Busy, Forbidden, NotFound
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import ID_PATTERN, DatasetList, DatasetPreview, DatasetView

router = APIRouter(prefix="/api/datasets", tags=["data sets"])
Name = Annotated[str, Path(pattern=ID_PATTERN)]
_MAX_UPLOADS = 8
_MAX_UPLOADS_EACH = 3
_WRITE_BYTES = 1 << 20
_BODY = {
    "requestBody": {
        "required": True,
        "description": "One JSON object per line, or one JSON array of objects.",
        "content": {
            "application/jsonl": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "array", "items": {"type": "object"}, "minItems": 1}},
        },
    }
}


def _seen(manager: JobManager, caller: Caller, name: str) -> DatasetView:
    dataset = manager.store.find_dataset(name)
    if dataset is None or not caller.may_see(dataset.owner):
        raise NotFound(f"there is no data set {name}")
    return manager.datasets.get(name)


@router.get("", responses=documented())
def list_datasets(manager: Manager, caller: Reader) -> DatasetList:
    return DatasetList(datasets=manager.datasets.list(caller.sees_owner))


@router.post("/{name}", status_code=201, responses=documented(400, 408, 409, 413, 429), openapi_extra=_BODY)
async def upload_dataset(name: Name, request: Request, manager: Manager, caller: Submitter) -> DatasetView:
    """A configuration names it as `dataset:NAME`. Uploading the same rows again changes nothing."""
    uploads: Counter[str] = request.app.state.uploads
    if uploads.total() >= _MAX_UPLOADS or (uploads[caller.name] >= _MAX_UPLOADS_EACH and not caller.is_admin):
        raise Busy("too many uploads are under way: try again later")
    await to_thread.run_sync(manager.datasets.check_room, name)
    uploads[caller.name] += 1
    incoming = manager.data_dir.uploads / uuid.uuid4().hex
    try:
        with incoming.open("w+b") as file:
            await _receive(request, file)
            add = partial(manager.datasets.add_file, name, file, caller.name, limited=not caller.is_admin)
            return await to_thread.run_sync(add)
    finally:
        uploads[caller.name] -= 1
        incoming.unlink(missing_ok=True)


async def _receive(request: Request, file: BinaryIO) -> None:
    waiting = bytearray()
    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= _WRITE_BYTES:
            await to_thread.run_sync(file.write, bytes(waiting))
            waiting.clear()
    await to_thread.run_sync(file.write, bytes(waiting))
    await to_thread.run_sync(file.flush)


@router.get("/{name}", responses=documented())
def get_dataset(name: Name, manager: Manager, caller: Reader) -> DatasetView:
    return _seen(manager, caller, name)


@router.get("/{name}/preview", responses=documented())
async def preview_dataset(
    name: Name,
    request: Request,
    manager: Manager,
    caller: Reader,
    model: Annotated[str | None, Query(min_length=1, max_length=500)] = None,
    rows: Annotated[int, Query(ge=1, le=50)] = 5,
    max_length: Annotated[int, Query(ge=2, le=4096)] = 2048,
) -> DatasetPreview:
    """The first rows; with `model`, also what a run would learn of them: tokens, masks, lengths, warnings."""
    await to_thread.run_sync(_seen, manager, caller, name)
    first = await to_thread.run_sync(manager.datasets.preview, name, rows)
    if model is None:
        return DatasetPreview(rows=first)
    if caller.role == "read":
        raise Forbidden("this token may only read, and a preview with a model starts a process: leave model out")
    config = {"model": model, "data": {"train": f"dataset:{name}", "max_length": max_length}}
    owner = caller.sees_owner or ""
    admitted = await to_thread.run_sync(lambda: manager.admit(config, owner=owner))
    dry_runs: DryRuns = request.app.state.dry_runs
    await request.body()  # nothing; but what comes after it is that the other side has left
    sheet = await dry_runs.preview(admitted.config, rows, request.is_disconnected)
    return DatasetPreview(rows=first, sheet=sheet)


@router.delete("/{name}", status_code=204, response_class=Response, responses=documented(409))
def delete_dataset(name: Name, manager: Manager, caller: Submitter) -> None:
    """Not while a job that has not ended needs it."""
    if not caller.may_change(_seen(manager, caller, name).owner):
        raise Forbidden(f"the data set {name} is not yours")
    manager.datasets.delete(name)
