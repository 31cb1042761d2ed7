"""Checks of every request before it is routed (host, origin, token, size and time of the body), and its headers.

Plain ASGI, so that streams stay streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from urllib.parse import urlsplit

from anyio import to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.service.access import Tokens, identify
from lockstep.service.errors import Forbidden, Misdirected, ServiceError, TooLarge
from lockstep.service.places import Places
from lockstep.service.settings import LOOPBACK, ServiceSettings

_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_METHODS = (*_SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
UPLOADS = "/api/datasets/"
_TINKER = "/api/v1/"
# Of training data and of prompts; a client of the Tinker API sends at most some 5 MB at once.
_TINKER_LIMITS = {f"{_TINKER}forward_backward": 64 << 20, f"{_TINKER}asample": 8 << 20}
_LARGE_BYTES = 1 << 18  # what is searched in less than a millisecond keeps nobody waiting
_NAMED_KINDS = ("application/json", "text/plain", "text/event-stream")


class SecurityMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        settings: ServiceSettings,
        tokens: Tokens | None,
        response_counts: Counter[tuple[str, int]],
    ) -> None:
        self._app = app
        self._settings = settings
        self._tokens = tokens
        self._response_counts = response_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._response_counts[(method, message["status"])] += 1
                _add_headers(MutableHeaders(raw=message["headers"]), scope["path"])
            await send(message)

        try:
            self._check_host(headers)
            self._check_origin(scope["method"], headers)
            if scope["method"] not in _SAFE_METHODS:
                identify(self._tokens, headers)  # of a stranger's body not a byte is read
            limit = self._check_length(scope, headers)
        except ServiceError as error:
            await _refuse(error, send_counted, for_tinker=self._is_for_tinker(scope))
            return
        is_upload = scope["path"].startswith(UPLOADS) or (
            self._is_for_tinker(scope) and scope["path"] in _TINKER_LIMITS
        )
        bounded = _Bounded(receive, limit, self._settings, is_upload=is_upload)
        await self._app(scope, bounded, send_counted)

    def _is_for_tinker(self, scope: Scope) -> bool:
        return self._settings.tinker is not None and scope["path"].startswith(_TINKER)

    def _check_host(self, headers: Headers) -> None:
        """Without tokens, a page of another site must not reach us under a name it made point here."""
        if self._settings.token_file is not None:
            return
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name.strip("[]").lower() not in (*LOOPBACK, self._settings.host):
            raise Misdirected("this service answers to localhost only")

    def _check_origin(self, method: str, headers: Headers) -> None:
        """A browser says which page sends a change: only our own may."""
        origin = headers.get("origin")
        if method not in _SAFE_METHODS and origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Forbidden("changes are not taken from pages of other sites")

    def _check_length(self, scope: Scope, headers: Headers) -> int:
        limit = self._settings.max_body_bytes
        if scope["path"].startswith(UPLOADS) and scope["method"] == "POST":
            limit = self._settings.max_upload_mb << 20
        elif self._is_for_tinker(scope):
            limit = _TINKER_LIMITS.get(scope["path"], limit)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise TooLarge(f"the body is larger than the {limit:,} bytes allowed")
        return limit


class NamingMiddleware:
    """Answers name files as requests do, and do not say where on this machine they are.

    Here, for all routes at once: whoever adds one cannot forget it. The bytes of artifacts pass as they are.
    """

    def __init__(self, app: ASGIApp, places: Places) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        renames = False

        async def send_named(message: Message) -> None:
            nonlocal start, renames
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
                renames = kind in _NAMED_KINDS
                if renames:
                    start = message  # its length is known with the first piece of the body
                    return
            elif renames:
                message = {**message, "body": await self._rename(message.get("body", b""))}
                if start is not None:
                    _set_length(start, None if message.get("more_body") else len(message["body"]))
                    first, start = start, None
                    await send(first)
            await send(message)

        await self._app(scope, receive, send_named)

    async def _rename(self, body: bytes) -> bytes:
        if len(body) < _LARGE_BYTES:
            return self._places.hide(body)
        return await to_thread.run_sync(self._places.hide, body)


def _set_length(start: Message, length: int | None) -> None:
    headers = MutableHeaders(raw=start["headers"])
    if "content-length" in headers:
        del headers["content-length"]
        if length is not None:
            headers["content-length"] = str(length)


class _Bounded:
    """Ends the request when its body is too large or too slow, so that none stays open for ever."""

    def __init__(self, receive: Receive, limit: int, settings: ServiceSettings, *, is_upload: bool) -> None:
        self._receive = receive
        self._limit = limit
        self._idle_s = settings.idle_timeout_s
        whole_s = settings.upload_timeout_s if is_upload else settings.body_timeout_s
        self._deadline = time.monotonic() + whole_s
        self._taken = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()  # waits for the other side to leave, as streams do
        left = min(self._deadline - time.monotonic(), self._idle_s)
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.001))
        except TimeoutError:
            raise HTTPException(408, "the request took too long to arrive") from None
        if message["type"] == "http.request":
            self._taken += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._taken > self._limit:
                raise HTTPException(413, f"the body is larger than the {self._limit:,} bytes allowed")
        return message


def _add_headers(headers: MutableHeaders, path: str) -> None:
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    if path.startswith(("/api", "/v1", "/metrics")):
        headers.setdefault("cache-control", "no-store")


async def _refuse(error: ServiceError, send: Send, *, for_tinker: bool) -> None:
    told: object = {"error": {"code": error.code, "message": str(error)}}
    if for_tinker:
        told = {"error": str(error), "category": "user" if error.status < 500 else "server"}
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # what is left of the body is not read
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
