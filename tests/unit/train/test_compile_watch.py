"""Compilations and slow ways are told where people look: events, status and the summary."""

from __future__ import annotations

import gc
import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch._dynamo.callback import callback_handler

from lockstep.cli.display import RunDisplay, print_summary
from lockstep.config import parse_config
from lockstep.model.compiled_code import note_compilations
from lockstep.rundir import PhaseClock, RunDir
from lockstep.train.steps import CompileWatch, LongLived


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "r", parse_config("model: x\ndata: {train: a}"))


def test_every_compilation_is_an_event_with_its_step_and_seconds(run: RunDir) -> None:
    step = 7
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with CompileWatch(run, note_compilations) as watch:
        watch.step = lambda: step
        double(torch.ones(3))
        double(torch.ones(3))  # compiled before
        step = 12
        double(torch.ones(4))
    double(torch.ones(5))  # nobody watches
    events = [event for event in run.events() if event["event"] == "compiled"]
    assert [event["step"] for event in events] == [7, 12]
    assert all(event["seconds"] > 0 for event in events)
    compilations = run.status()["compilations"]
    assert compilations["count"] == 2
    assert compilations["seconds"] == pytest.approx(sum(event["seconds"] for event in events), abs=2e-3)
    assert not callback_handler.start_callbacks
    assert not callback_handler.end_callbacks


def test_a_watch_that_is_not_enabled_registers_nothing(run: RunDir) -> None:
    with CompileWatch(run, None):
        assert not callback_handler.start_callbacks


def test_seconds_belong_to_what_was_done(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lockstep.rundir.time.monotonic", lambda: now[0])
    run.clock = PhaseClock()
    phases = {"reading data": 1, "loading the model": 4, "training": 10, "evaluating": 3, "checkpointing": 2}
    for phase, seconds in [*phases.items(), ("training", 20), ("exporting", 5), ("done", 0)]:
        run.write_status(phase=phase)
        now[0] += seconds
    assert run.status()["seconds"] == {"start": 5, "training": 30, "evaluation": 3, "checkpoints": 2, "export": 5}
    run.write_status(step=3)
    assert run.status()["seconds"]["start"] == 5  # nothing is counted twice


def test_the_summary_says_where_the_time_went_and_what_was_slow(run: RunDir) -> None:
    console = Console(file=io.StringIO(), width=200)
    view = RunDisplay(run, console)
    run.report_slow("steps are not captured: one of 64 rows takes 31.0 ms instead of 1.9")
    run.log_event("compiled", step=12, seconds=9.1)
    run.log_event("compiled", step=13, seconds=0.2)  # too short to be shown
    seconds = {"start": 12.0, "training": 40.0, "export": 0.4}
    run.write_status(state="completed", started_at=1.0, seconds=seconds, compilations={"count": 2, "seconds": 9.3})
    run.log_event("compiled", engine="engine-1", seconds=21.0)
    engines = {"engine-0": {"count": 2, "seconds": 13.0}, "engine-1": {"count": 1, "seconds": 21.0}}
    run.write_status(engine_compilations=engines)
    answers = iter([True, False])
    view.follow(lambda: next(answers))
    print_summary(console, run)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "warning: steps are not captured: one of 64 rows takes 31.0 ms instead of 1.9" in text
    assert "step 12  compiled for 9 s" in text
    assert "step 13" not in text
    assert "engine-1 compiled for 21 s" in text
    assert "(training 40s, start 12s, of these 9s compiling, 2 times, engines compiled for up to 21s)" in text
    status = json.loads((run.path / "status.json").read_text())
    assert status["slow"] == ["steps are not captured: one of 64 rows takes 31.0 ms instead of 1.9"]


def test_what_is_there_after_the_first_step_and_after_compiling_is_not_looked_at_again() -> None:
    counts = [0]
    before = gc.get_freeze_count()
    with LongLived(lambda: counts[0]) as long_lived:
        kept: list[object] = []
        found = []
        for compiled in (0, 0, 0, 1, 1):
            counts[0] = compiled
            long_lived.set_aside()
            found.append(gc.get_freeze_count())
            kept.append([[] for _ in range(100)])
        # Other threads may end what they had meanwhile, so that a few are fewer.
        grown = [after - before >= 100 for before, after in pairwise([before, *found])]
        assert grown == [False, True, False, True, False]
    assert gc.get_freeze_count() == 0
