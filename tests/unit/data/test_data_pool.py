"""Processes that work: results in order, errors told, nobody left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.data import DataError
from lockstep.data.pool import Pool, WorkerError


@dataclass(frozen=True)
class Square:
    """Squares numbers; does as it is told by other items."""

    offset: int = 0

    def prepare(self) -> Callable[[Any], Any]:
        return self.work

    def work(self, item: Any) -> Any:
        match item:
            case "pid":
                return os.getpid()
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "fail":
                raise KeyError("no such thing")
            case "hang":
                time.sleep(600)
            case "print":
                print("to the terminal", flush=True)
                return sys.stdin.read()
            case bytes():
                return item
        time.sleep(0.02 * (item % 3))
        return item * item + self.offset


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """For tests in which nothing goes wrong."""
    with Pool(Square(1), 2, timeout_s=60) as pool:
        yield pool


def test_results_come_in_order(pool: Pool) -> None:
    assert list(pool.map(range(20))) == [n * n + 1 for n in range(20)]
    assert list(pool.map([])) == []


def test_little_is_under_way_at_once(pool: Pool) -> None:
    taken = []

    def items() -> Iterator[int]:
        for n in range(30):
            taken.append(n)
            yield n

    for done, _ in enumerate(pool.map(items())):
        assert len(taken) <= done + 4


def test_large_items_and_results_do_not_block_each_other(pool: Pool) -> None:
    blobs = [bytes([n]) * 2**20 for n in range(8)]
    assert list(pool.map(blobs)) == blobs


def test_an_error_of_the_items_comes_after_what_was_before_it(pool: Pool) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise DataError("cannot be read on")

    results = pool.map(items())
    assert [next(results) for _ in range(3)] == [1, 2, 5]
    with pytest.raises(DataError, match="read on"):
        next(results)


def test_output_and_input_of_the_work_stay_apart(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(Square(), 1, timeout_s=60) as pool:
        assert list(pool.map(["print", 2])) == ["", 4]
    assert capfd.readouterr().err == "to the terminal\n"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("die", "was killed, most likely for want of memory: use fewer data.procs"),
        ("exit", "ended with code 3"),
        ("fail", "failed: KeyError: 'no such thing'"),
        ("hang", "has given no answer for 0.5 s"),
    ],
)
def test_what_goes_wrong_in_a_process_is_said(item: str, words: str) -> None:
    with Pool(Square(), 1, timeout_s=60) as pool:
        pids = list(pool.map(["pid"]))
        pool._timeout_s = 0.5 if item == "hang" else 60
        with pytest.raises(WorkerError, match=words):
            list(pool.map([item, 1, 2, 3]))
    assert not any(is_running(pid) for pid in pids)


def test_an_interrupt_leaves_no_process_behind() -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with Pool(Square(), 2, timeout_s=60) as pool:
            pids.extend(pool.map(["pid", "pid"]))
            for _ in pool.map(range(100)):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(set(pids)) >= 1
    assert not any(is_running(pid) for pid in pids)
