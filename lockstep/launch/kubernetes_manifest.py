"""What a run is on Kubernetes: a Job, a JobSet, Kubeflow's TrainJob or KubeRay's RayJob, and a ConfigMap. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import ConfigError, KubernetesLaunch, LocalLaunch, RayLaunch, RunConfig, resolve_pool
from lockstep.config.reach import texts_of
from lockstep.launch.local import LAUNCH_ID_VARIABLE
from lockstep.processes.rank_environment import MASTER_PORT
from lockstep.processes.stop_notice import SAVE_ON_SIGTERM_VARIABLE

Manifest = dict[str, Any]
LAUNCH_LABEL = "lockstep/launch-id"
CONTAINER = "node"
_CONFIG_FOLDER, _CONFIG_FILE = "/etc/lockstep", "config.yaml"
_NODE_ENTRY = "lockstep.launch.node"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_WOULD_FAIL_AGAIN = [2, 3]  # exit codes: a mistake of the user's, a diverged training
_MAX_SLUG = 30  # JobSet and KubeRay add to the name, and hosts have at most 63 characters
_HEAD_RESOURCES = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}


class ResourceType(NamedTuple):
    """Of the Kubernetes API: where objects of a kind are found."""

    group: str
    version: str
    plural: str
    kind: str
    installs: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


WORKLOADS = {
    "job": ResourceType("batch", "v1", "jobs", "Job", "Kubernetes"),
    "jobset": ResourceType("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", "JobSet"),
    "trainjob": ResourceType("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", "Kubeflow Trainer"),
    "rayjob": ResourceType("ray.io", "v1", "rayjobs", "RayJob", "KubeRay"),
}


@dataclass(frozen=True)
class Plan:
    """A launch of a run before it is applied."""

    config: RunConfig
    launch: KubernetesLaunch
    run_name: str
    launch_id: str

    @classmethod
    def of(cls, config: RunConfig, run_name: str, launch_id: str) -> Plan:
        """Raises ConfigError where the pods could not run it."""
        launch = config.launch
        assert isinstance(launch, KubernetesLaunch)
        plan = cls(config, launch, run_name, launch_id)
        plan._check_target()
        plan._check_paths()
        return plan

    @property
    def target(self) -> str:
        if self.launch.target != "auto":
            return self.launch.target
        if self.config.cluster or self.config.rollouts.engines:
            return "rayjob"
        return "job" if self.launch.nodes == 1 else "jobset"

    @property
    def name(self) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", self.run_name.lower()).strip("-")[:_MAX_SLUG].strip("-") or "run"
        return f"{slug if slug[0].isalpha() else f'r-{slug}'}-{self.launch_id[:8]}"

    @property
    def run_dir(self) -> str:
        """In the pods."""
        return f"{self.launch.run_root}/{self.run_name}"

    @property
    def labels(self) -> dict[str, str]:
        known = {f"app.kubernetes.io/{key}": "lockstep" for key in ("name", "managed-by")}
        return {**known, "app.kubernetes.io/instance": self.name, LAUNCH_LABEL: self.launch_id}

    def workload(self) -> Manifest:
        """What is watched, stopped and removed."""
        found = WORKLOADS[self.target]
        queue = {"kueue.x-k8s.io/queue-name": self.launch.queue} if self.launch.queue else {}
        about = {"name": self.name, "labels": {**self.labels, **queue}}
        if self.launch.namespace:
            about["namespace"] = self.launch.namespace
        make = {"job": _job, "jobset": _job_set, "trainjob": _train_job, "rayjob": _ray_job}[self.target]
        return {"apiVersion": found.api_version, "kind": found.kind, "metadata": about, "spec": make(self)}

    def config_map(self, owner_uid: str | None = None) -> Manifest:
        """The configuration. With the workload's uid it is removed with it."""
        about: Manifest = {"name": self.name, "labels": self.labels}
        if self.launch.namespace:
            about["namespace"] = self.launch.namespace
        if owner_uid is not None:
            found = WORKLOADS[self.target]
            owner = {"apiVersion": found.api_version, "kind": found.kind, "name": self.name, "uid": owner_uid}
            about["ownerReferences"] = [owner]
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {_CONFIG_FILE: self._inner_yaml()}}

    def _inner_yaml(self) -> str:
        """As the pods read it: there the ranks are processes of a machine, or of a Ray cluster."""
        launch = self.launch
        kept = {key: getattr(launch, key) for key in ("procs", "device", "timeout_s", "max_restarts")}
        inner: LocalLaunch | RayLaunch = LocalLaunch(**kept)
        if self.target == "rayjob":
            inner = RayLaunch(kind="ray", address="auto", placement_timeout_s=launch.pending_timeout_s, **kept)
        return self.config.model_copy(update={"launch": inner}).to_yaml()

    def _check_target(self) -> None:
        launch, target = self.launch, self.target
        if target != "rayjob" and (self.config.cluster or self.config.rollouts.engines):
            raise ConfigError(f"launch.target {target} has no pods for pools or rollouts.engines: use rayjob")
        if target == "trainjob" and launch.priority_class:
            raise ConfigError("launch.priority_class is for the runtime of a trainjob: set it there, or use jobset")
        if target == "rayjob" and launch.run_store:
            raise ConfigError("launch.run_store is for a job of one pod, and this is a rayjob: give a volume")

    def _check_paths(self) -> None:
        """A file of this machine that is in no volume is none of the pods'; one that is nowhere may be in the image."""
        for text in texts_of(self.config):
            is_path = text.reach in ("rows", "model", "file") and text.value.startswith("/")
            if is_path and not self.launch.mounts(text.value) and Path(text.value).exists():
                raise ConfigError(
                    f"{text.key}: {text.value} is on this machine, and in no volume of launch.volumes, so the pods "
                    "would not find it: put it on a volume and write its path there, or use a Hub id"
                )


# --- pods -------------------------------------------------------------------------------------------------------------


def _command(plan: Plan) -> list[str]:
    store = ["--store", f"{plan.launch.run_store}/{plan.run_name}"] if plan.launch.run_store else []
    config = f"{_CONFIG_FOLDER}/{_CONFIG_FILE}"
    return ["python", "-m", _NODE_ENTRY, plan.run_dir, "--config", config, *store]


def _variables(plan: Plan) -> list[Manifest]:
    launch = plan.launch
    own = {
        LAUNCH_ID_VARIABLE: plan.launch_id,
        SAVE_ON_SIGTERM_VARIABLE: "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",  # the root of the file system is read-only
        "USER": "lockstep",  # the user id may have no name in the image
    }
    plain = [{"name": name, "value": value} for name, value in {**own, **launch.env}.items()]
    secret = []
    for name, source in launch.secrets.items():
        of, key = source.split("/")
        secret.append({"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}})
    return [*plain, *secret]


def _place_variables(plan: Plan) -> list[Manifest]:
    """Torchrun's options, as Kubeflow's trainer sets them for its pods."""
    launch, first = plan.launch, f"{plan.name}-{CONTAINER}-0-0.{plan.name}"
    index = {"value": "0"} if launch.nodes == 1 else {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    return [
        {"name": "PET_NNODES", "value": str(launch.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(launch.procs_per_node)},
        {"name": "PET_NODE_RANK", **index},
        {"name": "PET_MASTER_ADDR", "value": first if launch.nodes > 1 else "127.0.0.1"},
        {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
    ]


def _volumes(plan: Plan) -> list[Manifest]:
    launch = plan.launch
    claims = {volume.claim: {"claimName": volume.claim} for volume in launch.volumes}
    scratch = ["scratch", *(["runs"] if launch.run_store else [])]
    return [
        {"name": "config", "configMap": {"name": plan.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": launch.shm}},
        *({"name": name, "emptyDir": {}} for name in scratch),
        *({"name": f"claim-{i}", "persistentVolumeClaim": claim} for i, claim in enumerate(claims.values())),
    ]


def _mounts(plan: Plan) -> list[Manifest]:
    launch = plan.launch
    claims = list(dict.fromkeys(volume.claim for volume in launch.volumes))
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    if launch.run_store:
        mounts.append({"name": "runs", "mountPath": launch.run_root})
    for volume in launch.volumes:
        mount: Manifest = {"name": f"claim-{claims.index(volume.claim)}", "mountPath": volume.path}
        mount |= {"subPath": volume.sub_path} if volume.sub_path else {}
        mounts.append(mount | ({"readOnly": True} if volume.read_only else {}))
    return mounts


def _resources(launch: KubernetesLaunch) -> Manifest:
    fixed = {"memory": launch.memory} if launch.memory else {}
    fixed |= {launch.gpu_resource: str(launch.gpus)} if launch.gpus else {}
    requested = {**({"cpu": launch.cpus} if launch.cpus else {}), **fixed}
    return {key: value for key, value in (("requests", requested), ("limits", fixed)) if value}


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _pod_security(launch: KubernetesLaunch) -> Manifest:
    security: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if launch.user is not None:
        owner = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), launch.user)
        security |= {**owner, "fsGroupChangePolicy": "OnRootMismatch"}
    return security


def _container(plan: Plan, name: str, resources: Manifest) -> Manifest:
    launch = plan.launch
    policy = {"imagePullPolicy": launch.image_pull_policy} if launch.image_pull_policy else {}
    return {
        "name": name,
        "image": launch.image,
        **policy,
        "env": _variables(plan),
        "resources": resources,
        "volumeMounts": _mounts(plan),
        "securityContext": _container_security(),
    }


def _placement(launch: KubernetesLaunch) -> Manifest:
    """Where pods may run, and with which rights: what Kubeflow lets a TrainJob say, too."""
    tolerations = [
        {"key": one.key, "operator": one.operator, "value": one.value, "effect": one.effect}
        for one in launch.tolerations
    ]
    optional: Manifest = {
        "serviceAccountName": launch.service_account,
        "imagePullSecrets": [{"name": name} for name in launch.image_pull_secrets],
        "nodeSelector": launch.node_selector,
        "tolerations": [{key: value for key, value in one.items() if value is not None} for one in tolerations],
    }
    return {
        "terminationGracePeriodSeconds": launch.grace_s,
        "securityContext": _pod_security(launch),
        **{key: value for key, value in optional.items() if value},
    }


def _pod_template(plan: Plan, container: Manifest) -> Manifest:
    launch = plan.launch
    about: Manifest = {"labels": plan.labels}
    about |= {"annotations": dict(launch.annotations)} if launch.annotations else {}
    spec: Manifest = {
        "containers": [container],
        "volumes": _volumes(plan),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_placement(launch),
    }
    spec |= {"priorityClassName": launch.priority_class} if launch.priority_class else {}
    return {"metadata": about, "spec": spec}


# --- workloads --------------------------------------------------------------------------------------------------------


def _job_spec(plan: Plan) -> Manifest:
    launch = plan.launch
    container = _container(plan, CONTAINER, _resources(launch))
    container["command"] = _command(plan)
    container["env"] = [*_place_variables(plan), *container["env"]]
    container["ports"] = [{"containerPort": MASTER_PORT, "protocol": "TCP"}]
    template = _pod_template(plan, container)
    template["spec"]["restartPolicy"] = "Never"
    codes = {"containerName": CONTAINER, "operator": "In", "values": _WOULD_FAIL_AGAIN}
    spec: Manifest = {
        "parallelism": launch.nodes,
        "completions": launch.nodes,
        "completionMode": "NonIndexed" if launch.nodes == 1 else "Indexed",
        "podReplacementPolicy": "Failed",  # never two pods of one place, which would write the same run
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": template,
    }
    return spec | ({"activeDeadlineSeconds": launch.deadline_s} if launch.deadline_s else {})


def _job(plan: Plan) -> Manifest:
    """A pod that has to go for others, or with its node, does not count as a restart."""
    launch, spec = plan.launch, _job_spec(plan)
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    spec["podFailurePolicy"]["rules"].append({"action": "Ignore", "onPodConditions": [disrupted]})
    spec["backoffLimit"] = launch.max_restarts
    return spec | ({} if launch.ttl_s is None else {"ttlSecondsAfterFinished": launch.ttl_s})


def _job_set(plan: Plan) -> Manifest:
    """One lost pod ends the Job, and all pods are made again: the others wait for it in vain."""
    launch, spec = plan.launch, _job_spec(plan)
    spec["backoffLimit"] = 0
    final = {"name": "wouldFailAgain", "action": "FailJobSet"}
    final_reasons = {"onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    job = {"name": CONTAINER, "replicas": 1, "template": {"metadata": {"labels": plan.labels}, "spec": spec}}
    return {
        "replicatedJobs": [job],
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": launch.max_restarts, "rules": [{**final, **final_reasons}]},
        **({} if launch.ttl_s is None else {"ttlSecondsAfterFinished": launch.ttl_s}),
    }


def _train_job(plan: Plan) -> Manifest:
    """The runtime has the JobSet; this adds to its pods what is the run's own."""
    launch = plan.launch
    template = _pod_template(plan, {})
    patched = {"name": CONTAINER, "volumeMounts": _mounts(plan), "securityContext": _container_security()}
    pods = {
        "metadata": template["metadata"],
        "spec": {"volumes": _volumes(plan), "containers": [patched], **_placement(launch)},
    }
    job_patch = {"name": CONTAINER, "template": {"spec": {"template": pods}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job_patch]}}}
    trainer: Manifest = {
        "image": launch.image,
        "command": _command(plan),
        "env": _variables(plan),
        "numNodes": launch.nodes,
        "numProcPerNode": launch.procs_per_node,
        "resourcesPerNode": _resources(launch),
    }
    return {
        "runtimeRef": {"name": launch.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "lockstep", "trainingRuntimeSpec": runtime}],
        **({"activeDeadlineSeconds": launch.deadline_s} if launch.deadline_s else {}),
    }


def _ray_job(plan: Plan) -> Manifest:
    """The driver runs in the head's pod, and has no rank there."""
    launch, rollouts = plan.launch, plan.config.rollouts
    head = _pod_template(plan, _container(plan, "ray-head", _HEAD_RESOURCES))
    submitter = _pod_template(plan, _container(plan, "ray-job-submitter", {}))
    submitter["spec"]["restartPolicy"] = "Never"
    groups = [_ray_group(plan, "training", launch.nodes, launch.procs_per_node)]
    if rollouts.engines:
        groups.append(_ray_group(plan, "rollouts", rollouts.engines, 1))
    return {
        "entrypoint": shlex.join(_command(plan)),
        "runtimeEnvYAML": f"env_vars:\n  {LAUNCH_ID_VARIABLE}: {plan.launch_id}\n",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": launch.ttl_s or 0,
        "backoffLimit": launch.max_restarts,
        "preRunningDeadlineSeconds": int(launch.pending_timeout_s) + 1,
        **({"activeDeadlineSeconds": launch.deadline_s} if launch.deadline_s else {}),
        "submitterPodTemplate": submitter,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"}, "template": head},
            "workerGroupSpecs": groups,
        },
    }


def _ray_group(plan: Plan, name: str, replicas: int, procs: int) -> Manifest:
    """Pods with what their processes need: as the pool says or, of training without one, as launch does."""
    launch = plan.launch
    if any(pool.pool == name for pool in plan.config.cluster) or name == "rollouts":
        pool = resolve_pool(plan.config.cluster, name, replicas * procs, launch.device)
        gpus = (pool.gpus or 0.0) * procs
        if gpus != int(gpus):
            raise ConfigError(f"cluster: {name} needs {gpus:g} GPUs in a pod, which has whole ones: change gpus")
        cpus = f"{max(int(pool.cpus * procs * 1000), 1000)}m"
        launch = launch.model_copy(update={"gpus": int(gpus), "cpus": cpus})
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "rayStartParams": {},
        "template": _pod_template(plan, _container(plan, "ray-worker", _resources(launch))),
    }
