"""Results that clients come back for: each under the id of its request, until it was fetched and for a while after."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from lockstep.service.errors import NotFound, ServiceError
from lockstep.service.tinker.errors import Gone, ProcessFailed, ProcessLost, category_of
from lockstep.service.tinker.settings import TinkerSettings

log = logging.getLogger(__name__)
JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True)
class StoredResult:
    content: bytes
    media_type: str

    @classmethod
    def of(cls, body: Mapping[str, object]) -> StoredResult:
        return cls(json.dumps(body, allow_nan=False).encode(), JSON)


@dataclass(eq=False)
class Promise:
    """The result of a request, `kind` being what was asked, in `num_bytes`. `result` is None until it is done."""

    id: str
    kind: str
    owner: str
    num_bytes: int = 0
    result: StoredResult | None = None
    fetched_at: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Results:
    """For the thread of the event loop alone."""

    def __init__(self, settings: TinkerSettings) -> None:
        self._settings = settings
        self._promises: dict[str, Promise] = {}
        self._finished: OrderedDict[str, Promise] = OrderedDict()  # oldest first
        self._dropped: OrderedDict[str, None] = OrderedDict()  # ids of what is not kept any more
        self._num_bytes = 0
        self.waiting_bytes = 0
        """Of requests that are not done."""

    def find(self, request_id: str) -> Promise | None:
        return self._promises.get(request_id)

    def was_dropped(self, request_id: str) -> bool:
        return request_id in self._dropped

    def add(self, request_id: str, kind: str, owner: str, num_bytes: int = 0) -> Promise:
        promise = self._promises[request_id] = Promise(request_id, kind, owner, num_bytes)
        self.waiting_bytes += num_bytes
        return promise

    async def keep(self, promise: Promise, operation: Callable[[], Awaitable[StoredResult]]) -> None:
        """The answer of the operation, or why there is none. A lost process is the caller's to explain."""
        try:
            self.finish(promise, await operation())
        except ProcessLost:
            raise
        except ServiceError as error:
            self.fail(promise, error)
        except OSError as error:
            log.error("request %s failed", promise.id, exc_info=error)
            self.fail(promise, ProcessFailed(f"the server cannot use its disk: {error.strerror or error}"))
        except asyncio.CancelledError:
            self.fail(promise, Gone("the service ends"))
            raise
        except Exception as error:
            log.error("request %s failed", promise.id, exc_info=error)
            self.fail(promise, ProcessFailed("the service made a mistake: its log says more"))

    def finish(self, promise: Promise, result: StoredResult) -> None:
        """The first answer stays: what was cancelled may still be answered."""
        if promise.result is not None:
            return
        promise.result = result
        self.waiting_bytes -= promise.num_bytes
        self._finished[promise.id] = promise
        self._num_bytes += len(result.content)
        promise.done.set()
        while len(self._finished) > self._settings.max_kept or self._num_bytes > self._settings.max_kept_bytes:
            self._drop(next(iter(self._finished.values())))

    def fail(self, promise: Promise, error: ServiceError) -> None:
        self.finish(promise, StoredResult.of({"error": str(error), "category": category_of(error)}))

    async def wait(self, promise: Promise) -> StoredResult | None:
        """None: not yet."""
        try:
            await asyncio.wait_for(promise.done.wait(), self._settings.poll_s)
        except TimeoutError:
            return None
        promise.fetched_at = promise.fetched_at or time.monotonic()
        return promise.result

    def refuse_unknown(self, request_id: str) -> ServiceError:
        if request_id in self._dropped:
            return Gone(f"the result of request {request_id} is not kept any more")
        return NotFound(f"there is no request {request_id}")

    def sweep(self) -> None:
        """Drop what was fetched long enough ago."""
        before = time.monotonic() - self._settings.kept_s
        for promise in list(self._finished.values()):
            if promise.fetched_at is not None and promise.fetched_at <= before:
                self._drop(promise)

    def _drop(self, promise: Promise) -> None:
        assert promise.result is not None, "only what is finished is dropped"
        del self._promises[promise.id], self._finished[promise.id]
        self._num_bytes -= len(promise.result.content)
        self._dropped[promise.id] = None
        while len(self._dropped) > self._settings.max_kept:
            self._dropped.popitem(last=False)
