"""Which rank is named when ranks on a cluster end, are stopped or fall silent. A scripted cluster and clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import PoolConfig, parse_config
from lockstep.launch import ray_ranks
from lockstep.launch.ray_driver import record_cause
from lockstep.launch.ray_ranks import HostedRank, RankLost, RayRanks
from lockstep.processes.ray import Interrupted, describe_join_error
from lockstep.rundir import RunDir

RUNS = (None, False)
Answer = Any  # (exit code, is stopped), an exception, or SILENT
SILENT = object()


class Died(Exception):
    pass


class Unavailable(Died):
    pass


class ScriptedRay:
    """Every host answers as its script says for the second of the call; a silent one never answers."""

    def __init__(self, *scripts: Callable[[float], Answer]) -> None:
        self.now = 0.0
        self.dead_nodes: set[str] = set()
        self.scripts = scripts
        self.exceptions = SimpleNamespace(RayActorError=Died, ActorUnavailableError=Unavailable)

    def wait(self, calls: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        ready = [call for call in calls if call[1] is not SILENT]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Answer) -> Answer:
        if isinstance(call[1], Exception):
            raise call[1]
        return call[1]

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": f"node{i}", "Alive": f"node{i}" not in self.dead_nodes} for i in range(len(self.scripts))]

    def make_ranks(self, heartbeat_s: float = 30.0) -> RayRanks:
        config = parse_config(f"model: x\ndata: {{train: a}}\nlaunch: {{kind: ray, heartbeat_s: {heartbeat_s}}}")
        ranks = []
        for number, script in enumerate(self.scripts):
            poll = SimpleNamespace(remote=lambda n=number, script=script: (n, script(self.now)))
            about = {"node": f"node{number}", "address": f"10.0.0.{number}"}
            ranks.append(HostedRank(number, SimpleNamespace(poll=poll), about, pid=100 + number))
        return RayRanks(ranks, config.launch, PoolConfig(pool="training"))


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedRay]:
    run = RunDir(tmp_path)
    run.logs.mkdir()

    def watch(*scripts: Callable[[float], Answer], dead: str = "", said: str = "", **settings: float) -> ScriptedRay:
        cluster = ScriptedRay(*scripts)
        cluster.dead_nodes = {dead}
        clock = SimpleNamespace(monotonic=lambda: cluster.now, sleep=lambda s: setattr(cluster, "now", cluster.now + s))
        monkeypatch.setattr(ray_ranks, "import_ray", lambda: cluster)
        monkeypatch.setattr(ray_ranks, "time", clock)
        if said:
            run.record_failure(0, said)
        cluster.make_ranks(**settings).watch(run, lambda: cluster.now > 1000)
        return cluster

    return watch


def runs(now: float) -> Answer:
    return RUNS


def until(second: float, then: Answer, before: Answer = RUNS) -> Callable[[float], Answer]:
    return lambda now: before if now < second else then


def test_ranks_that_end_well(watch: Callable[..., ScriptedRay]) -> None:
    assert watch(until(3, (0, False)), until(5, (0, False))).now < 7


def test_a_killed_rank_is_the_cause_and_not_who_lost_its_connection(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(RankLost, match=r"rank 1 on node 10\.0\.0\.1 .* was ended by signal 9") as caught:
        watch(until(3, (1, False)), until(3, (-9, False)), said="rank 0 lost its connection")
    assert caught.value.rank == 1


def test_a_rank_that_fails_speaks_for_itself(watch: Callable[..., ScriptedRay]) -> None:
    cluster = watch(until(3, (2, False)), runs, runs, said="data.train is empty")
    assert cluster.now < 15


def test_a_node_that_does_not_answer_after_another_rank_failed_is_the_cause(watch: Callable[..., ScriptedRay]) -> None:
    """Long before Ray has noticed, and before the heartbeat is missed."""
    with pytest.raises(RankLost) as caught:
        watch(until(3, (1, False)), until(3, SILENT), said="rank 0 lost its connection")
    assert str(caught.value) == "node 10.0.0.1 (node1) is lost or does not answer, and with it rank 1"


def test_a_slow_answer_is_waited_for(watch: Callable[..., ScriptedRay]) -> None:
    """Network trouble for some seconds while another rank fails for a reason of its own."""
    cluster = watch(until(3, (1, False)), lambda now: Unavailable() if 2 < now < 8 else RUNS, said="out of memory")
    assert 8 <= cluster.now < 13


def test_silence_alone_is_counted_against_the_heartbeat(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(RankLost, match=r"node 10\.0\.0\.1 .* does not answer"):
        watch(runs, until(5, SILENT), heartbeat_s=20)
    cluster = watch(until(40, (0, False)), lambda now: Unavailable() if 5 < now < 20 else until(40, (0, False))(now))
    assert cluster.now < 45, "a shorter silence changes nothing"


def test_an_actor_that_died_on_a_node_that_lives(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(RankLost, match=r"the process that held rank 1 on node 10\.0\.0\.1 \(node1\) ended"):
        watch(runs, until(5, Died("worker exited")))
    with pytest.raises(RankLost, match=r"node 10\.0\.0\.1 \(node1\) is lost"):
        watch(runs, until(5, Died("its node has died")), dead="node1")


def test_a_rank_that_is_stopped(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(RankLost, match=r"rank 1 on node .* \(process 101\) was stopped by a signal"):
        watch(runs, until(5, (None, True)))


def test_an_end_without_a_reason(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(RankLost, match=r"rank 1 on node 10\.0\.0\.1 \(node1\) with exit code 7"):
        watch(runs, until(5, (7, False)))


def test_a_signal_to_the_driver(watch: Callable[..., ScriptedRay]) -> None:
    with pytest.raises(Interrupted):
        watch(runs, runs)


def test_a_cluster_that_asks_for_a_token_says_so() -> None:
    error = ConnectionError("Failed to connect to Ray cluster\nmore")
    error.__cause__ = RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing")
    assert "RAY_AUTH_MODE=token" in describe_join_error(error)
    assert describe_join_error(ConnectionError("nobody there\nmore")) == "nobody there"


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.record_failure(0, "rank 0 lost its connection to rank 1")
    record_cause(run, 1, "node b is lost")
    assert run.failures()[0]["message"] == "node b is lost"
    assert json.loads((run.logs / "rank-1.error.json").read_text())["exit_code"] == 1
