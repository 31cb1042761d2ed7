"""The actor of a Ray worker: frames in, frames out. The handler has a thread of its own, as in a local worker.

Must not import ray: it is an ordinary class that Ray runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import traceback
from concurrent.futures import Future

from lockstep.workers.child import leave
from lockstep.workers.frames import unpack
from lockstep.workers.messages import Request, pack_result
from lockstep.workers.serving import Serving
from lockstep.workers.worker import Reply


class ServingActor:
    """Its methods are coroutines, so that many calls wait at once and a ping is answered between them."""

    def __init__(self, name: str) -> None:
        self._serving = Serving(name, self._send)
        self._answers: dict[int, Future[bytes]] = {}
        self._early: dict[int, Request] = {}
        self._num_arrived = 0
        self._has_ended = threading.Event()

    async def connect(self, entry: str, settings: str) -> tuple[int, str]:
        """(process id, host name)."""
        threading.Thread(target=self._serve, args=(entry, settings), name="serving", daemon=True).start()
        return os.getpid(), socket.gethostname()

    async def call(self, place: int, data: bytes) -> bytes:
        """`place` counts the calls: Ray may begin coroutines in another order than they were asked for."""
        request = Request.from_frame(unpack(data))
        answer = self._answers[request.number] = Future()
        self._early[place] = request
        while self._num_arrived in self._early:
            self._num_arrived += 1
            self._serving.receive(self._early.pop(self._num_arrived - 1))
        return await asyncio.wrap_future(answer)

    async def wait_for_end(self) -> None:
        """Never returns: its failure tells that the actor is gone."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        self._serving.end()
        await asyncio.to_thread(self._has_ended.wait)

    def _send(self, number: int, result: Reply | BaseException) -> None:
        self._answers.pop(number).set_result(b"".join(pack_result(number, result)))

    def _serve(self, entry: str, settings: str) -> None:
        try:
            self._serving.run(entry, json.loads(settings))
        except SystemExit as error:
            leave(error.code if isinstance(error.code, int) else int(error.code is not None))
        except BaseException:
            traceback.print_exc()
            leave(1)
        self._has_ended.set()
