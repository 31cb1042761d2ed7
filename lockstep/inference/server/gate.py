"""What is checked of every request before it is routed: host, key and announced size."""

from __future__ import annotations

import hmac
from collections import Counter

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.inference.server.errors import ApiError
from lockstep.inference.server.settings import LOOPBACK, ServerSettings

_OPEN = ("/health",)  # without a key, for probes


class Gate:
    def __init__(
        self, app: ASGIApp, settings: ServerSettings, answers: Counter[tuple[str, int]], paths: set[str]
    ) -> None:
        self._app, self._settings, self._answers, self._paths = app, settings, answers, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._answers[path, message["status"]] += 1
            await send(message)

        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send_counted)
            return
        await self._app(scope, receive, send_counted)

    def _check(self, scope: Scope, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None:
            self._check_host(headers)
        elif scope["path"] not in _OPEN:
            given = headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                raise ApiError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
        length, limit = headers.get("content-length", "0"), self._settings.max_body_bytes
        if length.isdecimal() and int(length[:20]) > limit:
            raise ApiError(413, f"the body is larger than the {limit:,} bytes allowed")

    def _check_host(self, headers: Headers) -> None:
        """Without a key, a page of another site must not reach us under a name that it made point here."""
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name.strip("[]").lower() not in LOOPBACK:
            raise ApiError(421, "this server answers to localhost only: it has no API key")
