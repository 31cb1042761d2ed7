"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

import pytest

from lockstep.config import OptimConfig
from lockstep.train.schedule import learning_rate_at, warmup_steps

PEAK = 0.02


def rates(num_steps: int, **options) -> list[float]:
    config = OptimConfig(**options)
    return [learning_rate_at(i, peak=PEAK, num_steps=num_steps, config=config) for i in range(num_steps)]


def test_warm_up_is_a_line_whose_first_step_is_not_zero():
    found = rates(20, schedule="constant", warmup_steps=4)
    assert found[:5] == pytest.approx([PEAK / 5, PEAK * 2 / 5, PEAK * 3 / 5, PEAK * 4 / 5, PEAK])
    assert found[4:] == [PEAK] * 16


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 0), (10, 0), (100, 3), (1000, 30)])
def test_warm_up_takes_three_hundredths_of_all_steps_unless_told(num_steps, expected):
    assert warmup_steps(OptimConfig(), num_steps) == expected
    assert warmup_steps(OptimConfig(warmup_steps=7), num_steps) == 7
    assert warmup_steps(OptimConfig(warmup_steps=0), num_steps) == 0


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_a_cosine_falls_from_the_peak_to_its_floor(floor):
    found = rates(10, schedule="cosine", warmup_steps=2, min_learning_rate_ratio=floor)
    expected = [PEAK * (floor + (1 - floor) * (1 + math.cos(math.pi * i / 8)) / 2) for i in range(8)]
    assert found[2:] == pytest.approx(expected, rel=1e-12)
    config = OptimConfig(schedule="cosine", warmup_steps=2, min_learning_rate_ratio=floor)
    assert learning_rate_at(10, peak=PEAK, num_steps=10, config=config) == pytest.approx(PEAK * floor, abs=1e-18)


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_a_line_falls_by_the_same_amount_each_step(floor):
    found = rates(8, schedule="linear", warmup_steps=0, min_learning_rate_ratio=floor)
    assert found == pytest.approx([PEAK * (1 - (1 - floor) * i / 8) for i in range(8)], rel=1e-12)


def test_a_constant_stays_whatever_the_floor_is():
    assert rates(6, schedule="constant", warmup_steps=0, min_learning_rate_ratio=0.5) == [PEAK] * 6


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [None, 0, 1, 200])
def test_every_step_learns_and_none_more_than_the_peak(schedule, num_steps, warmup):
    found = rates(num_steps, schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= PEAK for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_the_rate_of_a_step_does_not_depend_on_the_steps_before():
    config = OptimConfig(schedule="cosine", warmup_steps=3)
    forwards = [learning_rate_at(i, peak=PEAK, num_steps=30, config=config) for i in range(30)]
    backwards = [learning_rate_at(i, peak=PEAK, num_steps=30, config=config) for i in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_past_the_end_the_rate_stays_at_its_floor():
    config = OptimConfig(schedule="linear", warmup_steps=0, min_learning_rate_ratio=0.1)
    assert learning_rate_at(50, peak=PEAK, num_steps=10, config=config) == pytest.approx(0.1 * PEAK)
