"""What fits on a cluster and how it is said, what pools of resources may be, and what goes with a rank to its node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import ConfigError, PoolConfig, RunConfig, parse_config, resolve_pool
from lockstep.launch.ray_ranks import RankHost, carried_environment
from lockstep.processes.ray import Node, bundle_of, explain_shortage, num_fitting

ONE = {"CPU": 1.0}


def make_pool(**settings: Any) -> PoolConfig:
    given = PoolConfig.model_validate({"pool": "training", **settings})
    return resolve_pool((given,), "training", given.procs or 1, "cpu")


@pytest.mark.parametrize(
    ("strategy", "expected"), [("PACK", 5), ("SPREAD", 5), ("STRICT_PACK", 3), ("STRICT_SPREAD", 2)]
)
def test_strategies_fit_differently(strategy: str, expected: int) -> None:
    nodes = [{"CPU": 3.0}, {"CPU": 2.5}, {"CPU": 0.0}]
    assert num_fitting(ONE, strategy, nodes, most=9) == expected


def test_every_resource_must_fit_on_one_node() -> None:
    nodes = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 8.0}, {"CPU": 8.0}]
    assert num_fitting({"CPU": 2.0, "GPU": 1.0}, "PACK", nodes, most=9) == 1
    assert num_fitting({"CPU": 0.1}, "PACK", [{"CPU": 0.3}], most=9) == 3, "in spite of rounding"
    assert num_fitting(ONE, "PACK", [{"CPU": 100.0}], most=4) == 4, "never more than are asked for"
    assert num_fitting({}, "PACK", [{}], most=4) == 4, "who needs nothing fits anywhere"
    assert num_fitting(ONE, "STRICT_PACK", [], most=4) == 0


def test_what_a_process_needs() -> None:
    assert bundle_of(make_pool(cpus=2, gpus=1, resources={"fast": 0.5})) == {"CPU": 2.0, "GPU": 1.0, "fast": 0.5}
    assert bundle_of(make_pool(cpus=0)) == {}


def test_no_room_says_what_was_asked_what_there_is_and_what_would_fit() -> None:
    pool = make_pool(procs=3, cpus=2, strategy="STRICT_SPREAD")
    nodes = [
        Node("node 10.0.0.1 (aa)", {"CPU": 4, "memory": 1e9}, {"CPU": 0, "memory": 1e9}),
        Node("node 10.0.0.2 (bb)", {"CPU": 4}, {"CPU": 3}),
    ]
    assert explain_shortage(pool, nodes, 30.0) == (
        "the cluster had no room for the training pool within 30 s. Requested: 3 x CPU 2 with strategy STRICT_SPREAD. "
        "There: node 10.0.0.1 (aa) has CPU 4 (0 free); node 10.0.0.2 (bb) has CPU 4 (3 free). "
        "Room for 1 is free now, and the whole cluster has room for 2: ask for less, or add nodes"
    )


def test_no_room_because_of_others() -> None:
    nodes = [Node("n", {"CPU": 4}, {"CPU": 1})]
    assert "for 2 once others are done: wait for them" in explain_shortage(make_pool(procs=2), nodes, 1.0)
    assert "no nodes" in explain_shortage(make_pool(procs=2), [], 1.0)


def test_many_nodes_are_counted() -> None:
    nodes = [Node(f"n{i}", {"CPU": 8, "GPU": 4}, {"CPU": 8 * (i % 2), "GPU": 0}) for i in range(10)]
    told = explain_shortage(make_pool(procs=2, gpus=1), nodes, 1.0)
    assert "5 nodes with CPU 8 (0 free), GPU 4 (0 free); 5 nodes with CPU 8 (8 free), GPU 4 (0 free)" in told


# --- the configuration ------------------------------------------------------------------------------------------------


def settings(text: str) -> RunConfig:
    return parse_config(f"model: x\ndata: {{train: a}}\n{text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: [{pool: training}]", "cluster is for launch.kind ray"),
        ("launch: {kind: ray, procs: 2}\ncluster: [{pool: training, procs: 3}]", "3 procs, and launch.procs is 2"),
        ("launch: {kind: ray}\ncluster: [{pool: training}, {pool: training}]", "2 pools for training"),
        ("launch: {kind: ray}\ncluster: [{pool: rollouts}]", "rollouts.engines is 0"),
        ("launch: {kind: ray}\ncluster: [{pool: training, cpu: 1}]", "did you mean cluster.cpus"),
        ("launch: {kind: ray, procs: 2, min_procs: 3}", "min_procs 3 is more than procs 2"),
        ("launch: {min_procs: 1}", "it is a setting of kind ray, and this is local"),
        ("launch: {address: auto}", "it is a setting of kind ray, and this is local"),
    ],
)
def test_contradictions(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(text)
    assert message in str(caught.value)


def test_a_pool_takes_its_number_and_gpus_from_the_other_sections() -> None:
    config = settings("launch: {kind: ray, procs: 3, device: cuda}\ncluster: [{pool: training, cpus: 4}]")
    assert resolve_pool(config.cluster, "training", config.launch.procs, config.launch.device).gpus == 1.0
    without = resolve_pool((), "rollouts", 2, "cpu")
    assert (without.procs, without.cpus, without.gpus, without.strategy) == (2, 1.0, 0.0, "PACK")
    assert config == parse_config(config.to_yaml()), "the resolved copy says the same"


# --- on the node ------------------------------------------------------------------------------------------------------

RANK = """
import os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
names = ("RANK", "RAY_JOB_ID", "RAY_AUTH_MODE")
(run / "seen").write_text(" ".join(os.environ.get(name, "none") for name in names))
if (run / "fails").exists():
    sys.exit(7)
time.sleep(300)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "told_rank.py").write_text(RANK)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def start_rank(host: RankHost, run_dir: Path, lease_s: float = 60.0) -> int:
    folder = str(run_dir.parent)
    return host.start("told_rank", str(run_dir), folder, {"RANK": "3", "PYTHONPATH": folder}, lease_s)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.02)


def test_a_rank_has_the_places_it_is_given_and_nothing_of_ray(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    host = RankHost()
    pid = start_rank(host, run_dir)
    wait_for(lambda: (run_dir / "seen").exists() and (run_dir / "seen").read_text().count(" ") == 2)
    assert (run_dir / "seen").read_text() == "3 none token", "but may join it as the actor did"
    assert host.poll() == (None, False)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: host.poll() == (None, True))
    host.stop(grace_s=10.0)  # a rank that is stopped ends as well
    assert host.poll() == (-signal.SIGTERM, False)


def test_a_rank_that_fails_has_its_exit_code(run_dir: Path) -> None:
    (run_dir / "fails").touch()
    host = RankHost()
    start_rank(host, run_dir)
    wait_for(lambda: host.poll() == (7, False))
    host.stop(grace_s=1.0)


def test_a_rank_that_nobody_asks_about_ends(run_dir: Path) -> None:
    """Its node may be cut off, and the run go on elsewhere: there must not be two of it."""
    host = RankHost()
    pid = start_rank(host, run_dir, lease_s=2.0)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        assert host.poll() == (None, False)
        time.sleep(0.05)
    wait_for(lambda: " Z " in Path(f"/proc/{pid}/stat").read_text())
    assert host.poll() == (-signal.SIGKILL, False)


def test_a_rank_never_outlives_its_actor(run_dir: Path) -> None:
    """Also one that cannot hear of it, because it is stopped."""
    program = (
        "import os, signal, sys, time; from lockstep.launch.ray_ranks import RankHost\n"
        f"environment = dict(RANK='3', PYTHONPATH={str(run_dir.parent)!r})\n"
        f"pid = RankHost().start('told_rank', {str(run_dir)!r}, '/', environment, 60)\n"
        f"while not os.path.exists({str(run_dir / 'seen')!r}): time.sleep(0.02)\n"
        "os.kill(pid, signal.SIGSTOP); print(pid, flush=True); time.sleep(300)\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert actor.stdout is not None
        pid = int(actor.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    finally:
        actor.kill()
        actor.communicate()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_node_that_cannot_see_the_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("this")
    assert RankHost().can_read(str(tmp_path / "seen"), "this", patience_s=0.0)
    assert not RankHost().can_read(str(tmp_path / "seen"), "another", patience_s=0.0), "a folder of the same name"
    assert not RankHost().can_read(str(tmp_path / "missing"), "this", patience_s=0.0)


def test_what_a_user_sets_for_a_run_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "NCCL_DEBUG", "LOCKSTEP_CACHE", "PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "x")
    carried = carried_environment()
    assert {"HF_HUB_OFFLINE", "NCCL_DEBUG", "LOCKSTEP_CACHE"} <= carried.keys()
    assert not {"PATH", "HOME", "RAY_ADDRESS"} & carried.keys()
