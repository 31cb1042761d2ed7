"""One request from its ticket to its answer: waited for, or sent piece by piece; given up when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lockstep.inference.server.answers import Answer
from lockstep.inference.server.engine_thread import EngineThread, Ticket
from lockstep.inference.server.errors import ApiError

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
log = logging.getLogger(__name__)


class Follower:
    """Must be waited for, or read to its end: both release the ticket."""

    def __init__(self, engine: EngineThread, ticket: Ticket, deadline: float) -> None:
        self._engine, self._deadline = engine, deadline
        self.ticket = ticket

    async def wait(self, receive: Receive) -> Ticket | None:
        """The ticket when everything is there; None if the client has left."""
        async with contextlib.aclosing(self.read(receive)) as events:
            async for ended in events:
                if ended:
                    return self.ticket
        return None

    async def read(self, receive: Receive) -> AsyncGenerator[bool, None]:
        """Whenever there may be something new, and with True when that is the last. Ends early when nobody listens.

        Whatever goes wrong is an ApiError.
        """
        ticket = self.ticket
        listening = asyncio.create_task(_listen(receive, ticket))
        try:
            while True:
                ended = await self._next()
                if ticket.gone:
                    return
                yield ended
                if ended:
                    return
        finally:
            listening.cancel()
            self._engine.release(ticket)

    async def _next(self) -> bool:
        ticket = self.ticket
        try:
            async with asyncio.timeout(max(self._deadline - time.monotonic(), 0)):
                await ticket.woken.wait()
        except TimeoutError as error:
            raise ApiError(504, "the answer was not complete in time: ask for less", code="deadline") from error
        ticket.woken.clear()
        ended = ticket.ended  # before anything is read: what comes later wakes once more
        if ticket.error is not None and not ticket.gone:
            raise _as_api_error(ticket.error, of_request=ticket.call is None)
        return ended


async def _listen(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.leave()


def _as_api_error(error: Exception, *, of_request: bool) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if of_request and isinstance(error, ValueError):
        return ApiError(400, str(error))
    log.error("an answer was lost: %r", error)
    return ApiError(500, f"the engine failed: {error}"[:500], code="engine_failed")


class EventStream:
    """An ASGI response: server-sent events as OpenAI sends them."""

    def __init__(self, follower: Follower, make: Callable[[Ticket], Answer], *, with_usage: bool) -> None:
        self._follower, self._make, self._with_usage = follower, make, with_usage
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_all(receive, send)
        except ApiError as error:
            if not self._started:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": _event(error.body)})
        except OSError:
            return  # the client left while something was sent

    async def _send_all(self, receive: Receive, send: Send) -> None:
        answer: Answer | None = None
        async with contextlib.aclosing(self._follower.read(receive)) as events:
            async for ended in events:
                answer = answer or self._make(self._follower.ticket)
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    self._started = True
                chunks = answer.chunks(ended=ended, with_usage=self._with_usage)
                body = b"".join(map(_event, chunks)) + (b"data: [DONE]\n\n" if ended else b"")
                if body or ended:
                    await send({"type": "http.response.body", "body": body, "more_body": not ended})


def _event(content: Mapping[str, object]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n".encode()
