"""The state machine of engines over random events: who serves, who is found out, who is replaced. No processes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rollouts.engines.health import (
    MAX_FAILED_STARTS,
    Action,
    EngineHealth,
    Fleet,
    HealthLimits,
    PatientClock,
    State,
)

LIMITS = HealthLimits(check_interval_s=2.0, deadline_s=6.0, start_timeout_s=50.0, stuck_s=30.0)
EVENTS = ("started", "announce", "require", "acknowledged", "old acknowledged", "replied", "rejected", "failed")
schedules = st.lists(st.tuples(st.sampled_from([*EVENTS, "tick", "tick"]), st.floats(0, 4)), max_size=40)


class Story:
    """An engine with what it must have been told. Events come as they could: only what was pinged answers."""

    def __init__(self) -> None:
        self.now, self.published, self.required = 0.0, 0, 0
        self.engine = EngineHealth(LIMITS, since=0.0)
        self.engine.announce(0)
        self.acknowledged: int | None = None
        self.pings = self.progress = 0

    def happen(self, event: str, pause: float) -> list[Action]:
        self.now += pause
        engine, was_lost, actions = self.engine, self.engine.state is State.LOST, []
        if event == "started":
            engine.started(self.now)
        elif event == "announce":
            self.published += 1
            engine.announce(self.published)
        elif event == "require":
            self.required = self.published
            engine.require(self.required)
        elif "acknowledged" in event and engine.state is not State.STARTING:
            version = self.published if event == "acknowledged" else max(self.published - 1, self.acknowledged or 0)
            engine.acknowledged(version)
            self.acknowledged = version if not was_lost else self.acknowledged
        elif event == "replied" and self.pings:
            self.pings, self.progress = 0, self.progress + 1
            engine.replied(self.now, progress=self.progress, busy=True)
        elif event == "rejected" and engine.state is not State.STARTING:
            engine.rejected("a digest")
        elif event == "failed":
            engine.failed("killed")
        elif event == "tick":
            actions = engine.tick(self.now)
            self.pings += Action.PING in actions
        assert not was_lost or engine.state is State.LOST, "what is lost stays lost"
        return actions


@given(schedules)
def test_only_a_verified_current_version_is_served_and_only_while_serving(schedule: list[tuple[str, float]]) -> None:
    story = Story()
    for event, pause in schedule:
        actions = story.happen(event, pause)
        engine = story.engine
        served = [version for version in range(story.published + 2) if engine.serves(version, version)]
        if served:
            assert engine.state is State.SERVING
            assert served == [story.acknowledged]
            assert served[0] >= story.required
        assert engine.serves(0, 1000) == bool(served)
        assert story.pings <= 1, "a second ping while the first has no answer"
        if engine.state in (State.STARTING, State.LOST):
            assert not actions
        assert (engine.state is State.LOST) == bool(engine.reason)


@given(schedules, st.floats(0.05, 2.0))
def test_a_silent_engine_is_removed_in_time(schedule: list[tuple[str, float]], pause: float) -> None:
    story = Story()
    for event, wait in schedule:
        story.happen(event, wait)
    silent_since, was_starting = story.now, story.engine.state is State.STARTING
    allowed = LIMITS.check_interval_s + LIMITS.deadline_s
    allowed = LIMITS.start_timeout_s if was_starting else allowed
    while story.engine.state is not State.LOST:
        story.happen("tick", pause)
        assert story.now - silent_since <= allowed + 2 * pause, f"{story.engine.state} after all this time"
        if story.now - silent_since > LIMITS.check_interval_s + LIMITS.check_interval_s + 2 * pause:
            assert not story.engine.serves(0, 1000), "asked for more although it is silent"


@given(st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.0, 0.9), st.booleans()), max_size=60))
def test_an_engine_that_replies_and_makes_progress_is_left_alone(steps: list[tuple[float, float, bool]]) -> None:
    """Ticks at any rhythm; every ping is answered, some nearly as late as is allowed."""
    engine, now, progress = EngineHealth(LIMITS, since=0.0), 0.0, 0
    engine.started(now)
    engine.announce(0)
    engine.acknowledged(0)
    due: float | None = None
    for pause, delay, gets_on in steps:
        now += pause
        if due is not None and now >= due:
            progress += gets_on
            engine.replied(now, progress=progress, busy=gets_on)
            due = None
        if Action.PING in engine.tick(now):
            due = now + delay * (LIMITS.deadline_s - 1.0)
        assert engine.state in (State.SERVING, State.SUSPECT), engine.reason


def make_serving(version: int = 0) -> EngineHealth:
    engine = EngineHealth(LIMITS, since=0.0)
    engine.started(0.0)
    engine.announce(version)
    engine.tick(0.0)
    engine.acknowledged(version)
    assert engine.serves(version, version)
    return engine


def test_a_late_answer_makes_a_suspect_serve_again() -> None:
    engine = make_serving()
    assert engine.tick(2.0) == [Action.PING]
    assert engine.tick(3.9) == []
    assert engine.state is State.SERVING
    engine.tick(4.1)
    assert engine.state is State.SUSPECT
    assert not engine.serves(0, 0)
    engine.replied(7.9, progress=1, busy=True)
    assert engine.serves(0, 0)
    assert engine.tick(9.8) == []
    assert engine.tick(9.9) == [Action.PING]
    engine.tick(15.9)
    assert (engine.state, engine.reason) == (State.LOST, "did not reply to a ping within 6 s")


def test_an_engine_that_replies_without_progress_is_stuck() -> None:
    engine, now = make_serving(), 0.0
    while engine.state is not State.LOST:
        now += 0.5
        if Action.PING in engine.tick(now):
            engine.replied(now, progress=7, busy=now > 20)  # idle at first, which is no reason to get on
        assert now <= 60
    assert now >= 50
    assert "has made no progress for 30 s" in engine.reason


def test_new_weights_are_sent_once_while_the_old_are_served() -> None:
    engine = make_serving(version=3)
    engine.announce(4)
    assert engine.tick(0.5) == [Action.SEND_WEIGHTS]
    assert engine.tick(0.6) == []
    assert engine.serves(3, 3)
    engine.acknowledged(4)
    assert (engine.serves(4, 4), engine.serves(3, 3)) == (True, False)
    assert engine.tick(0.7) == []


def test_old_weights_are_not_served_once_newer_ones_are_required() -> None:
    engine = make_serving(version=3)
    engine.announce(4)
    engine.require(4)
    assert engine.state is State.LOADING
    assert engine.tick(0.5) == [Action.SEND_WEIGHTS]
    engine.announce(5)
    engine.acknowledged(4)
    assert not engine.serves(0, 9), "4 is verified, and 5 is wanted by now"
    assert engine.tick(0.6) == [Action.SEND_WEIGHTS]
    engine.acknowledged(5)
    assert engine.serves(5, 5)


def test_weights_that_are_refused_are_sent_a_second_time_and_no_third() -> None:
    engine = make_serving(version=3)
    engine.announce(4)
    assert engine.tick(0.1) == [Action.SEND_WEIGHTS]
    engine.rejected("the digest of a")
    assert engine.serves(3, 3)
    assert engine.tick(0.2) == [Action.SEND_WEIGHTS]
    engine.rejected("the digest of b")
    assert (engine.state, engine.reason) == (State.LOST, "refused the weights twice: the digest of b")


def test_a_refusal_long_ago_does_not_count() -> None:
    engine = make_serving(version=3)
    for version in (4, 5, 6):
        engine.announce(version)
        engine.tick(0.1)
        engine.rejected("chance")
        engine.tick(0.1)
        engine.acknowledged(version)
    assert engine.serves(6, 6)


def test_weights_that_are_never_acknowledged_have_a_deadline() -> None:
    engine, now = make_serving(version=3), 0.0
    engine.announce(4)
    while engine.state is not State.LOST:
        if Action.PING in engine.tick(now):
            engine.replied(now, progress=1, busy=False)
        now += 0.5
    assert now == pytest.approx(LIMITS.start_timeout_s, abs=1.0)
    assert engine.reason == "did not load version 4 within 50 s"


def test_before_anything_is_published_an_engine_may_wait_for_ever() -> None:
    engine, now = EngineHealth(LIMITS, since=0.0), 0.0
    engine.started(0.0)
    while now < 1000:
        now += 1.0
        if engine.tick(now) == [Action.PING]:
            engine.replied(now, progress=0, busy=False)
    assert engine.state is State.LOADING


# --- all of them ----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 3),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["serve", "fail", "fail", "fail"])), max_size=60),
)
def test_replacements_are_bounded_and_generations_differ(
    num_engines: int, max_replacements: int, schedule: list[tuple[int, str]]
) -> None:
    names = [f"engine-{number}" for number in range(num_engines)]
    fleet, now = Fleet(names, LIMITS, max_replacements, now=0.0), 0.0
    fleet.announce(1)
    generations: dict[str, list[int]] = {name: [1] for name in names}
    for number, event in schedule:
        name, now = names[number % num_engines], now + 0.01
        slot = fleet.slots[name]
        if event == "serve" and slot.health.state is State.STARTING:
            slot.health.started(now)
            assert (name, Action.SEND_WEIGHTS) in fleet.tick(now)
            slot.health.acknowledged(1)
        elif event == "fail":
            slot.health.failed("killed")
        for lost, action in fleet.tick(now):
            if action is Action.REMOVE:
                assert not fleet.slots[lost].health.serves(0, 9)
                assert fleet.tick(now) == [], "taken out twice"
                for started, _ in fleet.removed(lost, now):
                    generations[started].append(fleet.slots[started].generation)
    assert sum(len(own) - 1 for own in generations.values()) <= max_replacements
    assert all(own == sorted(set(own)) for own in generations.values())
    if fleet.is_lost:
        described = fleet.describe_losses()
        assert all(f"{name} (number {len(generations[name])}) killed" in described for name in names)


def lose(fleet: Fleet, name: str, reason: str) -> list[Any]:
    fleet.slots[name].health.failed(reason)
    assert fleet.tick(0.0) == [(name, Action.REMOVE)]
    return fleet.removed(name, 0.0)


def test_what_never_comes_to_serve_is_given_up_before_all_replacements_are_gone() -> None:
    fleet = Fleet(["engine-0", "engine-1"], LIMITS, max_replacements=100, now=0.0)
    for _ in range(MAX_FAILED_STARTS - 1):
        assert lose(fleet, "engine-0", "no such model") == [("engine-0", Action.START)]
    assert lose(fleet, "engine-0", "no such model") == []
    assert not fleet.is_lost, "the other one is there"
    assert fleet.slots["engine-1"].generation == 1


def test_a_replacement_must_get_the_current_weights_before_it_serves() -> None:
    fleet = Fleet(["engine-0"], LIMITS, max_replacements=1, now=0.0)
    fleet.announce(7)
    lose(fleet, "engine-0", "killed")
    engine = fleet.slots["engine-0"].health
    engine.started(1.0)
    assert fleet.tick(1.0) == [("engine-0", Action.SEND_WEIGHTS)]
    assert not engine.serves(0, 1000)
    engine.acknowledged(7)
    assert engine.serves(7, 7)
    assert lose(fleet, "engine-0", "killed") == []
    assert fleet.is_lost


def test_a_pause_of_this_process_is_not_blamed_on_engines() -> None:
    clock = PatientClock(max_gap_s=3.0)
    assert [clock.read(now) for now in (100.0, 101.0, 102.5, 200.0, 201.0)] == [0.0, 1.0, 2.5, 5.5, 6.5]
