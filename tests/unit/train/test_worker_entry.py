"""The entry of a rank, up to training: what it is told, and the run directory it makes or finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_config

from lockstep.config import load_config
from lockstep.processes.rank_environment import without_place
from lockstep.rundir import RunDir


def run_worker(*arguments: object, **variables: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "lockstep.train.worker", *map(str, arguments)],
        env={**without_place(os.environ), **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path / "no-model", launch={"timeout_s": 0.3})


def test_bad_variables_are_one_sentence(tmp_path):
    code, said = run_worker(tmp_path, RANK="one", WORLD_SIZE="2")
    assert (code, said) == (2, "error: the variable RANK is 'one': give a whole number of at least 0\n")


def test_a_folder_without_a_run_is_refused(tmp_path):
    code, said = run_worker(tmp_path)
    assert (code, said) == (2, f"error: {tmp_path} is not a run directory: it has no config.yaml\n")


def test_a_folder_with_another_run_is_refused(config, tmp_path):
    RunDir.create(tmp_path / "run", load_config(config, ["seed=1"]))
    code, said = run_worker(tmp_path / "run", "--config", config)
    assert code == 2
    assert "holds a run with other settings than the configuration" in said


def test_a_complete_run_is_not_trained_again(config, tmp_path):
    run = RunDir.create(tmp_path / "run", load_config(config))
    run.write_status(state="completed")
    assert run_worker(run.path, "--config", config) == (0, "")
    assert not (run.logs / "rank-0.log").exists()


def test_a_rank_does_not_wait_forever_for_the_folder(config, tmp_path):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    code, said = run_worker(tmp_path / "run", "--config", config, **place)
    assert code == 2
    assert "rank 0 has not made" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rank_0_makes_the_folder(config, tmp_path):
    code, said = run_worker(tmp_path / "run", "--config", config)  # there is no model
    assert code != 0
    assert "no-model" in said
    assert RunDir(tmp_path / "run").config() == load_config(config)
    assert RunDir(tmp_path / "run").status()["state"] == "failed"
