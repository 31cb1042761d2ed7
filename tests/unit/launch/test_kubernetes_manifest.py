"""Manifests against the schemas of those who read them: the official client's models, Kubeflow's, and where
LOCKSTEP_CRDS names a folder with them, the CustomResourceDefinitions of JobSet, Kubeflow Trainer and KubeRay."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import run_lockstep

from lockstep.config import ConfigError, resolve_config
from lockstep.launch.kubernetes_manifest import Plan

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
CRDS = Path(os.environ.get("LOCKSTEP_CRDS", "nowhere"))
EVERYTHING = {
    "kind": "kubernetes",
    "image": "registry.example/lockstep:1",
    "namespace": "team",
    "nodes": 2,
    "procs_per_node": 4,
    "gpus": 4,
    "cpus": "16",
    "memory": "64Gi",
    "shm": "8Gi",
    "volumes": [
        {"claim": "runs", "path": "/runs"},
        {"claim": "data", "path": "/data", "sub_path": "a/b", "read_only": True},
        {"claim": "data", "path": "/models"},
    ],
    "env": {"HF_HOME": "/models"},
    "secrets": {"HF_TOKEN": "hub/token"},
    "node_selector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu"}, {"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"}],
    "annotations": {"sidecar.istio.io/inject": "false"},
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "image_pull_policy": "Always",
    "user": 1000,
    "queue": "gpus",
    "deadline_s": 3600,
    "ttl_s": 600,
}


def plan_of(launch: dict[str, Any], **sections: Any) -> Plan:
    config = resolve_config({"model": "org/model", "data": {"train": "org/data"}, "launch": launch, **sections})
    return Plan.of(config, "my run", "0123456789abcdef0123456789abcdef")


def of_target(target: str, **changes: Any) -> Plan:
    launch = {**EVERYTHING, "target": target, **({"nodes": 1} if target == "job" else {}), **changes}
    return plan_of(launch)


def pods_of(target: str, workload: dict[str, Any]) -> list[dict[str, Any]]:
    spec = workload["spec"]
    if target == "job":
        return [spec["template"]]
    if target == "jobset":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    return [*(group["template"] for group in groups), spec["submitterPodTemplate"]]


def same_after_the_client(manifest: dict[str, Any], model: str) -> None:
    """A field that the client's model does not know is lost on the way, one of a wrong type is an error."""
    client = pytest.importorskip("kubernetes").client
    api = client.ApiClient()
    read = api.deserialize(json.dumps(manifest), model, "application/json")
    assert api.sanitize_for_serialization(read) == manifest


# --- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"priority_class": "high"}, {"user": None, "ttl_s": None, "deadline_s": None}])
def test_a_job_is_one_to_the_client(changes):
    same_after_the_client(of_target("job", **changes).workload(), "V1Job")


def test_a_config_map_is_one_to_the_client():
    same_after_the_client(of_target("job").config_map("0-1"), "V1ConfigMap")


@pytest.mark.parametrize("target", ["job", "jobset", "rayjob"])
def test_pods_are_pods_to_the_client(target):
    for template in pods_of(target, of_target(target).workload()):
        same_after_the_client(template, "V1PodTemplateSpec")


@pytest.mark.parametrize(
    ("model", "manifest"),
    [
        ("JobsetV1alpha2JobSet", of_target("jobset").workload()),
        ("TrainerV1alpha1TrainJob", of_target("trainjob").workload()),
        ("TrainerV1alpha1ClusterTrainingRuntime", yaml.safe_load((EXAMPLES / "runtime.yaml").read_text())),
        ("TrainerV1alpha1TrainJob", yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())),
    ],
)
def test_kubeflows_models_know_every_field(model, manifest):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = getattr(models, model).from_dict(manifest).to_dict()
    assert without_empty(read) == without_empty(manifest)


def without_empty(value: Any) -> Any:
    """The models write an empty object where none was given, and metadata that nobody set."""
    if isinstance(value, dict):
        kept = {key: without_empty(child) for key, child in value.items() if key != "creationTimestamp"}
        return {key: child for key, child in kept.items() if child not in ({}, None)}
    return [without_empty(child) for child in value] if isinstance(value, list) else value


def strict(schema: Any) -> Any:
    """As the API server validates: a field that is not in the schema is refused."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return schema


@pytest.mark.skipif(not CRDS.is_dir(), reason="set LOCKSTEP_CRDS to a folder with the definitions")
@pytest.mark.parametrize("target", ["jobset", "trainjob", "rayjob", "runtime"])
def test_the_definitions_know_every_field(target):
    jsonschema = pytest.importorskip("jsonschema")
    example = yaml.safe_load((EXAMPLES / "runtime.yaml").read_text())
    manifest = example if target == "runtime" else of_target(target).workload()
    found = [yaml.safe_load(path.read_text()) for path in CRDS.glob("*.yaml")]
    (definition,) = [one for one in found if one["spec"]["names"]["kind"] == manifest["kind"]]
    version = manifest["apiVersion"].split("/")[1]
    (schema,) = [one["schema"] for one in definition["spec"]["versions"] if one["name"] == version]
    strictly = strict(schema["openAPIV3Schema"])
    strictly["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft202012Validator(strictly).validate(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(strictly).validate({**manifest, "spec": {**manifest["spec"], "nodes": 2}})


# --- what is in them --------------------------------------------------------------------------------------------------


def test_auto_chooses_by_nodes_and_pools():
    one, several = {**EVERYTHING, "nodes": 1}, EVERYTHING
    assert plan_of(one).target == "job"
    assert plan_of(several).target == "jobset"
    engines = {"algorithm": {"kind": "grpo", "reward": "numeric"}, "rollouts": {"engines": 2}}
    assert plan_of({**EVERYTHING, "gpus": 0}, **engines).target == "rayjob"
    pools = [{"pool": "training", "cpus": 2, "gpus": 1}]
    assert plan_of(several, cluster=pools).target == "rayjob"


@pytest.mark.parametrize("target", ["job", "jobset", "rayjob"])
def test_pods_need_no_rights(target):
    for template in pods_of(target, of_target(target).workload()):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }


def test_a_secret_is_named_and_never_read():
    (template,) = pods_of("job", of_target("job").workload())
    variables = {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}
    assert variables["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}


def test_ranks_meet_at_the_first_pod():
    plan = of_target("jobset")
    (template,) = pods_of("jobset", plan.workload())
    variables = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
    assert variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"] == ("2", "4")
    assert variables["PET_MASTER_ADDR"] == f"{plan.name}-node-0-0.{plan.name}"
    assert len(f"{plan.name}-node-0-0") <= 63


def test_what_would_fail_again_is_not_started_again():
    job = of_target("job", max_restarts=5).workload()["spec"]
    assert job["backoffLimit"] == 5
    first, second = job["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert (second["action"], second["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    job_set = of_target("jobset", max_restarts=5).workload()["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 5
    assert job_set["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


def test_a_claim_that_is_mounted_twice_is_one_volume():
    (template,) = pods_of("job", of_target("job").workload())
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in template["spec"]["volumes"] if "persistentVolumeClaim" in v
    ]
    assert claims == ["runs", "data"]
    mounts = {mount["mountPath"]: mount for mount in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["/data"] == {"name": "claim-1", "mountPath": "/data", "subPath": "a/b", "readOnly": True}
    assert mounts["/models"] == {"name": "claim-1", "mountPath": "/models"}


def test_pools_become_groups_of_pods():
    grpo = {"algorithm": {"kind": "grpo", "reward": "numeric"}, "rollouts": {"engines": 3}}
    pools = [{"pool": "training", "cpus": 2, "gpus": 1}, {"pool": "rollouts", "cpus": 4, "gpus": 1}]
    groups = plan_of(EVERYTHING, cluster=pools, **grpo).workload()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    found = [
        (group["groupName"], group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["requests"])
        for group in groups
    ]
    assert found == [
        ("training", 2, {"cpu": "8000m", "memory": "64Gi", "nvidia.com/gpu": "4"}),
        ("rollouts", 3, {"cpu": "4000m", "memory": "64Gi", "nvidia.com/gpu": "1"}),
    ]


def test_the_pods_read_a_configuration_that_loads(tmp_path):
    for target, kind in (("job", "local"), ("rayjob", "ray")):
        text = of_target(target).config_map()["data"]["config.yaml"]
        config = resolve_config(yaml.safe_load(text))
        assert (config.launch.kind, config.launch.procs) == (kind, 4 if target == "job" else 8)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"image": None}, "launch.image"),
        ({"image": ""}, "launch.image"),
        ({"target": "pod"}, "launch.target"),
        ({"namespace": "Team"}, "launch.namespace"),
        ({"nodes": 0}, "launch.nodes"),
        ({"procs_per_node": 0}, "launch.procs_per_node"),
        ({"procs": 3}, "procs is nodes 2 x procs_per_node 4 = 8"),
        ({"gpus": -1}, "launch.gpus"),
        ({"gpu_resource": "gpu"}, "launch.gpu_resource"),
        ({"cpus": "many"}, "launch.cpus"),
        ({"memory": "64GB"}, "launch.memory"),
        ({"shm": "-1"}, "launch.shm"),
        ({"volumes": []}, "run_root /runs is in no volume that can be written to"),
        ({"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}]}, "in no volume that can be written to"),
        ({"volumes": [{"claim": "Runs", "path": "/runs"}]}, "launch.volumes"),
        ({"volumes": [{"claim": "runs", "path": "runs"}]}, "launch.volumes"),
        ({"volumes": [{"claim": "runs", "path": "/runs", "sub_path": "../x"}]}, "leads out of the volume"),
        ({"run_root": "runs"}, "launch.run_root"),
        ({"run_store": "s3://bucket/runs"}, "there is a run_store too"),
        ({"run_store": "bucket", "volumes": []}, "launch.run_store"),
        ({"run_store": "s3://bucket/runs", "volumes": []}, "run_store is for a job of one pod"),
        ({"env": {"1X": "a"}}, "'1X' is no name of a variable"),
        ({"env": {"RANK": "0"}}, "RANK is set by the launcher"),
        ({"env": {"PET_NNODES": "1"}}, "PET_NNODES is set by the launcher"),
        ({"env": {"HF_TOKEN": "a"}}, "HF_TOKEN is in env and in secrets"),
        ({"env": {"A": 1}}, "launch.env"),
        ({"secrets": {"HF_TOKEN": "hf_abc"}}, "HF_TOKEN must be SECRET/KEY"),
        ({"tolerations": [{"operator": "Equal", "value": "x"}]}, "give key"),
        ({"tolerations": [{"key": "a", "value": "x"}]}, "has a value with operator Equal"),
        ({"tolerations": [{"key": "a", "effect": "Never"}]}, "launch.tolerations"),
        ({"node_selector": ["gpu"]}, "launch.node_selector"),
        ({"annotations": {"a": True}}, "launch.annotations"),
        ({"service_account": "A b"}, "launch.service_account"),
        ({"image_pull_secrets": "registry!"}, "launch.image_pull_secrets"),
        ({"image_pull_policy": "Sometimes"}, "launch.image_pull_policy"),
        ({"user": 0}, "launch.user"),
        ({"priority_class": "High Prio"}, "launch.priority_class"),
        ({"queue": ""}, "launch.queue"),
        ({"runtime": "X"}, "launch.runtime"),
        ({"pending_timeout_s": 0}, "launch.pending_timeout_s"),
        ({"deadline_s": 0}, "launch.deadline_s"),
        ({"ttl_s": -1}, "launch.ttl_s"),
        ({"grace_s": 0}, "launch.grace_s"),
        ({"target": "job"}, "target job is one pod, and nodes is 2"),
        ({"replicas": 2}, "unknown key 'launch.replicas'"),
        ({"address": "auto"}, "unknown key 'launch.address'"),
    ],
)
def test_every_mistake_is_a_sentence(changes, sentence):
    launch = {key: value for key, value in {**EVERYTHING, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        plan_of(launch)
    assert sentence in str(caught.value)


def test_what_a_target_has_not():
    with pytest.raises(ConfigError, match=r"priority_class is for the runtime of a trainjob"):
        of_target("trainjob", priority_class="high")
    with pytest.raises(ConfigError, match=r"target jobset has no pods for pools or rollouts\.engines: use rayjob"):
        plan_of(
            {**EVERYTHING, "target": "jobset"}, algorithm={"kind": "grpo", "reward": "numeric"}, rollouts={"engines": 1}
        )


def test_a_file_of_this_machine_is_none_of_the_pods(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("{}\n")
    config = {"model": "org/model", "data": {"train": str(file)}, "launch": EVERYTHING}
    with pytest.raises(ConfigError, match=r"data\.train\.path: .*train\.jsonl is on this machine, and in no volume"):
        Plan.of(resolve_config(config), "run", "0" * 32)
    mounted = {**EVERYTHING, "volumes": [*EVERYTHING["volumes"], {"claim": "more", "path": str(tmp_path)}]}
    Plan.of(resolve_config({**config, "launch": mounted}), "run", "0" * 32)


def test_the_role_allows_what_the_launcher_asks_for():
    role = yaml.safe_load((EXAMPLES / "role.yaml").read_text())
    same_after_the_client(role, "V1Role")


def test_the_command_prints_what_it_would_apply():
    code, out, err = run_lockstep("manifest", EXAMPLES / "sft.yaml", "--name", "mine")
    assert (code, err) == (0, "")
    configuration, job_set = yaml.safe_load_all(out)
    assert (configuration["kind"], job_set["kind"]) == ("ConfigMap", "JobSet")
    command = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == ["python", "-m", "lockstep.launch.node", "/runs/mine", "--config", "/etc/lockstep/config.yaml"]


def test_a_dry_run_cannot_see_what_the_pods_see():
    code, _, err = run_lockstep("train", EXAMPLES / "sft.yaml", "--dry-run")
    assert code == 2
    assert "see lockstep manifest instead" in err


def test_manifests_are_for_kubernetes(tmp_path):
    config = tmp_path / "lockstep.yaml"
    config.write_text("model: org/model\ndata: {train: org/data}\n")
    code, _, err = run_lockstep("manifest", config)
    assert (code, err) == (2, "error: launch.kind is local: manifests are for kind kubernetes\n")
