"""The entry of a machine: it starts a real worker, prints what that writes, and ends with its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_config

from lockstep.config import load_config
from lockstep.processes.rank_environment import without_place
from lockstep.rundir import RunDir


def run_node(*arguments: object, **variables: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, "-m", "lockstep.launch.node", *map(str, arguments)],
        env={**without_place(os.environ), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout.splitlines()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path / "no-model")


def test_a_mistake_ends_the_pod_with_exit_code_2(config, tmp_path):
    RunDir.create(tmp_path / "run", load_config(config, ["launch.timeout_s=5"]))  # may change within a run
    code, lines = run_node(tmp_path / "run", "--config", config)
    assert code == 2
    records = {json.loads(line)["lockstep"]: json.loads(line) for line in lines if line.startswith("{")}
    assert json.loads(records["status.json"]["text"])["state"] == "failed"
    assert "no-model" in json.loads(records["logs/rank-0.error.json"]["text"])["message"]
    run = RunDir(tmp_path / "run")
    assert run.newest_config_path.name == "config-2.yaml"
    assert run.config() == load_config(config)


def test_what_may_not_change_is_refused(config, tmp_path):
    RunDir.create(tmp_path / "run", load_config(config, ["optim.learning_rate=0.5"]))
    code, lines = run_node(tmp_path / "run", "--config", config)
    assert code == 2
    assert lines[0].startswith("error: --resume cannot change optim.learning_rate from 0.5 to 0.01")


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        ((), {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "error: 2 machines must meet at the first of them"),
        (("--store", "nothing://x"), {}, "error: run_store nothing://x: "),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, variables, sentence, config, tmp_path):
    code, lines = run_node(tmp_path / "run", "--config", config, *arguments, **variables)
    assert code == 2
    assert lines[0].startswith(sentence)
    assert len(lines) == 1
