"""Calls of ranks against each other: what one leaves out, makes twice, in another order or size, or to nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lockstep.parallel.collectives import Call, Members, Record, find_mismatches

TENSOR = Members("tensor", (0, 1, 2, 3))


def call(number_of_bytes: int, kind: str = "all_reduce", line: int = 0, peer: int | None = None) -> Call:
    return Call(kind, 0, number_of_bytes, "float32", f"lockstep/parallel/tensor.py:{line}", peer)


def records(*calls: Sequence[Call], group: Members = TENSOR) -> list[Record]:
    return [Record(rank, [group], list(own)) for rank, own in enumerate(calls)]


SAID = [call(size, line=size) for size in (8, 16, 16, 32, 64, 8, 16, 16)]


def test_ranks_that_say_the_same_agree() -> None:
    assert find_mismatches(records(SAID, SAID, SAID, SAID)) == []


def test_a_call_that_one_rank_leaves_out_is_named() -> None:
    (found,) = find_mismatches(records(SAID, SAID, [*SAID[:3], *SAID[4:]], SAID))
    assert (found.rank, found.other, found.number) == (2, 0, 4)
    assert "rank 2 leaves out a call that rank 0 makes: all_reduce of 32 bytes" in str(found)
    assert "lockstep/parallel/tensor.py:32" in str(found)
    assert "call 4 over tensor (ranks 0 to 3)" in str(found)


def test_the_first_rank_may_be_the_odd_one() -> None:
    (found,) = find_mismatches(records(SAID[:-1], SAID, SAID, SAID))
    assert (found.rank, found.number) == (0, 8)
    assert "leaves out" in found.problem


def test_a_call_too_many_is_named() -> None:
    (found,) = find_mismatches(records(SAID, [*SAID[:2], call(7, "broadcast", 5), *SAID[2:]]))
    assert found.rank == 1
    assert "rank 1 makes a call that rank 0 does not: broadcast of 7 bytes (float32)" in str(found)


def test_another_order_and_another_size_are_told_apart() -> None:
    swapped = [SAID[0], SAID[1], SAID[2], SAID[4], SAID[3], *SAID[5:]]
    (found,) = find_mismatches(records(SAID, SAID, swapped))
    assert "in another order" in found.problem
    resized = [*SAID[:4], call(65, line=9), *SAID[5:]]
    (found,) = find_mismatches(records(SAID, SAID, resized))
    assert "differently" in found.problem
    assert "65 bytes" in found.problem


def test_a_rank_that_says_nothing_to_its_group_is_named() -> None:
    (found,) = find_mismatches([Record(0, [TENSOR], SAID), Record(1)])
    assert (found.rank, found.other) == (1, 0)


@pytest.mark.parametrize(
    ("sends", "receives", "said"),
    [
        ([8, 8], [8], "rank 0 sends and rank 1 never receives"),
        ([8], [8, 8], "rank 1 waits for rank 0, which never sends"),
        ([8], [16], "rank 0 sends what rank 1 does not expect"),
    ],
)
def test_a_send_without_its_receive_is_named(sends: list[int], receives: list[int], said: str) -> None:
    group = Members("pipeline", (0, 1))
    first = [call(size, "send", 1, peer=1) for size in sends]
    second = [call(size, "recv", 2, peer=0) for size in receives]
    (found,) = find_mismatches(records(first, second, group=group))
    assert said in str(found)


def test_what_goes_to_ranks_that_were_not_recorded_is_no_mismatch() -> None:
    group = Members("pipeline", (0, 1))
    assert find_mismatches([Record(0, [group], [call(8, "send", 1, peer=1)])]) == []


def test_traffic_is_in_bytes_that_a_ring_sends() -> None:
    (record,) = records([call(8), call(24), call(8, "all_gather"), call(8, "recv", peer=1)])
    assert record.traffic() == {
        ("tensor", "all_reduce"): (2, 48.0, 24),
        ("tensor", "all_gather"): (1, 6.0, 8),
        ("tensor", "recv"): (1, 0.0, 8),
    }
