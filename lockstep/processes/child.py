"""Inside a worker: methods run one after the other in order of arrival, and other work while no request waits.

`main` is the process of a LocalWorker; an actor of Ray runs the same Serving.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn, Protocol

from lockstep.processes.frames import FrameError, Request, pack_result, read_frame, receive_into, send_all
from lockstep.processes.tree import die_with_parent
from lockstep.processes.worker import Body, Reply

if TYPE_CHECKING:
    from torch import Tensor

Result = Reply | Body | None
Method = Callable[[Body, "dict[str, Tensor]"], "Result | Future[Reply]"]


class Handler(Protocol):
    """Made by an entry from its settings. All but `immediate` runs on the serving thread."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """A method may return a Future: its reply is sent when it is done, and the next method starts at once."""
        ...

    @property
    def immediate(self) -> Mapping[str, Method]:
        """Answered on the reading thread, also while a method runs."""
        ...

    def has_work(self) -> bool: ...

    def work(self) -> None:
        """One short piece of work; no request is answered meanwhile."""
        ...

    def close(self) -> None: ...


class Serving:
    """`send` takes the number of a request and its result; it is called from several threads."""

    def __init__(self, name: str, send: Callable[[int, Reply | BaseException], None]) -> None:
        self._name, self._send = name, send
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()
        self._handler: Handler | None = None
        self._ending = False

    def receive(self, request: Request) -> None:
        """Called by the reading thread."""
        if self._handler is not None and request.method in self._handler.immediate:
            self._answer(request, self._handler.immediate)
        else:
            self._inbox.put(request)

    def end(self) -> None:
        """After the method that runs now; waiting requests are not started."""
        self._ending = True
        self._inbox.put(None)

    def run(self, entry: str, settings: Body) -> None:
        """Make the handler, then serve until the end. If it cannot be made, every request fails with the reason."""
        try:
            handler = load_entry(entry)(settings)
        except Exception as error:
            self._refuse_all(error)
            return
        self._handler = handler
        methods = {**handler.methods, **handler.immediate}  # an immediate one may arrive before the handler is there
        while not self._ending:
            request = self._next(handler)
            if request is not None:
                self._answer(request, methods)
            elif not self._ending:
                handler.work()
        handler.close()

    def _next(self, handler: Handler) -> Request | None:
        """None: no request waits while there is work, or this is the end."""
        if not handler.has_work():
            return self._inbox.get()
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _refuse_all(self, error: Exception) -> None:
        while not self._ending:
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
    except BaseException as error:  # a cancelled future raises CancelledError
        return error


def telling_mistakes(method: Method) -> Method:
    """A caller's mistake (ValueError) is the answer {"mistake": sentence}; anything else is an error."""

    @functools.wraps(method)
    def call(body: Body, tensors: dict[str, Tensor]) -> Result | Future[Reply]:
        try:
            return method(body, tensors)
        except ValueError as error:
            return {"mistake": str(error)}

    return call


def load_entry(entry: str) -> Callable[[dict[str, object]], Handler]:
    module, _, name = entry.partition(":")
    try:
        start: Callable[[Body], Handler] = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"{module} has no {name!r}: an entry is written as package.module:function") from None
    return start


def serve_until_end(serving: Serving, entry: str, settings: Body) -> None:
    """Returns after an orderly end; whatever else happens ends the process."""
    try:
        serving.run(entry, settings)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)


def main(arguments: list[str]) -> None:
    name, descriptor, parent = arguments[0], int(arguments[1]), int(arguments[2])
    if not die_with_parent(parent):
        leave(0)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    connection = socket.socket(fileno=descriptor)
    start = read_frame(lambda buffer: receive_into(connection, buffer)).header
    lock = threading.Lock()

    def send(number: int, result: Reply | BaseException) -> None:
        packed = pack_result(number, result)
        try:
            with lock:
                send_all(connection, packed)
        except OSError:
            leave(0)  # the parent is gone

    serving = Serving(name, send)
    threading.Thread(target=_read, args=(connection, serving), name="requests", daemon=True).start()
    send(start["number"], Reply({"pid": os.getpid()}))
    serve_until_end(serving, start["entry"], start["settings"])
    leave(0)


def _read(connection: socket.socket, serving: Serving) -> None:
    try:
        while True:
            frame = read_frame(lambda buffer: receive_into(connection, buffer))
            if "method" in frame.header:
                serving.receive(Request.from_frame(frame))
            else:
                serving.end()
    except (EOFError, OSError):
        leave(0)  # the parent is gone
    except FrameError as error:
        print(f"the parent sent {error}", file=sys.stderr)
        leave(1)
    except BaseException:
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """Without waiting for threads or collectives, which may never end."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
