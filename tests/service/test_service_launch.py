"""Launches by their id: found again whatever process began them, and never begun twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import processes_of, python_path, tree, wait_for

from lockstep.config import resolve_config
from lockstep.launch import LocalLauncher, Resources
from lockstep.launch.local import LAUNCH_ID_VARIABLE, launch_lock
from lockstep.rundir import RunDir


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return LocalLauncher("scripted_job", grace_s=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir.create(tmp_path / "run", resolve_config(tree("hangs")))
    yield made
    for pid in processes_of(made.path):
        os.kill(pid, 9)


def test_nothing_was_started(launcher: LocalLauncher, run: RunDir, tmp_path: Path) -> None:
    assert launcher.find(run.path, "the-launch") is None
    assert launcher.find(tmp_path / "nowhere", "the-launch") is None
    run.write_status(launch="the-launch", state="created")
    assert launcher.find(run.path, "the-launch") is None, "its status was written, its process was not started"


def test_a_launch_is_found_by_its_mark(launcher: LocalLauncher, run: RunDir) -> None:
    handle = launcher.start(run.path, Resources(device="cpu"), launch_id="the-launch")
    assert handle.launch_id == run.status()["launch"] == "the-launch"
    assert LocalLauncher().find(run.path, "the-launch") == handle
    (run.path / "launch.json").unlink()
    wait_for(lambda: processes_of(run.path) == [] and (run.path / "ready").exists())
    assert LocalLauncher().find(run.path, "the-launch") == handle, "from its process"
    assert LocalLauncher().find(run.path, "another") is None
    launcher.stop(handle)


def test_a_launch_that_has_ended_is_found_too(launcher: LocalLauncher, run: RunDir) -> None:
    handle = launcher.start(run.path, Resources(device="cpu"), launch_id="the-launch")
    wait_for((run.path / "ready").exists)
    launcher.stop(handle)
    run.write_status(state="completed")
    (run.path / "launch.json").unlink()
    found = LocalLauncher().find(run.path, "the-launch")
    assert found is not None
    assert LocalLauncher().poll(found).state == "completed"


def test_a_process_that_is_just_beginning_is_waited_for(launcher: LocalLauncher, run: RunDir) -> None:
    """Between fork and exec a process has the lock, and not yet its launch id."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(subprocess.Popen(command, env={**os.environ, LAUNCH_ID_VARIABLE: "the-launch"}))

    with launch_lock(run.path):
        timer = threading.Timer(0.5, begin)
        timer.start()
        found = launcher.find(run.path, "the-launch")
        timer.join()
    started[0].kill()
    started[0].wait()
    assert found is not None
    assert found.pid == started[0].pid


def test_no_second_launch_while_one_lives(launcher: LocalLauncher, run: RunDir) -> None:
    launcher.start(run.path, Resources(device="cpu"))
    (run.path / "launch.json").unlink()
    with pytest.raises(ValueError, match="still running"):
        LocalLauncher("scripted_job").start(run.path, Resources(device="cpu"))
    wait_for((run.path / "starts.txt").exists)
    assert len((run.path / "starts.txt").read_text().splitlines()) == 1
    handle = launcher.find(run.path, str(run.status()["launch"]))
    assert handle is not None
    launcher.stop(handle)


def test_what_a_launch_printed_stays(launcher: LocalLauncher, run: RunDir) -> None:
    for text in ("first", "second", "third"):
        handle = launcher.start(run.path, Resources(device="cpu"))
        launcher.stop(handle)
        (run.logs / "launcher.log").write_text(text)
    kept = {path.name: path.read_text() for path in run.logs.glob("launcher*.log")}
    assert kept == {"launcher-1.log": "first", "launcher-2.log": "second", "launcher.log": "third"}


def test_resources_become_the_environment(launcher: LocalLauncher, run: RunDir) -> None:
    handle = launcher.start(run.path, Resources(1, "cpu", ("3", "GPU-x"), threads=7))
    wait_for((run.path / "ready").exists)
    environment = Path(f"/proc/{handle.pid}/environ").read_bytes().split(b"\0")
    assert {b"CUDA_VISIBLE_DEVICES=3,GPU-x", b"OMP_NUM_THREADS=7"} <= set(environment)
    launcher.stop(handle)
