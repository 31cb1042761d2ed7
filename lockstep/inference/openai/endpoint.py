"""Text from an OpenAI-compatible server (vLLM, SGLang and others): chat for conversations, completions for plain text.

`Connection` is JSON over HTTP: every request has a deadline and a bounded number of tries.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from lockstep.inference.chat import TextPrompt
from lockstep.types import SamplingParams

MAX_PAUSE_S = 30.0
_MAX_REPLY_BYTES = 64 << 20
_RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointError(OSError):
    """The server or the connection failed: not the user's settings."""


class EndpointRefusal(ValueError):
    """The server rejects the request. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _TransientError(Exception):
    """Worth another try, after `pause_s` where the server named a pause."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class Connection:
    """All routes below the address `root`. Safe to use from several threads."""

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
        self.timeout_s, self.num_tries, self._sleep = timeout_s, num_tries, sleep
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        # No connection is kept between requests: one that a restarted server has closed would cost a try.
        self._client = httpx.Client(
            headers=headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=timeout_s,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def request_json(self, path: str, body: Any = None, *, origin: str) -> Any:
        """The reply, parsed. `origin` names what is asked, for error messages."""
        content = self.request(path, body, origin=origin)
        try:
            return json.loads(content)
        except ValueError as error:
            raise EndpointError(
                f"{self.root + path} answered {origin} with {len(content)} bytes that are not JSON"
            ) from error

    def request_object(self, path: str, body: Any = None, *, origin: str) -> dict[str, Any]:
        reply = self.request_json(path, body, origin=origin)
        if not isinstance(reply, dict):
            raise EndpointError(f"{self.root + path} answered {origin} with JSON that is not an object")
        return reply

    def request(self, path: str, body: Any = None, *, origin: str) -> bytes:
        """GET without a body, POST with one. Transient errors are retried with growing pauses."""
        for attempt in range(1, self.num_tries + 1):
            try:
                return self._exchange(self.root + path, body, origin)
            except _TransientError as error:
                if attempt == self.num_tries:
                    raise EndpointError(
                        f"{self.root + path} gave no answer to {origin} in {attempt} tries: {error}"
                    ) from error
                pause_s = error.pause_s if error.pause_s is not None else 0.5 * 2.0 ** (attempt - 1)
                self._sleep(min(max(pause_s, 0.0), MAX_PAUSE_S))
        raise AssertionError("num_tries is at least 1")

    def _exchange(self, url: str, body: Any, origin: str) -> bytes:
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._client.stream("GET" if body is None else "POST", url, json=body) as response:
                if response.is_success:
                    return _read_body(response, deadline)
                reason = f"HTTP {response.status_code}: {_error_message(response, deadline)}"
        except httpx.TimeoutException as error:
            raise _TransientError(f"no reply within {self.timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise _TransientError(str(error)) from error
        except httpx.TransportError as error:
            raise _TransientError(f"the connection broke: {str(error) or type(error).__name__}") from error
        if response.status_code in _RETRY_STATUSES:
            raise _TransientError(reason, _retry_after(response.headers.get("Retry-After")))
        raise EndpointRefusal(f"{url} refused {origin}: {reason}", response.status_code)


def _read_body(response: httpx.Response, deadline: float) -> bytes:
    """httpx limits the time between two reads; a server that sends a byte now and then would never end."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            raise EndpointError(f"a reply of more than {_MAX_REPLY_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout("the reply is not complete")
    return bytes(content)


def _error_message(response: httpx.Response, deadline: float) -> str:
    """The error in the JSON shapes that model servers use, and nothing else of the body: what answers may be no model
    server, and this message is shown to whoever chose the address."""
    if response.has_redirect_location:
        return "a redirect, which is not followed: name the address that it leads to"
    try:
        body = json.loads(_read_body(response, deadline))
    except (httpx.TransportError, EndpointError, ValueError):
        body = None
    return error_in(body) or response.reason_phrase


def error_in(body: object) -> str:
    """What a model server says in its own error; empty where the body is none."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    if isinstance(body, list) and body and isinstance(body[0], dict):  # FastAPI's: one entry for each field
        body = body[0].get("msg")
    return shorten(body) if isinstance(body, str) else ""


def _retry_after(header: str | None) -> float | None:
    """In seconds; a date is ignored."""
    try:
        return float(header) if header is not None else None
    except ValueError:
        return None


def normalise_url(url: str) -> str:
    """The address below which /chat/completions is: "host:8000", "http://host/v1/" and the full path all lead there."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    parts = urlsplit(text)
    try:
        is_address = parts.scheme in ("http", "https") and bool(httpx.URL(text).host) and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        is_address = False
    if not is_address:
        raise ValueError(f"the endpoint {url!r} is not an address: write it like http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    if not path.rpartition("/")[2].startswith("v1"):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def shorten(text: str, length: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def map_concurrently(
    call: Callable[[Item], Result], items: Sequence[Item], num_at_once: int
) -> Iterator[tuple[int, Result]]:
    """(index, result) for every item in the order of completion. The first exception ends it."""
    waiting, lock, stop = iter(enumerate(items)), threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[tuple[int, Result | Exception]] = queue.SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                following = next(waiting, None)
            if following is None:
                return
            index, item = following
            try:
                finished.put((index, call(item)))
            except Exception as error:
                finished.put((index, error))

    # Daemon threads instead of a pool: an interrupted program must not wait for requests in flight.
    for _ in range(min(num_at_once, len(items))):
        threading.Thread(target=work, daemon=True, name="endpoint").start()
    try:
        for _ in items:
            index, result = finished.get()  # always comes: every request has a deadline
            if isinstance(result, Exception):
                raise result
            yield index, result
    finally:
        stop.set()


@dataclass(frozen=True, slots=True)
class EndpointCompletion:
    """`finish_reason` length: the completion is truncated."""

    text: str
    finish_reason: Literal["stop", "length"]


class EndpointEngine:
    """One model of one server; `batch_size` requests at once. Tokens stay with the server."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        batch_size: int = 8,
        timeout_s: float = 120.0,
        num_tries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = normalise_url(url)
        self.batch_size = batch_size
        self._connection = Connection(self.url, api_key=api_key, timeout_s=timeout_s, num_tries=num_tries, sleep=sleep)
        self.model = model or self._find_model()

    def complete_all(
        self, prompts: Sequence[TextPrompt], params: SamplingParams
    ) -> Iterator[tuple[int, EndpointCompletion]]:
        """(index, completion) in the order of arrival. The first failure ends it; the error names the prompt."""
        return map_concurrently(lambda prompt: self.complete(prompt, params), prompts, self.batch_size)

    def complete(self, prompt: TextPrompt, params: SamplingParams) -> EndpointCompletion:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "top_p": params.top_p}
        body["temperature"] = params.temperature
        if params.seed is not None and params.temperature > 0:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        # Not part of OpenAI's API; these are the names in vLLM and SGLang.
        extensions = {"top_k": params.top_k, "min_p": params.min_p, "stop_token_ids": list(params.stop_tokens)}
        body |= {name: value for name, value in extensions.items() if value}
        if isinstance(prompt.content, str):
            path, body["prompt"] = "/completions", prompt.content
        else:
            path, body["messages"] = "/chat/completions", prompt.content
            body |= {"tools": prompt.tools} if prompt.tools else {}
        return _read_choice(self._connection.request_object(path, body, origin=prompt.origin), self.url)

    def _find_model(self) -> str:
        entries = self._connection.request_object("/models", origin="its list of models").get("data")
        entries = entries if isinstance(entries, list) else []
        names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
        if len(names) != 1:
            problem = f"serves {', '.join(names)}" if names else "does not say which models it serves"
            raise ValueError(f"{self.url} {problem}: choose one with --endpoint-model")
        return names[0]


def _read_choice(reply: dict[str, Any], url: str) -> EndpointCompletion:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(
            f"{url} sent a reply of an unknown shape, without choices[0].message.content or choices[0].text"
        ) from error
    if text is None:  # only tool calls, or nothing
        text = ""
    if not isinstance(text, str):
        raise EndpointError(f"{url} sent an answer that is not text but {type(text).__name__}")
    return EndpointCompletion(text, "length" if choice.get("finish_reason") == "length" else "stop")
