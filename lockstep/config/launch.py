"""The launch and cluster sections: where the processes of a run are, and which resources each of them has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config.schema import NonNegativeInt, PositiveInt, Section

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class LaunchConfig(Section):
    kind: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: on the nodes of a Ray cluster."""
    procs: PositiveInt = 1
    """Processes that train, each a rank (one per GPU on CUDA)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of every collective: a rank that waits longer fails and says so."""
    max_restarts: NonNegativeInt = 3
    """How often a run that lost a rank starts again by itself, from its last checkpoint. A restart that gets no further
    than the one before is the last. Jobs of the service have max_restarts of their own."""
    address: str | None = None
    """For ray: the cluster to join: auto (the one this machine belongs to), HOST:PORT, or ray://HOST:PORT. null: start
    one on this machine, for this run alone."""
    placement_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """For ray: how long to wait for free resources on the cluster."""
    heartbeat_s: Annotated[float, Field(ge=5)] = 30.0
    """For ray: a rank whose node sends no heartbeat for so long is lost."""
    min_procs: PositiveInt | None = None
    """For ray: where the cluster has no resources for procs ranks, go on with fewer, but at least with this many.
    Default: never with fewer."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> LaunchConfig:
        if self.kind == "local":
            for key in ("address", "min_procs"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is for kind ray: set kind, or remove it")
        if self.min_procs is not None and self.min_procs > self.procs:
            raise ValueError(f"min_procs {self.min_procs} is more than procs {self.procs}: lower it")
        return self


class PoolConfig(Section):
    """Processes with the same needs, and how they are placed on nodes."""

    pool: Literal["training", "rollouts"]
    """Whose resources these are: the ranks that train, or the engines that sample."""
    procs: PositiveInt | None = None
    """Of training: as launch.procs; of rollouts: as rollouts.engines. Default: that number."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs for each process."""
    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs for each process. Default: 1 where its device is cuda, otherwise 0."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Other resources of the cluster's nodes, by name, for each process."""
    strategy: Strategy = "PACK"
    """PACK: on few nodes. SPREAD: on many. STRICT_PACK: all on one node. STRICT_SPREAD: each on another node."""


def check_pools(launch: LaunchConfig, pools: tuple[PoolConfig, ...], num_engines: int) -> None:
    """Raise ValueError where pools contradict the other sections."""
    if pools and launch.kind != "ray":
        raise ValueError("cluster is for launch.kind ray: set it, or remove cluster")
    for name, expected, key in (
        ("training", launch.procs, "launch.procs"),
        ("rollouts", num_engines, "rollouts.engines"),
    ):
        named = [pool for pool in pools if pool.pool == name]
        if len(named) > 1:
            raise ValueError(f"cluster has {len(named)} pools for {name}: give one")
        if named and expected == 0:
            raise ValueError(f"cluster has a pool for {name}, and {key} is 0: raise it, or remove the pool")
        if named and named[0].procs not in (None, expected):
            raise ValueError(
                f"cluster gives {name} {named[0].procs} procs, and {key} is {expected}: give the same number, or "
                "leave procs out of the pool"
            )


def resolve_pool(pools: tuple[PoolConfig, ...], name: str, num_procs: int, device: str) -> PoolConfig:
    """The pool with every number in its place, also where the configuration does not name it."""
    pool = next((pool for pool in pools if pool.pool == name), None) or PoolConfig.model_validate({"pool": name})
    gpus = float(device == "cuda") if pool.gpus is None else pool.gpus
    return pool.model_copy(update={"procs": num_procs, "gpus": gpus})
