"""The loop inside a worker: methods one after the other, in the order of arrival, and other work while none waits.

Must not know how messages travel, nor what the methods do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.workers.messages import Request
from lockstep.workers.worker import Reply

if TYPE_CHECKING:
    from torch import Tensor

Result = Reply | dict[str, Any] | None
Method = Callable[[dict[str, Any], "dict[str, Tensor]"], "Result | Future[Reply]"]


class Handler(Protocol):
    """What an entry makes of its settings. All but `immediate` runs on the serving thread."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """A method may return a Future: its reply is sent when that ends, and the next method begins at once."""
        ...

    @property
    def immediate(self) -> Mapping[str, Method]:
        """Answered on the thread that reads, also while a method runs."""
        ...

    def has_work(self) -> bool: ...

    def work(self) -> None:
        """One short piece of work; no request is answered meanwhile."""
        ...

    def close(self) -> None: ...


class Serving:
    """`send` takes the number of a request and what was made of it; it is called from several threads."""

    def __init__(self, name: str, send: Callable[[int, Reply | BaseException], None]) -> None:
        self._name, self._send = name, send
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._handler: Handler | None = None
        self._ends = False

    def receive(self, request: Request) -> None:
        """Called by the thread that reads."""
        if self._handler is not None and request.method in self._handler.immediate:
            self._answer(request, self._handler.immediate)
        else:
            self._inbox.put(request)

    def end(self) -> None:
        """After the method that runs now; those that wait are not begun."""
        self._ends = True
        self._inbox.put(None)

    def run(self, entry: str, settings: dict[str, Any]) -> None:
        """Make the handler, then serve until the end. A handler that could not be made answers with the reason."""
        try:
            handler = load_entry(entry)(settings)
        except Exception as error:
            self._refuse_all(error)
            return
        self._handler = handler
        every = {**handler.methods, **handler.immediate}  # an immediate one may have come before the handler was there
        while not self._ends:
            request = self._next(handler)
            if request is not None:
                self._answer(request, every)
            elif not self._ends:
                handler.work()
        handler.close()

    def _next(self, handler: Handler) -> Request | None:
        """None: there is time for a piece of work, or this is the end."""
        if not handler.has_work():
            return self._inbox.get()
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _refuse_all(self, error: Exception) -> None:
        while not self._ends:
            request = self._inbox.get()
            if request is not None:
                self._send(request.number, error)

    def _answer(self, request: Request, methods: Mapping[str, Method]) -> None:
        try:
            if request.method not in methods:
                raise ValueError(f"there is no method {request.method!r}: known are {', '.join(sorted(methods))}")
            result = methods[request.method](request.body, request.tensors)
        except Exception as error:
            self._send(request.number, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._send(request.number, _result_of(future)))
        else:
            self._send(request.number, as_reply(result))


def as_reply(result: Result) -> Reply:
    return result if isinstance(result, Reply) else Reply(result or {})


def _result_of(future: Future[Reply]) -> Reply | BaseException:
    try:
        return as_reply(future.result())
    except BaseException as error:  # also of a future that was cancelled
        return error


def load_entry(entry: str) -> Callable[[dict[str, Any]], Handler]:
    module, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"{module} has no {name!r}: an entry is written as package.module:function") from None
