"""Plots of runs: both files exist, the page stands alone, and odd runs do not break it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.config import parse_config
from lockstep.reports.curves import PANELS, moving_average, plot_runs, read_runs
from lockstep.rundir import RunDir

PAIR_KEYS = {"margin", "accuracy", "chosen_reward", "rejected_reward"}
SAMPLE_KEYS = {"reward", "entropy", "entropy_estimate", "kl"}
SAMPLE_KEYS |= {"completion_length", "sampler_trainer_logprob_diff", "zero_std_groups"}


def make_run(path: Path, num_steps: int = 40, *, validation: bool = True, pairs: bool = False) -> Path:
    run = RunDir.create(path, parse_config("model: x\ndata: {train: a}"))
    for step in range(1, num_steps + 1):
        record = {"loss": 1 / step, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_s": 100.0}
        record |= {"margin": step / 9, "accuracy": 0.5, "chosen_reward": 0.1, "rejected_reward": -0.1} if pairs else {}
        run.log_metrics({"step": step, "split": "train", **record})
        if validation and step % 10 == 0:
            judged = {"margin": -step, "accuracy": 0.1 * step} if pairs else {}
            run.log_metrics({"step": step, "split": "validation", "loss": 2 / step, **judged})
    run.write_status(state="completed", step=num_steps, loss=1 / num_steps, tokens=5000, started_at=1.0)
    return path


def test_several_runs_over_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b<i>", 1, validation=False)]
    png, page = plot_runs(runs, tmp_path / "out")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\s\"]+", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "b&lt;i&gt;" in text
    assert "<i>" not in text
    for panel in PANELS:
        assert (f">{panel.title}<" in text) == (panel.key not in PAIR_KEYS | SAMPLE_KEYS), panel
    ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_a_run_on_pairs_also_shows_rewards_margin_and_accuracy(tmp_path: Path) -> None:
    _, page = plot_runs([make_run(tmp_path / "a", pairs=True)], tmp_path)
    text = page.read_text()
    assert all(panel.title in text for panel in PANELS if panel.key not in SAMPLE_KEYS)


def test_a_run_that_samples_shows_rewards_and_how_far_the_model_has_moved(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 5)
    run = RunDir(path, owner=True)
    for step in (6, 7):
        run.log_metrics({"step": step, "split": "train", **dict.fromkeys(SAMPLE_KEYS, 0.5)})
        run.log_metrics({"step": step, "split": "validation", "reward": 0.1 * step})
    _, page = plot_runs([path], tmp_path)
    text = page.read_text()
    assert all(f">{panel.title}<" in text for panel in PANELS if panel.key in SAMPLE_KEYS)


def test_the_best_of_a_score_is_its_highest_and_of_a_loss_its_lowest() -> None:
    best = {(panel.split, panel.key): panel.best for panel in PANELS if panel.split == "validation"}
    assert best["validation", "loss"] is min
    assert best["validation", "margin"] is best["validation", "accuracy"] is max


def test_numbers_that_are_none_or_not_finite_are_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 3, validation=False)
    RunDir(path, owner=True).log_metrics({"step": 4, "split": "train", "loss": math.nan, "grad_norm": None})
    (curves,) = read_runs([path])
    assert curves.points(PANELS[0])[0] == [1, 2, 3]
    assert len(plot_runs([path], tmp_path)) == 2


def test_same_names_are_told_apart_by_folder(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x" / "run", 2), make_run(tmp_path / "y" / "run", 2)]
    assert [curves.label for curves in read_runs(runs)] == [str(run) for run in runs]


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "empty", parse_config("model: x\ndata: {train: a}"))
    with pytest.raises(ValueError, match="empty has no metrics yet"):
        plot_runs([tmp_path / "empty"], tmp_path)


def testmoving_averageing_keeps_constants_and_length() -> None:
    assert moving_average([2.0] * 50) == [2.0] * 50
    assert len(moving_average(list(range(100)))) == 100
