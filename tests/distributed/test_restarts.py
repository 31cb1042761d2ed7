"""A run whose rank is lost goes on by itself: same command, same weights as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from ranks import exported, newest_step, run_to_the_end

from lockstep.config import load_config
from lockstep.data import compile_data
from lockstep.launch.local import launched_processes, read_handle
from lockstep.model.load import load_run_tokenizer
from lockstep.rundir import RunDir

SETTINGS: dict[str, Any] = {
    "launch": {"procs": 2},
    "lora": {"rank": 4, "dropout": 0.1},
    "optim": {"epochs": 4, "learning_rate": 0.01},
    "checkpoint": {"every_steps": 3, "keep_best": 0},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return tiny.write_config(tmp_path_factory.mktemp("restarts"), tiny_model, **SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> RunDir:
    run = RunDir.create(config.parent / "undisturbed", load_config(config))
    run_to_the_end(run, 2)
    return run


@pytest.fixture
def following(config: Path, tmp_path: Path) -> Iterator[Any]:
    """(run, the command that follows it) when there is a checkpoint, and some steps after it."""
    run = RunDir(tmp_path / "run")
    command = tiny.start_lockstep("train", config, "--run-dir", run.path)
    try:
        deadline = time.monotonic() + 300
        while not run.list_checkpoints() or newest_step(run) < 5:
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield run, command
    finally:
        command.terminate()
        command.communicate(timeout=300)


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGKILL, 1), *(pytest.param(signal.SIGSTOP, rank, marks=pytest.mark.slow) for rank in (0, 1))],
)
def test_a_lost_rank_costs_the_steps_since_the_checkpoint(
    following: Any, undisturbed: RunDir, number: signal.Signals, rank: int
) -> None:
    run, command = following
    victim = tiny.pid_of_rank(run, rank)
    first = read_handle(run.path)
    os.kill(victim, number)
    out, err = command.communicate(timeout=300)
    assert (command.returncode, err) == (0, "")
    (event,) = [event for event in run.events() if event["event"] == "restarted"]
    told = {signal.SIGKILL: f"rank {rank} was ended by signal 9", signal.SIGSTOP: f"rank {rank} (process {victim}) was"}
    assert event["reason"].startswith(told[number])
    assert event["step"] >= 3
    assert f"{event['reason']}; starting again from step {event['step']} (restart 1 of 3)" in out
    assert [e["step"] for e in run.events() if e["event"] == "resumed"] == [event["step"]]
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(undisturbed))
    assert first is not None
    assert launched_processes(first.launch_id) == []
    assert run.status()["state"] == "completed"
    assert run.status()["error"] is None


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_is_taken_over(following: Any, undisturbed: RunDir) -> None:
    """The command that started it is killed, another attaches; a rank that is lost then costs no more than before."""
    run, command = following
    os.kill(command.pid, signal.SIGKILL)
    command.communicate(timeout=300)
    refused = tiny.start_lockstep("train", "--resume", run.path)
    assert "lockstep attach" in refused.communicate(timeout=300)[1]
    attached = tiny.start_lockstep("attach", run.path)
    try:
        deadline = time.monotonic() + 120
        while not [event for event in run.events() if event["event"] == "attached"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(tiny.pid_of_rank(run, 1), signal.SIGKILL)
        out, err = attached.communicate(timeout=300)
    finally:
        attached.kill()
    assert (attached.returncode, err) == (0, "")
    assert "now this command does. Ctrl-C stops the run." in out
    assert [event["restart"] for event in run.events() if event["event"] == "restarted"] == [1]
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(undisturbed))
    assert run.status()["state"] == "completed"


@pytest.mark.slow
def test_a_damaged_data_cache_costs_a_restart_and_is_not_learned(
    config: Path, undisturbed: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    settings = load_config(config)
    compile_data(settings.data, load_run_tokenizer(settings), seed=settings.seed)
    (tokens,) = (tmp_path / "cache").rglob("tokens.bin")
    content = bytearray(tokens.read_bytes())
    content[len(content) // 2] ^= 4
    tokens.write_bytes(content)
    code, _, err = tiny.run_lockstep("train", config, "--run-dir", tmp_path / "run")
    assert (code, err) == (0, "")
    run = RunDir(tmp_path / "run")
    (event,) = [event for event in run.events() if event["event"] == "restarted"]
    assert f"the data cache is damaged: {tokens}" in event["reason"]
    assert tiny.digest_weights(exported(run)) == tiny.digest_weights(exported(undisturbed))
