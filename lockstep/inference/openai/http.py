"""JSON over HTTP with a server of models: every request has a deadline and is tried a bounded number of times.

Must not know what is asked, nor which server answers.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

LONGEST_PAUSE_S = 30.0
_LONGEST_REPLY_BYTES = 64 << 20
_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
Item = TypeVar("Item")
Found = TypeVar("Found")


class EndpointError(OSError):
    """The server, or the way to it, failed: not the user's settings."""


class EndpointRefusal(ValueError):
    """The server understood, and will not. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _PassingError(Exception):
    """May be gone at the next try, after `pause_s` where the server said how long."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class Connection:
    """Everything below one address."""

    def __init__(
        self,
        root: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        num_tries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        self.timeout_s, self.num_tries = timeout_s, num_tries
        self._api_key, self._sleep = api_key, sleep

    def ask(self, path: str, body: Any = None, *, origin: str) -> Any:
        """What the server says in JSON: to GET without a body, to POST with one. `origin` names the question."""
        text = self._request(path, body, origin)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EndpointError(
                f"{self.root + path} answered {origin} with something that is not JSON: "
                f"{shorten(text.decode(errors='replace'))!r}"
            ) from error

    def ask_object(self, path: str, body: Any = None, *, origin: str) -> dict[str, Any]:
        reply = self.ask(path, body, origin=origin)
        if not isinstance(reply, dict):
            raise EndpointError(f"{self.root + path} answered {origin} with JSON that is not an object")
        return reply

    def tell(self, path: str, body: Any = None, *, origin: str) -> None:
        """For what is answered with a status, and words that nobody reads."""
        self._request(path, body, origin)

    def _request(self, path: str, body: Any, origin: str) -> bytes:
        """What may pass is tried again, with growing pauses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data=data, headers=self._headers())
        for attempt in range(1, self.num_tries + 1):
            try:
                return _exchange(request, self.timeout_s, origin)
            except _PassingError as error:
                if attempt == self.num_tries:
                    raise EndpointError(
                        f"{request.full_url} gave no answer to {origin} in {attempt} tries: {error}"
                    ) from error
                pause_s = error.pause_s if error.pause_s is not None else 0.5 * 2.0 ** (attempt - 1)
                self._sleep(min(max(pause_s, 0.0), LONGEST_PAUSE_S))
        raise AssertionError("num_tries is at least 1")

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        return headers | ({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {})


def ask_all(ask: Callable[[Item], Found], items: Sequence[Item], num_at_once: int) -> Iterator[tuple[int, Found]]:
    """(place, what was found) for every item, as they come. The first that fails ends it."""
    waiting, lock, stop = iter(enumerate(items)), threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[tuple[int, Found | Exception]] = queue.SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                following = next(waiting, None)
            if following is None:
                return
            place, item = following
            try:
                finished.put((place, ask(item)))
            except Exception as error:
                finished.put((place, error))

    # Daemons, and no pool: a program that is interrupted must not wait for requests that are under way.
    for _ in range(min(num_at_once, len(items))):
        threading.Thread(target=work, daemon=True, name="endpoint").start()
    try:
        for _ in items:
            place, found = finished.get()  # comes: every request has a deadline
            if isinstance(found, Exception):
                raise found
            yield place, found
    finally:
        stop.set()


def normalise_url(url: str) -> str:
    """The address below which /chat/completions is: "host:8000", "http://host/v1/" and the full path all lead there."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the endpoint {url!r} is not an address: write it like http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    if not path.rpartition("/")[2].startswith("v1"):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _exchange(request: urllib.request.Request, timeout_s: float, origin: str) -> bytes:
    """One try, over within about `timeout_s`, also where the server sends a byte now and then."""
    deadline = time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return _read_until(response, deadline, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"HTTP {error.code}: {_server_message(error)}"
            if error.code in _TRY_AGAIN:
                raise _PassingError(reason, _retry_after(error.headers.get("Retry-After"))) from error
        raise EndpointRefusal(f"{request.full_url} refused {origin}: {reason}", error.code) from error
    except TimeoutError as error:
        raise _PassingError(f"no reply within {timeout_s:g} s") from error
    except urllib.error.URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise _PassingError(f"no reply within {timeout_s:g} s" if late else f"{error.reason}") from error
    except EndpointError:
        raise
    except (http.client.HTTPException, OSError) as error:
        raise _PassingError(f"the connection broke: {error or type(error).__name__}") from error


def _read_until(response: Any, deadline: float, timeout_s: float) -> bytes:
    """The whole body. A socket's own limit counts from the last byte, so a slow drip would never end."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _LONGEST_REPLY_BYTES:
            raise EndpointError(f"a reply of more than {_LONGEST_REPLY_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the reply was not complete within {timeout_s:g} s")
    if response.length:  # known where the server said how long the reply is
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _server_message(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong, in whatever shape it says so."""
    try:
        text = error.read(1 << 16).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        found: Any = json.loads(text)
    except ValueError:
        return shorten(text) or str(error.reason)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return shorten(found if isinstance(found, str) else json.dumps(found))


def _retry_after(header: str | None) -> float | None:
    """Seconds; the form with a date is passed over."""
    try:
        return float(header) if header is not None else None
    except ValueError:
        return None


def shorten(text: str, length: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."
