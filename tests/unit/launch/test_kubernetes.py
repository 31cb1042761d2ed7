"""A run on Kubernetes, with the official client over HTTP against tests/kubernetes_server.py: applied once, followed,
stopped, found again, and every way in which a cluster says no."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import FakeCluster, serve_cluster

from lockstep.config import ConfigError, resolve_config
from lockstep.launch.kubernetes import KubernetesLauncher
from lockstep.launch.launcher import Resources, RunHandle, RunState
from lockstep.launch.local import read_handle
from lockstep.rundir import RunDir

pytest.importorskip("kubernetes")
LAUNCH = {
    "kind": "kubernetes",
    "image": "registry.example/lockstep:1",
    "memory": "8Gi",
    "volumes": [{"claim": "runs", "path": "/runs"}],
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with serve_cluster(tmp_path) as (cluster, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        add_claim(cluster, "runs", "ReadWriteMany")
        yield cluster


@pytest.fixture
def launcher() -> KubernetesLauncher:
    launcher = KubernetesLauncher()
    launcher.interval_s = 0.0
    return launcher


def add_claim(cluster: FakeCluster, name: str, mode: str) -> None:
    claim = {"metadata": {"name": name}, "spec": {"accessModes": [mode]}}
    cluster.objects["persistentvolumeclaims", "team", name] = claim


def new_run(folder: Path, **launch: Any) -> RunDir:
    config = resolve_config({"model": "org/model", "data": {"train": "org/data"}, "launch": {**LAUNCH, **launch}})
    return RunDir.create(folder / "my Run_1", config)


def start(launcher: KubernetesLauncher, run: RunDir, launch_id: str | None = None) -> RunHandle:
    return launcher.start(run.path, Resources(), launch_id=launch_id)


def running() -> dict[str, Any]:
    return {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}


# --- the way of a run -------------------------------------------------------------------------------------------------


def test_a_run_is_applied_followed_and_complete(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    job, configuration = cluster.only("jobs"), cluster.only("configmaps")
    assert job["metadata"]["name"].startswith("my-run-1-")
    assert job["metadata"]["labels"]["lockstep/launch-id"] == handle.launch_id == run.status()["launch"]
    assert configuration["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert RunHandle.from_json(handle.to_json()) == handle == read_handle(run.path)
    assert cluster.calls.index("create jobs dry") < cluster.calls.index("create jobs")

    assert launcher.poll(handle) == RunState("running")
    cluster.set_pod(**running())
    cluster.print_line(json.dumps({"lockstep": "metrics.jsonl", "at": 0, "line": '{"step": 1, "loss": 2.5}'}))
    cluster.print_line(json.dumps({"lockstep": "status.json", "text": '{"state": "running", "step": 1}'}))
    cluster.print_line("rank 0: hello")
    assert launcher.poll(handle) == RunState("running")
    assert [record["loss"] for record in run.metrics()] == [2.5]
    assert (run.status()["state"], run.status()["step"]) == ("running", 1)
    pod = cluster.only("pods")["metadata"]["name"]
    assert (run.logs / f"{pod}.log").read_text() == "rank 0: hello\n"

    cluster.print_line(json.dumps({"lockstep": "status.json", "text": '{"state": "completed", "step": 2}'}))
    cluster.set_pod(phase="Succeeded")
    cluster.end_workload("jobs", "Complete")
    assert launcher.poll(handle) == RunState("completed")
    assert run.status()["state"] == "completed"
    # Another process reads all of it again, and nothing is doubled.
    assert KubernetesLauncher().poll(handle) == RunState("completed")
    assert len(run.metrics()) == 1
    assert (run.path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_launch_is_never_doubled(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run, "a" * 32)
    with pytest.raises(ValueError, match=r"is still running as Job my-run-1-aaaaaaaa in namespace team"):
        start(launcher, run)
    cluster.only("pods")["status"] = {"phase": "Failed"}
    again = start(launcher, run, "a" * 32)  # whoever started it was killed, and starts it again under its id
    assert again == handle
    assert len(cluster.all("jobs")) == 1


def test_an_answer_that_is_lost_doubles_nothing(cluster, launcher, tmp_path):
    cluster.lost_answers = 1
    handle = start(launcher, new_run(tmp_path))
    assert len(cluster.all("jobs")) == len(cluster.all("configmaps")) == 1
    assert launcher.poll(handle) == RunState("running")


def test_a_launch_is_found_by_its_id(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    assert launcher.find(run.path, "b" * 32) is None
    handle = start(launcher, run, "b" * 32)
    (run.path / "launch.json").unlink()
    cluster.objects.pop(("configmaps", "team", cluster.only("configmaps")["metadata"]["name"]))
    assert KubernetesLauncher().find(run.path, "b" * 32) == handle  # killed before the rest was there
    assert cluster.only("configmaps")["data"]["config.yaml"]
    assert launcher.find(run.path, "c" * 32) is None


def test_stopping_removes_everything(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    launcher.stop(handle)
    assert not cluster.all("jobs")
    assert not cluster.all("pods")
    assert not cluster.all("configmaps")
    assert run.status()["state"] == "cancelled"
    assert launcher.poll(handle).state == "cancelled"


@pytest.mark.parametrize(
    ("target", "plural"), [("jobset", "jobsets"), ("trainjob", "trainjobs"), ("rayjob", "rayjobs")]
)
def test_every_target_is_applied_and_ends(target, plural, cluster, launcher, tmp_path):
    run = new_run(tmp_path, target=target)
    handle = start(launcher, run)
    assert launcher.poll(handle) == RunState("running")
    if target == "rayjob":
        cluster.only(plural)["status"] = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    else:
        cluster.end_workload(plural, "Completed" if target == "jobset" else "Complete")
    assert launcher.poll(handle) == RunState("completed")


def test_a_cluster_that_is_silent_for_a_while_is_waited_for(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    cluster.is_down = True
    assert launcher.poll(handle) == RunState("running")
    assert "does not answer: apiserver not ready" in run.status()["phase"]
    cluster.is_down = False
    assert launcher.poll(handle) == RunState("running")
    cluster.is_down, launcher.silence_limit_s = True, 0.0
    outcome = launcher.poll(handle)
    assert outcome.state == "failed"
    assert f"the run may go on there: follow it with lockstep attach {run.path}" in outcome.reason
    assert run.status()["state"] == "created"  # what it does there is not known


# --- what goes wrong in the cluster -----------------------------------------------------------------------------------


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "node", "image": "i:1", "state": state}]}


def ended(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": "Failed", "containerStatuses": [{"name": "node", "state": state}], **more}


def disrupted(reason: str, message: str) -> dict[str, Any]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return ended(75, conditions=[condition])


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/5 nodes are available: 5 Insufficient nvidia.com/gpu.",
        }
    ],
}


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (UNSCHEDULABLE, "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."),
        (waiting("ContainerCreating"), "is starting (ContainerCreating)"),
        (waiting("ImagePullBackOff", "Back-off pulling"), "the image i:1 of pod"),
        ({"phase": "Unknown"}, "is on a node that does not answer"),
    ],
)
def test_why_pods_wait_is_shown(status, sentence, cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    cluster.set_pod(**status)
    assert launcher.poll(handle) == RunState("running")
    assert sentence in run.status()["phase"]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (waiting("ImagePullBackOff", "no such image"), "cannot be pulled (ImagePullBackOff): no such image"),
        (waiting("CreateContainerConfigError", 'secret "hub" not found'), 'secret "hub" not found'),
        (UNSCHEDULABLE, "launch.pending_timeout_s allows 1e-06 s"),
    ],
)
def test_nobody_waits_forever(status, sentence, cluster, launcher, tmp_path):
    run = new_run(tmp_path, pending_timeout_s=1e-6)
    handle = start(launcher, run)
    launcher.stuck_limit_s = 0.0
    cluster.set_pod(**status)
    launcher.poll(handle)
    outcome = launcher.poll(handle)
    assert outcome.state == "failed"
    assert sentence in outcome.reason
    assert run.status()["error"] == outcome.reason
    assert not cluster.all("jobs"), "what waits holds its place"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (ended(137, "OOMKilled"), "ran out of memory (its limit is 8Gi): raise launch.memory"),
        (ended(137), "ended with exit code 137 (SIGKILL)"),
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}, "was evicted"),
        (disrupted("PreemptionByScheduler", "preempting"), "made room for a pod of higher priority (preempting)"),
        (disrupted("DeletionByPodGC", "node is gone"), "was lost with its node"),
        (disrupted("EvictionByEvictionAPI", "drained"), "was evicted, as when a node is drained"),
        ({"phase": "Failed", "reason": "NodeLost"}, "its node does not answer"),
    ],
)
def test_why_a_job_failed(status, sentence, cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    cluster.set_pod(**status)
    cluster.end_workload("jobs", "Failed", "BackoffLimitExceeded", "too many")
    outcome = launcher.poll(handle)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    assert sentence in outcome.reason
    assert run.status()["error"] == outcome.reason


def test_a_lost_pod_is_started_again_by_the_cluster(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    cluster.set_pod(**disrupted("EvictionByEvictionAPI", "drained"))
    assert launcher.poll(handle) == RunState("running")
    assert "was evicted, as when a node is drained (drained); it is started again" in run.status()["phase"]


def test_a_mistake_of_the_user_is_the_ranks_own_sentence(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    record = {"time": 1.0, "rank": 0, "message": "there is no file /data/x", "exit_code": 2}
    cluster.print_line(json.dumps({"lockstep": "logs/rank-0.error.json", "text": json.dumps(record)}))
    cluster.set_pod(**ended(2))
    cluster.end_workload("jobs", "Failed", "PodFailurePolicy", "exit code 2")
    assert launcher.poll(handle) == RunState("failed", "there is no file /data/x", 2)


def test_what_a_pod_says_before_it_has_a_run(cluster, launcher, tmp_path):
    run = new_run(tmp_path)
    handle = start(launcher, run)
    cluster.print_line("error: /runs/x holds a run with other settings")
    cluster.set_pod(**ended(2))
    cluster.end_workload("jobs", "Failed", "PodFailurePolicy", "exit code 2")
    assert launcher.poll(handle) == RunState("failed", "/runs/x holds a run with other settings", 2)


def test_a_deadline_that_passed_is_named(cluster, launcher, tmp_path):
    handle = start(launcher, new_run(tmp_path, deadline_s=60))
    cluster.set_pod(**ended(75))
    cluster.end_workload("jobs", "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
    assert "took longer than launch.deadline_s allows" in launcher.poll(handle).reason


def test_a_job_that_somebody_deleted(cluster, launcher, tmp_path):
    handle = start(launcher, new_run(tmp_path))
    cluster.delete("jobs", "team", cluster.only("jobs")["metadata"]["name"])
    outcome = launcher.poll(handle)
    assert outcome.state == "failed"
    assert "was deleted from namespace team" in outcome.reason


def test_time_in_a_queue_does_not_count(cluster, launcher, tmp_path):
    cluster.makes_pods = False
    run = new_run(tmp_path, queue="gpus", pending_timeout_s=1e-6)
    handle = start(launcher, run)
    cluster.only("jobs")["spec"]["suspend"] = True
    for _ in range(3):
        assert launcher.poll(handle) == RunState("running")
    assert run.status()["phase"] == "waiting in the queue gpus"


# --- before anything is applied ---------------------------------------------------------------------------------------


def refused(launcher: KubernetesLauncher, cluster: FakeCluster, run: RunDir) -> str:
    with pytest.raises(ConfigError) as caught:
        start(launcher, run)
    assert not any(cluster.all(plural) for plural in ("jobs", "jobsets", "trainjobs", "rayjobs", "configmaps"))
    assert not (run.path / "launch.json").exists()
    return str(caught.value)


def test_no_right_to_make_jobs(cluster, launcher, tmp_path):
    cluster.forbidden.add(("create", "jobs"))
    said = refused(launcher, cluster, new_run(tmp_path))
    assert said.startswith(
        "you may not create jobs in namespace team: ask for a role that allows it (jobs is forbidden"
    )


def test_no_right_to_make_config_maps(cluster, launcher, tmp_path):
    cluster.forbidden.add(("create", "configmaps"))
    assert "you may not create configmaps in namespace team" in refused(launcher, cluster, new_run(tmp_path))


def test_no_such_namespace(cluster, launcher, tmp_path):
    said = refused(launcher, cluster, new_run(tmp_path, namespace="nowhere"))
    assert said == "the cluster has no namespace nowhere: make it, or set launch.namespace"


@pytest.mark.parametrize(
    ("target", "name"), [("jobset", "JobSet"), ("trainjob", "Kubeflow Trainer"), ("rayjob", "KubeRay")]
)
def test_a_type_that_is_not_installed(target, name, cluster, launcher, tmp_path):
    cluster.known = {"batch/v1": {"jobs"}}
    assert f"install {name}, or choose another launch.target" in refused(
        launcher, cluster, new_run(tmp_path, target=target)
    )


def test_an_older_trainer_would_drop_the_volumes(cluster, launcher, tmp_path):
    cluster.prunes.add("runtimePatches")
    assert "must be 2.2 or newer" in refused(launcher, cluster, new_run(tmp_path, target="trainjob"))


def test_a_claim_that_is_not_there(cluster, launcher, tmp_path):
    run = new_run(tmp_path, volumes=[{"claim": "missing", "path": "/runs"}])
    assert "namespace team has no PersistentVolumeClaim missing" in refused(launcher, cluster, run)


def test_a_claim_that_only_one_pod_can_mount(cluster, launcher, tmp_path):
    add_claim(cluster, "single", "ReadWriteOnce")
    run = new_run(tmp_path, nodes=2, volumes=[{"claim": "single", "path": "/runs"}])
    assert "the claim single can be mounted as ReadWriteOnce only" in refused(launcher, cluster, run)
    cluster.forbidden.add(("get", "persistentvolumeclaims"))  # then nobody can look
    assert start(launcher, run).launcher == "kubernetes"


def test_nobody_is_logged_in(cluster, launcher, tmp_path, monkeypatch):
    run = new_run(tmp_path)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubeconfig.read_text().replace("token: secret", "token: stale"))
    assert "the cluster does not know who you are: log in again" in refused(launcher, cluster, run)


@pytest.mark.parametrize(
    ("kubeconfig", "context", "sentence"),
    [
        (None, None, "there is no kubeconfig"),
        ("nonsense: [", None, "is no kubeconfig that can be used"),
        ("{}", None, "is no kubeconfig that can be used"),
        ("same", "elsewhere", "launch.context elsewhere is not in"),
    ],
)
def test_no_kubeconfig(kubeconfig, context, sentence, cluster, launcher, tmp_path, monkeypatch):
    run = new_run(tmp_path, context=context)
    if kubeconfig != "same":
        path = tmp_path / "other"
        monkeypatch.setenv("KUBECONFIG", str(path))
        if kubeconfig is not None:
            path.write_text(kubeconfig)
    assert sentence in refused(launcher, cluster, run)


def test_a_cluster_that_is_not_there(cluster, launcher, tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(kubeconfig.read_text().replace("http://127.0.0.1:", "http://127.0.0.1:1#"))
    with pytest.raises(OSError, match=r"the API server .* does not answer"):
        start(launcher, new_run(tmp_path))
