"""The launch and cluster sections: where the processes of a run are, and which resources each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.schema import NonNegativeInt, PositiveInt, Section

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class AnyLaunch(Section):
    """What every kind has."""

    procs: PositiveInt = 1
    """Processes that train, each a rank (one per GPU on CUDA)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of every collective: a rank that waits longer fails and says so."""
    max_restarts: NonNegativeInt = 3
    """How often a run that lost a rank starts again by itself, from its last checkpoint. A restart that gets no further
    than the one before is the last. Jobs of the service have max_restarts of their own."""


class LocalLaunch(AnyLaunch):
    kind: Literal["local"] = "local"
    """local: processes on this machine. Other kinds have settings of their own: see docs/configuration.md."""


class RayLaunch(AnyLaunch):
    kind: Literal["ray"]
    """Processes on the nodes of a Ray cluster."""
    address: str | None = None
    """The cluster to join: auto (the one this machine belongs to), HOST:PORT, or ray://HOST:PORT. null: start one on
    this machine, for this run alone."""
    placement_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long to wait for free resources on the cluster."""
    heartbeat_s: Annotated[float, Field(ge=5)] = 30.0
    """A rank whose node sends no heartbeat for so long is lost."""
    min_procs: PositiveInt | None = None
    """Where the cluster has no resources for procs ranks, go on with fewer, but at least with this many. Default: never
    with fewer."""

    @model_validator(mode="after")
    def _min_procs_is_fewer(self) -> RayLaunch:
        if self.min_procs is not None and self.min_procs > self.procs:
            raise ValueError(f"min_procs {self.min_procs} is more than procs {self.procs}: lower it")
        return self


LAUNCH_KINDS: dict[str, type[AnyLaunch]] = {"local": LocalLaunch, "ray": RayLaunch}


def expand_launch(section: Any) -> Any:
    """Without a kind it is local. Run directories of version 0.1 have the defaults of ray in every section: they go."""
    if not isinstance(section, Mapping):
        return section
    section = {"kind": "local", **section}
    if section["kind"] == "local":
        of_ray = {name: info.default for name, info in RayLaunch.model_fields.items() if not info.is_required()}
        is_default = [key for key in of_ray.keys() - LocalLaunch.model_fields if section.get(key, ...) == of_ray[key]]
        section = {key: value for key, value in section.items() if key not in is_default}
    return section


LaunchConfig = Annotated[LocalLaunch | RayLaunch, Field(discriminator="kind"), BeforeValidator(expand_launch)]


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


def check_pools(launch: AnyLaunch, pools: tuple[PoolConfig, ...], num_engines: int) -> None:
    """Raise ValueError where pools contradict the other sections."""
    if pools and not isinstance(launch, RayLaunch):
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
