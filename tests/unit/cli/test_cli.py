"""The commands as a person runs them: subprocesses, exit codes, what is on stdout and what on stderr."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import RunConfig, load_config, parse_config, resolve_config
from lockstep.config.template import starter_yaml
from lockstep.launch.local import is_running, read_handle
from lockstep.launch.start import new_run_dir, stop
from lockstep.rundir import RunDir

COMMANDS = ["train", "attach", "init", "export", "chat", "generate", "runs", "plot", "demo"]
HEAVY = ("torch", "transformers", "matplotlib", "numpy")
# A worker that does what the name of the run says.
WORKER = """
import sys, time
from lockstep.rundir import RunDir
run = RunDir(sys.argv[1], owner=True)
config = run.config()
run.write_status(state="preparing", phase="reading data", started_at=time.time())
if config.name == "bad":
    run.record_failure(0, "train.jsonl:3: not valid JSON", 2)
    run.write_status(state="failed", error="train.jsonl:3: not valid JSON")
    sys.exit(2)
first = run.status().get("step", 0) + 1
run.write_status(state="running", phase="training", total_steps=4)
for step in range(first, 5):
    record = {"loss": 1 / step, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_s": 100.0, "epoch": step / 4}
    run.log_metrics({"step": step, "split": "train", **record})
    run.write_status(step=step, loss=1 / step, tokens=step * 10, tokens_per_s=100.0)
    if config.name == "slow" and step == 2:
        time.sleep(60)
run.log_metrics({"step": 4, "split": "validation", "loss": 0.5})
run.write_status(state="completed", phase=None, validation_loss=0.5, best_validation_loss=0.5, best_step=4, export="e")
"""
MAIN = "from lockstep.launch import local; local.WORKER_MODULE = 'told_worker'; from lockstep.cli import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "told_worker.py").write_text(WORKER)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "c.yaml").write_text("name: good\nmodel: org/model\ndata: {train: train.jsonl}\n")
    return tmp_path


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def lockstep(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import atexit, sys; from lockstep.cli import main; "
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *([command] if command else []), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert done.stderr.strip() == "[]"


def test_version(folder: Path) -> None:
    assert lockstep(folder, "--version")[:2] == (0, "lockstep 0.1.0\n")


# --- train ----------------------------------------------------------------------------------------------------------


def test_train_shows_the_run_and_its_result(folder: Path) -> None:
    code, out, err = lockstep(folder, "train", "c.yaml", "optim.epochs=2", "--run-dir", "my run")
    assert (code, err) == (0, "")
    assert "step 1/4  loss 1.0000" in out
    assert "step 4/4  loss 0.2500" in out
    assert "validation loss 0.5000" in out
    assert "lockstep chat 'my run'" in out  # as a shell takes it
    assert RunDir(folder / "my run").config().optim.epochs == 2


def test_json_has_stdout_to_itself(folder: Path) -> None:
    code, out, err = lockstep(folder, "train", "c.yaml", "--json")
    assert code == 0
    result = json.loads(out)
    assert re.fullmatch(r"runs/good-\d{8}-\d{6}", result.pop("run_dir"))
    assert result == {
        "state": "completed",
        "steps": 4,
        "final_loss": 0.25,
        "final_validation_loss": 0.5,
        "best_validation_loss": 0.5,
        "best_step": 4,
        "tokens": 40,
        "tokens_per_s": 100.0,
        "export": "e",
        "error": None,
    }
    assert "step 4/4" in err


def test_json_has_stdout_to_itself_whatever_libraries_and_processes_print(tmp_path: Path) -> None:
    program = """
import os, subprocess, sys
from lockstep.cli.options import Json, app, echo, echo_json

@app.command("noisy")
def noisy(as_json: Json = False) -> None:
    print("a library")
    os.write(1, b"a library in C\\n")
    subprocess.run(["echo", "a process"], check=True)
    echo("a line of ours")
    (echo_json if as_json else echo)('{"of": "ours"}')

app()
"""

    def run(*arguments: str) -> tuple[str, str]:
        command = [sys.executable, "-c", program, "noisy", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout, done.stderr

    out, err = run("--json")
    assert json.loads(out) == {"of": "ours"}
    assert sorted(err.splitlines()) == ["a library", "a library in C", "a line of ours", "a process"]
    out, err = run()
    assert (len(out.splitlines()), err) == (5, "")


def test_the_default_file_and_overrides_alone(folder: Path) -> None:
    (folder / "c.yaml").rename(folder / "lockstep.yaml")
    code, out, _ = lockstep(folder, "train", "name=other", "--run-dir", "r")
    assert code == 0
    assert "training other" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "no configuration"),
        (["train", "missing.yaml"], "cannot read the configuration missing.yaml"),
        (["train", "c.yaml", "optim.lr=1"], "unknown key 'optim.lr'"),
        (["train", "c.yaml", "--procs", "0"], "launch.procs"),
        (["train", "c.yaml", "parallel.shard=3", "--procs", "2"], "replicate 1 x shard 3 = 3 ranks"),
        (["train", "c.yaml", "data.train=nothing.jsonl"], "data.train: there is no file"),
        (["train", "c.yaml", "--resume", "r"], "--resume continues a run as it was configured"),
        (["train", "--resume", "r", "--procs", "2"], "r is not a run directory"),
        (["train", "--resume", "nothing"], "nothing is not a run directory"),
        (["runs", "nothing"], "there is no folder nothing"),
        (["plot", "nothing"], "nothing is not a run directory"),
        (["export", "nothing", "--out", "x"], "nothing is not a run directory"),
        (["init", "c.yaml"], "c.yaml already exists"),
        (["init", "--algorithm", "magic"], "unknown algorithm 'magic'"),
        (["chat", "./nothing"], "there is no run or model ./nothing"),
        (["generate", "m", "--prompts", "nothing.txt"], "cannot read the prompts nothing.txt"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not (folder / "runs").exists()


def test_what_a_worker_refuses(folder: Path) -> None:
    code, out, err = lockstep(folder, "train", "c.yaml", "name=bad", "--run-dir", "r")
    assert code == 2
    assert "error: train.jsonl:3: not valid JSON\n" in err
    assert "more in r/logs" in err
    assert "--resume" not in out, "the same configuration would fail again"


def test_a_used_run_dir_is_refused(folder: Path) -> None:
    RunDir.create(folder / "r", load_config(folder / "c.yaml"))
    code, _, err = lockstep(folder, "train", "c.yaml", "--run-dir", "r")
    assert code == 2
    assert "already holds a run" in err


def wait_for_step(folder: Path, step: int) -> RunDir:
    run, deadline = RunDir(folder / "r"), time.monotonic() + 300
    while run.status().get("step") != step:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    process = start(folder, "train", "c.yaml", "name=slow", "--run-dir", "r", "--json")
    run = wait_for_step(folder, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert json.loads(out)["state"] == run.status()["state"] == "cancelled"
    assert "lockstep train --resume r" in err
    assert not is_running(run.path)


def test_a_killed_worker_and_a_resume(folder: Path) -> None:
    process = start(folder, "train", "c.yaml", "name=slow", "launch.max_restarts=0", "--run-dir", "r")
    run = wait_for_step(folder, 2)
    handle = read_handle(run.path)
    assert handle is not None
    os.kill(handle.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "signal 9 (SIGKILL)" in err
    assert run.status()["state"] == "failed"

    code, out, err = lockstep(folder, "train", "--resume", "r")
    assert (code, err) == (0, "")
    assert "resuming slow" in out
    assert "step 1/4" not in out, "shows only what is new"
    assert run.status()["state"] == "completed"

    code, out, _ = lockstep(folder, "train", "--resume", "r")
    assert code == 0
    assert "already complete" in out


def test_run_dirs_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    for expected in ("a-b-now", "a-b-now-2", "a-b-now-3"):
        path = new_run_dir("a/b")
        assert path == Path("runs") / expected
        path.mkdir(parents=True)


# --- init -----------------------------------------------------------------------------------------------------------


def test_init_writes_what_train_reads(folder: Path) -> None:
    code, out, _ = lockstep(folder, "init", "new.yaml")
    assert code == 0
    assert "lockstep train new.yaml" in out
    config = load_config(folder / "new.yaml")
    assert [source.path for source in config.data.train] == [str(folder / "train.jsonl")]
    assert config.lora is not None
    assert lockstep(folder, "init", "new.yaml", "--force")[0] == 0


def test_every_commented_default_is_the_default() -> None:
    active = parse_config(starter_yaml())
    uncommented = parse_config(re.sub(r"^( *)#(\w+:)", r"\1\2", starter_yaml(), flags=re.MULTILINE))
    assert uncommented == active
    defaults = RunConfig(model=active.model, data=active.data, lora=active.lora, name=active.name)
    assert active == defaults


# --- attach ---------------------------------------------------------------------------------------------------------


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or words not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], f"ended after {lines}"
    return "".join(lines)


def test_a_run_whose_launcher_was_killed_is_taken_over_and_stopped(folder: Path) -> None:
    first = start(folder, "train", "c.yaml", "name=slow", "--run-dir", "r")
    read_until(first, "step 1/4")
    first.kill()
    first.communicate()
    assert is_running(folder / "r")
    (row,) = json.loads(lockstep(folder, "runs", ".", "--json")[1])
    assert row["state"] == "unsupervised"
    code, _, err = lockstep(folder, "train", "--resume", "r")
    assert code == 2
    assert "follow it with lockstep attach" in err
    second = start(folder, "attach", "r")
    read_until(second, "Nobody supervised this run; now this command does. Ctrl-C stops the run.")
    third = start(folder, "attach", "r")
    read_until(third, "Only following this run: Ctrl-C leaves it running.")
    third.send_signal(signal.SIGINT)
    assert third.communicate(timeout=300)[0].endswith("The run goes on.\n")
    assert (third.returncode, is_running(folder / "r")) == (130, True)
    second.send_signal(signal.SIGINT)
    out, _ = second.communicate(timeout=300)
    assert (second.returncode, is_running(folder / "r")) == (130, False)
    assert "cancelled" in out
    code, out, _ = lockstep(folder, "attach", "r")
    assert (code, "cancelled" in out) == (1, True), "there is nothing left to follow"


def test_a_run_that_follows_nobody_and_has_no_process_is_not_waited_for(folder: Path) -> None:
    run = RunDir.create(folder / "lost", load_config(folder / "c.yaml"))
    run.write_status(state="running", step=1)
    code, _, err = lockstep(folder, "attach", "lost")
    assert code == 2
    assert "no process of lost is left: go on with lockstep train --resume lost" in err


# --- runs -----------------------------------------------------------------------------------------------------------


def test_runs(folder: Path) -> None:
    assert lockstep(folder, "runs", ".") == (0, "no runs in .\n", "")
    config = load_config(folder / "c.yaml")
    run = RunDir.create(folder / "runs" / "one", config)
    run.write_status(state="completed", step=4, total_steps=4, loss=0.25, tokens_per_s=12345.0, started_at=time.time())
    lost = RunDir.create(folder / "runs" / "two", config)
    lost.write_status(state="running", step=1)
    (lost.path / "launch.json").write_text(
        json.dumps({"launcher": "local", "run_dir": "x", "pid": 1, "started": "never", "mark": "x"})
    )
    code, out, _ = lockstep(folder, "runs")
    assert code == 0
    assert re.search(r"one +completed +4/4 +0.2500 +- +12.3k +\d+s", out)
    assert re.search(r"two +lost +1 ", out)
    rows = json.loads(lockstep(folder, "runs", "--json")[1])
    assert {row["name"]: row["state"] for row in rows} == {"one": "completed", "two": "lost"}


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("completed", "is completed: there is nothing to stop"),
        ("running", "runs on this machine: end it with Ctrl-C where it was started, or lockstep attach"),
    ],
)
def test_stop_is_for_runs_of_a_cluster_that_have_not_ended(tmp_path: Path, state: str, sentence: str) -> None:
    tree = {"model": "m", "data": {"train": "rows.jsonl"}}
    run = RunDir.create(tmp_path / "run", resolve_config(tree))
    run.write_status(state=state)
    with pytest.raises(ValueError, match=sentence):
        stop(run.path)
