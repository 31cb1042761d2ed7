"""Whole runs through the command and a Kubernetes API server whose pods are processes here (kubernetes_server.py): the
run directory here follows that of the pods, Ctrl-C leaves the run, and another command takes it over."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import FakeCluster, serve_cluster
from tiny import run_lockstep, start_lockstep, write_config

from lockstep.rundir import RunDir, damage

pytest.importorskip("kubernetes")
TIMEOUT_S = 400


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with serve_cluster(tmp_path) as (cluster, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        cluster.runs_containers = True
        claim = {"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteMany"]}}
        cluster.objects["persistentvolumeclaims", "team", "disk"] = claim
        yield cluster


def write_launch(folder: Path, model: Path, **changes: Any) -> Path:
    """A configuration whose pods see the temporary folder of this machine."""
    root = Path(os.path.commonpath([folder, model]))
    launch = {
        "kind": "kubernetes",
        "image": "lockstep:1",
        "device": "cpu",
        "volumes": [{"claim": "disk", "path": str(root)}],
        "run_root": str(folder / "pods"),
    }
    optim = changes.pop("optim", {"max_steps": 4})
    return write_config(folder, model, launch={**launch, **changes}, optim=optim, checkpoint={"export": "none"})


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_from_the_command_to_its_end(nodes, cluster, tiny_model, tmp_path):
    config = write_launch(tmp_path, tiny_model, nodes=nodes)
    code, out, err = run_lockstep("train", config, "--run-dir", tmp_path / "mine", "--json", timeout_s=TIMEOUT_S)
    assert code == 0, (out, err, cluster.logs)
    assert json.loads(out)["state"] == "completed"
    here, there = RunDir(tmp_path / "mine"), RunDir(tmp_path / "pods" / "mine")
    assert there.status()["ranks"] == nodes
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes()
    assert [record["step"] for record in here.metrics()] == [1, 2, 3, 4]
    assert there.list_checkpoints()[-1].step == 4
    assert list(here.logs.glob("mine-*.log")), "what pods print for people is kept"


@pytest.mark.slow
def test_a_mistake_comes_back_as_the_ranks_sentence(cluster, tiny_model, tmp_path):
    config = write_launch(tmp_path, tiny_model)
    (tmp_path / "train.jsonl").write_text('{"messages": "none"}\n')
    code, _, err = run_lockstep("train", config, "--run-dir", tmp_path / "mine", timeout_s=TIMEOUT_S)
    assert code == 2, (err, cluster.logs, cluster.all("jobs")[0].get("status"))
    assert "train.jsonl" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_attach_follows_and_stop_ends(cluster, tiny_model, tmp_path):
    config = write_launch(tmp_path, tiny_model, optim={"max_steps": 100_000, "epochs": 100_000})
    run = RunDir(tmp_path / "mine")
    command = start_lockstep("train", config, "--run-dir", run.path)
    wait_for(lambda: bool(run.metrics()), "the first step")
    command.send_signal(signal.SIGTERM)
    out, err = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 143, (out, err)
    assert "The run goes on" in out
    steps = len(run.metrics())

    follower = start_lockstep("attach", run.path)
    wait_for(lambda: len(run.metrics()) > steps, "another step")
    assert len({record["step"] for record in run.metrics()}) == len(
        (run.path / "metrics.jsonl").read_text().splitlines()
    )
    code, out, err = run_lockstep("stop", run.path, timeout_s=TIMEOUT_S)
    assert code == 0, (out, err)
    assert run.status()["state"] == "cancelled"
    assert not cluster.all("jobs")
    follower.communicate(timeout=TIMEOUT_S)
    assert run.status()["state"] == "cancelled"


def evict(cluster: FakeCluster) -> None:
    """The pod gets SIGTERM, as from a node that is drained, and has ended when this returns."""
    pod = cluster.only("pods")
    cluster.terminate(pod["metadata"]["name"])
    wait_for(lambda: pod["status"]["phase"] == "Failed", "the pod's end")


@pytest.mark.slow
@pytest.mark.parametrize("procs", [1, 2])
def test_an_evicted_pod_saves_and_the_next_goes_on(procs, cluster, tiny_model, tmp_path):
    config = write_launch(tmp_path, tiny_model, procs_per_node=procs, optim={"max_steps": 100_000, "epochs": 100_000})
    there = RunDir(tmp_path / "pods" / "mine")
    command = start_lockstep("train", config, "--run-dir", tmp_path / "mine")
    wait_for(lambda: bool(there.metrics()), "the first step")
    evict(cluster)
    ended = cluster.only("pods")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 75, cluster.logs
    saved = there.list_checkpoints()[-1].step
    assert there.status()["state"] == "interrupted"
    assert saved == there.metrics()[-1]["step"]
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=TIMEOUT_S)

    cluster.objects.pop(("jobs", "team", cluster.only("jobs")["metadata"]["name"]))
    cluster.objects.pop(("pods", "team", cluster.only("pods")["metadata"]["name"]))
    command = start_lockstep("train", "--resume", tmp_path / "mine")
    wait_for(lambda: there.metrics()[-1]["step"] > saved, "a step more")
    assert [event["step"] for event in there.events() if event["event"] == "resumed"] == [saved]
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=TIMEOUT_S)


@pytest.mark.slow
def test_a_run_without_a_volume_is_kept_in_a_store(cluster, tiny_model, tmp_path):
    store = tmp_path / "store"
    root = Path(os.path.commonpath([tmp_path, tiny_model]))
    config = write_launch(
        tmp_path,
        tiny_model,
        run_store=f"file://{store}",
        run_root=str(tmp_path / "pods"),
        volumes=[{"claim": "disk", "path": str(root), "read_only": True}],
    )
    code, out, err = run_lockstep("train", config, "--run-dir", tmp_path / "mine", timeout_s=TIMEOUT_S)
    assert code == 0, (out, err, cluster.logs)
    kept = RunDir(store / "mine")
    assert kept.status()["state"] == "completed"
    assert kept.list_checkpoints()[-1].step == 4
    assert damage(kept.list_checkpoints()[-1].path) is None
    assert (kept.path / "metrics.jsonl").read_bytes() == (tmp_path / "mine" / "metrics.jsonl").read_bytes()
