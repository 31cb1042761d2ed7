"""Ray: a cluster joined, resources reserved on it, and workers as actors there.

Ray itself is imported only inside functions: the actor is an ordinary class that Ray runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from lockstep.config import ConfigError, PoolConfig, RayLaunch
from lockstep.processes.child import Serving, serve_until_end
from lockstep.processes.frames import FrameError, Request, pack_message, pack_result, read_result, unpack
from lockstep.processes.tree import read_command, start_time
from lockstep.processes.worker import TICK_S, PendingCalls, Reply, WorkerDied, WorkerTimedOut

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from torch import Tensor

# A Reservation as JSON, for the processes that a rank starts.
RESERVATION_VARIABLE = "LOCKSTEP_RESERVATION"
_OBJECT_STORE_BYTES = 256 << 20  # of a cluster that is started for one run: nothing large goes through it
_JOIN_S = 60.0
_LOOK_INTERVAL_S = 0.5
_SMALLER_TIMEOUT_S = 20.0  # for resources that were free a moment ago
_NAMED_NODES = 4  # more are counted, alike ones together
_REAP_S = 10.0  # how long Ray may take to report that an actor is gone
_JOINING = threading.Lock()  # workers are started in parallel

Amounts = Mapping[str, float]


# --- the cluster ------------------------------------------------------------------------------------------------------


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'lockstep[ray]'") from error
    return ray


class Interrupted(Exception):
    """A signal asked the driver to end."""


@contextlib.contextmanager
def join_cluster(launch: RayLaunch, namespace: str, give_up: Callable[[str], None]) -> Iterator[None]:
    """Joined until the end of the block. A cluster that was started for this run ends with it.

    Ray tries for very long to reach a cluster that is not there: `give_up` is called, in another thread, after
    a minute.
    """
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, str | int] = {"namespace": namespace, "log_to_driver": True}
    if launch.address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    else:
        options["address"] = launch.address
    where = "the cluster of this machine" if launch.address in (None, "auto") else launch.address
    late = f"launch.address: {where} gave no answer within {_JOIN_S:g} s: is it up?"
    timer = threading.Timer(_JOIN_S, give_up, [late])
    timer.daemon = True
    timer.start()
    try:
        ray.init(**options)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        if launch.address is None:
            raise
        raise ConfigError(f"launch.address {launch.address} cannot be joined: {describe_join_error(error)}") from error
    finally:
        timer.cancel()
    try:
        yield
    finally:
        ray.shutdown()


def describe_join_error(error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any("InvalidAuthToken" in str(cause) for cause in causes):
        return "it asks for a token: set RAY_AUTH_MODE=token, and have its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    return str(error).strip().splitlines()[0]


@dataclass(frozen=True)
class Node:
    name: str
    total: Amounts
    free: Amounts


def list_nodes() -> list[Node]:
    """Of the cluster, those that are alive."""
    ray = import_ray()
    # There is no public way (Ray 2.60).
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return [
        Node(name_node(node["NodeID"], node["NodeManagerAddress"]), node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def name_node(node_id: str, address: str) -> str:
    """One machine may hold several nodes: its address is not enough."""
    return f"node {address} ({node_id[:8]})"


# --- reservations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """A placement group of Ray, with a bundle for each process of the pool. As JSON it can be used on a node too.

    `cluster` is the address by which a process joins unless it has; `environment` is what workers start with.
    """

    pool: PoolConfig
    group_id: str
    cluster: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def request(cls, pool: PoolConfig) -> Reservation:
        """Not granted yet: see `wait`."""
        group = import_ray().util.placement_group([bundle_of(pool)] * (pool.procs or 0), strategy=pool.strategy)
        return cls(pool, group.id.hex())

    @classmethod
    def of_this_process(cls) -> Reservation | None:
        """What the launcher has reserved for the processes that this rank starts."""
        text = os.environ.get(RESERVATION_VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        return cls(**{**values, "pool": PoolConfig.model_validate(values["pool"])})

    def to_json(self) -> str:
        values = {"group_id": self.group_id, "cluster": self.cluster, "environment": dict(self.environment)}
        return json.dumps({"pool": self.pool.model_dump(mode="json"), **values})

    @property
    def group(self) -> PlacementGroup:
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(import_ray().PlacementGroupID.from_hex(self.group_id))

    def wait(self, deadline: float, interrupted: Callable[[], bool]) -> bool:
        while not self.group.wait(_LOOK_INTERVAL_S):
            if time.monotonic() > deadline or interrupted():
                return False
        return True

    def release(self) -> None:
        import_ray().util.remove_placement_group(self.group)

    def spawn(
        self, name: str, entry: str, settings: Mapping[str, object], *, start_timeout_s: float, bundle: int = -1
    ) -> RayWorker:
        """In any free bundle unless one is named, so that a worker which replaces another finds its place."""
        ray, pool = import_ray(), self.pool
        with _JOINING:
            if not ray.is_initialized():
                ray.init(address=self.cluster, log_to_driver=False, logging_level=logging.WARNING)
        return RayWorker.spawn(
            name,
            entry,
            settings,
            env=self.environment,
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or 0.0,
            resources=pool.resources,
            placement=(self.group, bundle),
            start_timeout_s=start_timeout_s,
        )


def reserve(
    pool: PoolConfig,
    timeout_s: float,
    interrupted: Callable[[], bool],
    is_possible: Callable[[int], bool] = lambda procs: False,
) -> Reservation:
    """For the whole pool or, if that times out, for fewer processes where that number `is_possible`."""
    reservation = Reservation.request(pool)
    if reservation.wait(time.monotonic() + timeout_s, interrupted):
        return reservation
    reservation.release()
    if interrupted():
        raise Interrupted
    alive, bundle, procs = list_nodes(), bundle_of(pool), pool.procs or 0
    most = num_fitting(bundle, pool.strategy, [node.free for node in alive], procs - 1)
    for fewer in range(most, 0, -1):
        if is_possible(fewer) and not interrupted():
            reservation = Reservation.request(pool.model_copy(update={"procs": fewer}))
            if reservation.wait(time.monotonic() + _SMALLER_TIMEOUT_S, interrupted):
                return reservation
            reservation.release()
    raise ConfigError(explain_shortage(pool, alive, timeout_s))


# --- what fits -------------------------------------------------------------------------------------------------------


def bundle_of(pool: PoolConfig) -> dict[str, float]:
    """What one process needs."""
    amounts = {"CPU": pool.cpus, "GPU": pool.gpus or 0.0, **pool.resources}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def num_fitting(bundle: Amounts, strategy: str, nodes: Sequence[Amounts], most: int) -> int:
    """How many of `most` such processes fit on the nodes."""
    counts = [min((math.floor(node.get(k, 0.0) / v + 1e-9) for k, v in bundle.items()), default=most) for node in nodes]
    if strategy == "STRICT_PACK":
        total = max(counts, default=0)
    elif strategy == "STRICT_SPREAD":
        total = sum(count >= 1 for count in counts)
    else:
        total = sum(counts)
    return min(total, most)


def explain_shortage(pool: PoolConfig, nodes: Sequence[Node], waited_s: float) -> str:
    """Why nothing was reserved: what was requested, what there is, what would fit."""
    bundle, procs = bundle_of(pool), pool.procs or 0
    free = num_fitting(bundle, pool.strategy, [node.free for node in nodes], procs)
    idle = num_fitting(bundle, pool.strategy, [node.total for node in nodes], procs)
    requested = f"{procs} x {_list_amounts(bundle)} with strategy {pool.strategy}"
    if idle < procs:
        fits = f"Room for {free} is free now, and the whole cluster has room for {idle}: ask for less, or add nodes"
    elif free < procs:
        fits = f"Room for {free} is free now, and for {idle} once others are done: wait for them, or ask for less"
    else:
        fits = "By now there is room: start again"
    return (
        f"the cluster had no room for the {pool.pool} pool within {waited_s:.0f} s. Requested: {requested}. "
        f"There: {_describe_nodes(nodes, bundle)}. {fits}"
    )


def _describe_nodes(nodes: Sequence[Node], bundle: Amounts) -> str:
    if not nodes:
        return "no nodes"
    names = list(dict.fromkeys(["CPU", *bundle]))
    texts = [_describe_node(node, names) for node in nodes]
    if len(nodes) <= _NAMED_NODES:
        return "; ".join(f"{node.name} has {text}" for node, text in zip(nodes, texts, strict=True))
    return "; ".join(f"{count} nodes with {text}" for text, count in Counter(texts).items())


def _describe_node(node: Node, names: Sequence[str]) -> str:
    parts = [f"{name} {node.total.get(name, 0):g} ({node.free.get(name, 0):g} free)" for name in names]
    return ", ".join(parts)


def _list_amounts(amounts: Amounts) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()) or "nothing"


# --- workers ---------------------------------------------------------------------------------------------------------


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
        """`place` counts the calls: Ray may start coroutines in another order than they were called."""
        request = Request.from_frame(unpack(data))
        answer = self._answers[request.number] = Future()
        self._early[place] = request
        while self._num_arrived in self._early:
            self._num_arrived += 1
            self._serving.receive(self._early.pop(self._num_arrived - 1))
        return await asyncio.wrap_future(answer)

    async def wait_for_end(self) -> None:
        """Never returns: its failure means that the actor is gone."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        self._serving.end()
        await asyncio.to_thread(self._has_ended.wait)

    def _send(self, number: int, result: Reply | BaseException) -> None:
        self._answers.pop(number).set_result(b"".join(pack_result(number, result)))

    def _serve(self, entry: str, settings: str) -> None:
        serve_until_end(self._serving, entry, json.loads(settings))
        self._has_ended.set()


class RayWorker:
    """Made by `spawn`. `pid` is known if the actor is on this machine."""

    def __init__(self, name: str, actor: Any, pid: int | None) -> None:
        self.name, self.pid, self._actor = name, pid, actor
        self._started = "" if pid is None else start_time(pid)
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
        settings: Mapping[str, object],
        *,
        env: Mapping[str, str] | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: tuple[PlacementGroup, int] | None = None,
        start_timeout_s: float = 60.0,
    ) -> RayWorker:
        """As LocalWorker.spawn. `placement` is a placement group and the number of the bundle in it."""
        ray = import_ray()
        options: dict[str, object] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
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
            amounts = {"num_cpus": num_cpus, "num_gpus": num_gpus, **(resources or {})}
            needed = _list_amounts({key: value for key, value in amounts.items() if value} or {"num_cpus": 0})
            message = f"{name} did not start within {start_timeout_s:g} s: is there a free node with {needed}?"
            raise WorkerTimedOut(name, message) from None
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            raise WorkerDied(name, f"{name} could not start: {describe_loss(error)}") from None
        return cls(name, actor, pid if _is_here(pid, host) else None)

    def call(
        self,
        method: str,
        body: Mapping[str, object] | None = None,
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
        self._end("was killed by its owner", grace_s=None)

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
        """Ray asks a process to end itself, which a stopped or stuck one does not. Returns when it is gone."""
        deadline = time.monotonic() + _REAP_S
        while self._started and start_time(pid) == self._started and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _receive(self) -> None:
        """Not in Ray's own thread, which must not wait for the callbacks of our futures."""
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
        while not self._gone.wait(TICK_S):
            self._pending.expire()

    def _lose(self, message: str) -> None:
        """An actor that is only out of reach is killed too: it must not come back."""
        self._pending.fail_all(WorkerDied(self.name, message))
        ray = import_ray()
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                ray.kill(self._actor)
        self._gone.set()


_WHY = re.compile(r"The actor (?:is dead|died) because (.+?)(?:\.(?:\s|$)|$)", re.MULTILINE)
_UNREACHABLE = re.compile(r"temporarily unavailable: (?:RpcError: )?(?:RPC error: )?(.+?)(?: rpc_code|\.\s|\.?$)")
_DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\.\s|\.?$)", re.MULTILINE)


def describe_loss(error: Exception) -> str:
    """One sentence of what Ray writes in many."""
    text = str(error)
    if unreachable := _UNREACHABLE.search(text):
        return f"its process or its node is out of reach ({unreachable[1]})"
    why, detail = _WHY.search(text), _DETAIL.search(text)
    reason = why[1] if why else text.strip().split("\n")[0]
    return f"{reason} ({detail[1]})" if detail else reason


def _is_here(pid: int, host: str) -> bool:
    """Whether it is a process of Ray on this machine: another one's pid may belong to anything here."""
    return host == socket.gethostname() and any("ray::" in word for word in read_command(pid))
