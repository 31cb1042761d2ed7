"""Connections from outside: how many at once, how long each may be silent, and TLS.

Whoever connects and asks nothing is the first to go when there are too many, so half-open connections keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.config import ConfigError
from lockstep.service.settings import ServiceSettings

_RESERVED_FILES = 256  # for the database, logs that are read, and processes that are started
_KEEP_ALIVE_S = 30
_ACCEPTED_AT_ONCE = 16  # before those that came earlier are read: a burst must not throw out whoever is about to ask
_BACKLOG = 2048
_FULL_BODY = b'{"error": {"code": "busy", "message": "too many connections: try again later"}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL_BODY), _FULL_BODY)
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    total: int
    per_address: int
    header_s: float
    """From the first byte, or from the connection itself, to the end of the headers."""
    stall_s: float
    """For the other side to take what is sent to it."""
    proxies: frozenset[str] = frozenset()
    """Addresses that many clients share: only `total` counts for them."""


class Connections:
    """Those that are open. Of those that wait for a request, the ones that never sent any go first, then the ones that
    have waited longest."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._addresses: dict[GuardedProtocol, str] = {}
        self._counts: Counter[str] = Counter()
        self._asked: set[GuardedProtocol] = set()
        # By address ("" for all) and whether they ever asked, in the order in which they began to wait.
        self._waiting: dict[tuple[str, bool], dict[GuardedProtocol, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: GuardedProtocol, host: str) -> bool:
        """Makes room by closing one that waits; False where all the others are being answered."""
        address = _network_of(host)
        too_many_here = host not in self.limits.proxies and self._counts[address] >= self.limits.per_address
        if too_many_here and not self._evict(address):
            return False
        if len(self) >= self.limits.total and not self._evict(""):
            return False
        self._addresses[connection] = address
        self._counts[address] += 1
        self.wait(connection)
        return True

    def wait(self, connection: GuardedProtocol) -> None:
        for key in self._keys(connection):
            self._waiting.setdefault(key, {})[connection] = None

    def work(self, connection: GuardedProtocol) -> None:
        """It has sent a request."""
        self._stop_waiting(connection)
        self._asked.add(connection)

    def remove(self, connection: GuardedProtocol) -> None:
        if connection in self._addresses:
            self._stop_waiting(connection)
            self._asked.discard(connection)
            address = self._addresses.pop(connection)
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _keys(self, connection: GuardedProtocol) -> tuple[tuple[str, bool], tuple[str, bool]]:
        asked = connection in self._asked
        return (self._addresses[connection], asked), ("", asked)

    def _stop_waiting(self, connection: GuardedProtocol) -> None:
        for key in self._keys(connection):
            waiting = self._waiting.get(key, {})
            waiting.pop(connection, None)
            if not waiting:
                self._waiting.pop(key, None)

    def _evict(self, address: str) -> bool:
        for asked in (False, True):
            for oldest in self._waiting.get((address, asked), {}):
                oldest.abort()
                return True
        return False


def _network_of(host: str) -> str:
    """An IPv6 client has a whole /64 of addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines for headers, TLS handshakes and readers that do not read."""

    def __init__(self, *args: Any, guard: Connections, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._guard = guard
        self._tls = tls
        self._raw: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._early: list[bytes] = []  # what came right behind the handshake
        self._handshake: asyncio.Task[None] | None = None

    def abort(self) -> None:
        self._guard.remove(self)
        self._forget_timers()
        if self._raw is not None:
            self._raw.abort()

    # --- asyncio calls these ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        host = (transport.get_extra_info("peername") or ("",))[0]
        self._raw = transport
        if not self._guard.admit(self, host):
            self._raw = None
            if self._tls is None:
                transport.write(_FULL)
            transport.close()
        elif self._tls is None:
            self._begin(transport)
        else:
            self._handshake = self.loop.create_task(self._shake_hands(transport, self._tls))

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            if self._raw is not None:
                self._early.append(data)
            return
        super().data_received(data)
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.remove(self)
        self._forget_timers()
        self._raw = None
        if self.transport is not None:
            super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._raw is not None:
            self._guard.wait(self)
            self._note_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self._stall or self.loop.call_later(self._guard.limits.stall_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- deadlines ----------------------------------------------------------------------------------------------

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        timeout_s = self._guard.limits.header_s
        try:
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=timeout_s
            )
        except (OSError, ConnectionError, asyncio.CancelledError):
            self.abort()
            return
        if secured is None or self._raw is None:
            self.abort()
            return
        self._raw = secured
        self._begin(secured)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def _note_state(self) -> None:
        """After anything that may have begun a request or ended one."""
        if self._raw is None:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._guard.work(self)
            self._cancel_deadline()
        elif self.timeout_keep_alive_task is None:  # something came, and it is no request yet
            self._expect_headers()

    def _expect_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._guard.limits.header_s, self.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_timers(self) -> None:
        self._cancel_deadline()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


# --- the server ------------------------------------------------------------------------------------------------------


class GuardedServer(uvicorn.Server):
    """`ending`: what is said about its end when it has started. `drain`: waited for before connections are closed."""

    def __init__(self, config: uvicorn.Config, ending: str, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(config)
        self._ending, self._drain = ending, drain

    async def shutdown(self, sockets: Any = None) -> None:
        if self._drain is not None:
            await self._drain()
        await super().shutdown(sockets)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in getattr(self, "servers", []):
            for (
                listener
            ) in server.sockets:  # asyncio has one number for the backlog and for how many it accepts at once
                with socket.socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(_BACKLOG)

    def _log_started_message(self, listeners: Any) -> None:
        """uvicorn's own names http: it does not know of the TLS above."""
        protocol: Any = self.config.http
        scheme = "http" if protocol.keywords["tls"] is None else "https"
        for listener in listeners:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("serving on %s://%s:%d (%s)", scheme, shown, port, self._ending)


def make_server(app: object, settings: ServiceSettings) -> uvicorn.Server:
    proxies = frozenset(settings.proxies)
    limits = ConnectionLimits(
        _allow_files(settings.max_connections),
        settings.max_connections_per_address,
        settings.header_timeout_s,
        settings.stall_timeout_s,
        proxies,
    )
    config = guarded_config(app, settings.host, settings.port, limits, load_tls(settings))
    return GuardedServer(config, "Ctrl+C ends it; jobs run on")


def guarded_config(
    app: Any, host: str, port: int, limits: ConnectionLimits, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    protocol: Any = partial(GuardedProtocol, guard=Connections(limits), tls=tls)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="info",
        access_log=False,
        server_header=False,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=sorted(limits.proxies),
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
    )


def load_tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """None without a certificate. Whatever is wrong with the files is said at the start, not at the first request."""
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None or key is None:
        return None
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        _check_file(option, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        problem = "the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else "they are not PEM"
        raise ConfigError(f"--tls-cert {certificate} and --tls-key {key} cannot be used: {problem}") from error
    return context


def _check_file(option: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror or error}") from error


def _refuse_password() -> str:
    raise ConfigError("--tls-key has a passphrase, and nobody is there to type it: give a key without one")


def _allow_files(wanted: int) -> int:
    """How many connections the limit of open files leaves, which is raised as far as it goes for this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(min(wanted, soft - _RESERVED_FILES), 16)
    return wanted
