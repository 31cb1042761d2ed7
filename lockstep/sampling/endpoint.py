"""Answers from an OpenAI-compatible server, as vLLM, SGLang and others run: chat for conversations, plain completions.

Text goes in and comes out; tokens stay with the server. Every request has a deadline and is tried a bounded number
of times. Must not know torch, metrics or files.
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
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from lockstep.sampling.prompts import PromptRow
from lockstep.sampling.sampler import SamplingParams

LONGEST_PAUSE_S = 30.0
_LONGEST_REPLY_BYTES = 64 << 20
_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish_reason` length: the answer was cut."""

    text: str
    finish_reason: Literal["stop", "length"]


class EndpointError(OSError):
    """The server, or the way to it, failed: not the user's settings."""


class _PassingError(Exception):
    """May be gone at the next try, after `pause_s` where the server said how long."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class EndpointEngine:
    """One server and one of its models; `batch_size` requests are under way at once."""

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
        self.timeout_s = timeout_s
        self.num_tries = num_tries
        self._api_key = api_key
        self._sleep = sleep
        self.model = model or self._find_model()

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams) -> Iterator[tuple[int, Answer]]:
        """(place in `rows`, answer) of every row as they come. A row that fails ends it; the error names the row."""
        waiting, lock, stop = iter(enumerate(rows)), threading.Lock(), threading.Event()
        finished: queue.SimpleQueue[tuple[int, Answer | Exception]] = queue.SimpleQueue()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    place, row = next(waiting, (-1, None))
                if row is None:
                    return
                try:
                    finished.put((place, self.answer_one(row, params)))
                except Exception as error:
                    finished.put((place, error))

        # Daemons, and no pool: a program that is interrupted must not wait for requests that are under way.
        for _ in range(min(self.batch_size, len(rows))):
            threading.Thread(target=work, daemon=True, name="endpoint").start()
        try:
            for _ in rows:
                place, found = finished.get()  # comes: every request has a deadline
                if isinstance(found, Exception):
                    raise found
                yield place, found
        finally:
            stop.set()

    def answer_one(self, row: PromptRow, params: SamplingParams) -> Answer:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "top_p": params.top_p}
        body["temperature"] = params.temperature
        if params.seed is not None and params.temperature > 0:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        # Beyond OpenAI's own, by the names that vLLM and SGLang know.
        more = {"top_k": params.top_k, "min_p": params.min_p, "stop_token_ids": list(params.stop_tokens)}
        body |= {name: value for name, value in more.items() if value}
        if isinstance(row.content, str):
            return _read_choice(self._post("/completions", {**body, "prompt": row.content}, row.origin), self.url)
        body["messages"] = row.content
        if row.tools:
            body["tools"] = row.tools
        return _read_choice(self._post("/chat/completions", body, row.origin), self.url)

    def _find_model(self) -> str:
        listing = self._ask(urllib.request.Request(self.url + "/models", headers=self._headers()), "its list of models")
        entries = listing.get("data")
        names = (
            [str(m["id"]) for m in entries if isinstance(m, dict) and "id" in m] if isinstance(entries, list) else []
        )
        if len(names) != 1:
            found = f"serves {', '.join(names)}" if names else "does not say which models it serves"
            raise ValueError(f"{self.url} {found}: choose one with --endpoint-model")
        return names[0]

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        return headers | ({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {})

    def _post(self, path: str, body: dict[str, Any], origin: str) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers(), method="POST")
        return self._ask(request, origin)

    def _ask(self, request: urllib.request.Request, origin: str) -> dict[str, Any]:
        """The reply as an object. What may pass is tried again, with growing pauses."""
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


def _exchange(request: urllib.request.Request, timeout_s: float, origin: str) -> dict[str, Any]:
    """One try, over within about `timeout_s`, also where the server sends a byte now and then."""
    deadline = time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = _read_until(response, deadline, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"HTTP {error.code}: {_server_message(error)}"
            if error.code in _TRY_AGAIN:
                raise _PassingError(reason, _retry_after(error.headers.get("Retry-After"))) from error
        raise ValueError(f"{request.full_url} refused {origin}: {reason}") from error
    except TimeoutError as error:
        raise _PassingError(f"no reply within {timeout_s:g} s") from error
    except urllib.error.URLError as error:
        late = isinstance(error.reason, TimeoutError)
        raise _PassingError(f"no reply within {timeout_s:g} s" if late else f"{error.reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise _PassingError(f"the connection broke: {error or type(error).__name__}") from error
    try:
        reply = json.loads(text)
    except ValueError as error:
        raise EndpointError(
            f"{request.full_url} answered {origin} with something that is not JSON: "
            f"{_shorten(text.decode(errors='replace'))!r}"
        ) from error
    if not isinstance(reply, dict):
        raise EndpointError(f"{request.full_url} answered {origin} with JSON that is not an object")
    return reply


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
        return _shorten(text) or str(error.reason)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _shorten(found if isinstance(found, str) else json.dumps(found))


def _retry_after(header: str | None) -> float | None:
    """Seconds; the form with a date is passed over."""
    try:
        return float(header) if header is not None else None
    except ValueError:
        return None


def _read_choice(reply: dict[str, Any], url: str) -> Answer:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(
            f"{url} sent a reply of an unknown shape, without choices[0].message.content or choices[0].text: "
            f"{_shorten(json.dumps(reply))}"
        ) from error
    if text is None:  # only tool calls, or nothing
        text = ""
    if not isinstance(text, str):
        raise EndpointError(f"{url} sent an answer that is not text: {_shorten(json.dumps(text))}")
    return Answer(text, "length" if choice.get("finish_reason") == "length" else "stop")


def _shorten(text: str, length: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."
