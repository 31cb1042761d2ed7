"""The Tinker API over HTTP: what is there of runs, checkpoints and sessions, and what may be done with a checkpoint."""

from __future__ import annotations

import asyncio
import hmac
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse

from lockstep.service.access import Caller, Reader, Submitter
from lockstep.service.errors import Forbidden, NotFound, ServiceError
from lockstep.service.tinker.routes import Payload, Server, TinkerRoute
from lockstep.service.tinker.runs import SavedWeights, TrainingRun
from lockstep.service.tinker.schemas import CheckpointLife, PathAddress, read
from lockstep.service.tinker.server import TinkerServer

_DOWNLOAD_S = 3600
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0)]
router = APIRouter(prefix="/api/v1", route_class=TinkerRoute, include_in_schema=False)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe(run: TrainingRun, saved: SavedWeights | None) -> dict[str, object] | None:
    if saved is None:
        return None
    return {
        "checkpoint_id": saved.id,
        "checkpoint_type": _TYPES[saved.kind],
        "time": _time(saved.created_at),
        "tinker_path": run.path_of(saved),
        "size_bytes": saved.size_bytes,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": _time(saved.expires_at),
    }


def _as_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """The client takes anything and reads texts."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _describe_run(run: TrainingRun) -> dict[str, object]:
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": _time(run.last_request_at),
        "last_checkpoint": _describe(run, run.newest("weights")),
        "last_sampler_checkpoint": _describe(run, run.newest("sampler_weights")),
        "user_metadata": _as_texts(run.user_metadata),
    }


def _seen_runs(server: TinkerServer, caller: Caller) -> list[TrainingRun]:
    return [run for run in server.runs.all() if caller.may_see(run.owner)]


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


@router.get("/training_runs")
async def list_runs(server: Server, caller: Reader, limit: Limit = 20, offset: Offset = 0) -> dict[str, object]:
    runs = _seen_runs(server, caller)
    page = [_describe_run(run) for run in runs[offset : offset + limit]]
    return {"training_runs": page, "cursor": _cursor(offset, limit, len(runs))}


@router.get("/training_runs/{run_id}")
async def get_run(run_id: str, server: Server, caller: Reader) -> dict[str, object]:
    return _describe_run(server.find_run(caller, run_id))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(run_id: str, server: Server, caller: Reader) -> dict[str, object]:
    run = server.find_run(caller, run_id)
    return {"checkpoints": [_describe(run, saved) for saved in run.saved()]}


@router.get("/checkpoints")
async def list_all_checkpoints(
    server: Server, caller: Reader, limit: Limit = 100, offset: Offset = 0
) -> dict[str, object]:
    found = [(run, saved) for run in _seen_runs(server, caller) for saved in run.saved()]
    found.sort(key=lambda pair: pair[1].created_at, reverse=True)
    page = [_describe(run, saved) for run, saved in found[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _cursor(offset, limit, len(found))}


@router.post("/weights_info")
async def get_weights_info(server: Server, caller: Reader, payload: Payload) -> dict[str, object]:
    run, _ = server.find_checkpoint(caller, read(PathAddress, payload).tinker_path)
    return {
        "base_model": run.base_model,
        "is_lora": True,
        "lora_rank": run.rank,
        "train_unembed": run.train_unembed,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
    }


# --- one checkpoint --------------------------------------------------------------------------------------------------


def _own(server: TinkerServer, caller: Caller, run_id: str, kind: str, name: str) -> tuple[TrainingRun, SavedWeights]:
    run, saved = server.find_checkpoint(caller, f"tinker://{run_id}/{kind}/{name}")
    if not caller.may_change(run.owner):
        raise Forbidden(f"training run {run.id} belongs to {run.owner or 'nobody'}")
    return run, saved


@router.delete(_CHECKPOINT, status_code=204)
async def delete_checkpoint(run_id: str, kind: str, name: str, server: Server, caller: Submitter) -> None:
    await server.delete_checkpoint(*_own(server, caller, run_id, kind, name))


@router.put(f"{_CHECKPOINT}/ttl", status_code=204)
async def set_life(run_id: str, kind: str, name: str, server: Server, caller: Submitter, payload: Payload) -> None:
    run, saved = _own(server, caller, run_id, kind, name)
    life = read(CheckpointLife, payload).ttl_seconds
    await asyncio.to_thread(server.runs.set_expiry, run, saved, None if life is None else time.time() + life)


@router.api_route(f"{_CHECKPOINT}/publish", methods=["POST", "DELETE"])
async def publish(run_id: str, kind: str, name: str, server: Server, caller: Submitter) -> None:
    _own(server, caller, run_id, kind, name)
    raise ServiceError("this server has no public checkpoints: who may see one is decided by the operator's tokens")


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def get_download_urls(
    run_id: str, kind: str, name: str, server: Server, caller: Reader, http: Request
) -> dict[str, object]:
    """Of every file an address that needs no token, for an hour. It is signed with a secret of this service's life."""
    run, saved = server.find_checkpoint(caller, f"tinker://{run_id}/{kind}/{name}")
    folder = server.runs.folder_of(run, saved)
    names = await asyncio.to_thread(lambda: sorted(path.name for path in folder.iterdir() if path.is_file()))
    expires = int(time.time()) + _DOWNLOAD_S
    urls = {}
    for file in names:
        path = f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/files/{file}"
        signature = server.sign(f"{path} {expires}")
        urls[file] = f"{str(http.base_url).rstrip('/')}{quote(path)}?expires={expires}&signature={signature}"
    return {"urls": urls, "expires": _time(expires)}


@router.get(f"{_CHECKPOINT}/files/{{file}}")
async def download(
    run_id: str, kind: str, name: str, file: str, expires: int, signature: str, server: Server
) -> FileResponse:
    """Whoever has a signed address: it names the file, so nobody comes to another one."""
    path = f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/files/{file}"
    signed = server.sign(f"{path} {expires}")
    if expires < time.time() or not hmac.compare_digest(signed.encode(), signature.encode()):
        raise Forbidden("this address of a file is not valid, or not any more: ask for new ones")
    run, saved = server.runs.resolve(f"tinker://{run_id}/{kind}/{name}")
    return FileResponse(server.runs.folder_of(run, saved) / file, media_type="application/octet-stream")


# --- sessions, and everything else -----------------------------------------------------------------------------------


@router.get("/sessions")
async def list_sessions(server: Server, caller: Reader, limit: Limit = 20, offset: Offset = 0) -> dict[str, object]:
    """Those that are open, and those that have left runs."""
    ids = [session.id for session in reversed(server.sessions.seen_by(caller))]
    ids += [run.session_id for run in _seen_runs(server, caller)]
    return {"sessions": list(dict.fromkeys(ids))[offset : offset + limit]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, server: Server, caller: Reader) -> dict[str, object]:
    session = server.sessions.find(caller, session_id)
    runs = [run.id for run in _seen_runs(server, caller) if run.session_id == session_id]
    if session is None and not runs:
        raise NotFound(f"there is no session {session_id[:100]}")
    return {
        "training_run_ids": runs,
        "sampler_ids": [] if session is None else session.sampler_ids,
        "user_metadata": None if session is None else _as_texts(session.user_metadata),
        "display_name": None if session is None else session.display_name,
    }


@router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def refuse_unknown(path: str, http: Request, caller: Reader) -> None:
    raise NotFound(f"this server does not offer {http.method} /api/v1/{path[:200]}")
