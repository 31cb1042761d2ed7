"""The order of training: which rows are in which batch.

A pure function of (seed, epoch, number and lengths of rows), independent of the world size; the cursor is one integer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil

import numpy as np
import numpy.typing as npt

from lockstep.config import BatchConfig
from lockstep.data.sources.rows import DataError
from lockstep.types import Datum

Indices = npt.NDArray[np.int64]
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = 2**64 - 1


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """A permutation of the rows. Hashed rather than drawn, so that no library version can change it."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return hashed_order(num_rows, seed, epoch)


def hashed_order(num_rows: int, *keys: int) -> Indices:
    """Rows sorted by splitmix64 of (keys, index)."""
    state = 0
    for key in keys:
        state = _mix_one(state ^ _mix_one(key & _MASK))
    steps = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(steps + np.uint64(state)), kind="stable").astype(np.int64)


def _mix_one(value: int) -> int:
    # As an array of one: numpy's scalars warn when they wrap around, its arrays do not.
    return int(_mix(np.array([(value + _GOLDEN) & _MASK], dtype=np.uint64))[0])


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fill_batches(order: Indices, lengths: Indices, budget_tokens: int, look_ahead: int = 64) -> Indices:
    """Move short rows a little forward, so that batches cut at a token budget are full.

    Rows that do not fit, at most `look_ahead` of them, wait for the next batch and come first there.
    """
    waiting, filled, shortest = deque(order.tolist()), [], int(lengths.min())
    while waiting:
        room, is_empty = budget_tokens, True
        postponed: list[int] = []
        while waiting and len(postponed) < look_ahead and (room >= shortest or is_empty):
            row = waiting.popleft()
            if not is_empty and lengths[row] > room:
                postponed.append(row)
                continue
            filled.append(row)
            room, is_empty = room - int(lengths[row]), False
        waiting.extendleft(reversed(postponed))
    return np.array(filled, dtype=np.int64)


class Batches:
    """The batches of a run. The cursor counts the rows consumed since the start; batches do not cross epochs."""

    def __init__(self, data: Sequence[Datum], config: BatchConfig, *, seed: int, shuffle: bool) -> None:
        if not data:
            raise DataError("there are no rows to train on: check data.train")
        self.num_rows = len(data)
        self._data = data
        self._samples = config.samples_per_step
        self._tokens = config.tokens
        self._seed = seed
        self._shuffle = shuffle
        # Compiled rows have their lengths without reading the tokens.
        lengths = getattr(data, "lengths", None)
        self._lengths: Indices = np.array([d.num_tokens for d in data] if lengths is None else lengths, dtype=np.int64)
        # The current epoch, its order, and for each position in it the tokens of all rows before.
        self._epoch = -1
        self._order: Indices = np.empty(0, dtype=np.int64)
        self._tokens_before: Indices = np.empty(0, dtype=np.int64)

    def batch_at(self, cursor: int) -> tuple[list[Datum], int]:
        """The batch that starts after `cursor` rows, and the cursor after it."""
        epoch, start = divmod(cursor, self.num_rows)
        self._set_epoch(epoch)
        end = self._end_of_batch(start)
        return [self._data[i] for i in self._order[start:end]], epoch * self.num_rows + end

    def num_steps(self, epochs: float, most: int | None = None) -> int:
        """Steps until `epochs` times all rows are consumed; the last batch may go past a fraction of an epoch. With
        `most` not more than that, and the epochs after it are not counted."""
        total = 0
        for steps in self._steps_by_epoch(epochs):
            total += steps
            if most is not None and total >= most:
                return most
        return total

    def _steps_by_epoch(self, epochs: float) -> Iterator[int]:
        """In one number where all epochs have as many."""
        # repr, because 0.07 means 7 hundredths: 0.07 * 100 in floats is more than 7 rows.
        num_rows = ceil(Fraction(repr(float(epochs))) * self.num_rows)
        whole, rest = divmod(num_rows, self.num_rows)
        if self._samples is not None:
            yield whole * ceil(self.num_rows / self._samples) + ceil(rest / self._samples)
        elif not self._shuffle:
            yield whole * self._steps_in(0, self.num_rows) + self._steps_in(0, rest)
        else:
            yield from (self._steps_in(epoch, self.num_rows) for epoch in range(whole))
            yield self._steps_in(whole, rest)

    def _steps_in(self, epoch: int, num_rows: int) -> int:
        """Steps of one epoch until at least `num_rows` of its rows are consumed."""
        if num_rows == 0:
            return 0
        self._set_epoch(epoch)
        position = steps = 0
        while position < num_rows:
            position = self._end_of_batch(position)
            steps += 1
        return steps

    def _end_of_batch(self, start: int) -> int:
        if self._samples is not None:
            return min(start + self._samples, self.num_rows)
        assert self._tokens is not None
        budget = self._tokens_before[start] + self._tokens
        fits = int(np.searchsorted(self._tokens_before, budget, side="right")) - 1
        return max(fits, start + 1)  # a row longer than the budget is a batch of its own

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._order = epoch_order(self.num_rows, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            if self._tokens is not None and self._shuffle:
                self._order = fill_batches(self._order, self._lengths, self._tokens)
            self._tokens_before = np.concatenate([[0], np.cumsum(self._lengths[self._order])])
            self._epoch = epoch
