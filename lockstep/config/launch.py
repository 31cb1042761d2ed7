"""The launch and cluster sections: where the processes of a run are, and which resources each of them has."""

from __future__ import annotations

import re
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
    check_memory: bool = True
    """On CUDA: refuse a run that does not fit into the GPUs' memory by its plan (docs/plan.md). false: only warn."""
    max_restarts: NonNegativeInt = 3
    """How often a run that lost a rank starts again by itself, from its last checkpoint. A restart that gets no further
    than the one before is the last. Jobs of the service have max_restarts of their own."""


class LocalLaunch(AnyLaunch):
    kind: Literal["local"] = "local"
    """local: processes on this machine. Other kinds have settings of their own: see docs/configuration.md."""


class NodesLaunch(AnyLaunch):
    """Of a cluster that is asked for whole nodes, or pods, with equally many ranks."""

    nodes: PositiveInt = 1
    """Nodes, or pods, that train."""
    procs_per_node: PositiveInt = 1
    """Ranks on each of them. procs is then nodes times this."""

    @model_validator(mode="before")
    @classmethod
    def _count_procs(cls, section: Any) -> Any:
        """procs is what nodes and procs_per_node say; given as well, it must be the same."""
        if not isinstance(section, Mapping):
            return section
        nodes, per_node = section.get("nodes", 1), section.get("procs_per_node", 1)
        if not (isinstance(nodes, int) and isinstance(per_node, int)):
            return section  # refused with its own sentence
        if section.get("procs", nodes * per_node) != nodes * per_node:
            raise ValueError(
                f"procs is nodes {nodes} x procs_per_node {per_node} = {nodes * per_node}, and not "
                f"{section['procs']}: set these, and leave procs out"
            )
        return {**section, "procs": nodes * per_node}


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


_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
_Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
_Folder = Annotated[str, Field(pattern=r"^/[^:]*[^/:]$")]
# Set for every pod by the launcher or by Kubernetes.
_OWN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+")


class VolumeConfig(Section):
    """A claim of the cluster's storage, and where pods see it."""

    claim: _Name
    """The PersistentVolumeClaim."""
    path: _Folder
    """Where it is mounted."""
    sub_path: str | None = None
    """The folder of the volume that is mounted. Default: all of it."""
    read_only: bool = False
    """Nothing can be written to it."""

    @model_validator(mode="after")
    def _sub_path_is_inside(self) -> VolumeConfig:
        if self.sub_path is not None and (self.sub_path.startswith("/") or ".." in self.sub_path.split("/")):
            raise ValueError(f"sub_path {self.sub_path!r} leads out of the volume: give a folder inside of it")
        return self


class TolerationConfig(Section):
    """A taint of nodes that pods put up with."""

    key: str | None = None
    """The taint's key. Default: every key."""
    operator: Literal["Equal", "Exists"] = "Exists"
    """Whether value must be the taint's."""
    value: str | None = None
    """For Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Default: every effect."""

    @model_validator(mode="after")
    def _value_is_for_equal(self) -> TolerationConfig:
        if (self.value is not None) != (self.operator == "Equal"):
            raise ValueError("a toleration has a value with operator Equal, and none with Exists")
        if self.key is None and self.operator == "Equal":
            raise ValueError("a toleration without a key tolerates every taint, with operator Exists: give key")
        return self


class KubernetesLaunch(NodesLaunch):
    kind: Literal["kubernetes"]
    """Pods of a Kubernetes cluster."""
    target: Literal["auto", "job", "jobset", "trainjob", "rayjob"] = "auto"
    """job: one node. jobset: several, needs JobSet. trainjob: needs Kubeflow's trainer. rayjob: pools of cluster, needs
    KubeRay. auto: rayjob where there are pools or engines, otherwise job for one node and jobset for several."""
    image: str
    """The container image. Lockstep must be installed in it."""
    context: str | None = None
    """Of the kubeconfig. Default: its current one, or inside a pod the cluster of that."""
    namespace: _Name | None = None
    """Default: that of the context."""
    gpus: NonNegativeInt = 0
    """GPUs of each pod. Default: none."""
    gpu_resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """What the cluster calls them."""
    cpus: _Quantity | None = None
    """CPUs of each pod, as "8" or "500m"."""
    memory: _Quantity | None = None
    """Memory of each pod, as "64Gi": more ends it."""
    shm: _Quantity = "1Gi"
    """Size of /dev/shm, which counts as memory."""
    volumes: tuple[VolumeConfig, ...] = ()
    """Claims that are mounted: for runs, models, data."""
    run_root: _Folder = "/runs"
    """The run directory is made in this folder of the pods: in one of the volumes, or kept by run_store."""
    run_store: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://.+[^/]$")] | None = None
    """For one node without a volume for runs: an address that fsspec knows (s3://bucket/folder), to which checkpoints
    and results are copied, and from which a run goes on."""
    env: dict[str, str] = Field(default={})
    """Variables of the environment."""
    secrets: dict[str, str] = Field(default={})
    """Variables from Secrets: the variable, and SECRET/KEY."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that nodes must have."""
    tolerations: tuple[TolerationConfig, ...] = ()
    """Taints that are put up with."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the pods."""
    service_account: _Name | None = None
    """Default: that of the namespace, without its token."""
    image_pull_secrets: tuple[_Name, ...] = ()
    """For a private registry."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Default: Kubernetes' own."""
    user: PositiveInt | None = None
    """The user id of the processes and the group of the volumes. Default: the image's own, which may not be root."""
    priority_class: _Name | None = None
    """The PriorityClass of the pods."""
    queue: _Name | None = None
    """The local queue, where Kueue admits jobs."""
    runtime: _Name = "lockstep"
    """For trainjob: the ClusterTrainingRuntime (examples/kubernetes/runtime.yaml)."""
    pending_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """How long pods may wait for a node or an image. Time in the queue does not count."""
    deadline_s: PositiveInt | None = None
    """The cluster ends a run that takes longer."""
    ttl_s: NonNegativeInt | None = 86400
    """After the end, the cluster removes the job after this time. null: never."""
    grace_s: PositiveInt = 120
    """What a pod that must go has to write a checkpoint."""

    @model_validator(mode="after")
    def _consistent(self) -> KubernetesLaunch:
        if self.target == "job" and self.nodes > 1:
            raise ValueError(f"target job is one pod, and nodes is {self.nodes}: use jobset or trainjob")
        kept = any(_is_inside(self.run_root, volume.path) and not volume.read_only for volume in self.volumes)
        if kept == (self.run_store is not None):
            raise ValueError(
                f"run_root {self.run_root} is in a volume, and there is a run_store too: remove one of them"
                if kept
                else f"run_root {self.run_root} is in no volume that can be written to, so a run would be lost with "
                "its pod: add a volume, or give run_store"
            )
        if self.run_store is not None and (self.nodes > 1 or self.target in ("trainjob", "rayjob")):
            raise ValueError(
                "run_store is for a job of one pod: several pods need a volume that all of them can write to"
            )
        self._check_variables()
        return self

    def _check_variables(self) -> None:
        for key in ("env", "secrets"):
            for name in getattr(self, key):
                if not _VARIABLE.fullmatch(name):
                    raise ValueError(f"{key}: {name!r} is no name of a variable")
                if name in _OWN_VARIABLES or name.startswith("PET_"):
                    raise ValueError(f"{key}: {name} is set by the launcher: remove it")
        for name, source in self.secrets.items():
            if not _SECRET.fullmatch(source):
                raise ValueError(f"secrets: {name} must be SECRET/KEY, the name of a Secret and its key")
        if both := self.env.keys() & self.secrets.keys():
            raise ValueError(f"{min(both)} is in env and in secrets: remove one of them")

    def mounts(self, path: str) -> bool:
        """Whether the pods have this path from a volume."""
        return any(_is_inside(path, volume.path) for volume in self.volumes)


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


_SlurmName = Annotated[str, Field(pattern=r"^[\w.,:@%+-]+$")]
_SlurmOption = Annotated[str, Field(pattern=r"^--[a-z][^\n\r]*$")]
_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
# What the patterns of this file ask for, in words; the words of others are made of the pattern itself.
FORMS = {
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$": "should be of lower-case letters, digits, - and .",
    r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$": "should be a quantity of Kubernetes, such as 500m, 4 or 16Gi",
    r"^/[^:]*[^/:]$": "should be an absolute folder, such as /data",
    r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$": "should be a resource of Kubernetes, such as nvidia.com/gpu",
    r"^[a-z][a-z0-9+.-]*://.+[^/]$": "should be an address without a slash at its end, such as s3://bucket/runs",
    r"^[\w.,:@%+-]+$": "should be a name of Slurm: letters, digits and .,:@%+-",
    r"^--[a-z][^\n\r]*$": "should be one option of sbatch, such as --constraint=a100",
    rf"^{_SLURM_TIME.pattern}$": "should be minutes, h:mm:ss or d-hh:mm:ss, such as 4:00:00",
    r"^[^\r\n]+$": "should be one line",
}
# Options of sbatch that the other settings decide, or that would break what the launcher relies on.
_OWN_SBATCH_OPTIONS = (
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "signal", "requeue"),
    *("no-requeue", "partition", "account", "qos", "job-name", "comment", "output", "error", "open-mode", "export"),
    *("wrap", "array", "parsable"),
)


class SlurmEngines(Section):
    """Nodes of their own for rollouts.engines: the second component of a heterogeneous job."""

    nodes: PositiveInt = 1
    """rollouts.engines are shared out among them equally."""
    partition: _SlurmName | None = None
    """Default: launch.partition."""
    gpus_per_node: NonNegativeInt | None = None
    """Default: one for each engine where their device is cuda, otherwise none is asked for."""
    cpus_per_engine: PositiveInt | None = None
    """Cores of each engine. Default: as the cluster says."""
    memory: _SlurmName | None = None
    """Of each node, as "64G". Default: the cluster's."""
    extra: tuple[_SlurmOption, ...] = ()
    """More options of sbatch for these nodes, as "--constraint=l40s"."""

    @model_validator(mode="after")
    def _options_are_not_decided_twice(self) -> SlurmEngines:
        _refuse_own_options(self.extra)
        return self


def _refuse_own_options(extra: tuple[str, ...]) -> None:
    for option in extra:
        name = re.split(r"[=\s]", option.removeprefix("--"))[0]
        if name in _OWN_SBATCH_OPTIONS:
            raise ValueError(f"extra holds {option}, which other settings of launch decide: use those")


class SlurmLaunch(NodesLaunch):
    kind: Literal["slurm"]
    """A batch job of Slurm. See docs/slurm.md."""
    partition: _SlurmName | None = None
    """Default: the cluster's."""
    account: _SlurmName | None = None
    """Who is charged. Default: the user's."""
    qos: _SlurmName | None = None
    """Quality of service. Default: the user's."""
    time: Annotated[str, Field(pattern=rf"^{_SLURM_TIME.pattern}$")] | None = None
    """Time limit, as "4:00:00", "1-12:00:00" or minutes. A run that needs more goes on in another turn of the same job.
    Default: the partition's."""
    gpus_per_node: NonNegativeInt | None = None
    """Default: procs_per_node where device is cuda, otherwise none is asked for."""
    cpus_per_proc: PositiveInt | None = None
    """Cores of each rank. Default: as the cluster says."""
    memory: _SlurmName | None = None
    """Of each node, as "64G". Default: the cluster's."""
    container: str | None = None
    """An image to run the ranks in, for srun --container-image (the Pyxis plugin). Lockstep must be installed in it."""
    setup: tuple[Annotated[str, Field(pattern=r"^[^\r\n]+$")], ...] = ()
    """Lines of shell before the ranks are started, as "module load cuda"."""
    extra: tuple[_SlurmOption, ...] = ()
    """More options of sbatch, as "--constraint=h100"."""
    requeue: bool = True
    """Whether the job goes back to the queue when its time is up, when it is preempted or loses a node."""
    notice_s: Annotated[int, Field(ge=1, le=65535)] = 120
    """How long before the time limit the run is asked to write a checkpoint and stop."""
    engines: SlurmEngines | None = None
    """Nodes for the engines of rollouts. Default: they are beside rank 0, on the first node."""

    @model_validator(mode="after")
    def _options_are_not_decided_twice(self) -> SlurmLaunch:
        _refuse_own_options(self.extra)
        if self.time is not None and self.notice_s >= _slurm_seconds(self.time):
            raise ValueError(f"notice_s {self.notice_s} leaves nothing of the time {self.time}: lower it")
        return self


def _slurm_seconds(time: str) -> int:
    """MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = _SLURM_TIME.fullmatch(time)
    assert match is not None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


LAUNCH_KINDS: dict[str, type[AnyLaunch]] = {
    "local": LocalLaunch,
    "ray": RayLaunch,
    "kubernetes": KubernetesLaunch,
    "slurm": SlurmLaunch,
}


def expand_launch(section: object) -> object:
    """Without a kind it is local. Run directories of version 0.1 have the defaults of ray in every section: they go."""
    if not isinstance(section, Mapping):
        return section
    section = {"kind": "local", **section}
    if section["kind"] == "local":
        of_ray = {name: info.default for name, info in RayLaunch.model_fields.items() if not info.is_required()}
        is_default = [key for key in of_ray.keys() - LocalLaunch.model_fields if section.get(key, ...) == of_ray[key]]
        section = {key: value for key, value in section.items() if key not in is_default}
    return section


LaunchConfig = Annotated[
    LocalLaunch | RayLaunch | KubernetesLaunch | SlurmLaunch,
    Field(discriminator="kind"),
    BeforeValidator(expand_launch),
]


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
    """Raise ValueError where pools, or nodes for engines, contradict the other sections."""
    if isinstance(launch, SlurmLaunch) and launch.engines is not None:
        nodes = launch.engines.nodes
        if num_engines == 0 or num_engines % nodes:
            raise ValueError(
                f"launch.engines has {nodes} nodes, and rollouts.engines is {num_engines}: give a multiple of that, or "
                "remove launch.engines"
            )
    has_ray = isinstance(launch, RayLaunch | SlurmLaunch) or getattr(launch, "target", "") in ("auto", "rayjob")
    if pools and not has_ray:
        raise ValueError(
            "cluster is for launch.kind ray, slurm, or kubernetes with target rayjob: set it, or remove cluster"
        )
    if pools and isinstance(launch, SlurmLaunch):
        for key in ("engines", "container"):
            if getattr(launch, key) is not None:
                raise ValueError(
                    f"launch.{key} is for ranks that Slurm starts, and cluster has Ray start them: remove one"
                )
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
