"""The local launcher with workers that do what a test tells them: end well, end badly, be killed, not want to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lockstep.config import parse_config
from lockstep.launch import LocalLauncher, Resources, RunHandle
from lockstep.launch.local import (
    HANDLE_FILE,
    LAUNCH_ID_VARIABLE,
    ask_to_stop,
    is_running,
    launched_processes,
    read_handle,
)
from lockstep.processes.tree import start_time
from lockstep.rundir import RunDir

# What it does is the name of the run.
WORKER = """
import os, signal, sys, time
from lockstep.rundir import RunDir
rank = int(os.environ.get("RANK", "0"))
run = RunDir(sys.argv[1], owner=rank == 0)
run.write_status(state="running", step=1, threads=os.environ.get("OMP_NUM_THREADS"))
(run.path / f"pid-{rank}").write_text(str(os.getpid()))
name = run.config().name
if name == "completes":
    run.write_status(state="completed", step=2)
if name == "bad-configuration":
    run.record_failure(rank, "data.train is empty", 2)
    run.write_status(state="failed", error="lost connection to a peer")
    sys.exit(2)
if name == "exits-silently":
    sys.exit(7)
if name == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run.path / "ready").touch()
if name in ("hangs", "stubborn"):
    time.sleep(120)
if name == "saves":
    (run.path / "ready").touch()
    while signal.SIGUSR1 not in signal.sigpending():
        time.sleep(0.01)
    run.write_status(state="interrupted", step=2)
    os._exit(75)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    (tmp_path / "told_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return LocalLauncher("told_worker", grace_s=5.0)


def make_run(tmp_path: Path, name: str) -> RunDir:
    return RunDir.create(tmp_path / name, parse_config(f"name: {name}\nmodel: x\ndata: {{train: a}}"))


def wait_for(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.02)


def wait_until_ended(launcher: LocalLauncher, handle: RunHandle) -> None:
    wait_for(lambda: launcher.poll(handle).state != "running")


def test_a_run_that_is_asked_to_stop_before_it_listens_still_hears_it(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "saves")
    handle = launcher.start(run.path, Resources(procs=1, device="cpu"))
    ask_to_stop(run.path)  # Python itself has hardly begun to start: the signal would end it, were it not blocked
    wait_until_ended(launcher, handle)
    state = launcher.poll(handle)
    assert (state.state, state.exit_code) == ("interrupted", 75)
    ask_to_stop(run.path)  # nobody is left to be asked


def test_a_run_that_completes(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "completes")
    handle = launcher.start(run.path, Resources(procs=1, device="cpu"))
    wait_until_ended(launcher, handle)
    state = launcher.poll(handle)
    assert (state.state, state.reason, state.exit_code) == ("completed", "", 0)
    assert run.status()["step"] == 2
    assert run.status()["threads"] == str(len(os.sched_getaffinity(0)))


def test_the_first_failure_is_the_reason(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "bad-configuration")
    handle = launcher.start(run.path, Resources())
    wait_until_ended(launcher, handle)
    state = launcher.poll(handle)
    assert (state.state, state.reason, state.exit_code) == ("failed", "data.train is empty", 2)
    assert run.status()["error"] == "data.train is empty"


def test_an_end_without_a_word(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "exits-silently")
    handle = launcher.start(run.path, Resources())
    wait_until_ended(launcher, handle)
    assert "exit code 7" in launcher.poll(handle).reason
    assert run.status()["state"] == "failed"
    assert launcher.poll(handle).exit_code == 1


def test_a_killed_worker_is_failed_with_the_reason(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "hangs")
    handle = launcher.start(run.path, Resources())
    wait_for((run.path / "pid-0").exists)
    assert launcher.poll(handle).state == "running"
    os.kill(handle.pid, signal.SIGKILL)
    wait_until_ended(launcher, handle)
    state = launcher.poll(handle)
    assert state.state == run.status()["state"] == "failed"
    assert "signal 9 (SIGKILL)" in state.reason


def test_stop_ends_even_who_ignores_sigterm(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "stubborn")
    launcher.grace_s = 0.3
    handle = launcher.start(run.path, Resources())
    wait_for((run.path / "ready").exists)
    log_steps(run.path)
    launcher.stop(handle)
    assert launcher.poll(handle).state == run.status()["state"] == "cancelled"
    assert launched_processes(handle.launch_id) == []
    assert [run.status()[key] for key in ("step", "loss", "tokens")] == [5, 0.5, 50], "what it logged last"


def log_steps(path: Path) -> None:
    """As a run does that writes its status once a second, and its metrics at every step."""
    writer = RunDir(path, owner=True)
    writer.write_status(step=3, loss=2.5, tokens=30)
    for step in (2, 3, 4, 5):
        writer.log_metrics({"step": step, "split": "train", "loss": 5.5 - step, "tokens": 10})
    writer.log_metrics({"step": 6, "split": "validation", "loss": 9.0})


def test_a_run_of_the_first_release_is_found_and_stopped(launcher: LocalLauncher, tmp_path: Path) -> None:
    """It called the launch id a mark, in the handle and in the environment."""
    run = make_run(tmp_path, "hangs")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(command, env={**os.environ, "LOCKSTEP_LAUNCH_MARK": "old-launch"})
    try:
        wait_for(lambda: launched_processes("old-launch") == [process.pid])
        old = {"launcher": "local", "run_dir": str(run.path), "pid": process.pid, "started": start_time(process.pid)}
        (run.path / HANDLE_FILE).write_text(json.dumps({**old, "mark": "old-launch"}))
        handle = read_handle(run.path)
        assert handle == RunHandle(**old, launch_id="old-launch")
        assert launcher.poll(handle).state == "running"
        launcher.stop(handle)
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_handle_survives_a_restart(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "hangs")
    handle = launcher.start(run.path, Resources())
    assert read_handle(run.path) == handle
    again = RunHandle.from_json(handle.to_json())
    assert again == handle
    assert json.loads(handle.to_json()) == asdict(handle)
    wait_for((run.path / "pid-0").exists)
    other = LocalLauncher()
    assert other.poll(again).state == "running"
    assert is_running(run.path)
    assert LocalLauncher().poll(replace(again, started="1", launch_id="none")).state == "failed", "a recycled pid"
    other.stop(again)
    assert not is_running(run.path)
    assert other.poll(again).state == "cancelled"


def test_a_completed_run_stays_completed_after_a_restart(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "completes")
    handle = launcher.start(run.path, Resources())
    wait_until_ended(launcher, handle)
    assert LocalLauncher().poll(handle).state == "completed"
    LocalLauncher().stop(handle)
    assert run.status()["state"] == "completed"


def test_a_running_run_is_not_started_twice(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "hangs")
    handle = launcher.start(run.path, Resources())
    with pytest.raises(ValueError, match=f"still running as process {handle.pid}"):
        LocalLauncher("told_worker").start(run.path, Resources())
    launcher.stop(handle)


def test_starting_again_forgets_how_it_ended(launcher: LocalLauncher, tmp_path: Path) -> None:
    run = make_run(tmp_path, "exits-silently")
    run.write_status(state="completed", error="old")
    run.record_failure(0, "old", 2)
    handle = launcher.start(run.path, Resources())
    wait_until_ended(launcher, handle)
    assert launcher.poll(handle).state == "failed"
    assert "old" not in launcher.poll(handle).reason


@pytest.fixture
def torchrun(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LocalLauncher, RunHandle, RunDir]:
    run = make_run(tmp_path, "hangs")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    handle = launcher.start(run.path, Resources(procs=2, device="cpu"))
    wait_for(lambda: (run.path / "pid-0").exists() and (run.path / "pid-1").exists(), 40.0)
    return launcher, handle, run


def test_a_killed_rank_is_named_and_takes_the_others_along(
    torchrun: tuple[LocalLauncher, RunHandle, RunDir],
) -> None:
    launcher, handle, run = torchrun
    assert len(launched_processes(handle.launch_id)) == 3
    run.record_failure(0, "lost connection to a peer")
    os.kill(int((run.path / "pid-1").read_text()), signal.SIGKILL)
    wait_until_ended(launcher, handle)
    assert launcher.poll(handle).reason.startswith("rank 1 was ended by signal 9")
    assert launched_processes(handle.launch_id) == []


def test_workers_do_not_outlive_a_killed_torchrun(torchrun: tuple[LocalLauncher, RunHandle, RunDir]) -> None:
    launcher, handle, run = torchrun
    os.kill(handle.pid, signal.SIGKILL)
    wait_until_ended(launcher, handle)
    assert run.status()["state"] == "failed"
    assert launched_processes(handle.launch_id) == []
    assert list((run.path.parent / "temporary").iterdir()) == []
    assert sorted(path.name for path in run.logs.iterdir()) == ["launcher.log"], "nothing of torchrun stays"


def test_a_clock_that_is_set_back_does_not_make_the_launcher_wait(launcher: LocalLauncher, tmp_path: Path) -> None:
    """A rank failed before the clock went back by an hour, and the process does not end."""
    run = make_run(tmp_path, "hangs")
    handle = launcher.start(run.path, Resources())
    wait_for(lambda: (run.path / "pid-0").exists())
    run.record_failure(0, "it broke", at=time.time() + 3600)
    launcher.patience_s = 0.3
    try:
        assert launcher.poll(handle).state == "running", "the others get some time to end by themselves"
        wait_for(lambda: launcher.poll(handle).state != "running", 30)
        assert launcher.poll(handle).reason == "it broke"
    finally:
        launcher.stop(handle)


def test_does_not_import_torch() -> None:
    code = "import sys, lockstep.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert LAUNCH_ID_VARIABLE not in os.environ
