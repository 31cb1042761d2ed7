"""The batch script of a run: complete, readable by bash, and nothing of a configuration can leave its quotes."""

from __future__ import annotations

import json
import shlex
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
    ("state", "code", "exit_codes", "failures", "goes_back"),
    [
        ("interrupted", 75, [], 0, True),
        ("interrupted", 75, [], 9, True),  # asked for: not a failure
        ("running", 137, [], 0, True),
        ("running", 1, [1, 1], 1, True),
        ("running", 1, [1, 1], 2, False),  # as often as allowed
        ("failed", 1, [2], 0, False),  # a mistake in the configuration
        ("failed", 1, [1, 3], 0, False),  # training must not continue
        ("completed", 0, [], 0, False),
    ],
)
def test_which_jobs_go_back_to_the_queue(
    tmp_path: Path, state: str, code: int, exit_codes: list[int], failures: int, goes_back: bool
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "status.json").write_text(json.dumps({"state": state}, indent=2))
    (tmp_path / "slurm-failures").write_text(f"{failures}\n")
    for rank, exit_code in enumerate(exit_codes):
        (tmp_path / "logs" / f"rank-{rank}.error.json").write_text(json.dumps({"exit_code": exit_code}))
    script = batch_script(config(max_restarts=2), tmp_path, "the-launch")
    end = script[script.index("# Another turn") :]
    stubs = (
        f'scontrol() {{ echo "asked to $1"; }}; sleep() {{ :; }}; run_dir={shlex.quote(str(tmp_path))} code={code}\n'
    )
    said = subprocess.run(["bash", "-c", stubs + end], capture_output=True, text=True, check=False)
    assert said.stderr == ""
    assert ("asked to requeue" in said.stdout) == goes_back
    assert said.returncode == code


def with_engines(num_engines: int = 4, **launch: Any) -> RunConfig:
    """Of reinforcement learning."""
    algorithm = {"kind": "grpo", "reward": [{"name": "numeric"}]}
    settings = {"model": "m", "data": {"train": "rows"}, "algorithm": algorithm, "rollouts": {"engines": num_engines}}
    return resolve_config({**settings, "launch": {"kind": "slurm", **launch}})


def test_engines_on_nodes_of_their_own_are_a_second_component() -> None:
    engines = {"nodes": 2, "partition": "small", "cpus_per_engine": 3, "extra": ["--constraint=l40s"]}
    settings = with_engines(nodes=2, procs_per_node=8, device="cuda", account="mine", time="1:00:00", engines=engines)
    script = batch_script(settings, Path("/shared/it's"), "the-launch")
    check_syntax(script)
    chosen = directives(script)
    second = chosen[chosen.index("hetjob") + 1 :]
    assert "--gpus-per-node=8" in chosen
    assert "--signal=USR1@120" in chosen
    assert {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=3", "--requeue"} <= set(second)
    assert {"--partition=small", "--account=mine", "--time=1:00:00", "--constraint=l40s"} <= set(second)
    assert "--comment=lockstep:the-launch" in second
    assert not any("signal" in option for option in second)
    assert "srun --het-group=1 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=3 bash" in script
    assert "--ntasks=16 --ntasks-per-node=8 --het-group=0" in script
    assert script.index("export LOCKSTEP_SAVE_ON_SIGTERM=1") < script.index("srun --het-group=1 --ntasks=4")


@pytest.mark.parametrize(
    ("visible", "local", "expected"), [("4,5,6", "1", "5"), ("4,5,6", "3", "4"), ("7", "0", "7"), ("", "2", "2")]
)
def test_each_engine_has_a_gpu_of_its_own(visible: str, local: str, expected: str) -> None:
    script = batch_script(with_engines(device="cuda", engines={}), Path("/run"), "the-launch")
    begin = script.index("  IFS=,")
    lines = script[begin : script.index("  for attempt", begin)]
    environment = {"SLURM_LOCALID": local, "CUDA_VISIBLE_DEVICES": visible}
    said = subprocess.run(
        ["bash", "-c", f'{lines}\necho "$CUDA_VISIBLE_DEVICES"'], env=environment, capture_output=True, text=True
    )
    assert said.stdout.strip() == expected, said.stderr
    assert "gpus[" not in batch_script(with_engines(device="cpu", engines={}), Path("/run"), "the-launch")


def with_pools(**launch: Any) -> RunConfig:
    sections = {"model": "m", "data": {"train": "rows"}, "cluster": [{"pool": "training"}]}
    return resolve_config({**sections, "launch": {"kind": "slurm", **launch}})


def test_pools_have_a_ray_of_the_job_alone() -> None:
    settings = with_pools(nodes=2, procs_per_node=4, device="cuda")
    script = batch_script(settings, Path("/shared/it's"), "the-launch", Path("/shared/my file.yaml"))
    check_syntax(script)
    assert "srun --ntasks=2 --ntasks-per-node=1" in script
    assert "--num-gpus=4" in script
    assert "RAY_AUTH_MODE=token" in script
    driver = next(line for line in script.splitlines() if "lockstep.launch.ray_driver" in line)
    assert shlex.split(driver)[3:] == ["/shared/it's", "lockstep.train.worker", "/shared/my file.yaml"]
    assert "LOCKSTEP_SAVE_ON_SIGTERM" not in script, "Ray ends ranks with SIGTERM, and does not wait"
    with pytest.raises(ConfigError, match=r"launch\.container is for ranks that Slurm starts"):
        with_pools(container="image")
    tree = with_engines(engines={}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"launch\.engines is for ranks that Slurm starts"):
        resolve_config({**tree, "cluster": [{"pool": "training"}]})


def test_a_name_is_no_directive() -> None:
    settings = config().model_copy(update={"name": "mine\n#SBATCH --uid=0 \U0001f600"})
    script = batch_script(settings, Path("/shared/50%j"), "the-launch")
    assert "--job-name=mine-SBATCH---uid-0-" in directives(script)
    assert "--output=/shared/50%%j/logs/launcher.log" in directives(script)


@pytest.mark.parametrize(("engines", "nodes"), [(0, 1), (3, 2)])
def test_nodes_for_engines_need_engines_for_each(engines: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"launch.engines has {nodes} nodes, and rollouts.engines is {engines}"):
        with_engines(engines, engines={"nodes": nodes})


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
        ({"nodes": 0}, "launch.nodes"),
        ({"nodes": "two"}, "launch.nodes"),
        ({"procs_per_node": -1}, "launch.procs_per_node"),
        ({"account": "a b"}, "launch.account"),
        ({"qos": "$(id)"}, "launch.qos"),
        ({"memory": "64 G"}, "launch.memory"),
        ({"gpus_per_node": -1}, "launch.gpus_per_node"),
        ({"cpus_per_proc": 0}, "launch.cpus_per_proc"),
        ({"setup": ["a\nb"]}, "launch.setup"),
        ({"notice_s": 0}, "launch.notice_s"),
        ({"requeue": "often"}, "launch.requeue"),
        (
            {"time": "soon"},
            r"launch\.time: should be minutes, h:mm:ss or d-hh:mm:ss, such as 4:00:00 \(given: 'soon'\)",
        ),
        ({"container": 3}, "launch.container"),
        ({"engines": {"nodes": 0}}, "launch.engines.nodes"),
        ({"engines": {"partition": "x;y"}}, "launch.engines.partition"),
        ({"engines": {"extra": ["--time=1"]}}, "other settings of launch decide"),
        ({"engines": {"machines": 2}}, "machines"),
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
