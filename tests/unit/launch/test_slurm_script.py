"""The batch script of a run: complete, readable by bash, and nothing of a configuration can leave its quotes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.config import ConfigError, RunConfig, resolve_config
from lockstep.launch.slurm_script import batch_script


def config(**launch: Any) -> RunConfig:
    return resolve_config({"model": "m", "data": {"train": "rows"}, "launch": {"kind": "slurm", **launch}})


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def check_syntax(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_what_sbatch_is_told() -> None:
    settings = config(nodes=2, procs_per_node=4, device="cuda", time="4:00:00", partition="gpu", extra=["--exclusive"])
    script = batch_script(settings, Path("/shared/run"), "the-launch")
    check_syntax(script)
    assert settings.launch.procs == 8
    assert {
        "--comment=lockstep:the-launch",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--partition=gpu",
        "--time=4:00:00",
        "--signal=USR1@120",
        "--open-mode=append",
        "--output=/shared/run/logs/launcher.log",
        "--requeue",
        "--exclusive",
    } <= set(directives(script))
    assert "--kill-on-bad-exit=1 --ntasks=8 --ntasks-per-node=4" in script


def test_names_with_quotes_and_spaces_stay_names() -> None:
    """The command of a rank is inside the quotes of bash -c: bash itself says what it becomes."""
    run_dir = Path("/shared/it's $(mine) `now`")
    script = batch_script(config(), run_dir, "the-launch")
    check_syntax(script)
    started = script[script.index("srun ") : script.index("code=$?")]
    shown = started.replace("exec ", "printf '\\''%s\\n'\\'' ")
    said = subprocess.run(["bash", "-c", f'srun() {{ shift 3; "$@"; }}\n{shown}'], capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == str(run_dir), said.stderr


def test_a_job_that_may_not_go_back_to_the_queue_does_not() -> None:
    script = batch_script(config(requeue=False), Path("/run"), "the-launch")
    assert "scontrol requeue" not in script
    assert "--no-requeue" in directives(script)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"nodes": 2, "procs": 3}, "nodes 2 x procs_per_node 1"),
        ({"time": "1:30"}, "notice_s 120 leaves nothing of the time 1:30"),
        ({"time": "tomorrow"}, "launch.time"),
        ({"extra": ["--nodes=4"]}, "other settings of launch decide"),
        ({"extra": ["--x\n#SBATCH --uid=0"]}, "launch.extra"),
        ({"partition": "gpu; rm -rf /"}, "launch.partition"),
        ({"address": "auto"}, "kind ray"),
    ],
)
def test_what_cannot_be_is_refused(launch: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**launch)


@pytest.mark.parametrize("time", ["3", "2:30", "0:03:00", "0-1", "1-00:00:00"])
def test_times_as_slurm_reads_them(time: str) -> None:
    assert config(time=time).launch.procs == 1


def test_dry_run_prints_a_script_that_makes_its_own_run(tmp_path: Path, tiny_model: Path) -> None:
    file = tiny.write_config(tmp_path, tiny_model, launch={"kind": "slurm", "nodes": 2})
    code, script, errors = tiny.run_lockstep("train", file, "--dry-run", "--run-dir", tmp_path / "run")
    assert code == 0, errors
    check_syntax(script)
    assert f"--config {file}" in script
    assert "--output=slurm-%j.out" in directives(script)
    assert not (tmp_path / "run").exists()


def test_detach_is_for_clusters(tmp_path: Path, tiny_model: Path) -> None:
    file = tiny.write_config(tmp_path, tiny_model)
    code, _, errors = tiny.run_lockstep("train", file, "--detach", "--run-dir", tmp_path / "run")
    assert code == 2
    assert "--detach is for runs of a cluster" in errors
    assert not (tmp_path / "run").exists()
