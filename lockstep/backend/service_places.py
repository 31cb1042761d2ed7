"""Where the ranks of a training service run: processes of this machine, or actors of a Ray cluster.

One function for each place; a caller sees workers either way. Must not know what the ranks do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import PoolConfig
from lockstep.config.cluster import Strategy
from lockstep.launch.ray_cluster import reserve
from lockstep.workers.local import LocalWorker
from lockstep.workers.ray_worker import RayWorker, import_ray
from lockstep.workers.worker import Worker

ENTRY = "lockstep.backend.service_worker:start"


@dataclass(frozen=True)
class Room:
    """What each rank needs. `address` and the numbers are for Ray; `log_dir` is for processes of this machine."""

    procs: int
    start_timeout_s: float
    log_dir: Path | None = None
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Strategy = "PACK"


Spawned = tuple[list[Worker], Callable[[], None]]


def spawn_locally(room: Room, settings: Mapping[str, Any]) -> Spawned:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(max(num_cores // room.procs, 1)))

    def spawn(rank: int) -> Worker:
        return LocalWorker.spawn(
            f"rank {rank}",
            ENTRY,
            settings,
            env={"OMP_NUM_THREADS": threads},
            log_path=room.log_dir / f"rank-{rank}.log" if room.log_dir else None,
            start_timeout_s=room.start_timeout_s,
        )

    return _spawn_all(spawn, room.procs), lambda: None


def spawn_on_ray(room: Room, settings: Mapping[str, Any]) -> Spawned:
    """All ranks have room on the cluster before the first is started. Joins the cluster unless this process has."""
    ray = import_ray()
    if not ray.is_initialized():
        # Without an address Ray would join whatever cluster this machine happens to belong to.
        ray.init(address=room.address or "local", include_dashboard=False)
    resources = dict(room.resources)
    pool = PoolConfig(
        pool="training", procs=room.procs, cpus=room.cpus, gpus=room.gpus, resources=resources, strategy=room.strategy
    )
    reserved = reserve(pool, room.start_timeout_s, interrupted=lambda: False)

    def release() -> None:
        with suppress(Exception):  # the cluster may be gone, and the room with it
            reserved.release()

    def spawn(rank: int) -> Worker:
        return RayWorker.spawn(
            f"rank {rank}",
            ENTRY,
            settings,
            num_cpus=room.cpus,
            num_gpus=room.gpus,
            resources=resources,
            placement=(reserved.group, rank),
            start_timeout_s=room.start_timeout_s,
        )

    try:
        return _spawn_all(spawn, room.procs), release
    except BaseException:
        release()
        raise


SPAWN: dict[str, Callable[[Room, Mapping[str, Any]], Spawned]] = {"local": spawn_locally, "ray": spawn_on_ray}


def _spawn_all(spawn: Callable[[int], Worker], procs: int) -> list[Worker]:
    """At the same time; when one does not start, those that did are ended."""
    with ThreadPoolExecutor(procs, thread_name_prefix="spawn-ranks") as threads:
        futures = [threads.submit(spawn, rank) for rank in range(procs)]
    problem = next((error for error in (future.exception() for future in futures) if error is not None), None)
    if problem is None:
        return [future.result() for future in futures]
    for future in futures:
        if future.exception() is None:
            future.result().kill()
    raise problem
