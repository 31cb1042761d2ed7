"""What a cluster does to runs: permissions, full queues, preemption, lost nodes, a folder that a node does not see."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed.test_slurm import (
    ON_TWO_NODES,
    assert_undisturbed,
    make_run,
    start,
    turns,
    wait_for,
    wait_for_end,
)
from ranks import newest_step
from slurm_cluster import SlurmCluster, cluster_of_this_process, missing_programs

from lockstep.launch import RunState, slurm_queue
from lockstep.launch.slurm import SlurmLauncher
from lockstep.launch.slurm_queue import SlurmFull, SlurmRefused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"there is no {', '.join(missing_programs())}"),
]
PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60 MaxTime=1:00:00 OverSubscribe=NO State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=1:00:00 OverSubscribe=NO State=UP
PartitionName=theirs Nodes=ALL AllowAccounts=theirs MaxTime=1:00:00 State=UP
PartitionName=short Nodes=ALL MaxTime=0:10:00 State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with cluster_of_this_process(tmp_path_factory.mktemp("slurm"), PARTITIONS) as started:
        yield started


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"partition": "theirs"}, r"launch\.(account|partition)"),
        ({"partition": "short", "time": "0:30:00"}, r"launch\.time"),
        ({"memory": "900G"}, r"launch\.nodes.*memory"),
        ({"gpus_per_node": 1}, r"launch\.gpus_per_node"),
        ({"procs_per_node": 64}, r"launch\.nodes, procs_per_node"),
        ({"extra": ["--constraint=gold"]}, "feature"),
        ({"extra": ["--nonsense=1"]}, "nonsense"),
    ],
)
def test_what_the_cluster_does_not_give_is_refused_before_anything_waits(
    cluster: SlurmCluster, tmp_path: Path, tiny_model: Path, launch: dict[str, object], words: str
) -> None:
    run = make_run(tmp_path / "slurm", tiny_model, 1, {**ON_TWO_NODES, **launch})
    with pytest.raises(SlurmRefused, match=words) as refusal:
        start(run)
    assert "\n" not in str(refusal.value)
    assert cluster.query("squeue", "-h") == ""
    assert run.status()["state"] == "failed"


def test_a_node_that_is_lost_costs_a_turn(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "slurm", tiny_model, 30)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 15, "step 15")
    cluster.query("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    wait_for(lambda: cluster.query("squeue", "-h", "-j", handle.started, "-o", "%T") == "PENDING", "the queue")
    assert launcher.poll(handle).state == "running"
    cluster.query("scontrol", "update", "nodename=n2", "state=resume")
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 2
    assert_undisturbed(run, tiny_model, tmp_path / "local", 30)


def test_a_preempted_run_saves_in_its_grace_time(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    """Somebody with more rights takes the nodes for a while: the run writes a checkpoint at once, and goes on later."""
    changes = {"checkpoint": {"every_steps": 10_000, "keep_last": 2}}
    run = make_run(tmp_path / "slurm", tiny_model, 40, {**ON_TWO_NODES, "partition": "low"}, **changes)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 15, "step 15")
    assert cluster.query("sbatch", "-p", "high", "--exclusive", "-N2", "--time=5", "--wrap=sleep 8")
    wait_for(lambda: run.status().get("state") == "interrupted" or turns(run) == 2, "a checkpoint")
    assert run.list_checkpoints()[-1].step >= 15
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 2
    assert [event["event"] for event in run.events()].count("interrupted") == 1
    assert_undisturbed(run, tiny_model, tmp_path / "local", 40)


def test_a_full_queue_and_a_folder_that_a_node_does_not_see(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces need rights that this user does not have")
    (tmp_path / "hidden").mkdir()
    with cluster_of_this_process(tmp_path / "c", "MaxJobCount=3\n", hidden=tmp_path / "hidden"):
        unseen = make_run(tmp_path / "hidden" / "run", tiny_model, 1)
        launcher, handle = start(unseen)
        began = time.monotonic()
        outcome = wait_for(lambda: (found := launcher.poll(handle)).state != "running" and found, "the end")
        assert time.monotonic() - began < 120
        assert (outcome.state, outcome.exit_code) == ("failed", 2)
        assert f"n2 cannot see {unseen.path}/config.yaml" in outcome.reason
        assert "file system that all nodes share" in outcome.reason
        assert turns(unseen) == 1, "it would not see it the next time either"

        held = make_run(tmp_path / "held", tiny_model, 1, {**ON_TWO_NODES, "extra": ["--hold"]})
        _, waiting = start(held)
        monkeypatch.setattr(slurm_queue, "_COMMAND_S", 6.0)
        full = make_run(tmp_path / "full", tiny_model, 1)
        with pytest.raises(SlurmFull, match=r"queue is full|takes no more jobs"):
            start(full)
        monkeypatch.setattr(slurm_queue, "_COMMAND_S", 60.0)
        SlurmLauncher().stop(waiting)
