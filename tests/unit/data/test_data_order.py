"""Order and batches: pure functions of seed and epoch, every row once per epoch, steps counted exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from lockstep.config import BatchConfig
from lockstep.data import Batches, DataError, epoch_order, fill_batches
from lockstep.types import Completion, Datum


def make_data(lengths: list[int]) -> list[Datum]:
    return [Datum([0], (Completion([1] * (n - 1), [1.0] * (n - 1)),), str(i)) for i, n in enumerate(lengths)]


def walk(batches: Batches, num_steps: int) -> list[list[int]]:
    cursor, steps = 0, []
    for _ in range(num_steps):
        batch, cursor = batches.batch_at(cursor)
        steps.append([int(datum.origin) for datum in batch])
    return steps


def splitmix(state: int) -> int:
    """The published algorithm in plain integers: state is already advanced."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_order_is_what_plain_integers_give() -> None:
    golden = 0x9E3779B97F4A7C15
    assert splitmix(golden) == 0xE220A8397B1DCDAF  # the first output of the reference generator with seed 0
    state = 0
    for key in (3, 5):
        state = splitmix((state ^ splitmix(key + golden)) + golden)
    expected = sorted(range(100), key=lambda i: splitmix(state + (i + 1) * golden))
    assert epoch_order(100, seed=3, epoch=5, shuffle=True).tolist() == expected


def test_order_is_pinned() -> None:
    """A resumed run relies on these numbers: they may never change."""
    assert epoch_order(12, seed=0, epoch=0, shuffle=True).tolist() == [11, 10, 2, 4, 1, 6, 7, 8, 9, 0, 5, 3]
    assert epoch_order(12, seed=0, epoch=1, shuffle=True).tolist() == [11, 10, 7, 2, 0, 1, 5, 9, 6, 8, 3, 4]
    assert epoch_order(5, seed=1, epoch=7, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_orders_are_permutations_and_differ() -> None:
    seen = set()
    for seed in (0, 1, 2, 2**40, 2**64 + 7):
        for epoch in range(4):
            order = epoch_order(257, seed=seed, epoch=epoch, shuffle=True)
            assert sorted(order.tolist()) == list(range(257))
            seen.add(tuple(order.tolist()))
    assert len(seen) == 20


def test_every_place_gets_every_row_equally_often() -> None:
    counts = np.zeros((8, 8))
    for seed in range(50):
        for epoch in range(40):
            counts[np.arange(8), epoch_order(8, seed=seed, epoch=epoch, shuffle=True)] += 1
    chi_squared = float(((counts - 250) ** 2 / 250).sum())
    assert chi_squared < 90  # 49 degrees of freedom: 85 has a probability of 0.1 %


@pytest.mark.parametrize("config", [BatchConfig(samples=4), BatchConfig(tokens=40), BatchConfig(tokens=3)])
def test_batches_cover_each_epoch_once(config: BatchConfig) -> None:
    rng = random.Random(0)
    for num_rows in (1, 3, 4, 17):
        lengths = [rng.randint(2, 30) for _ in range(num_rows)]
        batches = Batches(make_data(lengths), config, seed=5, shuffle=True)
        cursor = 0
        for epoch in range(3):
            seen: list[int] = []
            while cursor < (epoch + 1) * num_rows:
                batch, cursor = batches.batch_at(cursor)
                rows = [int(d.origin) for d in batch]
                seen += rows
                if config.tokens:
                    assert len(rows) == 1 or sum(lengths[i] for i in rows) <= config.tokens
            assert cursor == (epoch + 1) * num_rows
            order = epoch_order(num_rows, seed=5, epoch=epoch, shuffle=True).tolist()
            assert seen == order if config.tokens is None else sorted(seen) == sorted(order)


def test_token_batches_are_as_full_as_they_can_be() -> None:
    batches = Batches(make_data([4, 4, 2, 9, 3, 3, 3, 1]), BatchConfig(tokens=9), seed=0, shuffle=False)
    assert walk(batches, 6) == [[0, 1], [2], [3], [4, 5, 6], [7], [0, 1]]


def test_batch_depends_on_the_cursor_alone() -> None:
    data = make_data([random.Random(i).randint(2, 20) for i in range(30)])
    for config in (BatchConfig(samples=7), BatchConfig(tokens=50)):
        forward = Batches(data, config, seed=1, shuffle=True)
        cursors, cursor = [0], 0
        for _ in range(20):
            _, cursor = forward.batch_at(cursor)
            cursors.append(cursor)
        for start in reversed(cursors):
            fresh = Batches(data, config, seed=1, shuffle=True)
            expected, end = fresh.batch_at(start)
            found, found_end = forward.batch_at(start)
            assert [d.origin for d in found] == [d.origin for d in expected]
            assert found_end == end


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("config", [BatchConfig(), BatchConfig(samples=3), BatchConfig(tokens=25)])
def test_num_steps_counts_what_walking_takes(config: BatchConfig, shuffle: bool) -> None:
    rng = random.Random(1)
    for num_rows in (1, 2, 7, 30):
        batches = Batches(make_data([rng.randint(2, 20) for _ in range(num_rows)]), config, seed=2, shuffle=shuffle)
        for epochs in (0.01, 0.1, 0.5, 1, 1.0, 1.1, 2.3, 3.0):
            cursor = steps = 0
            while cursor < round(epochs * num_rows, 6):
                _, cursor = batches.batch_at(cursor)
                steps += 1
            assert batches.num_steps(epochs) == steps
            assert [batches.num_steps(epochs, most) for most in (1, steps, steps + 1)] == [1, steps, steps]


def test_epochs_mean_their_decimal_digits() -> None:
    assert 0.07 * 100 > 7  # in floats: one row more than meant
    assert Batches(make_data([2] * 100), BatchConfig(samples=1), seed=0, shuffle=True).num_steps(0.07) == 7


def test_epochs_after_the_last_step_are_not_counted() -> None:
    batches = Batches(make_data([2] * 100), BatchConfig(tokens=8), seed=0, shuffle=True)
    assert batches.num_steps(1e9, 70) == 70  # to count them all would take days


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        Batches([], BatchConfig(), seed=0, shuffle=True)


def test_rows_move_forward_to_fill_batches_and_none_waits_for_long() -> None:
    rng = random.Random(3)
    lengths = np.array([rng.randint(20, 400) for _ in range(500)])
    order = np.arange(500)
    filled = fill_batches(order, lengths, 2000, look_ahead=16)
    assert sorted(filled.tolist()) == order.tolist()
    moved_back = [place - row for place, row in enumerate(filled.tolist())]
    assert max(moved_back) <= 16 * 3  # a row that waits opens one of the next batches
    data = make_data(lengths.tolist())
    batches = Batches(data, BatchConfig(tokens=2000, micro_batch_tokens=2000), seed=0, shuffle=True)
    sizes, cursor = [], 0
    while cursor < 500:
        batch, cursor = batches.batch_at(cursor)
        sizes.append(sum(datum.num_tokens for datum in batch))
    assert max(sizes) <= 2000
    assert sum(sizes[:-1]) / (2000 * len(sizes[:-1])) > 0.99


def test_lengths_are_taken_from_data_that_knows_them() -> None:
    class Known(list[Datum]):
        lengths = np.array([3, 5, 4, 2])

        def __iter__(self) -> Iterator[Datum]:
            raise AssertionError("no row has to be read for its length")

    batches = Batches(Known(make_data([3, 5, 4, 2])), BatchConfig(tokens=8), seed=0, shuffle=False)
    assert walk(batches, 2) == [[0, 1], [2, 3]]
