"""The Tinker API over HTTP: sessions, training, sampling and results."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from lockstep.service.access import Caller, Reader, Submitter
from lockstep.service.errors import NotFound, ServiceError
from lockstep.service.tinker.errors import category_of
from lockstep.service.tinker.forward_backward import parse_request
from lockstep.service.tinker.results import JSON, PROTOBUF, StoredResult
from lockstep.service.tinker.runs import Kind
from lockstep.service.tinker.sampling import as_sample_body
from lockstep.service.tinker.schemas import (
    AskedSample,
    CreateModel,
    CreateSampler,
    ModelAddress,
    RequestAddress,
    SessionAddress,
    read,
)
from lockstep.service.tinker.server import TinkerServer

_LARGE_BYTES = 1 << 16  # what is read in less than a few milliseconds keeps nobody waiting
_CONNECTIONS_LEFT = 100  # of one address, for training and everything else than samples
log = logging.getLogger(__name__)


class TinkerRoute(APIRoute):
    """Errors in the shape that the client reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handle = super().get_route_handler()

        async def handle_told(request: Request) -> Response:
            try:
                return await handle(request)
            except ServiceError as error:
                return _refuse(error.status, str(error), category_of(error))
            except RequestValidationError as error:
                problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
                return _refuse(422, "; ".join(problems))
            except HTTPException as error:
                return _refuse(error.status_code, str(error.detail))
            except Exception as error:
                log.error("%s %s failed", request.method, request.url.path, exc_info=error)
                return _refuse(500, "the service made a mistake: its log says more", "server")

        return handle_told


def _refuse(status: int, sentence: str, category: str = "user") -> JSONResponse:
    shown = sentence.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": shown, "category": category}, status)


async def _server_of(request: Request) -> TinkerServer:
    server: TinkerServer = request.app.state.tinker
    return server


async def _json_of(request: Request) -> dict[str, Any]:
    body = await request.body()
    try:
        payload = await asyncio.to_thread(_parse, body) if len(body) > _LARGE_BYTES else _parse(body)
    except (ValueError, RecursionError):
        raise ServiceError("the body is not JSON") from None
    if not isinstance(payload, dict):
        raise ServiceError("the body is not a JSON object")
    return payload


def _parse(body: bytes) -> object:
    payload = json.loads(body)
    if re.search(rb"\\u[dD][89a-fA-F]", body):  # half a character is valid JSON, and no answer could repeat it
        json.dumps(payload, ensure_ascii=False).encode()
    return payload


Server = Annotated[TinkerServer, Depends(_server_of)]
Payload = Annotated[dict[str, Any], Depends(_json_of)]
router = APIRouter(prefix="/api/v1", route_class=TinkerRoute, include_in_schema=False)


# --- the client and its sessions -------------------------------------------------------------------------------------


@router.get("/healthz")
async def get_health() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def configure_client(caller: Reader, http: Request) -> dict[str, int]:
    """Every sample under way holds a connection: as many as one address may have."""
    allowed = http.app.state.max_connections_per_address
    return {"sample_max_concurrent_requests": max(allowed - _CONNECTIONS_LEFT, allowed // 2)}


@router.post("/client/dynamic_config")
async def configure_client_again(caller: Reader) -> dict[str, bool]:
    return {"sample_cancel_enabled": True}


@router.post("/telemetry")
async def take_telemetry(caller: Reader) -> dict[str, str]:
    """Taken and forgotten: without an answer the client would send it again and again."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_capabilities(server: Server, caller: Reader) -> dict[str, object]:
    models = [
        {
            "model_name": name,
            "max_context_length": process.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        for name, process in server.processes.items()
    ]
    return {"supported_models": models}


@router.post("/create_session")
async def create_session(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    return {"session_id": server.sessions.open(caller, payload).id, "type": "create_session"}


@router.post("/session_heartbeat")
async def take_heartbeat(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    server.sessions.use(caller, read(SessionAddress, payload).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(session_id: str, server: Server, caller: Submitter) -> None:
    """Also of one that has ended by itself."""
    session = server.sessions.find(caller, session_id)
    if session is not None and caller.may_change(session.owner):
        server.end_session(session, "its session was finished")


# --- training --------------------------------------------------------------------------------------------------------


@router.post("/create_model")
async def create_model(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    session = server.sessions.use(caller, read(CreateModel, payload).session_id)
    request_id = server.training.create(session, payload)
    return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


@router.post("/get_info")
async def get_info(server: Server, caller: Submitter, payload: Payload) -> dict[str, object]:
    model = server.training.find(caller, read(ModelAddress, payload).model_id)
    served = model.process.served
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": {"arch": None, "model_name": served.name, "tokenizer_id": served.path},
        "is_lora": True,
        "lora_rank": model.adapter.rank,
        "model_name": served.name,
    }


@router.post("/unload_model")
async def unload_model(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    model = server.training.find(caller, read(ModelAddress, payload).model_id)
    server.training.unload(model.id, "it was unloaded")
    promise = server.results.find(f"{model.id}:unload") or server.results.add(
        f"{model.id}:unload", "unload_model", model.owner
    )
    server.results.finish(promise, StoredResult.of({"model_id": model.id, "type": "unload_model"}))
    return {"request_id": promise.id, "model_id": model.id}


@router.post("/forward_backward")
async def forward_backward(server: Server, caller: Submitter, http: Request) -> dict[str, str]:
    if http.headers.get("content-type", "").partition(";")[0] != PROTOBUF:
        raise ServiceError(f"the body of forward_backward is protobuf: send it with Content-Type: {PROTOBUF}")
    if "content-encoding" in http.headers:
        raise ServiceError("the body is compressed, which this server does not ask for")
    body = await http.body()
    request = await asyncio.to_thread(parse_request, body)
    kind = "forward" if request.forward_only else "forward_backward"
    operation = server.training.forward_backward(request)
    request_id = server.training.submit(caller, request.model_id, request.seq_id, kind, operation, num_bytes=len(body))
    server.sessions.touch(request.model_id.partition(":")[0])
    return {"request_id": request_id, "model_id": request.model_id}


def _address_of(server: TinkerServer, payload: dict[str, Any]) -> tuple[str, int]:
    """Of a training request: all else that may be wrong with it is told at its turn."""
    model_id, number = payload.get("model_id"), payload.get("seq_id")
    if not isinstance(model_id, str) or type(number) is not int:
        raise ServiceError("model_id and seq_id are missing: a request to a model has both")
    server.sessions.touch(model_id.partition(":")[0])
    return model_id, number


@router.post("/optim_step")
async def optim_step(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    model_id, number = _address_of(server, payload)
    operation = server.training.optim_step(payload)
    return {"request_id": server.training.submit(caller, model_id, number, "optim_step", operation)}


def _save(server: TinkerServer, caller: Caller, payload: dict[str, Any], kind: Kind) -> dict[str, str]:
    model_id, number = _address_of(server, payload)
    operation = server.training.save(payload, kind)
    return {"request_id": server.training.submit(caller, model_id, number, f"save {kind}", operation)}


@router.post("/save_weights")
async def save_weights(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    return _save(server, caller, payload, "weights")


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    return _save(server, caller, payload, "sampler_weights")


@router.post("/save_weights_external")
async def save_weights_external(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    return _save(server, caller, payload, "external_weights")


@router.post("/load_weights")
async def load_weights(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    if payload.get("session_id") is not None:
        raise ServiceError("load_weights: create the model first, and load into it by its model_id and seq_id")
    model_id, number = _address_of(server, payload)
    operation = server.training.load(caller, payload)
    return {"request_id": server.training.submit(caller, model_id, number, "load_weights", operation)}


# --- sampling --------------------------------------------------------------------------------------------------------


@router.post("/create_sampling_session")
async def create_sampling_session(server: Server, caller: Submitter, payload: Payload) -> dict[str, str]:
    session = server.sessions.use(caller, read(CreateSampler, payload).session_id)
    sampler_id = server.samplers.create(caller, session, payload)
    return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}


@router.post("/asample")
async def sample(server: Server, caller: Submitter, payload: Payload) -> dict[str, object]:
    request = await asyncio.to_thread(_read_sample, payload)
    request_id = server.samplers.sample(caller, request)
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{index}" for index in range(request.num_samples)],
    }


def _read_sample(payload: dict[str, Any]) -> AskedSample:
    request = read(AskedSample, payload)
    as_sample_body(request)  # what is wrong with it is said at once
    return request


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, server: Server, caller: Reader) -> dict[str, object]:
    sampler = server.samplers.find(caller, sampler_id)
    served = sampler.process.served
    return {"sampler_id": sampler.id, "base_model": served.name, "model_path": sampler.model_path}


# --- results ---------------------------------------------------------------------------------------------------------


@router.post("/retrieve_future")
async def retrieve_future(server: Server, caller: Reader, payload: Payload) -> Response:
    request_id = read(RequestAddress, payload).request_id
    found = server.find_result(caller, request_id)
    answer = found if isinstance(found, StoredResult) else await server.results.wait(found)
    if answer is None:
        body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return Response(json.dumps(body), media_type=JSON)
    return Response(answer.content, media_type=answer.media_type)


@router.post("/cancel_future", status_code=204)
async def cancel_future(server: Server, caller: Submitter, payload: Payload) -> None:
    request_id = read(RequestAddress, payload).request_id
    promise = server.results.find(request_id)
    if promise is None or not caller.may_change(promise.owner):
        raise NotFound(f"there is no request {request_id[:200]}")
    server.samplers.cancel(promise)
