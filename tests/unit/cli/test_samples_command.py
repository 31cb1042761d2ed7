"""What a run sampled, as a person reads it: the samples command, the live display and the closing summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_display import make_console, text_of
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cli.display import RunDisplay, print_header, print_summary
from lockstep.config import parse_config
from lockstep.rundir import RunDir

CONFIG = "model: org/m\ndata: {train: t.jsonl}\nalgorithm: {kind: dapo, reward: numeric}\n"


def row_of(step: int, number: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    row = {"step": step, "origin": f"/data/t.jsonl:{number}", "prompt": f"question {number}", "reference": "4"}
    row |= {"sample": number, "turns": [f"answer {number}"], "reward": reward, "scores": {"numeric": reward or 0.0}}
    row |= {"advantage": 0.5, "problem": None, "tokens": 3, "truncated": False, "version": step - 1}
    return {**row, **changes}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run", parse_config(CONFIG))
    (made.path / "samples").mkdir()
    rows = {
        9: [row_of(9, 1, 0.0)],
        10: [
            row_of(10, 1, 0.2),
            row_of(10, 2, 0.9, turns=["first", "second"], truncated=True),
            row_of(10, 3, None, problem="reward numeric failed: KeyError", scores={}, advantage=None),
            row_of(10, 4, 0.1),
        ],
    }
    for step, own in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in own)
        (made.path / f"samples/step-{step}.jsonl").write_text(text)
    return made


def ask(run: RunDir, *options: str) -> str:
    result = CliRunner().invoke(app, ["samples", str(run.path), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_latest_step_is_shown_with_what_each_answer_earned(run):
    text = ask(run)
    assert "step 10  t.jsonl:1  sample 1  reward 0.200  (numeric 0.2)  advantage +0.50" in text
    assert "prompt  question 1   [4]" in text
    assert "answer  first" in text
    assert "answer  second" in text
    assert "reward failed" in text
    assert "problem  reward numeric failed: KeyError" in text
    assert "4 of 4 answers" in text
    assert "step 9 " not in text


def test_a_step_the_best_and_the_worst_can_be_selected(run):
    assert "step 9  t.jsonl:1" in ask(run, "--step", "9")
    best, worst = (
        [json.loads(line)["reward"] for line in ask(run, choice, "--json").splitlines()]
        for choice in ("--best", "--worst")
    )
    assert (best, worst) == ([0.9, 0.2, 0.1], [0.1, 0.2, 0.9])
    assert len(ask(run, "--best", "--json", "-n", "1").splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "7"], "has no samples of step 7: it has those of 9 to 10"),
        (["--best", "--worst"], "give either --best or --worst"),
    ],
)
def test_what_is_not_there_is_said(run, options, words):
    result = CliRunner().invoke(app, ["samples", str(run.path), *options])
    assert words in str(result.exception)


def test_a_run_without_samples_is_named(tmp_path):
    RunDir.create(tmp_path / "other", parse_config("model: m\ndata: {train: t}"))
    result = CliRunner().invoke(app, ["samples", str(tmp_path / "other")])
    assert "has no samples: only runs of kind grpo sample" in str(result.exception)


def test_the_display_shows_rewards_and_how_sampler_and_trainer_agree(run):
    console = make_console(terminal=False, width=300)
    display = RunDisplay(run, console)
    run.write_status(state="running", phase="training", total_steps=9)
    run.log_metrics({"step": 0, "split": "validation", "reward": 0.25, "reward_format": 0.5, "rows": 4, "time_s": 1.0})
    facts = {
        "reward": 0.5,
        "completion_length": 17.2,
        "entropy_estimate": 1.5,
        "kl": 0.01,
        "sampler_trainer_logprob_diff": 2e-6,
        "staleness": 0,
    }
    run.log_metrics({"step": 1, "split": "train", "loss": 0.1, "step_time_s": 1.0, "reward_failed": 2.0, **facts})
    run.log_metrics({"step": 1, "split": "validation", "reward": 0.75, "rows": 4, "time_s": 1.0})
    display.print_plain(final=True)
    text = text_of(console)
    assert "step 0  held-out reward 0.2500  reward_format 0.500" in text
    assert "held-out reward 0.7500  best so far" in text
    assert "reward 0.500  length 17  entropy 1.50  kl 0.01  logprob diff 2.0e-06  staleness 0  rewards failed 2" in text


def test_an_entropy_that_was_computed_takes_the_place_of_the_estimate(run):
    console = make_console(terminal=False, width=300)
    display = RunDisplay(run, console)
    run.log_metrics(
        {"step": 1, "split": "train", "loss": 0.1, "entropy": 2.5, "entropy_estimate": 1.5, "reward_failed": 0.0}
    )
    display.print_plain(final=True)
    text = text_of(console)
    assert "entropy 2.50" in text
    assert "1.50" not in text
    assert "rewards failed" not in text


def test_header_and_summary(run):
    console = make_console(terminal=False, width=200)
    print_header(console, run, run.config(), resumed=False)
    run.write_status(state="completed", step=9, best_step=4, best_reward=0.9, validation_scores={"reward": 0.8})
    print_summary(console, run)
    text = text_of(console)
    assert "grpo: grpo" in text
    assert "reward 0.800  (best 0.900 at step 4)" in text


def test_a_run_that_samples_has_no_rows_to_look_at(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "t.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    result = CliRunner().invoke(app, ["data", str(tmp_path / "run.yaml")])
    assert "lockstep train --dry-run counts its prompts" in str(result.exception)
