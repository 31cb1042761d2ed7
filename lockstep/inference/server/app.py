"""The HTTP application: OpenAI's routes for chat, completions and models, and those for whoever operates it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lockstep.inference.server.answers import Answer
from lockstep.inference.server.engine_thread import DecodeRequest, EngineThread, Ticket
from lockstep.inference.server.errors import ApiError
from lockstep.inference.server.following import EventStream, Follower
from lockstep.inference.server.gate import Gate
from lockstep.inference.server.request_reader import RequestReader
from lockstep.inference.server.requests import ChatBody, CompletionBody, SamplingBody, parse_body
from lockstep.inference.server.served import ServedModels
from lockstep.inference.server.settings import ServerSettings
from lockstep.inference.server.token_text import TokenTexts


class ModelServer:
    """`slow`: fast ways that could not be taken; /health says so."""

    def __init__(self, models: ServedModels, settings: ServerSettings, slow: list[str] | None = None) -> None:
        self.models, self.settings, self.slow = models, settings, [] if slow is None else slow
        self.engine = EngineThread(models.engine, settings.max_waiting)
        self.answers: Counter[tuple[str, int]] = Counter()
        self._reader = RequestReader(models, settings)
        self._texts = TokenTexts(models.engine.tokenizer)

    def app(self) -> ASGIApp:
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {ApiError: _tell, 404: _no_route, 405: _no_method, Exception: _own_fault}
        inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._live)
        return Gate(inner, self.settings, self.answers, {route.path for route in routes})

    @contextlib.asynccontextmanager
    async def _live(self, _: object) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            self.engine.stop()
            self._reader.close()

    async def drain(self) -> None:
        """Before connections are closed: answers in progress end, or are cut with a word about it."""
        await self.engine.close(self.settings.grace_s)

    # --- routes -----------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> object:
        body = parse_body(ChatBody, await self._read(request))
        model, tools, messages = self.models.find(body.model), body.offered_tools, body.conversation()
        prompt = await self._reader.run(lambda: self.models.encode(model, messages, tools))
        work = self._reader.make_request(model, body, [prompt], body.wanted_tokens, body.num_top)

        def make(ticket: Ticket) -> Answer:
            samples = work.params.num_samples
            return Answer(
                "chat", model.name, ticket.sequences, self._texts, num_samples=samples, with_tools=bool(tools)
            )

        return await self._respond(request, body, work, make)

    async def _complete(self, request: Request) -> object:
        body = parse_body(CompletionBody, await self._read(request))
        model, prompts = self.models.find(body.model), body.prompts
        encoded, shown = await self._reader.run(lambda: self._reader.encode(prompts))
        work = self._reader.make_request(model, body, encoded, body.max_tokens, body.logprobs)
        echoes = shown if body.echo else None

        def make(ticket: Ticket) -> Answer:
            samples = work.params.num_samples
            return Answer("text", model.name, ticket.sequences, self._texts, num_samples=samples, echoes=echoes)

        return await self._respond(request, body, work, make)

    async def _read(self, request: Request) -> bytes:
        """The whole body, within its limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be application/json")
        limit, parts, size = self.settings.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise ApiError(413, f"the body is larger than the {limit:,} bytes allowed")
                    parts.append(part)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_timeout_s:.0f} s") from error
        return b"".join(parts)

    async def _list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.models.describe()})

    async def _show_model(self, request: Request) -> Response:
        name = self.models.find(request.path_params["name"]).name
        return JSONResponse(next(model for model in self.models.describe() if model["id"] == name))

    async def _health(self, _: Request) -> Response:
        stuck = self.engine.stuck_s > self.settings.timeout_s  # every request has met its deadline by then
        about = {
            "status": "stuck" if stuck else "ok",
            "models": self.models.names,
            "rows": {"slots": self.engine.num_slots, "in_use_or_waiting": self.engine.num_rows},
            "slow": self.slow,
        }
        return JSONResponse(about, 503 if stuck else 200)

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse("\n".join(self._metric_lines()) + "\n")

    def _metric_lines(self) -> Iterator[str]:
        yield "# TYPE lockstep_http_answers_total counter"
        for (path, status), count in sorted(self.answers.items()):
            yield f'lockstep_http_answers_total{{path="{path}",status="{status}"}} {count}'
        for name in ("prompt_tokens", "completion_tokens", "cancelled", "refused"):
            yield f"# TYPE lockstep_{name}_total counter"
            yield f"lockstep_{name}_total {self.engine.counts[name]}"
        for name, value in (("rows", self.engine.num_rows), ("slots", self.engine.num_slots)):
            yield f"# TYPE lockstep_{name} gauge"
            yield f"lockstep_{name} {value}"

    async def _respond(
        self, request: Request, body: SamplingBody, work: DecodeRequest, make: Callable[[Ticket], Answer]
    ) -> object:
        deadline = time.monotonic() + self.settings.timeout_s
        follower = Follower(self.engine, self.engine.submit(work), deadline)
        if body.stream:
            return EventStream(follower, make, with_usage=body.wants_usage)
        answer = await follower.wait(request.receive)
        return Response(status_code=499) if answer is None else JSONResponse(await self._reader.run(make(answer).whole))


def _tell(_: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


def _no_route(request: Request, _: Exception) -> Response:
    return _tell(request, ApiError(404, f"there is nothing at {request.url.path[:200]}", code="no_such_route"))


def _no_method(request: Request, _: Exception) -> Response:
    return _tell(request, ApiError(405, f"{request.url.path[:200]} does not take {request.method}"))


def _own_fault(request: Request, _: Exception) -> Response:
    return _tell(request, ApiError(500, "a fault of the server: its log says more"))
