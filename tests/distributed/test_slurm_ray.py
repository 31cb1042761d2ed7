"""Pools of `cluster` on a real Slurm: the batch script starts Ray on the nodes of the job, and it ends with the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from distributed import test_grpo_async
from distributed.test_slurm import ask, start, turns, wait_for, wait_for_end
from ranks import exported, newest_step
from slurm_cluster import SlurmCluster, cluster_of_this_process, missing_programs

from lockstep.launch import RunState
from lockstep.launch.local import launched_processes

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"there is no {', '.join(missing_programs())}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with cluster_of_this_process(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def test_pools_inside_an_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Ranks on two nodes and two engines, by Ray. Asked to stop, the job goes on bit for bit in another turn."""
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=2, initializer_range=0.05)
    for name in ("slurm", "local"):
        (tmp_path / name).mkdir()
    settings = {"rollouts": {"engines": 2}, "layout": "fsdp-2"}
    pools = [{"pool": "training", "strategy": "STRICT_SPREAD"}, {"pool": "rollouts"}]
    launch = {"kind": "slurm", "nodes": 2, "cpus_per_proc": 2, "device": "cpu"}
    run = test_grpo_async.make_run(tmp_path / "slurm", model, **settings, launch=launch, cluster=pools)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 2, "step 2")
    ask(cluster, run, handle.started)
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 2
    assert [event["event"] for event in run.events()].count("interrupted") == 1
    local = test_grpo_async.make_run(tmp_path / "local", model, **settings)
    test_grpo_async.run_to_the_end(local, 2)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(local))
    wait_for(lambda: not launched_processes(run.status()["launch"]), "the end of Ray")
