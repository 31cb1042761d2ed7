"""Terminal views: what is printed where, and that a growing file is read in whole lines, once."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from lockstep.cli import display
from lockstep.cli.display import JsonlTail, RunDisplay, print_facts, print_summary
from lockstep.cli.options import echo
from lockstep.config import parse_config
from lockstep.reports.page import format_count, format_duration
from lockstep.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "r", parse_config("model: x\ndata: {train: a}"))


def make_console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, no_color=True)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def log_step(run: RunDir, step: int, split: str = "train") -> None:
    extra = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_s": 2000.0, "step_time_s": 1.0, "memory_gib": 1.5}
    run.log_metrics({"step": step, "split": split, "loss": 1 / (step + 1), **(extra if split == "train" else {})})


def test_what_others_wrote_is_no_command_to_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    hostile = "red\x1b[31m \x1b]52;c;eA==\x07 exe\u202egnp"
    console = display.TerminalConsole(file=io.StringIO(), force_terminal=True, width=100)
    columns = ("name", "state", "step", "total_steps", "loss", "validation_loss", "tokens_per_s", "age_s")
    console.print(display.runs_table([dict.fromkeys(columns) | {"name": hostile, "state": "running", "age_s": 1.0}]))
    console.print(Text.assemble(("answer ", "bold"), hostile))
    shown = text_of(console)
    assert r"red\x1b[31m \x1b]52;c;eA==" in shown
    assert r"exe\u202egnp" in shown
    assert [sign for sign in ("\x1b[31m ", "\x1b]", "\x07", "\u202e") if sign in shown] == []
    assert "\x1b[1m" in shown, "our own commands stay"
    echo(hostile)
    assert "exe\u202egnp\n" in capsys.readouterr().out, "a pipe gets it as it is"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    echo(hostile)
    assert capsys.readouterr().out == r"red\x1b[31m \x1b]52;c;eA==\x07 exe\u202egnp" + "\n"


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"old": 1}\n')
    tail = JsonlTail(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"a": 1}\n{"b"')
        file.flush()
        assert tail.read() == [{"a": 1}]
        file.write(": 2}\nbroken\n[1]\n")
        file.flush()
        assert tail.read() == [{"b": 2}]
    assert tail.read() == []
    assert JsonlTail(tmp_path / "none").read() == []


def test_plain_lines_are_throttled_but_first_last_and_evaluations_stay(run: RunDir) -> None:
    console = make_console(terminal=False)
    view = RunDisplay(run, console)

    def script() -> Iterator[bool]:
        run.write_status(state="preparing", phase="reading data")
        yield True
        run.write_status(state="running", phase="training", total_steps=9)
        for step in range(1, 9):
            log_step(run, step)
            if step == 4:
                log_step(run, step, "validation")
                run.log_event("checkpoint", step=4)
            yield True
        log_step(run, 9)
        run.write_status(state="completed")
        yield False

    steps = script()
    view.follow(lambda: next(steps))
    lines = text_of(console).splitlines()
    assert lines[0] == "reading data"
    assert "step 1/9  loss 0.5000  lr 1.00e-04  grad 1  2k tokens/s  1.5 GiB  8s left" in lines
    assert lines[-1].startswith("step 9/9")
    assert "step 4  validation loss 0.2000" in lines
    assert "step 4  checkpoint saved" in lines
    assert sum("lr" in line for line in lines) <= 4


def test_live_display_keeps_only_what_matters(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "POLL_INTERVAL_S", 0.01)
    console = make_console(terminal=True)
    view = RunDisplay(run, console)
    answers = iter([True, True, False])
    run.write_status(state="running", total_steps=4, phase="training")
    log_step(run, 0, "validation")
    log_step(run, 2)
    run.log_event("warning", message="three rows were cut")
    view.follow(lambda: next(answers))
    assert "step 2/4" in text_of(console)
    assert "50 %" in text_of(console)
    assert "three rows were cut" in text_of(console)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_lines_fit_the_terminal(run: RunDir, width: int) -> None:
    view = RunDisplay(run, make_console(terminal=True, width=width))
    run.write_status(state="running", total_steps=4000, phase="writing a checkpoint")
    log_step(run, 2000)
    view.refresh()
    output = make_console(terminal=False, width=width)
    output.print(view.render())
    lines = text_of(output).splitlines()
    assert max(map(len, lines)) <= width
    assert any("1.5 GiB" in line for line in lines)


def test_best_after_resume_is_told_from_the_earlier_best(run: RunDir) -> None:
    run.write_status(best_validation_loss=0.3)
    view = RunDisplay(run, make_console(terminal=False))
    assert "best" not in view.validation_line({"step": 5, "loss": 0.4}).plain
    assert "best so far" in view.validation_line({"step": 6, "loss": 0.2}).plain


def test_summary_says_how_to_go_on(run: RunDir) -> None:
    run.write_status(state="cancelled", step=3, total_steps=9, loss=0.5)
    console = make_console(terminal=False)
    print_summary(console, run)
    assert f"lockstep train --resume {run.path}  (from the start: there is no checkpoint yet)" in text_of(console)
    run.begin_checkpoint(2)
    run.commit_checkpoint(2, {})
    print_summary(console, run)
    assert "(from step 2)" in text_of(console)


def test_summary_names_a_checkpoint_that_is_better_than_the_export(run: RunDir) -> None:
    console = make_console(terminal=False)
    run.write_status(
        state="completed", step=9, total_steps=9, validation_loss=0.5, best_validation_loss=0.4, best_step=6
    )
    print_summary(console, run)
    assert "lockstep export" not in text_of(console)  # its checkpoint was not kept
    run.begin_checkpoint(6)
    run.commit_checkpoint(6, {})
    print_summary(console, run)
    assert f"step 6, the export is of step 9: lockstep export {run.path} --step 6" in text_of(console)
    console = make_console(terminal=False)
    run.write_status(best_step=9)
    print_summary(console, run)
    assert "lockstep export" not in text_of(console)


def test_how_long_a_run_took_is_not_what_the_clock_says_after_it_was_set(run: RunDir) -> None:
    console = make_console(terminal=False)
    run.write_status(state="completed", step=3, started_at=time.time() + 3600, duration_s=75.0)
    print_summary(console, run)
    assert re.search(r"time +1m15s", text_of(console))
    run.write_status(state="failed", duration_s=None)
    print_summary(console, run)
    assert re.search(r"time +0s", text_of(console))


def test_a_run_on_pairs_shows_margin_accuracy_and_its_reference(run: RunDir) -> None:
    console = make_console(terminal=False)
    view = RunDisplay(run, console)
    judged = {"margin": 0.4567, "accuracy": 0.75, "chosen_reward": 1.0, "rejected_logprob": -9.0}
    run.log_event("reference", kind="copy", why="as configured")
    run.log_metrics({"step": 1, "split": "train", "loss": 0.5, **judged})
    run.log_metrics({"step": 1, "split": "validation", "loss": 0.6, **judged})
    answers = iter([True, False])
    view.follow(lambda: next(answers))
    lines = text_of(console).splitlines()
    assert "reference copy: as configured" in lines
    assert "step 1  loss 0.5000  margin 0.457  accuracy 75%" in lines
    assert "step 1  validation loss 0.6000  margin 0.457  accuracy 0.750" in lines
    run.write_status(state="completed", step=1, loss=0.5, validation_loss=0.6, validation_scores=judged)
    print_summary(console, run)
    assert "held out    margin 0.457, accuracy 75%" in text_of(console)


def test_facts_of_any_shape() -> None:
    console = make_console(terminal=False)
    facts = {"steps": 1200, "data": {"rows": 5, "cut": False}, "warnings": ["a", "b"], "drift": None, "rate": 2e-4}
    print_facts(console, facts)
    lines = [line.split() for line in text_of(console).splitlines()]
    assert ["steps", "1,200"] in lines
    assert ["cut", "no"] in lines
    assert ["rate", "0.0002"] in lines


def test_numbers_for_people() -> None:
    assert [format_count(n) for n in (0, 999, 1234, 999_999, 5_600_000)] == ["0", "999", "1.23k", "1000k", "5.6M"]
    assert [format_duration(s) for s in (3.4, 61, 3700, 200_000)] == ["3s", "1m01s", "1h01m", "2d07h"]
