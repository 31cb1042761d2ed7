"""Which prompts may be sampled now, and which groups the next step learns from, within the bound on staleness.

A pure state machine. A key is a prompt's place in the order of training; versions count optimizer steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StalenessSchedule:
    """`size_at(cursor)`: prompts of the step that starts after `cursor` prompts. `updates`: optimizer steps per step.

    To replace groups that were left out, a step may sample up to `max_refills` times its size.
    """

    size_at: Callable[[int], int]
    num_steps: int
    updates: int = 1
    max_staleness: int = 0
    max_refills: int = 0

    @property
    def window(self) -> int:
        """Steps that sampling may be ahead of training."""
        return self.max_staleness // self.updates


@dataclass(frozen=True, slots=True)
class RolloutBatch(Generic[T]):
    """One step's groups in the order of their keys, those left out since the step before, and how many were too old.

    `first_row` to `last_row`: the rows that the run consumes with it.
    """

    groups: list[T]
    left_out: list[T]
    num_stale: int
    first_row: int
    last_row: int


@dataclass(slots=True)
class _Ready(Generic[T]):
    group: T
    oldest_version: int


@dataclass
class Buffer(Generic[T]):
    """`step`: completed steps. Every key is in flight, then ready or left out, then gone; never trained on twice."""

    schedule: StalenessSchedule
    step: int = 0
    cursor: int = 0
    """Where the next step starts: prompts that were trained on or left out before it."""
    next_key: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    """Keys being sampled, with the step at which they were admitted."""
    retry: set[int] = field(default_factory=set)
    """Keys to be admitted again before any other: their groups were too old, or the run was interrupted."""
    ready: dict[int, _Ready[T]] = field(default_factory=dict)
    left_out: list[tuple[int, T]] = field(default_factory=list)
    num_stale: int = 0
    is_training: bool = False

    @property
    def version(self) -> int:
        """Of the weights that the next step starts with."""
        return self.step * self.schedule.updates

    @property
    def oldest_allowed(self) -> int:
        """What is started now from these weights, or newer ones, is not too old for the last step it may wait for."""
        spare = self.schedule.max_staleness - self.schedule.window * self.schedule.updates
        return max(0, self.version - spare)

    def admit(self) -> list[int]:
        """Keys to sample now, lowest first."""
        room = self._capacity() - len(self.in_flight) - len(self.ready)
        keys = sorted(self.retry)[: max(room, 0)]
        self.retry -= set(keys)
        fresh = max(room - len(keys), 0)
        keys += range(self.next_key, self.next_key + fresh)
        self.next_key += fresh
        self.in_flight |= dict.fromkeys(keys, self.step)
        return keys

    def add(self, key: int, group: T, oldest_version: int, *, is_kept: bool) -> None:
        """A complete group. `oldest_version`: of all its tokens."""
        assert key in self.in_flight, f"key {key} was not admitted"
        del self.in_flight[key]
        if is_kept:
            self.ready[key] = _Ready(group, oldest_version)
        else:
            self.left_out.append((key, group))

    def take(self) -> RolloutBatch[T] | None:
        """The next step's groups, or None while there are too few. `advance` must follow before the next `take`.

        Groups that would be too old soonest go first, then the lowest keys. There are fewer than the step's size when
        its refills are used up.
        """
        assert not self.is_training, "the step that was taken is not completed yet"
        assert self.step < self.schedule.num_steps, "every step is completed"
        self._drop_stale()
        wanted = self.schedule.size_at(self.cursor)
        if len(self.ready) < wanted and len(self.ready) + len(self.left_out) < wanted + self._max_extra:
            return None
        urgent = sorted(self.ready, key=lambda key: (self._last_step_of(self.ready[key].oldest_version), key))
        keys = sorted(urgent[:wanted])
        cursor = self.cursor + len(keys) + len(self.left_out)
        if self._would_be_late(cursor):
            return None
        groups = [self.ready.pop(key).group for key in keys]
        left_out = [group for _, group in sorted(self.left_out, key=lambda entry: entry[0])]
        batch = RolloutBatch(groups, left_out, self.num_stale, self.cursor, cursor)
        self.cursor, self.left_out, self.num_stale, self.is_training = cursor, [], 0, True
        return batch

    def advance(self) -> None:
        """The step that was taken is completed."""
        assert self.is_training, "no step was taken"
        self.step, self.is_training = self.step + 1, False

    def to_json(self, write: Callable[[T], object]) -> dict[str, object]:
        """Between two steps."""
        assert not self.is_training, "there is no consistent state in the middle of a step"
        return {
            "step": self.step,
            "cursor": self.cursor,
            "next_key": self.next_key,
            "in_flight": sorted({*self.in_flight, *self.retry}),
            "ready": [[key, entry.oldest_version, write(entry.group)] for key, entry in sorted(self.ready.items())],
            "left_out": [[key, write(group)] for key, group in self.left_out],
            "num_stale": self.num_stale,
        }

    @classmethod
    def from_json(cls, schedule: StalenessSchedule, values: Mapping[str, Any], read: Callable[[Any], T]) -> Buffer[T]:
        """What was in flight is sampled again. `begun` is the name that earlier releases wrote."""
        return cls(
            schedule,
            step=values["step"],
            cursor=values["cursor"],
            next_key=values["next_key"],
            retry=set(values["in_flight"] if "in_flight" in values else values["begun"]),
            ready={key: _Ready(read(group), oldest) for key, oldest, group in values["ready"]},
            left_out=[(key, read(group)) for key, group in values["left_out"]],
            num_stale=values["num_stale"],
        )

    @property
    def _max_extra(self) -> int:
        return self.schedule.max_refills * self.schedule.size_at(self.cursor)

    def _capacity(self) -> int:
        """Groups that may be in flight or ready: those of the next steps, as far as their weights may be old.

        Groups left out are replaced until the refills of this step are used up. Nothing is sampled for after the end.
        """
        first = self.step + self.is_training
        last = min(self.step + self.schedule.window + 1, self.schedule.num_steps)
        return sum(islice(self._sizes(self.cursor), last - first)) - max(0, len(self.left_out) - self._max_extra)

    def _sizes(self, cursor: int) -> Iterator[int]:
        """Of the steps from `cursor` on."""
        while True:
            size = self.schedule.size_at(cursor)
            yield size
            cursor += size

    def _last_step_of(self, oldest_version: int) -> int:
        """The last step that may train on a group."""
        return (oldest_version + self.schedule.max_staleness) // self.schedule.updates

    def _would_be_late(self, cursor: int) -> bool:
        """Whether a group in flight would be too old for all later steps if this one, ending at `cursor`, skipped it.

        Training then waits for it. Dropping and resampling would take as long, and would hit slow, that is long,
        completions again and again.
        """
        last = self.schedule.num_steps - 1
        open_until = sorted(min(step + self.schedule.window, last) for step in self.in_flight.values())
        room, sizes = 0, self._sizes(cursor)
        for step in range(self.step, open_until[-1] + 1 if open_until else 0):
            if step > self.step:
                room += next(sizes)
            if bisect_right(open_until, step) > room:
                return True
        return False

    def _drop_stale(self) -> None:
        bound = self.version - self.schedule.max_staleness
        stale = {key for key, entry in self.ready.items() if entry.oldest_version < bound}
        self.retry |= stale
        self.num_stale += len(stale)
        for key in stale:
            del self.ready[key]
