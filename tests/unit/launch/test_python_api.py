"""`lockstep.train`: a whole run from Python, in worker processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml

import lockstep
from lockstep.launch.start import RunFailed
from lockstep.rundir import RunDir


def test_train_runs_a_file_with_overrides_and_returns_what_the_command_prints(tmp_path: Path, tiny_model: Path) -> None:
    config = tiny.write_config(tmp_path, tiny_model)
    result = lockstep.train(config, overrides=["optim.max_steps=2"], run_dir=tmp_path / "run")
    assert result["state"] == "completed"
    assert result["steps"] == 2
    assert result["final_loss"] > 0
    assert Path(result["export"]).is_dir()
    assert len([r for r in RunDir(tmp_path / "run").metrics() if r["split"] == "train"]) == 2


def test_train_takes_a_mapping_and_names_what_failed(tmp_path: Path, tiny_model: Path) -> None:
    tree = yaml.safe_load(tiny.write_config(tmp_path, tiny_model).read_text())
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [}\n')
    tree["data"]["train"] = str(broken)
    with pytest.raises(RunFailed, match=r"broken\.jsonl:1: not valid JSON"):
        lockstep.train(tree, run_dir=tmp_path / "run")


def test_train_is_a_function_before_and_after_the_package_of_loops_is_imported() -> None:
    program = (
        "import inspect, lockstep; assert inspect.isfunction(lockstep.train); import lockstep.train.schedule;"
        "from lockstep.train import schedule; from lockstep.launch import start; import sys;"
        "assert schedule is sys.modules['lockstep.train.schedule']; assert inspect.isfunction(lockstep.train);"
        "assert inspect.signature(lockstep.train) == inspect.signature(start.train)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_key_is_refused_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean optim\.learning_rate"):
        lockstep.train(
            {"model": str(tiny_model), "data": {"train": "x.jsonl"}, "learning_rate": 1}, run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
