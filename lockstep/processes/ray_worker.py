"""The actor of a Ray worker: frames in, frames out. The handler has a thread of its own, as in a local worker.

Must not import ray: it is an ordinary class that Ray runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from lockstep.config.launch import ROOM_VARIABLE
from lockstep.processes.child import Serving, leave
from lockstep.processes.frames import FrameError, Request, pack_message, pack_result, read_result, unpack
from lockstep.processes.worker import PendingCalls, Reply, WorkerDied, WorkerTimedOut

if TYPE_CHECKING:
    from torch import Tensor


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


_TICK_S = 0.1  # how late a deadline may be
_REAP_S = 10.0  # how long Ray may take to say that an actor is gone
_WHY = re.compile(r"The actor (?:is dead|died) because (.+?)(?:\.(?:\s|$)|$)", re.MULTILINE)
_UNREACHABLE = re.compile(r"temporarily unavailable: (?:RpcError: )?(?:RPC error: )?(.+?)(?: rpc_code|\.\s|\.?$)")
_DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\.\s|\.?$)", re.MULTILINE)


class RayWorker:
    """Made by `spawn`. `pid` is known where the actor is on this machine."""

    def __init__(self, name: str, actor: Any, pid: int | None) -> None:
        self.name, self.pid, self._actor = name, pid, actor
        self._begun_at = None if pid is None else _begun_at(pid)
        self._pending = PendingCalls(name)
        self._arrived: SimpleQueue[tuple[int, Future[bytes]]] = SimpleQueue()
        self._order = threading.Lock()
        self._num_sent = 0
        self._gone = threading.Event()
        actor.wait_for_end.remote().future().add_done_callback(lambda future: self._arrived.put((-1, future)))
        for work in (self._receive, self._watch):
            threading.Thread(target=work, name=f"{name}{work.__name__}", daemon=True).start()

    @classmethod
    def spawn(
        cls,
        name: str,
        entry: str,
        settings: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: tuple[Any, int] | None = None,
        start_timeout_s: float = 60.0,
    ) -> RayWorker:
        """As LocalWorker.spawn. `placement` is a placement group and the number of the bundle in it."""
        ray = import_ray()
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
        options |= {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1000}
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        if placement is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(*placement)
        actor = ray.remote(ServingActor).options(**options).remote(name)
        try:
            pid, host = ray.get(actor.connect.remote(entry, json.dumps(dict(settings))), timeout=start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)
            asked = ", ".join(f"{key} {value:g}" for key, value in _asked_for(num_cpus, num_gpus, resources).items())
            message = f"{name} did not start within {start_timeout_s:g} s: is there a free node with {asked}?"
            raise WorkerTimedOut(name, message) from None
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            raise WorkerDied(name, f"{name} could not start: {describe_loss(error)}") from None
        return cls(name, actor, pid if _is_here(pid, host) else None)

    def call(
        self,
        method: str,
        body: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        number = self._pending.number()
        data = b"".join(pack_message({"number": number, "method": method, "body": dict(body or {})}, tensors))
        future = self._pending.begin(number, method, timeout_s)
        if not future.done():
            try:
                with self._order:
                    answer = self._actor.call.remote(self._num_sent, data).future()
                    self._num_sent += 1
            except Exception as error:  # Ray itself is gone
                self._lose(f"{self.name} is lost: {describe_loss(error)}")
            else:
                answer.add_done_callback(lambda done: self._arrived.put((number, done)))
        return future

    def is_alive(self) -> bool:
        return not self._gone.is_set()

    def kill(self) -> None:
        self._end("was killed by whoever started it", grace_s=None)

    def close(self, grace_s: float = 5.0) -> None:
        self._end("has been closed", grace_s)

    def _end(self, why: str, grace_s: float | None) -> None:
        ray = import_ray()
        self._pending.fail_all(WorkerDied(self.name, f"{self.name} {why}"))
        if not ray.is_initialized():
            self._gone.set()  # the actor went with the cluster
            return
        if grace_s is not None and self.is_alive():
            with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                ray.get(self._actor.end.remote(), timeout=grace_s)
        ray.kill(self._actor)
        if self.pid is not None:
            self._kill_process(self.pid)
        self._gone.wait(_REAP_S)

    def _kill_process(self, pid: int) -> None:
        """Ray asks a process to end itself, which one that is stopped or stuck does not. Returns when it is gone."""
        deadline = time.monotonic() + _REAP_S
        while self._begun_at is not None and _begun_at(pid) == self._begun_at and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _receive(self) -> None:
        """Not in Ray's own thread, which must not wait for what our callers do with an answer."""
        while True:
            number, done = self._arrived.get()
            try:
                data = done.result()
                method = self._pending.method_of(number)
                self._pending.finish(number, read_result(unpack(data), self.name, method))
            except FrameError as error:
                self._lose(f"{self.name} sent what cannot be read: {error}")
                return
            except Exception as error:
                self._lose(f"{self.name} is lost: {describe_loss(error)}")
                return

    def _watch(self) -> None:
        while not self._gone.wait(_TICK_S):
            self._pending.expire()

    def _lose(self, message: str) -> None:
        """What is only out of reach may come back: nobody wants it any more."""
        self._pending.fail_all(WorkerDied(self.name, message))
        ray = import_ray()
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                ray.kill(self._actor)
        self._gone.set()


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("Ray is not installed: pip install 'lockstep[ray]'") from None
    return ray


def describe_loss(error: Exception) -> str:
    """One sentence of what Ray writes in many."""
    text = str(error)
    if unreachable := _UNREACHABLE.search(text):
        return f"its process or its node is out of reach ({unreachable[1]})"
    why, detail = _WHY.search(text), _DETAIL.search(text)
    reason = why[1] if why else text.strip().split("\n")[0]
    return f"{reason} ({detail[1]})" if detail else reason


def _asked_for(num_cpus: float, num_gpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    asked = {"num_cpus": num_cpus, "num_gpus": num_gpus, **(resources or {})}
    return {name: amount for name, amount in asked.items() if amount} or {"num_cpus": 0}


def _begun_at(pid: int) -> str | None:
    """When the process was started, in the system's own count; None where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_here(pid: int, host: str) -> bool:
    """Whether a process of Ray's: another machine's number may be anybody's here."""
    try:
        return host == socket.gethostname() and b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


_JOINING = threading.Lock()  # workers are started side by side


@dataclass(frozen=True)
class ReservedRoom:
    """`placement_group` is a number in hex; the amounts are for each worker; `environment` is what they start with."""

    cluster: str
    placement_group: str
    cpus: float
    gpus: float
    resources: Mapping[str, float]
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> ReservedRoom | None:
        told = os.environ.get(ROOM_VARIABLE)
        return cls(**json.loads(told)) if told else None

    def spawn(self, name: str, entry: str, settings: Mapping[str, Any], *, start_timeout_s: float) -> RayWorker:
        """In any part of the room that is free, so that the one who replaces another finds its place."""
        ray = import_ray()
        with _JOINING:
            if not ray.is_initialized():
                ray.init(address=self.cluster, log_to_driver=False, logging_level=logging.WARNING)
        from ray.util.placement_group import PlacementGroup

        group = PlacementGroup(ray.PlacementGroupID.from_hex(self.placement_group))
        return RayWorker.spawn(
            name,
            entry,
            settings,
            env=self.environment,
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            resources=self.resources,
            placement=(group, -1),
            start_timeout_s=start_timeout_s,
        )
