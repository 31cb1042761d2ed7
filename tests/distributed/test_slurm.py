"""Runs as jobs of a real Slurm with two nodes: as undisturbed runs, whatever Slurm or somebody does to the job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from distributed import test_grpo_async
from ranks import exported, newest_step, run_to_the_end
from slurm_cluster import SlurmCluster, cluster_of_this_process, missing_programs

from lockstep.config import load_config
from lockstep.launch import Resources, RunHandle, RunState, slurm_queue
from lockstep.launch.local import HANDLE_FILE, launched_processes
from lockstep.launch.slurm import SlurmLauncher
from lockstep.launch.slurm_queue import SlurmRefused, SlurmSilent
from lockstep.processes.tree import read_command, read_environment
from lockstep.rundir import EXIT_INTERRUPTED, RunDir

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"Slurm is not installed: there is no {', '.join(missing_programs())}"
)
ON_TWO_NODES = {"kind": "slurm", "nodes": 2, "device": "cpu"}
PATIENCE_S = 500.0  # a net, not a measure of speed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with cluster_of_this_process(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def make_run(
    folder: Path, model: Path, epochs: int = 2, launch: dict[str, Any] | None = None, **changes: Any
) -> RunDir:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "launch": launch or ON_TWO_NODES,
        "optim": {"epochs": epochs, "learning_rate": 0.01},
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        **changes,
    }
    return RunDir.create(folder / "run", load_config(tiny.write_config(folder, model, **settings)))


def start(run: RunDir) -> tuple[SlurmLauncher, RunHandle]:
    launcher = SlurmLauncher()
    launcher.interval_s = 0.2
    return launcher, launcher.start(run.path, Resources(2, "cpu"))


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
    return found


def wait_for_end(
    cluster: SlurmCluster, launcher: SlurmLauncher, handle: RunHandle, then: str = "StartTime=now+6"
) -> RunState:
    """Slurm lets a job that went back to the queue wait for two minutes; a few seconds are enough. `then`: for its next
    turns."""
    turns_seen = set()

    def ended() -> RunState | None:
        waits = cluster.query("squeue", "-h", "-j", handle.started, "-o", "%r") == "BeginTime"
        if waits and (turn := turns(RunDir(handle.run_dir))) not in turns_seen:
            turns_seen.add(turn)
            cluster.query("scontrol", "update", f"JobId={handle.started}", "StartTime=now+6", then)
        outcome = launcher.poll(handle)
        return None if outcome.state == "running" else outcome

    return wait_for(ended, "the end of the job")


def assert_undisturbed(run: RunDir, model: Path, folder: Path, epochs: int) -> None:
    """The weights of the same run on this machine, which nothing happens to."""
    other = make_run(folder, model, epochs, {"procs": 2, "device": "cpu"})
    run_to_the_end(other, 2)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(other))


def turns(run: RunDir) -> int:
    return (run.logs / "launcher.log").read_text().count(", turn ")


def test_a_run_on_two_nodes(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    """That its weights are those of one machine is shown below, where the job is disturbed, too."""
    run = make_run(tmp_path / "slurm", tiny_model, 1)
    launcher, handle = start(run)
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 1
    assert run.status()["ranks"] == 2
    assert tiny.digest_weights(exported(run)) != tiny.digest_weights(tiny_model)


# --- another turn of the same job -------------------------------------------------------------------------------------


def ask(cluster: SlurmCluster, run: RunDir, job: str) -> None:
    cluster.query("scancel", "--signal=USR1", job)


def requeue(cluster: SlurmCluster, run: RunDir, job: str) -> None:
    cluster.query("scontrol", "requeue", job)


def kill_a_rank(cluster: SlurmCluster, run: RunDir, job: str) -> None:
    launch_id = run.status()["launch"]
    os.kill(next(p for p in launched_processes(launch_id) if read_environment(p).get("RANK") == "1"), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [ask, requeue, kill_a_rank])
def test_a_disturbed_job_goes_on_bit_for_bit(
    cluster: SlurmCluster, tmp_path: Path, tiny_model: Path, disturb: Callable[[SlurmCluster, RunDir, str], None]
) -> None:
    run = make_run(tmp_path / "slurm", tiny_model, 30)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 15, "step 15")
    disturb(cluster, run, handle.started)
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 2
    assert_undisturbed(run, tiny_model, tmp_path / "local", 30)


@pytest.mark.slow
def test_a_job_whose_time_is_up_has_another_turn(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    """The signal comes fifteen seconds after the job began, or when Slurm looks the next time; then it has an hour."""
    run = make_run(tmp_path / "slurm", tiny_model, 100, {**ON_TWO_NODES, "time": "1", "notice_s": 45})
    launcher, handle = start(run)
    assert wait_for_end(cluster, launcher, handle, "TimeLimit=60") == RunState("completed")
    assert turns(run) == 2
    assert [event["event"] for event in run.events()].count("interrupted") == 1
    assert_undisturbed(run, tiny_model, tmp_path / "local", 100)


@pytest.mark.slow
def test_a_job_that_may_not_go_back_ends_as_interrupted(
    cluster: SlurmCluster, tmp_path: Path, tiny_model: Path
) -> None:
    run = make_run(tmp_path / "slurm", tiny_model, 30, {**ON_TWO_NODES, "requeue": False})
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 5, "step 5")
    ask(cluster, run, handle.started)
    outcome = wait_for_end(cluster, launcher, handle)
    assert (outcome.state, outcome.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    resumed = launcher.start(run.path, Resources(2, "cpu"))
    assert resumed.started != handle.started
    assert wait_for_end(cluster, launcher, resumed) == RunState("completed")


@pytest.mark.slow
def test_failures_have_an_end(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    """Every turn fails in the same way; a mistake is not even tried twice."""
    run = make_run(
        tmp_path / "slurm", tiny_model, 1, {**ON_TWO_NODES, "max_restarts": 1, "setup": ["export LOCKSTEP_X=1"]}
    )
    (tmp_path / "slurm" / "train.jsonl").unlink()
    launcher, handle = start(run)
    outcome = wait_for_end(cluster, launcher, handle)
    assert (outcome.state, outcome.exit_code, turns(run)) == ("failed", 2, 1)
    assert "train.jsonl" in outcome.reason


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scancel_and_stop_end_a_run_as_cancelled(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "slurm", tiny_model, 100)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 5, "step 5")
    cluster.query("scancel", handle.started)
    assert wait_for_end(cluster, launcher, handle).state == "cancelled"
    assert run.status()["state"] == "cancelled"
    second = launcher.start(run.path, Resources(2, "cpu"))
    launcher.stop(second)
    assert launcher.poll(second).state == run.status()["state"] == "cancelled"
    assert launched_processes(second.launch_id) == []


@pytest.mark.slow
def test_a_launch_is_found_whoever_submitted_it(cluster: SlurmCluster, tmp_path: Path, tiny_model: Path) -> None:
    """As after a kill between sbatch and the handle."""
    run = make_run(tmp_path / "slurm", tiny_model, 1, {**ON_TWO_NODES, "extra": ["--hold"]})
    launcher = SlurmLauncher()
    handle = launcher.start(run.path, Resources(2, "cpu"), launch_id="the-launch")
    (run.path / HANDLE_FILE).unlink()
    assert SlurmLauncher().find(run.path, "the-launch") == handle
    assert SlurmLauncher().find(run.path, "another") is None
    assert launcher.poll(handle).state == "running"
    assert "it is held" in run.status()["phase"]
    with pytest.raises(ValueError, match=f"still running as job {handle.started}"):
        launcher.start(run.path, Resources(2, "cpu"))
    launcher.stop(handle)


@pytest.mark.slow
def test_what_slurm_refuses_is_one_sentence(
    cluster: SlurmCluster, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = make_run(tmp_path / "wrong", tiny_model, 1, {**ON_TWO_NODES, "partition": "nowhere"})
    with pytest.raises(SlurmRefused, match=r"nvalid partition.*set launch.partition to one that sinfo lists"):
        start(wrong)
    assert wrong.status()["state"] == "failed"
    large = make_run(tmp_path / "large", tiny_model, 1, {**ON_TWO_NODES, "nodes": 9})
    with pytest.raises(SlurmRefused, match=r"launch\.nodes"):
        start(large)
    assert cluster.query("squeue", "-h") == ""
    run = make_run(tmp_path / "run", tiny_model, 1)
    gone = RunHandle("slurm", str(run.path), 0, "99999", "forgotten")
    assert "no longer knows job 99999" in wait_for_end(cluster, SlurmLauncher(), gone).reason
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no sbatch"):
        start(run)


@pytest.mark.slow
def test_a_controller_that_does_not_answer_loses_nothing(
    cluster: SlurmCluster, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_queue, "_COMMAND_S", 3.0)
    run, other = make_run(tmp_path / "slurm", tiny_model, 30), make_run(tmp_path / "other", tiny_model)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 5, "step 5")
    cluster.stop_controller()
    try:
        assert launcher.poll(handle).state == "running"
        with pytest.raises(SlurmSilent, match="try again later"):
            start(other)
    finally:
        cluster.start_controller()
    monkeypatch.setattr(slurm_queue, "_COMMAND_S", 60.0)
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")


def kill_an_engine(cluster: SlurmCluster, run: RunDir, job: str) -> None:
    (engine,) = [p for p in launched_processes(run.status()["launch"]) if "engine-1" in read_command(p)]
    os.kill(engine, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("on_nodes_of_their_own", [False, True])
def test_reinforcement_learning_with_engines(
    cluster: SlurmCluster, tmp_path: Path, on_nodes_of_their_own: bool
) -> None:
    """Engines are beside rank 0, or a component of a heterogeneous job. One is killed; then the job is asked to stop
    while they sample, and goes on bit for bit."""
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=2, initializer_range=0.05)
    for name in ("slurm", "local"):
        (tmp_path / name).mkdir()
    settings = {"rollouts": {"engines": 2}, "layout": "fsdp-2"}
    launch = ON_TWO_NODES
    if on_nodes_of_their_own:
        launch = {"kind": "slurm", "procs_per_node": 2, "device": "cpu", "engines": {"nodes": 1}}
    run = test_grpo_async.make_run(tmp_path / "slurm", model, **settings, launch=launch)
    launcher, handle = start(run)
    wait_for(lambda: newest_step(run) >= 1, "step 1")
    kill_an_engine(cluster, run, handle.started)
    wait_for(lambda: newest_step(run) >= 2, "step 2")
    ask(cluster, run, handle.started)
    assert wait_for_end(cluster, launcher, handle) == RunState("completed")
    assert turns(run) == 2
    assert [event["event"] for event in run.events()].count("engine_lost") == 1
    if on_nodes_of_their_own:
        nodes = (run.logs / "launcher.log").read_text()
        assert nodes.count("engine-1 is process") == 3  # also the one that took the place of the killed one
    local = test_grpo_async.make_run(tmp_path / "local", model, **settings)
    test_grpo_async.run_to_the_end(local, 2)
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(local))
    wait_for(lambda: not launched_processes(run.status()["launch"]), "the end of every process")
