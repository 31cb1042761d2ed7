"""A pool of processes: results in order, errors reported, no process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.processes.local import LocalWorker
from lockstep.processes.pool import MAX_DEATHS, PoolStartFailed, WorkerPool
from lockstep.processes.tree import start_time
from lockstep.processes.worker import WorkerDied, WorkerError, WorkerFailed, WorkerTimedOut


@dataclass(frozen=True)
class Square:
    """Squares numbers; other items ask for faults."""

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
            case "wait":
                time.sleep(0.3)
                return "waited"
            case (signal.Signals() as number, Path() as first) if not first.exists():
                first.touch()
                os.kill(os.getpid(), number)
            case (_, Path()):
                return os.getpid()
            case "print":
                print("to the terminal", flush=True)
                return sys.stdin.read()
            case bytes():
                return item
        time.sleep(0.02 * (item % 3))
        return item * item + self.offset


def is_running(pid: int) -> bool:
    return bool(start_time(pid))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """For tests in which nothing goes wrong."""
    with WorkerPool("square", Square(1), 2, timeout_s=60) as pool:
        yield pool


def test_results_come_in_order(pool: WorkerPool) -> None:
    assert list(pool.map(range(20))) == [n * n + 1 for n in range(20)]
    assert list(pool.map([])) == []


def test_little_is_under_way_at_once(pool: WorkerPool) -> None:
    taken = []

    def items() -> Iterator[int]:
        for n in range(30):
            taken.append(n)
            yield n

    for done, _ in enumerate(pool.map(items())):
        assert len(taken) <= done + 4


def test_large_items_and_results_do_not_block_each_other(pool: WorkerPool) -> None:
    blobs = [bytes([n]) * 2**20 for n in range(8)]
    assert list(pool.map(blobs)) == blobs


def test_an_error_of_the_items_comes_after_what_was_before_it(pool: WorkerPool) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("cannot be read on")

    results = pool.map(items())
    assert [next(results) for _ in range(3)] == [1, 2, 5]
    with pytest.raises(ValueError, match="read on"):
        next(results)


def test_output_and_input_of_the_work_stay_apart(capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool("square", Square(), 1, timeout_s=60) as pool:
        assert list(pool.map(["print", 2])) == ["", 4]
    assert capfd.readouterr().err == "to the terminal\n"


@pytest.mark.parametrize(
    ("item", "error", "words"),
    [
        ("die", WorkerDied, r"square 0 was ended by signal 9 \(SIGKILL\)"),
        ("exit", WorkerDied, "square 0 ended with exit code 3"),
        ("fail", WorkerFailed, "square 0: run failed: 'no such thing'"),
        ("hang", WorkerTimedOut, r"square 0 gave no answer to run within 0\.5 s"),
    ],
)
def test_a_process_that_fails_fails_one_item_and_the_next_has_another(item: str, error: type, words: str) -> None:
    deaths: list[Any] = []
    with WorkerPool("square", Square(), 1, timeout_s=60, on_death=lambda item, _: deaths.append(item)) as pool:
        pids = [pool.submit("pid").result()]
        pool.timeout_s = 0.5 if item == "hang" else 60
        failed = pool.submit(item)
        with pytest.raises(error, match=words):
            failed.result()
        pool.timeout_s = 60
        pids.append(pool.submit("pid").result())
        assert (pids[0] == pids[1]) == (item == "fail")
        assert deaths == [item] * (MAX_DEATHS if error is WorkerDied else 0)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "square 0 was ended by signal 9"), (signal.SIGSTOP, "was stopped by a signal and did not go on")],
)
def test_what_a_lost_process_had_to_do_another_does(tmp_path: Path, number: signal.Signals, words: str) -> None:
    deaths: list[tuple[Any, str]] = []
    note = lambda item, death: deaths.append((item, str(death)))  # noqa: E731
    with WorkerPool("square", Square(), 1, timeout_s=60, on_death=note) as pool:
        before = pool.submit("pid").result()
        pool.timeout_s = 0.5 if number == signal.SIGSTOP else 60
        item = (number, tmp_path / "happened")
        assert pool.submit(item).result() not in (before, os.getpid())
    assert [given for given, _ in deaths] == [item]
    assert words in deaths[0][1]


@dataclass(frozen=True)
class DiesAtFirst:
    happened: Path

    def prepare(self) -> Callable[[Any], Any]:
        if not self.happened.exists():
            self.happened.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda item: item


def test_a_process_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    with WorkerPool("square", DiesAtFirst(tmp_path / "happened"), 1, timeout_s=60) as pool:
        pool.start()
        assert pool.submit(5).result() == 5


@dataclass(frozen=True)
class Broken:
    def prepare(self) -> Callable[[Any], Any]:
        raise ValueError("there is no such tokenizer")


def test_a_task_that_cannot_be_prepared_is_reported_at_the_start_and_for_every_item() -> None:
    with WorkerPool("broken", Broken(), 1, timeout_s=60) as pool:
        with pytest.raises(PoolStartFailed, match="there is no such tokenizer") as caught:
            pool.start()
        assert isinstance(caught.value.cause, WorkerFailed)
        with pytest.raises(PoolStartFailed, match="there is no such tokenizer"):
            pool.submit(1).result()


@dataclass(frozen=True)
class StartsAnother:
    """A child that would outlive the process, had it not been in its session."""

    def prepare(self) -> Callable[[Any], Any]:
        return lambda _: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_what_a_process_has_started_ends_with_it() -> None:
    with WorkerPool("parent", StartsAnother(), 1, timeout_s=60) as pool:
        pid = pool.submit(None).result()
        assert is_running(pid)
    deadline = time.monotonic() + 300
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_interrupt_leaves_no_process_behind() -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with WorkerPool("square", Square(), 2, timeout_s=60) as pool:
            pids.extend(pool.map(["pid", "pid"]))
            for _ in pool.map(range(100)):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(set(pids)) >= 1
    assert not any(is_running(pid) for pid in pids)


def test_quick_items_travel_together_and_fail_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is lost with one of them is known to be its fault; the others are answered."""
    calls, deaths, call = [], list[Any](), LocalWorker.call

    def count(self: LocalWorker, method: str, *rest: Any, **options: Any) -> Any:
        calls.append(method)
        return call(self, method, *rest, **options)

    monkeypatch.setattr(LocalWorker, "call", count)
    with WorkerPool("square", Square(), 1, timeout_s=60, on_death=lambda item, _: deaths.append(item)) as pool:
        items: list[Any] = [3 * n for n in range(50)]  # without a pause
        assert [future.result() for future in pool.submit_all(items)] == [n * n for n in items]
        assert calls.count("run") < 25
        pool.timeout_s = 0.5
        once = (signal.SIGKILL, tmp_path / "happened")
        odd = [*items[:10], "hang", *items[10:20], once, "fail", *items[20:], lambda: None]
        results = [future.exception() or future.result() for future in pool.submit_all(odd)]
    assert [r for item, r in zip(odd, results, strict=True) if type(item) is int] == [n * n for n in items]
    hung, killed, failed, unreadable = (results[i] for i in (10, 21, 22, -1))
    assert isinstance(hung, WorkerTimedOut)
    assert "within 0.5 s" in str(hung)
    assert isinstance(killed, int)  # its second process
    assert deaths == [once]
    assert isinstance(failed, WorkerFailed)
    assert "pickle" in str(unreadable).lower()


def test_slow_items_are_not_kept_waiting_behind_each_other(pool: WorkerPool) -> None:
    for future in pool.submit_all([0] * 40):  # quick so far
        future.result()
    started = time.monotonic()
    assert [future.result() for future in pool.submit_all(["wait"] * 6)] == ["waited"] * 6
    assert time.monotonic() - started < 6 * 0.3  # the other process took a share


def test_closing_a_pool_ends_every_future() -> None:
    pool = WorkerPool("square", Square(), 1, timeout_s=60)
    futures = pool.submit_all(["hang", *range(5)])
    time.sleep(0.2)
    pool.close()
    assert all(future.done() for future in futures)
    assert isinstance(futures[0].exception(), WorkerError)


@dataclass(frozen=True)
class ClosesAll:
    """Closes what it has not opened, up to the highest number that a process starts with."""

    def prepare(self) -> Callable[[Any], Any]:
        return self.work

    def work(self, item: Any) -> Any:
        kept = {0, 1, 2} | {fd for fd in range(3, 64) if is_socket(fd)}
        for fd in set(range(3, 64)) - kept:
            with contextlib.suppress(OSError):
                os.close(fd)
        return item


def is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_work_that_closes_descriptors_goes_on() -> None:
    with WorkerPool("closes", ClosesAll(), 1, timeout_s=60) as pool:
        assert [future.result() for future in pool.submit_all(range(20))] == list(range(20))
