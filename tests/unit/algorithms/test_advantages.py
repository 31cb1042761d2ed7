"""Advantages are what the papers write, over groups and over the whole batch; unknown rewards take no part."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algorithms.advantages import BASELINES, find_advantages, has_zero_std, scale_of, token_weight

NAN = math.nan
REWARDS = [[1.0, 0.0, 0.5, 0.25], [2.0, -1.0, 2.0], [0.1, 0.7]]


def plain(rewards: list[list[float]], baseline: str) -> list[list[float]]:
    """Formula by formula, for groups whose rewards are all known."""
    every = [reward for group in rewards for reward in group]
    if baseline == "grpo":
        return [[(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4) for r in g] for g in rewards]
    if baseline == "dr_grpo":
        return [[r - statistics.fmean(g) for r in g] for g in rewards]
    if baseline == "rloo":
        return [[r - statistics.fmean(g[:i] + g[i + 1 :]) for i, r in enumerate(g)] for g in rewards]
    if baseline == "reinforce++":
        return [[(r - statistics.fmean(every)) / (statistics.stdev(every) + 1e-4) for r in g] for g in rewards]
    centred = [[r - statistics.fmean(g) for r in g] for g in rewards]
    size = statistics.stdev([difference for group in centred for difference in group]) + 1e-4
    return [[difference / size for difference in group] for group in centred]


def assert_same(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(group) for group in found] == [len(group) for group in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("baseline", BASELINES)
def test_each_baseline_is_its_formula(baseline):
    assert_same(find_advantages(REWARDS, baseline), plain(REWARDS, baseline))


@pytest.mark.parametrize("baseline", BASELINES)
@given(
    rewards=st.lists(
        st.lists(st.floats(-100, 100), min_size=2, max_size=6).filter(lambda g: len(set(g)) > 1), min_size=1, max_size=5
    )
)
def test_each_baseline_is_its_formula_for_any_rewards(baseline, rewards):
    assert_same(find_advantages(rewards, baseline), plain(rewards, baseline))


@pytest.mark.parametrize("baseline", BASELINES)
def test_an_unknown_reward_is_as_if_the_answer_were_not_there(baseline):
    found = find_advantages([[1.0, NAN, 0.0, 0.5, 0.25], [2.0, -1.0, 2.0, NAN], [0.1, 0.7]], baseline)
    assert math.isnan(found[0][1])
    assert math.isnan(found[1][3])
    without = [[value for value in group if not math.isnan(value)] for group in found]
    assert_same(without, plain(REWARDS, baseline))


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_single_known_reward_of_a_group_is_compared_with_the_batch_or_not_at_all(baseline):
    found = find_advantages([[1.0, NAN], [0.0, 2.0, 4.0]], baseline)
    assert math.isnan(found[0][1])
    assert math.isnan(found[0][0]) == (baseline != "reinforce++")
    if baseline == "reinforce++":
        assert found[0][0] == pytest.approx((1 - 1.75) / (statistics.stdev([1, 0, 2, 4]) + 1e-4))


@pytest.mark.parametrize("baseline", [name for name in BASELINES if name != "reinforce++"])
def test_answers_that_earned_the_same_have_exactly_no_advantage(baseline):
    found = find_advantages([[0.1] * 3, [0.7, 0.7, NAN], [0.0, 1.0]], baseline)
    assert found[0] == [0.0] * 3
    assert found[1][:2] == [0.0] * 2


def test_nothing_known_at_all():
    for baseline in BASELINES:
        assert all(math.isnan(value) for value in find_advantages([[NAN, NAN], [NAN]], baseline)[0])


def test_a_group_is_flat_when_no_known_reward_differs():
    assert has_zero_std([0.1, 0.1, NAN])
    assert has_zero_std([NAN])
    assert not has_zero_std([0.1, 0.2])


def test_every_aggregation_normalises_a_batch_by_one_number():
    counts = {"num_tokens": 40, "num_answers": 5, "max_tokens": 16}
    assert scale_of("token", **counts) == 1 / 40
    assert scale_of("sequence", **counts) == 1 / 5
    assert scale_of("fixed", **counts) == 1 / 80
    assert [token_weight(name, 8) for name in ("token", "sequence", "fixed")] == [1, 1 / 8, 1]
