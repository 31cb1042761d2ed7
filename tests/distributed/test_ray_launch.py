"""A real Ray cluster of three nodes on this machine: runs over all of them, nodes that go and come, no room, no rest.

Every node has a resource of its own name, so that a test can say which is which.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from ranks import exported, newest_step, run_to_the_end

from lockstep.config import load_config
from lockstep.launch.launcher import RunState
from lockstep.launch.local import launched_processes, read_handle
from lockstep.launch.start import RestartingRun, start
from lockstep.processes.tree import process_stat, start_time
from lockstep.rundir import RunDir

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

_STORE_BYTES = 80 << 20
REWARD = {"name": "length", "options": {"most": 4, "unit": "characters", "soft": 12}}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"algorithm": {"kind": "dpo"}, "optim": {"learning_rate": 0.003, "epochs": 4}},
    "grpo": {
        "algorithm": {"kind": "grpo", "reward": REWARD, "group_size": 4, "max_tokens": 12},
        "optim": {"learning_rate": 0.003, "epochs": 4},
    },
}


class Nodes:
    """The nodes by name, and the cluster they are in."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.by_name: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> None:
        self.by_name[name] = self.cluster.add_node(num_cpus=2, resources={name: 2}, object_store_memory=_STORE_BYTES)

    def remove(self, name: str, *, until_known: bool = False) -> str:
        """As a power cut does, which Ray itself finds out after a while. Returns how messages call it."""
        node = self.by_name.pop(name)
        self.cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + 300
        while until_known and node.node_id in [
            n["NodeID"] for n in self.cluster.global_state.node_table() if n["Alive"]
        ]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return f"({node.node_id[:8]})"

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    logging.getLogger("ray").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        made = Nodes()
        try:
            for name in "abc":
                made.add(name)
            yield made
        finally:
            made.close()


@pytest.fixture
def three(nodes: Nodes) -> Nodes:
    """Whatever a test before has done, there are three."""
    for name in set("abc") - nodes.by_name.keys():
        nodes.add(name)
    for name in nodes.by_name.keys() - set("abc"):
        nodes.remove(name)
    return nodes


def write_config(folder: Path, model: Path, kind: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if kind == "dpo":
        rows = [{"prompt": f"say {n}", "chosen": f"{n}", "rejected": f"no {n}"} for n in range(24)]
    else:
        rows = [{"prompt": f"say {n}"} for n in range(24)]
    if kind != "sft":
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "launch": {"procs": 3},
        "checkpoint": {"every_steps": 3, "keep_best": 0},
        "optim": {"epochs": 4, "learning_rate": 0.01},
        **KINDS[kind],
    }
    for section, values in changes.items():
        old = settings.get(section)
        settings[section] = {**old, **values} if isinstance(old, dict) and isinstance(values, dict) else values
    return tiny.write_config(folder, model, **settings)


def on_ray(config: Path, nodes: Nodes, *overrides: str, name: str = "ray") -> RunDir:
    settings = ["launch.kind=ray", f"launch.address={nodes.address}", "launch.placement_timeout_s=60", *overrides]
    return RunDir.create(config.parent / name, load_config(config, settings))


def follow(run: RunDir, meanwhile: Callable[[RestartingRun], object] = lambda lasting: None) -> RunState:
    lasting = start(run, run.config())
    try:
        meanwhile(lasting)
        return wait_until(lasting, lambda: False)
    except BaseException:
        lasting.stop()
        raise


def pid_of_rank(run: RunDir, rank: int) -> int:
    """The oldest process of that rank: what it starts itself has its environment, too."""
    handle = read_handle(run.path)
    assert handle is not None
    name = f"RANK={rank}".encode()
    found = [
        p for p in launched_processes(handle.launch_id) if name in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")
    ]
    return min(found, key=lambda pid: int(start_time(pid)))


def wait_until(lasting: RestartingRun, condition: Callable[[], bool], timeout_s: float = 200.0) -> RunState:
    deadline = time.monotonic() + timeout_s
    while (outcome := lasting.poll()).state == "running" and not condition():
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.05)
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], RunDir]:
    """The same on this machine without Ray, by kind; made once."""
    made: dict[str, RunDir] = {}

    def get(kind: str) -> RunDir:
        if kind not in made:
            config = write_config(tmp_path_factory.mktemp(kind), tiny_model, kind)
            made[kind] = RunDir.create(config.parent / "alone", load_config(config))
            run_to_the_end(made[kind], 3)
        return made[kind]

    return get


def assert_same(run: RunDir, other: RunDir) -> None:
    assert run.status()["state"] == "completed"
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(other))
    losses = [[(record["step"], record.get("loss")) for record in r.metrics()] for r in (run, other)]
    assert losses[0] == losses[1]


def assert_nothing_is_left(run: RunDir, nodes: Nodes) -> None:
    handle = read_handle(run.path)
    assert handle is not None
    assert launched_processes(handle.launch_id) == []
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        deadline = time.monotonic() + 300
        while (rest := taken_resources()) and time.monotonic() < deadline:
            time.sleep(0.2)  # Ray counts what was given back a moment later
        assert rest == {}
    finally:
        ray.shutdown()


def taken_resources() -> dict[str, float]:
    free, total = ray.available_resources(), ray.cluster_resources()
    return {name: total[name] - free.get(name, 0.0) for name in ("CPU", *"abc") if total.get(name) != free.get(name)}


SPREAD = "cluster=[{pool: training, strategy: STRICT_SPREAD}]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_ranks_on_three_nodes_come_to_the_same(
    tmp_path: Path, tiny_model: Path, three: Nodes, alone: Callable[[str], RunDir], kind: str
) -> None:
    run = on_ray(write_config(tmp_path, tiny_model, kind), three, SPREAD)
    seen: set[str] = set()

    def look(lasting: RestartingRun) -> None:
        wait_until(lasting, lambda: newest_step(run) > 0)
        for rank in range(3):
            environment = Path(f"/proc/{pid_of_rank(run, rank)}/environ").read_text().split("\0")
            seen.update(entry for entry in environment if entry.startswith("LOCAL_RANK="))

    assert follow(run, look).state == "completed"
    assert seen == {"LOCAL_RANK=0"}, "each is alone on its node"
    assert_same(run, alone(kind))
    assert (run.logs / "ray.log").exists()
    assert (run.logs / "launcher.log").read_text() == "", "Ray's own words go elsewhere"
    assert_nothing_is_left(run, three)


@pytest.mark.parametrize(
    "kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow), pytest.param("grpo", marks=pytest.mark.slow)]
)
def test_a_node_that_is_lost_is_survived(
    tmp_path: Path, tiny_model: Path, three: Nodes, alone: Callable[[str], RunDir], kind: str
) -> None:
    """Three ranks fit on the two nodes that stay."""
    run = on_ray(write_config(tmp_path, tiny_model, kind), three, "cluster=[{pool: training, strategy: SPREAD}]")
    lost: list[str] = []

    def remove(lasting: RestartingRun) -> None:
        wait_until(lasting, lambda: newest_step(run) >= 5)
        lost.append(three.remove("b"))

    assert follow(run, remove).state == "completed"
    (event,) = [event for event in run.events() if event["event"] == "restarted"]
    assert lost[0] in event["reason"], "it names the node"
    assert "and with it rank" in event["reason"]
    assert_same(run, alone(kind))
    assert_nothing_is_left(run, three)


@pytest.mark.slow
def test_no_room_is_explained(tmp_path: Path, tiny_model: Path, three: Nodes) -> None:
    pool = "cluster=[{pool: training, cpus: 2, resources: {a: 1}, strategy: STRICT_SPREAD}]"
    run = on_ray(write_config(tmp_path, tiny_model, "sft"), three, pool, "launch.placement_timeout_s=2")
    outcome = follow(run)
    assert (outcome.state, outcome.exit_code) == ("failed", 2)
    assert "no room for the training pool within 2 s" in outcome.reason
    assert "Requested: 3 x CPU 2, a 1 with strategy STRICT_SPREAD" in outcome.reason
    assert "CPU 2 (2 free), a 2 (2 free)" in outcome.reason
    assert "the whole cluster has room for 1" in outcome.reason
    assert run.status()["error"] == outcome.reason
    assert not [event for event in run.events() if event["event"] == "restarted"]
    assert_nothing_is_left(run, three)


@pytest.mark.slow
def test_a_node_that_joins_is_used(
    tmp_path: Path, tiny_model: Path, three: Nodes, alone: Callable[[str], RunDir]
) -> None:
    """Without it there is no room: the run waits for it, both at its start and after a loss."""
    run = on_ray(write_config(tmp_path, tiny_model, "sft"), three, SPREAD)
    three.remove("c")

    def disturb(lasting: RestartingRun) -> None:
        wait_until(lasting, lambda: run.status().get("phase") == "waiting for room on the cluster")
        three.add("c")
        wait_until(lasting, lambda: newest_step(run) >= 5)
        three.remove("b")
        three.add("b")

    assert follow(run, disturb).state == "completed"
    assert_same(run, alone("sft"))
    assert_nothing_is_left(run, three)


@pytest.mark.slow
def test_fewer_ranks_only_if_that_was_said(tmp_path: Path, tiny_model: Path, three: Nodes) -> None:
    config = write_config(tmp_path, tiny_model, "sft")
    three.remove("c", until_known=True)
    settings = (SPREAD, "launch.placement_timeout_s=3")
    assert "the whole cluster has room for 2" in follow(on_ray(config, three, *settings)).reason
    run = on_ray(config, three, *settings, "launch.min_procs=2", name="fewer")
    assert follow(run).state == "completed"
    assert run.status()["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_is_named(
    tmp_path: Path, tiny_model: Path, three: Nodes, alone: Callable[[str], RunDir], number: signal.Signals
) -> None:
    run = on_ray(write_config(tmp_path, tiny_model, "sft"), three)

    def disturb(lasting: RestartingRun) -> None:
        wait_until(lasting, lambda: newest_step(run) >= 5)
        os.kill(pid_of_rank(run, 1), number)

    assert follow(run, disturb).state == "completed"
    (event,) = [event for event in run.events() if event["event"] == "restarted"]
    assert event["reason"].startswith("rank 1 on node ")
    assert ("was stopped by a signal" if number == signal.SIGSTOP else "signal 9") in event["reason"]
    assert_same(run, alone("sft"))


@pytest.mark.slow
def test_a_node_that_falls_silent_is_given_up(tmp_path: Path, tiny_model: Path, three: Nodes) -> None:
    """Its actor stands still while the rank goes on: the others do not notice, and the rank must not go on for ever."""
    config = write_config(tmp_path, tiny_model, "sft")
    run = on_ray(config, three, "launch.heartbeat_s=6", "optim.epochs=40", "checkpoint.every_steps=50")
    lasting = start(run, run.config())
    try:
        wait_until(lasting, lambda: newest_step(run) >= 1)
        ranks = [pid_of_rank(run, rank) for rank in range(3)]
        actor = process_stat(ranks[1])
        assert actor is not None
        os.kill(int(actor[1]), signal.SIGSTOP)  # the parent of the rank
        wait_until(lasting, lambda: any(event["event"] == "restarted" for event in run.events()))
    finally:
        lasting.stop()
    (event,) = [event for event in run.events() if event["event"] == "restarted"]
    assert event["reason"].endswith("is lost or does not answer, and with it rank 1")
    assert all((process_stat(pid) or "Z")[0] in "ZX" for pid in ranks), "one may wait for the actor to take note"
    assert_nothing_is_left(run, three)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "driver killed"])
def test_nothing_is_left_of_a_run_that_is_ended(tmp_path: Path, tiny_model: Path, three: Nodes, how: str) -> None:
    config = write_config(tmp_path, tiny_model, "sft", optim={"epochs": 100})
    run = on_ray(config, three, "launch.max_restarts=0")
    lasting = start(run, run.config())
    try:
        wait_until(lasting, lambda: newest_step(run) > 0)
        if how == "driver killed":
            handle = read_handle(run.path)
            assert handle is not None
            os.kill(handle.pid, signal.SIGKILL)
            assert wait_until(lasting, lambda: False).reason.startswith("the Ray driver was ended by signal 9")
    finally:
        lasting.stop()
    assert run.status()["state"] == "cancelled"
    assert_nothing_is_left(run, three)


@pytest.mark.slow
def test_a_cluster_of_its_own(tmp_path: Path, tiny_model: Path, alone: Callable[[str], RunDir]) -> None:
    """launch.address null, by the command: a cluster for this run alone, which ends with it."""
    config = write_config(tmp_path, tiny_model, "sft", launch={"procs": 2})
    run = RunDir(tmp_path / "run")
    code, _, err = tiny.run_lockstep("train", config, "launch.kind=ray", "--run-dir", run.path)
    assert (code, err) == (0, "")
    handle = read_handle(run.path)
    assert handle is not None
    assert launched_processes(handle.launch_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", [False, True])
def test_engines_have_a_pool_of_their_own(tmp_path: Path, tiny_model: Path, three: Nodes, disturbed: bool) -> None:
    """At staleness 0 they sample what the ranks would have, to the last bit, also when one's node is lost."""
    config = write_config(tmp_path, tiny_model, "grpo", rollouts={"engines": 2, "check_interval_s": 0.5})
    pools = "[{pool: training, resources: {a: 0.5}}, {pool: rollouts, strategy: SPREAD, resources: {%s: 0.5}}]"
    three.add("d")
    run = on_ray(config, three, "cluster=" + pools % "d", "launch.procs=1")

    def disturb(lasting: RestartingRun) -> None:
        wait_until(lasting, lambda: newest_step(run) >= 3)
        assert {event["event"] for event in run.events()} >= {"engine_started", "weights_published"}
        if disturbed:
            three.remove("d")
            three.add("d")

    assert follow(run, disturb).state == "completed"
    if disturbed:
        assert [event for event in run.events() if event["event"] in ("engine_lost", "restarted")]
    plain = RunDir.create(tmp_path / "plain", load_config(config, ["launch.procs=1", "rollouts.engines=0"]))
    run_to_the_end(plain, 1)
    assert_same(run, plain)
    assert_nothing_is_left(run, three)
