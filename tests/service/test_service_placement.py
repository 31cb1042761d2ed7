"""A service whose jobs run on a cluster: what the operator's file makes of a job, and a cluster that is busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_process import job, tree, wait_for

from lockstep.config import ConfigError, RunConfig, SlurmLaunch, resolve_config
from lockstep.launch import LauncherBusy, LocalLauncher, Resources, RunHandle
from lockstep.rundir import RunDir
from lockstep.service import scheduler
from lockstep.service.errors import ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.placement import JobPlacement
from lockstep.service.schemas import JobRequest

OPERATORS = """
launch:
  kind: slurm
  nodes: 4
  procs_per_node: 8
  device: cuda
  partition: gpu
  account: lab
  time: "4:00:00"
  setup: ["module load cuda"]
"""


def read(folder: Path, text: str) -> JobPlacement:
    (folder / "slurm.yaml").write_text(text)
    return JobPlacement.read(folder / "slurm.yaml")


def config(procs: int, engines: int = 0, **launch: Any) -> RunConfig:
    sections: dict[str, Any] = {"launch": {"procs": procs, "max_restarts": 7, **launch}}
    if engines:
        sections |= {"algorithm": {"kind": "grpo", "reward": [{"name": "numeric"}]}, "rollouts": {"engines": engines}}
    return resolve_config({**tree(), **sections})


def placed(cluster: JobPlacement, *args: Any, **launch: Any) -> SlurmLaunch:
    found = cluster.place(config(*args, **launch)).launch
    assert isinstance(found, SlurmLaunch)
    return found


@pytest.mark.parametrize(
    ("procs", "engines", "nodes", "per_node", "gpus"),
    [(1, 0, 1, 1, 1), (8, 0, 1, 8, 8), (12, 0, 2, 6, 6), (32, 0, 4, 8, 8), (6, 2, 1, 6, 8), (8, 2, 2, 4, 6)],
)
def test_a_job_gets_the_fewest_nodes(
    tmp_path: Path, procs: int, engines: int, nodes: int, per_node: int, gpus: int
) -> None:
    launch = placed(read(tmp_path, OPERATORS), procs, engines)
    assert (launch.nodes, launch.procs_per_node, launch.gpus_per_node) == (nodes, per_node, gpus)
    assert (launch.partition, launch.account, launch.time, launch.device) == ("gpu", "lab", "4:00:00", "cuda")
    assert launch.setup == ("module load cuda",)
    assert launch.max_restarts == 0, "the service counts restarts"
    assert launch.requeue, "a job whose time is up has another turn"


def test_engines_go_where_the_operator_says(tmp_path: Path) -> None:
    cluster = read(tmp_path, OPERATORS + "  engines: {nodes: 2, partition: small, gpus_per_node: 4}\n")
    launch = placed(cluster, 8, 6)
    assert launch.nodes == 1
    assert launch.engines is not None
    assert (launch.engines.nodes, launch.engines.partition) == (2, "small")
    assert placed(cluster, 8).engines is None
    with pytest.raises(ServiceError, match=r"rollouts.engines: 9 cannot be shared out"):
        placed(cluster, 8, 9)


def test_a_job_on_cpu_takes_no_gpus(tmp_path: Path) -> None:
    launch = placed(read(tmp_path, OPERATORS), 2, device="cpu")
    assert (launch.device, launch.gpus_per_node) == ("cpu", None)


@pytest.mark.parametrize(("procs", "engines"), [(33, 0), (11, 0), (8, 8)])
def test_what_does_not_fit_is_refused(tmp_path: Path, procs: int, engines: int) -> None:
    with pytest.raises(ServiceError, match=f"launch.procs: {procs} processes.*at most 4 nodes with room for 8"):
        placed(read(tmp_path, OPERATORS), procs, engines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launch: {kind: local}", "launch.kind must be slurm"),
        ("launch: []", "launch.kind must be slurm"),
        ("model: m\nlaunch: {kind: slurm}", "and nothing else"),
        ("just text", "and nothing else"),
        ("launch:\n  kind: slurm\n  partitionn: gpu", "slurm.yaml:3.*partitionn"),
        ("launch:\n  kind: slurm\n  time: soon", "slurm.yaml:3.*launch.time"),
    ],
)
def test_what_is_wrong_with_the_operators_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot read"):
        JobPlacement.read(tmp_path / "missing.yaml")


def test_a_service_without_slurm_says_so(
    make_manager: Callable[..., JobManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch"):
        make_manager(cluster=read(tmp_path, OPERATORS))


class BusyLauncher(LocalLauncher):
    """Takes nothing the first two times."""

    num_asked = 0

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        self.num_asked += 1
        if self.num_asked <= 2:
            raise LauncherBusy("Slurm takes no more jobs now")
        return super().start(run_dir, resources, launch_id=launch_id)


def test_a_busy_cluster_is_asked_again_and_fails_no_job(
    make_manager: Callable[..., JobManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_BUSY_LAUNCHER_S", 0.3)
    launcher = BusyLauncher("scripted_job", grace_s=1.0)
    manager = make_manager(launcher=launcher)
    manager.start()
    view = manager.submit(job(id="mine"))
    waiting = wait_for(lambda: (found := manager.get("mine")).progress.phase and found)
    assert (waiting.state, waiting.progress.phase) == ("preparing", "Slurm takes no more jobs now")
    assert wait_for(lambda: (found := manager.get(view.id)).state == "completed" and found).restarts == 0
    assert launcher.num_asked == 3


def test_a_run_goes_where_the_operator_says_now(make_manager: Callable[..., JobManager], tmp_path: Path) -> None:
    """The service was in front of Slurm when the job was first started, and is not any more."""
    manager = make_manager()
    manager.submit(job(id="mine"))
    run = RunDir.create(tmp_path / "data" / "jobs" / "mine", read(tmp_path, OPERATORS).place(config(1)))
    assert run.config().launch.kind == "slurm"
    manager.start()
    wait_for(lambda: manager.get("mine").state == "completed")
    assert run.config().launch.kind == "local"


def test_jobs_of_another_launcher_are_not_given_up(make_manager: Callable[..., JobManager], tmp_path: Path) -> None:
    first = make_manager()
    first.submit(job(id="mine"))
    found = first.store.get("mine")
    first.store.change(found, state="running", launch_id="the-launch")
    folder = tmp_path / "data" / "jobs" / "mine"
    folder.mkdir()
    (folder / "launch.json").write_text(RunHandle("slurm", str(folder), 0, "12", "the-launch").to_json())
    first.close()
    with pytest.raises(ServiceError, match="job mine was started by launcher slurm and has not ended"):
        make_manager()


def test_a_caller_does_not_choose_the_cluster(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager()
    with pytest.raises(ConfigError, match=r"launch\.kind is slurm, and runs are started here with kind local"):
        manager.submit(JobRequest(config=tree(launch={"kind": "slurm", "nodes": 2})))
    with pytest.raises(ServiceError, match=r"launch\.partition: the operator of this service decides that"):
        manager.submit(JobRequest(config=tree(launch={"kind": "slurm", "partition": "gpu"})))
