"""The buffer between sampling and learning: what holds in every order of events, and the plain cases by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollouts.buffer import Buffer, RolloutBatch, StalenessSchedule

ROWS = 10  # of an epoch
Group = tuple[int, int]  # key, oldest version


def sizes_of(batch: int) -> Callable[[int], int]:
    """As of batches that do not cross epochs: the last of an epoch may be shorter."""
    return lambda cursor: min(batch, ROWS - cursor % ROWS)


def schedule_of(batch: int = 4, **options: int) -> StalenessSchedule:
    return StalenessSchedule(sizes_of(batch), **{"num_steps": 9, **options})


def finish(buffer: Buffer[Group], keys: Any, version: int | None = None, left_out: Any = ()) -> None:
    for key in keys:
        oldest = buffer.version if version is None else version
        buffer.add(key, (key, oldest), oldest, is_kept=key not in left_out)


def keys_of(taken: RolloutBatch[Group] | None) -> list[int]:
    assert taken is not None
    return [key for key, _ in taken.groups]


# --- by hand --------------------------------------------------------------------------------------------------------


def test_without_a_window_steps_are_sampled_and_learned_in_turns():
    buffer: Buffer[Group] = Buffer(schedule_of(num_steps=4))
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13]):
        assert buffer.admit() == expected
        assert buffer.admit() == []
        finish(buffer, reversed(expected[1:]))
        assert buffer.take() is None
        finish(buffer, expected[:1])
        assert keys_of(buffer.take()) == expected
        assert buffer.admit() == [], "nothing is begun from weights that are about to change"
        buffer.advance()
    assert buffer.admit() == []


def test_a_window_lets_sampling_run_ahead_and_no_further():
    buffer: Buffer[Group] = Buffer(schedule_of(num_steps=4, updates=2, max_staleness=5))
    assert buffer.schedule.window == 2
    assert buffer.admit() == list(range(10))  # three steps of 4, 4 and 2
    finish(buffer, [5, 2, 9, 0])
    taken = buffer.take()
    assert keys_of(taken) == [0, 2, 5, 9], "what is ready is learned; what is slow is waited for later"
    assert buffer.admit() == []
    buffer.advance()
    assert buffer.version == 2
    assert buffer.oldest_allowed == 1
    assert buffer.admit() == [10, 11, 12, 13], "the last step's: there is nothing after it"


def test_learning_waits_for_what_would_otherwise_be_too_old():
    buffer: Buffer[Group] = Buffer(schedule_of(batch=2, max_staleness=1))
    assert buffer.admit() == [0, 1, 2, 3]
    finish(buffer, [0, 3])
    assert keys_of(buffer.take()) == [0, 3]
    buffer.advance()
    assert buffer.admit() == [4, 5]
    finish(buffer, [4, 5])
    assert buffer.take() is None, "1 and 2 were begun before the last step: this is the last that can learn from them"
    finish(buffer, [2], version=0)
    assert buffer.take() is None
    finish(buffer, [1], version=0)
    assert keys_of(buffer.take()) == [1, 2]
    assert buffer.num_stale == 0


def test_what_is_too_old_is_sampled_again_and_counted():
    """Which happens where an engine begins with weights that are older than it was asked for, or a run goes on."""
    buffer: Buffer[Group] = Buffer(schedule_of(batch=2, max_staleness=1), step=5)
    assert buffer.admit() == [0, 1, 2, 3]
    finish(buffer, [0], version=3)
    finish(buffer, [1, 2])
    taken = buffer.take()
    assert keys_of(taken) == [1, 2]
    assert taken is not None
    assert taken.num_stale == 1
    buffer.advance()
    assert buffer.admit() == [0, 4, 5]


def test_what_would_be_too_old_first_is_learned_first():
    buffer: Buffer[Group] = Buffer(schedule_of(batch=1, max_staleness=1), step=5)
    assert buffer.admit() == [0, 1]
    finish(buffer, [0], version=3)
    finish(buffer, [1])
    assert keys_of(buffer.take()) == [1]
    buffer.advance()
    assert buffer.admit() == [0, 2]
    finish(buffer, [0], version=6)
    finish(buffer, [2], version=5)
    assert keys_of(buffer.take()) == [2]


def test_at_the_end_learning_waits_for_all_that_is_left():
    """Two of the four that are under way could wait for longer, but there is no step that would learn from them."""
    buffer: Buffer[Group] = Buffer(schedule_of(batch=2, num_steps=2, max_staleness=3))
    assert buffer.admit() == [0, 1, 2, 3]
    finish(buffer, [0, 2])
    assert keys_of(buffer.take()) == [0, 2]
    buffer.advance()
    finish(buffer, [3])
    assert buffer.take() is None
    finish(buffer, [1])
    assert keys_of(buffer.take()) == [1, 3]


def test_what_is_just_young_enough_is_learned():
    buffer: Buffer[Group] = Buffer(schedule_of(batch=2, updates=2, max_staleness=5))
    finish(buffer, buffer.admit())
    for _ in range(2):
        assert buffer.take() is not None
        buffer.advance()
    finish(buffer, buffer.admit(), version=0)
    assert buffer.version == 4
    taken = buffer.take()
    assert taken is not None
    assert [oldest for _, oldest in taken.groups] == [0, 0]
    buffer.advance()
    buffer.take()
    assert buffer.num_stale == 4, "by now the others are six old"


def test_groups_that_are_left_out_are_replaced_until_refills_are_used_up():
    buffer: Buffer[Group] = Buffer(schedule_of(num_steps=3, max_refills=2))
    finish(buffer, buffer.admit(), left_out=range(100))
    assert buffer.admit() == [4, 5, 6, 7]
    finish(buffer, [4, 5, 6, 7], left_out=[4, 5, 6])
    assert buffer.admit() == [8, 9, 10]
    finish(buffer, [8, 9, 10], left_out=range(100))
    assert buffer.admit() == [11], "eight were sampled in the place of others"
    finish(buffer, [11])
    assert buffer.admit() == []
    taken = buffer.take()
    assert keys_of(taken) == [7, 11]
    assert taken is not None
    assert [key for key, _ in taken.left_out] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert (taken.first_row, taken.last_row) == (0, 12)
    buffer.advance()
    assert len(buffer.admit()) == 4


def test_a_key_is_added_once():
    buffer: Buffer[Group] = Buffer(schedule_of())
    finish(buffer, buffer.admit()[:1])
    with pytest.raises(AssertionError, match="key 0 was not admitted"):
        finish(buffer, [0])
    with pytest.raises(AssertionError, match="key 50 was not admitted"):
        finish(buffer, [50])


def test_it_is_read_as_it_was_written_and_what_was_in_flight_is_sampled_again():
    buffer: Buffer[Group] = Buffer(schedule_of(max_staleness=2, max_refills=1))
    finish(buffer, buffer.admit()[1:6], left_out=[3])
    buffer.take()
    buffer.advance()
    finish(buffer, buffer.admit()[:1])
    written = json.loads(json.dumps(buffer.to_json(list)))
    read: Buffer[Group] = Buffer.from_json(buffer.schedule, written, tuple)
    assert read.to_json(list) == buffer.to_json(list) == written
    assert (read.ready, read.left_out, read.step, read.cursor) == (buffer.ready, [], 1, 5)
    assert set(read.admit()) == buffer.in_flight.keys()


# --- in any order ---------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Whatever can happen to a run, and all that was learned in the one history that counts."""

    buffer: Buffer[Group]
    zero_std_every: int
    learned: list[list[int]] = field(default_factory=list)
    left_out: list[list[int]] = field(default_factory=list)
    under_way: dict[int, int] = field(default_factory=dict)
    num_stale: int = 0
    saved: tuple[dict[str, Any], int] = field(init=False)

    def __post_init__(self) -> None:
        self.save()

    def begin(self, lag: int) -> None:
        """With weights that are `lag` optimizer steps old: an engine may be behind."""
        held = self.buffer.in_flight.keys() | self.buffer.ready.keys()
        keys = self.buffer.admit()
        assert not held & set(keys), "none is sampled twice at once"
        self.under_way |= {key: max(self.buffer.version - lag, 0) for key in keys}
        schedule, ahead, cursor = self.buffer.schedule, 0, self.buffer.cursor
        for _ in range(self.buffer.step + self.buffer.is_training, self.buffer.step + schedule.window + 1):
            cursor += schedule.size_at(cursor)
            ahead = cursor - self.buffer.cursor
        if keys:
            assert len(self.buffer.in_flight) + len(self.buffer.ready) <= ahead, "memory is bounded"

    def end(self, place: int) -> None:
        if self.under_way:
            key = sorted(self.under_way)[place % len(self.under_way)]
            oldest = self.under_way.pop(key)
            self.buffer.add(key, (key, oldest), oldest, is_kept=bool((key * 7 + 3) % self.zero_std_every))

    def take(self) -> None:
        buffer, schedule = self.buffer, self.buffer.schedule
        if buffer.is_training or buffer.step == schedule.num_steps:
            return
        wanted = schedule.size_at(buffer.cursor)
        taken = buffer.take()
        if taken is None:
            return
        keys = keys_of(taken)
        assert keys == sorted(keys)
        assert len(keys) <= wanted
        if len(keys) < wanted:
            assert len(taken.left_out) > schedule.max_refills * wanted
        bound = buffer.version - schedule.max_staleness
        assert all(oldest >= bound for _, oldest in taken.groups), "the bound is hard"
        self.num_stale += taken.num_stale
        self.learned.append(keys)
        self.left_out.append([key for key, _ in taken.left_out])

    def make(self) -> None:
        if self.buffer.is_training:
            self.buffer.advance()

    def save(self) -> None:
        if not self.buffer.is_training:
            self.saved = json.loads(json.dumps(self.buffer.to_json(list))), len(self.learned)

    def kill_and_restore(self) -> None:
        written, num_steps = self.saved
        self.buffer = Buffer.from_json(self.buffer.schedule, written, tuple)
        self.learned, self.left_out, self.under_way = self.learned[:num_steps], self.left_out[:num_steps], {}

    def run_to_the_end(self) -> None:
        """Everything that is begun ends at last, and then every step is made: nothing ever waits for nothing."""
        while self.buffer.step < self.buffer.schedule.num_steps:
            self.make()
            self.take()
            if self.buffer.is_training or self.buffer.step == self.buffer.schedule.num_steps:
                continue
            self.begin(0)
            assert self.under_way, "learning waits, and nothing is sampled"
            for _ in range(len(self.under_way)):
                self.end(0)


EVENTS = {"begin": st.integers(0, 6), "end": st.integers(0, 50), "take": st.none(), "make": st.none()}
EVENTS |= {"save": st.none(), "kill_and_restore": st.none()}
# Ends come most often, as they do: a step has many of them.
NAMES = st.sampled_from(["begin", "begin", *["end"] * 8, "take", "take", "make", "make", "save", "kill_and_restore"])
SCHEDULES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 6),
        "num_steps": st.integers(1, 7),
        "updates": st.integers(1, 3),
        "max_staleness": st.integers(0, 8),
        "max_refills": st.integers(0, 3),
    }
)


def synchronous(
    schedule: StalenessSchedule, has_zero_std: Callable[[int], bool]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each step samples its prompts, and the next ones in the place of those left out, one by one."""
    learned, left_out, key = [], [], 0
    for _ in range(schedule.num_steps):
        wanted = schedule.size_at(key)
        kept: list[int] = []
        skipped: list[int] = []
        most = key + wanted * (1 + schedule.max_refills)
        while len(kept) < wanted and key < most:
            (skipped if has_zero_std(key) else kept).append(key)
            key += 1
        learned.append(kept)
        left_out.append(skipped)
    return learned, left_out


@settings(max_examples=400, deadline=None)
@given(
    given=SCHEDULES,
    zero_std_every=st.integers(2, 9),
    events=st.lists(NAMES.flatmap(lambda name: st.tuples(st.just(name), EVENTS[name])), max_size=120),
)
def test_in_any_order_of_events_every_prompt_is_learned_once_and_none_is_too_old(given, zero_std_every, events):
    schedule = schedule_of(**given)
    world = World(Buffer(schedule), zero_std_every)
    for name, argument in events:
        method = getattr(world, name)
        method() if argument is None else method(argument)
    world.run_to_the_end()
    buffer = world.buffer
    done = sorted(key for keys in [*world.learned, *world.left_out] for key in keys)
    rest = sorted([*buffer.in_flight, *buffer.retry, *buffer.ready, *(key for key, _ in buffer.left_out)])
    assert sorted(done + rest) == list(range(buffer.next_key)), "none is lost, and none is learned twice"
    zero_std = {key for key in range(buffer.next_key) if not (key * 7 + 3) % zero_std_every}
    assert not zero_std & {key for keys in world.learned for key in keys}
    assert len(world.learned) == schedule.num_steps
    expected, expected_left_out = synchronous(schedule, lambda key: not (key * 7 + 3) % zero_std_every)
    if schedule.window == 0:
        assert world.learned == expected
        assert world.left_out == expected_left_out
    if schedule.window == 0 or not any(world.left_out):
        assert rest == [], "nothing is begun that can never be learned"


@settings(max_examples=100, deadline=None)
@given(
    given=SCHEDULES,
    events=st.lists(st.sampled_from(["begin", "end", "end", "end", "take", "make"]), max_size=100),
    place=st.integers(0, 99),
)
def test_whatever_is_sampled_while_nothing_is_left_out_is_what_a_synchronous_run_samples(given, events, place):
    schedule = schedule_of(**given)
    world = World(Buffer(schedule), zero_std_every=10**9)
    for name in events:
        getattr(world, name)(*({"begin": [0], "end": [place]}.get(name, [])))
    world.run_to_the_end()
    expected, _ = synchronous(schedule, lambda key: False)
    assert sorted(key for keys in world.learned for key in keys) == [key for keys in expected for key in keys]
    assert [len(keys) for keys in world.learned] == [len(keys) for keys in expected]
    assert world.num_stale == 0, "where no engine is behind, nothing is ever too old"
