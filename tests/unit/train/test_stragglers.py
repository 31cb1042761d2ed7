"""Who is named as slow, since when and how often; and that a run says so."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.cli.display import RunDisplay
from lockstep.config import LoggingConfig, RunConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.traffic import Traffic
from lockstep.rundir import RunDir
from lockstep.train.checkpoints import Progress
from lockstep.train.steps import QUIET_STEPS, WINDOW, MetricsLog, Straggler, StragglerWatch, compare_peers, take_seconds


def watch(steps: Sequence[Sequence[float]], first: int = 1, peers: str = "0") -> list[tuple[int, Straggler]]:
    """(step, who was named in it) for ranks that compute these seconds."""
    state = StragglerWatch()
    found = []
    for step, seconds in enumerate(steps, start=first):
        found += [(step, slow) for slow in state.add(step, {peers: dict(enumerate(seconds))})]
    return found


def test_ranks_of_one_speed_are_left_alone():
    assert not watch([[1.0, 1.1, 0.9, 1.2]] * 200)


def test_a_slow_rank_is_named_once_its_window_is_full():
    ((step, slow),) = watch([[1.0, 1.0, 1.5, 1.0]] * 50)
    assert step == WINDOW
    assert slow == Straggler(2, 1.5, 1)


def test_the_bound_is_a_quarter_more_than_the_median_of_the_others():
    assert not watch([[1.0, 1.0, 1.25]] * 50)
    assert watch([[1.0, 1.0, 1.26]] * 50)
    # Its own seconds do not count to the median: of two ranks, one would never be slow.
    assert watch([[1.0, 1.26]] * 50)
    # One fast rank makes nobody slow.
    assert not watch([[1.0, 1.0, 0.1]] * 50)


def test_it_says_since_which_step():
    good, bad = [1.0, 1.0, 1.1], [1.0, 3.0, 1.1]
    ((step, slow),) = watch([*[good] * 40, *[bad] * 30], first=101)
    assert slow.rank == 1
    assert slow.since_step == 141
    assert slow.times == pytest.approx(3.0 / 1.1)
    assert step == 141 + WINDOW // 2, "slow in more than half of the window"


def test_a_hiccup_is_no_straggler():
    good, hiccup = [1.0, 1.0], [1.0, 60.0]
    assert not watch([*[good] * 30, hiccup, *[good] * 30])
    assert not watch([good, good, good, [1.0, 3.0]] * 30), "every fourth step"
    # Slow in most steps, and fast where they are long: nobody waits for it on the whole.
    assert not watch([[1.0, 1.3], [1.0, 1.3], [5.0, 1.0]] * 30)


def test_a_rank_is_named_again_only_after_a_while():
    named = watch([[1.0, 2.0]] * (WINDOW + 2 * QUIET_STEPS))
    assert [step for step, _ in named] == [WINDOW, WINDOW + QUIET_STEPS, WINDOW + 2 * QUIET_STEPS]


def test_two_slow_ranks_are_both_named():
    found = watch([[2.0, 1.0, 1.0, 1.0, 3.0]] * WINDOW)
    assert [slow.rank for _, slow in found] == [0, 4]


def test_only_peers_are_compared():
    state = StragglerWatch()
    for step in range(1, 60):
        assert not state.add(step, {"0": {0: 1.0, 1: 1.0}, "1": {2: 3.0, 3: 3.0}, "2": {4: 9.0}})
    found = []
    for step in range(60, 90):
        found += state.add(step, {"0": {0: 1.0, 1: 1.0}, "1": {2: 3.0, 3: 5.0}, "2": {4: 9.0}})
    assert [(slow.rank, slow.since_step) for slow in found] == [(3, 60)]


def test_steps_without_seconds_name_nobody():
    state = StragglerWatch()
    for step in range(50):
        assert not state.add(step, {})
    assert not state.add(50, {"0": {0: 1.0, 1: 9.0}})


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_a_rank_is_compared_with_the_median_of_the_others(seconds: list[float]):
    for rank, (own, others) in compare_peers(dict(enumerate(seconds))).items():
        assert own == seconds[rank]
        assert others == statistics.median_high(seconds[:rank] + seconds[rank + 1 :])


@example([[0.0, 0.0, 1.0]] * WINDOW)
@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=WINDOW, max_size=3 * WINDOW))
def test_any_seconds_are_survived(steps: list[list[float]]):
    for step, slow in watch(steps):
        assert slow.times > 1
        assert step - WINDOW < slow.since_step <= step


# --- in a run -------------------------------------------------------------------------------------------------------


def test_seconds_are_taken_out_of_the_record():
    rest, seconds = take_seconds({"loss": 2.0, "busy_s/0/0": 1.0, "busy_s/0/1": 2, "busy_s/1/12": 3.0, "row": [0, 4]})
    assert rest == {"loss": 2.0, "row": [0, 4]}
    assert seconds == {"0": {0: 1.0, 1: 2.0}, "1": {12: 3.0}}


def test_a_run_warns_of_the_rank_that_all_wait_for(tmp_path: Path):
    """From what ranks tell each other to the line on the terminal."""
    settings = RunConfig.model_validate({"model": {"path": "none"}, "data": {"train": ["none.jsonl"]}})
    run = RunDir.create(tmp_path / "run", settings)
    out = io.StringIO()
    display = RunDisplay(run, Console(file=out, width=300))
    metrics = MetricsLog(run, LoggingConfig(tensorboard=False), last_step=0)
    traffic = Traffic(ProcessGroup(0, 3, torch.device("cpu")))
    for step in range(1, 31):
        slow = 2.0 if step > 5 else 1.0
        told = traffic.read_facts([1.0, 0.5, 1.0, slow, 0.1, 1.0, 1.0, 0.5, 1.0])
        metrics.train(step, Progress(step=step), {"loss": 1.0, **told}, last=False)
    (event,) = [event for event in run.events() if event["event"] == "warning"]
    assert {key: event[key] for key in ("kind", "rank", "times", "since_step")} == {
        "kind": "straggler",
        "rank": 1,
        "times": 2.0,
        "since_step": 6,
    }
    record = run.metrics()[-1]
    assert record["straggler"] == 1
    assert not [key for key in record if key.startswith("busy_s/")]
    display.follow(lambda: False)
    (line,) = [line for line in out.getvalue().splitlines() if "warning" in line]
    assert "rank 1 computes 2.00 times as long as the median of the others, since step 6" in line
    assert line.startswith(f"step {event['step']}")
