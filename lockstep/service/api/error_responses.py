"""Error responses of the API: their one shape, and the statuses that each kind of route documents."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from lockstep.config import ConfigError
from lockstep.service.errors import NoSpace, ServiceError
from lockstep.service.rows import raise_if_full
from lockstep.service.schemas import ErrorView
from lockstep.service.store import describe_fault

log = logging.getLogger(__name__)
_MEANINGS = {
    400: "The body could not be read.",
    401: "No token, or one that is not known.",
    403: "The token's role, or the service, does not allow it.",
    404: "There is no such thing, or not for this token.",
    408: "The body took too long to arrive.",
    409: "It clashes with what is there.",
    413: "Too large, or too many.",
    416: "The range is not in the file.",
    421: "Asked under a name that is not this machine's.",
    429: "As many as one user may have: wait, or delete some.",
    422: "The request cannot be done; the message says why.",
    503: "Too much at once, or it took too long: try again.",
    507: "The disk is full.",
}
_CODES = {400: "unreadable", 404: "not_found", 405: "method_not_allowed", 408: "too_slow", 413: "too_large"}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the description of a route. Errors are JSON also where the answer itself is not."""
    every = {401, 403, 404, 421, 422, 503, 507, *statuses}
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorView"}}}
    return {status: {"description": _MEANINGS[status], "content": body} for status in sorted(every)}


def describe_errors(app: FastAPI) -> None:
    """Their shape, into the OpenAPI document. Once every route is there."""
    schemas = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    shape = ErrorView.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= {**shape.pop("$defs"), "ErrorView": shape}


def error_response(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A message may repeat half a character of the request, which no encoding has."""
    shown = message.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": {"code": code, "message": shown}}, status, headers=headers)


def install_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return error_response(error.status, error.code, str(error), headers)

    @app.exception_handler(ConfigError)
    async def bad_config(request: Request, error: ConfigError) -> JSONResponse:
        return error_response(422, "invalid_config", str(error))

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        kind = request.headers.get("content-type", "")
        if "json" not in kind and any(tuple(problem["loc"]) == ("body",) for problem in problems):
            return error_response(422, "invalid", "the body must be JSON: send it with Content-Type: application/json")
        return error_response(422, "invalid", "; ".join(_explain(problem) for problem in problems))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, "error")
        return error_response(error.status_code, code, str(error.detail), error.headers)

    @app.exception_handler(SQLAlchemyError)
    async def no_database(request: Request, error: SQLAlchemyError) -> JSONResponse:
        problem = describe_fault(error)
        log.error("the database did not answer: %s", problem)
        return error_response(503, "busy", f"the database does not answer: {problem}: try again later")

    @app.exception_handler(OSError)
    async def no_space(request: Request, error: OSError) -> JSONResponse:
        try:
            raise_if_full(error)
        except NoSpace as full:
            log.error("the disk is full", exc_info=error)
            return error_response(full.status, full.code, str(full))
        raise error

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, "internal", "the service made a mistake: its log says more")


def _explain(problem: dict[str, Any]) -> str:
    """Without the input: it may hold what should not be repeated."""
    place = ".".join(str(part) for part in problem["loc"] if part != "body")
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])
