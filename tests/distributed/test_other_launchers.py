"""Ranks that others start: real processes under the variables of torchrun, Kubeflow, JobSet and MPI, which meet over
gloo and take the steps of one rank. Rank 0 makes the run directory from the configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tiny import write_config

from lockstep.processes.rank_environment import without_place
from lockstep.processes.tree import free_port
from lockstep.rundir import RunDir

TIMEOUT_S = 300


def three_steps(folder: Path, model: Path, **changes: object) -> Path:
    config = write_config(folder, model, optim={"max_steps": 3}, checkpoint={"export": "none"}, **changes)
    config.write_text(config.read_text().replace("precision: fp32", "precision: fp64"))
    return config


def kubeflow(node: int, port: int, procs: int = 1, num_nodes: int = 2) -> dict[str, str]:
    return {
        "PET_NNODES": str(num_nodes),
        "PET_NPROC_PER_NODE": str(procs),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }


def jobset(node: int, port: int) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": str(node),
        "PET_NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def open_mpi(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {"MASTER_PORT": str(port)} | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def mpich(rank: int, port: int) -> dict[str, str]:
    values = {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2, "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()}


def pmix(rank: int, port: int) -> dict[str, str]:
    return {
        "PMIX_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_workers(environments: Sequence[Mapping[str, str]], *arguments: object) -> None:
    """One `python -m lockstep.train.worker` in each environment; all must end well."""
    inherited = {**without_place(os.environ), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep.train.worker", *map(str, arguments)]
    workers = [
        subprocess.Popen(command, env={**inherited, **variables}, stderr=subprocess.PIPE, text=True)
        for variables in environments
    ]
    try:
        said = [worker.communicate(timeout=TIMEOUT_S)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * len(workers), said


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in RunDir(run_dir).metrics() if record["split"] == "train"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, list[float]]:
    """The configuration, and the losses of one rank that has it."""
    folder = tmp_path_factory.mktemp("one")
    config = three_steps(folder, tiny_model)
    run_workers([{}], folder / "run", "--config", config)
    assert RunDir(folder / "run").status()["state"] == "completed"
    found = losses(folder / "run")
    assert len(found) == 3
    return config, found


def check(run_dir: Path, expected: list[float], num_ranks: int) -> None:
    status = RunDir(run_dir).status()
    assert (status["state"], status["ranks"]) == ("completed", num_ranks), status
    assert losses(run_dir) == pytest.approx(expected, abs=1e-10, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [kubeflow, jobset, open_mpi, mpich, pmix])
def test_two_ranks_take_the_steps_of_one(variables, one_rank, tmp_path):
    config, expected = one_rank
    port = free_port("127.0.0.1")
    run_workers([variables(rank, port) for rank in range(2)], tmp_path / "run", "--config", config)
    check(tmp_path / "run", expected, 2)


@pytest.mark.slow
def test_two_machines_with_two_ranks_each_take_the_steps_of_one(one_rank, tmp_path):
    config, expected = one_rank
    port = free_port("127.0.0.1")
    machines = [kubeflow(node, port, procs=2) for node in range(2)]
    run_workers(machines, tmp_path / "run", "--config", config)
    check(tmp_path / "run", expected, 4)


@pytest.mark.slow
def test_torchrun_on_two_machines(one_rank, tmp_path):
    config, expected = one_rank
    options = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port('127.0.0.1')}".split()
    entry = ["-m", "lockstep.train.worker", str(tmp_path / "run"), "--config", str(config)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    machines = [subprocess.Popen([*torchrun, "--node-rank", str(node), *entry]) for node in range(2)]
    try:
        assert [machine.wait(TIMEOUT_S) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.terminate()
    check(tmp_path / "run", expected, 2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI here")
def test_a_real_mpirun(one_rank, tmp_path):
    config, expected = one_rank
    command = ["mpirun", "-n", "2", sys.executable, "-m", "lockstep.train.worker", tmp_path / "run", "--config", config]
    rights = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(
        command, env={**os.environ, **rights}, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    check(tmp_path / "run", expected, 2)
