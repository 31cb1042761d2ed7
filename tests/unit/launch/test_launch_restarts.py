"""Which runs are restarted, when, and when not any more; and ranks that are stopped."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import parse_config
from lockstep.launch import LocalLauncher, Resources, RunHandle, RunState, start
from lockstep.launch.local import launched_processes
from lockstep.launch.start import Reached, RestartingRun, pause_before, why_not_again
from lockstep.processes.tree import StoppedTimes
from lockstep.rundir import RunDir

FAILED = RunState("failed", "rank 1 was ended by signal 9", 1)


def make_run(folder: Path, name: str = "run") -> RunDir:
    return RunDir.create(folder / name, parse_config(f"name: {name}\nmodel: x\ndata: {{train: a}}"))


class ScriptedLauncher:
    """Starts nothing: each start ends in its given state, after the given number of steps."""

    def __init__(self, run: RunDir, *starts: tuple[RunState, int]) -> None:
        self.run = run
        self.starts = list(starts)
        self.num_started = 0
        self.num_stopped = 0

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        self.num_started += 1
        return RunHandle("scripted", str(run_dir), 0, "", str(self.num_started))

    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        return None

    def poll(self, handle: RunHandle) -> RunState:
        outcome, step = self.starts[int(handle.launch_id) - 1]
        self.run.write_status(state=outcome.state, step=step, error=outcome.reason)
        return outcome

    def stop(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        self.num_stopped += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause is over at the next poll."""
    ticks = itertools.count(1000, 61)
    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def restarting_run(
    launcher: ScriptedLauncher, run: RunDir, max_restarts: int, say: Callable[[str], None] = lambda line: None
) -> RestartingRun:
    return RestartingRun(launcher, launcher.start(run.path, Resources()), run, Resources(), max_restarts, say)


def follow(restarting: RestartingRun) -> RunState:
    for _ in range(100):
        outcome = restarting.poll()
        if outcome.state != "running":
            return outcome
    raise AssertionError("the run never ended")


def restarts_of(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == "restarted"]


@pytest.mark.usefixtures("clock")
def test_a_run_that_lost_a_rank_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    launcher = ScriptedLauncher(run, (FAILED, 5), (FAILED, 9), (RunState("completed"), 12))
    said: list[str] = []
    assert follow(restarting_run(launcher, run, 3, said.append)).state == "completed"
    assert launcher.num_started == 3
    assert [(event["restart"], event["reason"]) for event in restarts_of(run)] == [
        (1, FAILED.reason),
        (2, FAILED.reason),
    ]
    assert said[0] == "rank 1 was ended by signal 9; starting again from the start (restart 1 of 3)"
    assert [event["pause_s"] for event in restarts_of(run)] == [1.0, 2.0], "the pause grows"


@pytest.mark.usefixtures("clock")
def test_it_says_which_checkpoint_it_goes_on_from(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.begin_checkpoint(4)
    run.commit_checkpoint(4, {})
    said: list[str] = []
    follow(restarting_run(ScriptedLauncher(run, (FAILED, 5), (RunState("completed"), 9)), run, 1, said.append))
    assert "from step 4" in said[0]
    assert restarts_of(run)[0]["step"] == 4


@pytest.mark.usefixtures("clock")
def test_a_restart_that_gets_no_further_is_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    launcher = ScriptedLauncher(run, (FAILED, 7), (FAILED, 8), (FAILED, 8), (RunState("completed"), 12))
    outcome = follow(restarting_run(launcher, run, 10))
    assert (outcome.state, launcher.num_started) == ("failed", 3)
    assert outcome.reason.startswith(FAILED.reason)
    assert "got no further than step 8" in outcome.reason
    assert run.status()["error"] == outcome.reason


@pytest.mark.usefixtures("clock")
def test_not_more_often_than_allowed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    launcher = ScriptedLauncher(run, *((FAILED, step) for step in range(1, 9)))
    restarting = restarting_run(launcher, run, 2)
    outcome = follow(restarting)
    assert launcher.num_started == 3
    assert "as often as launch.max_restarts allows" in outcome.reason
    assert restarting.poll().state == "failed", "and stays so"
    assert launcher.num_started == 3


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "outcome",
    [
        RunState("failed", "data.train is empty", 2),
        RunState("failed", "the loss is nan at step 5", 3),
        RunState("cancelled"),
        RunState("completed"),
    ],
)
def test_not_for_a_mistake_nor_after_the_end(tmp_path: Path, outcome: RunState) -> None:
    run = make_run(tmp_path)
    launcher = ScriptedLauncher(run, (outcome, 3))
    assert follow(restarting_run(launcher, run, 5)) == outcome
    assert launcher.num_started == 1
    assert restarts_of(run) == []


@pytest.mark.usefixtures("clock")
def test_without_restarts_the_reason_is_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert follow(restarting_run(ScriptedLauncher(run, (FAILED, 3)), run, 0)) == FAILED


def test_stopping_in_a_pause_starts_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    launcher = ScriptedLauncher(run, (FAILED, 5), (RunState("completed"), 9))
    restarting = restarting_run(launcher, run, 3)
    assert restarting.poll().state == "running", "a pause begins"
    assert restarting.poll().state == "running"
    assert run.status()["state"] == "created"
    assert run.status()["phase"].startswith("starting again in")
    restarting.stop()
    assert restarting.poll().state == "failed"
    assert (launcher.num_started, launcher.num_stopped) == (1, 1)


# --- one supervisor at a time ----------------------------------------------------------------------------------------


class FindingLauncher(ScriptedLauncher):
    def find(self, run_dir: Path, launch_id: str) -> RunHandle | None:
        return RunHandle("scripted", str(run_dir), 0, "", launch_id)


@pytest.mark.usefixtures("clock")
def test_who_takes_over_counts_the_restarts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first supervisor is killed after one restart: the second has one less to go."""
    config = parse_config("model: x\ndata: {train: a}\nlaunch: {max_restarts: 2}")
    run = RunDir.create(tmp_path / "run", config)
    launcher = FindingLauncher(run, (FAILED, 5), (FAILED, 9), (FAILED, 12), (RunState("completed"), 12))
    monkeypatch.setattr(start, "LocalLauncher", lambda: launcher)
    supervision = start.Supervision.take(run.path)
    assert supervision is not None
    first = RestartingRun(launcher, launcher.start(run.path, Resources()), run, Resources(), 2, supervision=supervision)
    assert first.poll().state == "running"  # the first failure: a restart is planned, and the supervisor killed
    run.write_status(launch="1")
    assert start.attach(run.path) is None, "there is one"
    assert start.is_supervised(run.path)
    supervision.release()
    assert not start.is_supervised(run.path)
    second = start.attach(run.path)
    assert second is not None
    ended = follow(second)
    assert launcher.num_started == 3, "what was planned is begun, and once more"
    assert ended.reason.endswith("it was started again 2 times, as often as launch.max_restarts allows")
    assert [event["restart"] for event in restarts_of(run)] == [1, 2]
    assert start.has_ended(run)
    assert not start.is_supervised(run.path)


def test_a_supervisor_that_is_killed_leaves_the_run_to_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from lockstep.launch.start import Restarts, Supervision\n"
        "s = Supervision.take(Path(sys.argv[1])); s.record(Restarts(count=2))\n"
        "print('taken', flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", program, run.path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "taken\n"
            assert start.Supervision.take(run.path) is None
            with pytest.raises(ValueError, match="is supervised by another process"):
                start.start(run, run.config())
            run.write_status(state="failed")
            assert not start.has_ended(run), "its supervisor has not decided yet"
        finally:
            holder.kill()
    taken = start.Supervision.take(run.path)
    assert taken is not None
    assert taken.read() == start.Restarts(count=2)
    taken.end()
    assert start.has_ended(run)


def test_a_job_of_the_service_is_not_taken_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(launch="1")
    assert start.attach(run.path) is None


def test_progress_is_a_later_checkpoint_or_a_later_step() -> None:
    before = Reached(checkpoint=6, step=8)
    assert why_not_again(FAILED, 1, 3, Reached(6, 9), before) == ""
    assert why_not_again(FAILED, 1, 3, Reached(7, 8), before) == ""
    assert why_not_again(FAILED, 1, 3, Reached(6, 8), before)
    assert why_not_again(FAILED, 0, 3, Reached(0, 0), Reached()) == "", "the first time it may be chance"


def test_pauses_end_somewhere() -> None:
    assert [pause_before(n) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert pause_before(50) == 60.0


# --- standing still ---------------------------------------------------------------------------------------------------


def look_often(times: StoppedTimes, stopped: list[str], since: float, until: float) -> list[str]:
    found: list[str] = []
    for tenth in range(int(since * 10), int(until * 10)):
        found = times.update(stopped, tenth / 10)
    return found


def test_a_long_stop_is_found_and_a_short_one_is_not() -> None:
    times = StoppedTimes(limit_s=5.0)
    assert look_often(times, ["rank 1"], 0, 4.9) == []
    assert look_often(times, [], 4.9, 5.0) == [], "it went on"
    assert look_often(times, ["rank 1"], 5.0, 9.9) == [], "and everything begins anew"
    assert look_often(times, ["rank 1"], 9.9, 10.4) == ["rank 1"]


def test_who_was_stopped_itself_blames_nobody() -> None:
    """A whole machine that is suspended: the watcher goes on a moment before the others."""
    times = StoppedTimes(limit_s=5.0)
    assert times.update(["rank 0", "rank 1"], 0.0) == []
    assert times.update(["rank 0", "rank 1"], 3600.0) == []
    assert times.update(["rank 1"], 3600.2) == []


# What it does is the name of the run. A child of its own is what an engine is: it has the launch id and the RANK, too.
WORKER = """
import os, subprocess, sys, time
from lockstep.rundir import RunDir
rank = int(os.environ.get("RANK", "0"))
run = RunDir(sys.argv[1], owner=rank == 0)
child = subprocess.Popen(["sleep", "300"])
(run.path / f"child-{rank}").write_text(str(child.pid))
(run.path / f"pid-{rank}").write_text(str(os.getpid()))
time.sleep(300)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    (tmp_path / "sleeping_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return LocalLauncher("sleeping_worker", grace_s=3.0)


@pytest.fixture(params=[1, 2])
def started(
    launcher: LocalLauncher, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[RunHandle, RunDir]]:
    run = make_run(tmp_path)
    handle = launcher.start(run.path, Resources(procs=request.param, device="cpu"))
    try:
        deadline = time.monotonic() + 300
        while not all((run.path / f"pid-{rank}").exists() for rank in range(request.param)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield handle, run
    finally:
        launcher.stop(handle)


def poll_for(launcher: LocalLauncher, handle: RunHandle, seconds: float) -> RunState:
    deadline = time.monotonic() + seconds
    while (outcome := launcher.poll(handle)).state == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    return outcome


def pids(run: RunDir, kind: str = "pid") -> list[int]:
    return [int(path.read_text()) for path in sorted(run.path.glob(f"{kind}-*"))]


def test_a_stopped_rank_is_named_and_ends_the_run(launcher: LocalLauncher, started: tuple[RunHandle, RunDir]) -> None:
    handle, run = started
    last = pids(run)[-1]
    os.kill(last, signal.SIGSTOP)
    outcome = poll_for(launcher, handle, 30)
    assert outcome.state == "failed"
    assert outcome.reason.startswith(f"rank {len(pids(run)) - 1} (process {last}) was stopped by a signal")
    assert outcome.exit_code == 1, "and may be started again"
    assert launched_processes(handle.launch_id) == [], "its children are gone, too"


def test_a_stopped_child_of_a_rank_is_not_a_stopped_rank(
    launcher: LocalLauncher, started: tuple[RunHandle, RunDir]
) -> None:
    handle, run = started
    launcher.stopped_limit_s = 0.3
    for child in pids(run, "child"):
        os.kill(child, signal.SIGSTOP)
    assert poll_for(launcher, handle, 1.5).state == "running"
    os.kill(pids(run)[0], signal.SIGSTOP)
    assert poll_for(launcher, handle, 30).reason.startswith("rank 0"), "this limit is short enough to be seen"


def test_a_short_stop_changes_nothing(launcher: LocalLauncher, started: tuple[RunHandle, RunDir]) -> None:
    handle, run = started
    os.kill(pids(run)[-1], signal.SIGSTOP)
    assert poll_for(launcher, handle, 1.0).state == "running"
    os.kill(pids(run)[-1], signal.SIGCONT)
    assert poll_for(launcher, handle, 1.0).state == "running"


def test_a_run_of_another_kind_is_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    config = parse_config("model: x\ndata: {train: a}\nlaunch: {kind: ray}")
    run = RunDir.create(tmp_path / "elsewhere", config)
    with pytest.raises(ValueError, match=r"launch\.kind is ray"):
        launcher.start(run.path, Resources())
