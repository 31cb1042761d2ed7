"""A Ray cluster as the driver of a run needs it: joined or started, its nodes, and room reserved on them.

Must not know ranks nor what they run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.config import ConfigError, LaunchConfig, PoolConfig
from lockstep.launch.placement import Node, bundle_of, explain, num_fitting

_OBJECT_STORE_BYTES = 256 << 20  # of a cluster that is started for one run: nothing large goes through it
_JOIN_S = 60.0
_LOOK_INTERVAL_S = 0.5
_SMALLER_TIMEOUT_S = 20.0  # for room that was seen to be free a moment ago


class Interrupted(Exception):
    """A signal asked the driver to end."""


@contextlib.contextmanager
def joined(launch: LaunchConfig, namespace: str, give_up: Callable[[str], None]) -> Iterator[None]:
    """In the cluster, until the end. One that was started for this run ends with it.

    Ray tries for very long to reach a cluster that is not there: `give_up` is called, in another thread, when it has
    for too long.
    """
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": True}
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
        raise ConfigError(f"launch.address {launch.address} cannot be joined: {_say_why(error)}") from error
    finally:
        timer.cancel()
    try:
        yield
    finally:
        ray.shutdown()


def _say_why(error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any("InvalidAuthToken" in str(cause) for cause in causes):
        return "it asks for a token: set RAY_AUTH_MODE=token, and have its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    return str(error).strip().splitlines()[0]


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("launch.kind ray needs Ray: pip install 'lockstep[ray]'") from error
    return ray


def nodes() -> list[Node]:
    """Those that are alive."""
    ray = import_ray()
    free: dict[str, Any] = ray._private.state.available_resources_per_node()  # there is no public way (Ray 2.60)
    return [
        Node(name_node(found["NodeID"], found["NodeManagerAddress"]), found["Resources"], free.get(found["NodeID"], {}))
        for found in ray.nodes()
        if found["Alive"]
    ]


def name_node(node_id: str, address: str) -> str:
    """One machine may hold several nodes, so that its address is not enough."""
    return f"node {address} ({node_id[:8]})"


class Reservation:
    """What is reserved for a pool. `group` is Ray's placement group, with a bundle for each process."""

    def __init__(self, pool: PoolConfig) -> None:
        ray = import_ray()
        self.pool = pool
        self.group = ray.util.placement_group([bundle_of(pool)] * (pool.procs or 0), strategy=pool.strategy)

    def wait(self, deadline: float, interrupted: Callable[[], bool]) -> bool:
        while not self.group.wait(_LOOK_INTERVAL_S):
            if time.monotonic() > deadline or interrupted():
                return False
        return True

    def release(self) -> None:
        import_ray().util.remove_placement_group(self.group)


def reserve(
    pool: PoolConfig,
    timeout_s: float,
    interrupted: Callable[[], bool],
    is_possible: Callable[[int], bool] = lambda procs: False,
) -> Reservation:
    """Room for the whole pool or, where it stays too little, for fewer processes if that number `is_possible`."""
    room = Reservation(pool)
    if room.wait(time.monotonic() + timeout_s, interrupted):
        return room
    room.release()
    if interrupted():
        raise Interrupted
    found, bundle, procs = nodes(), bundle_of(pool), pool.procs or 0
    most = num_fitting(bundle, pool.strategy, [node.free for node in found], procs - 1)
    for fewer in range(most, 0, -1):
        if is_possible(fewer) and not interrupted():
            room = Reservation(pool.model_copy(update={"procs": fewer}))
            if room.wait(time.monotonic() + _SMALLER_TIMEOUT_S, interrupted):
                return room
            room.release()
    raise ConfigError(explain(pool, found, timeout_s))
