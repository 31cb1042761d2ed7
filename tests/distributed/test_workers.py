"""Local workers as real processes: many calls, deadlines, signals, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lockstep.processes.local import LocalWorker
from lockstep.processes.worker import Reply, WorkerDied, WorkerFailed, WorkerTimedOut

SOON = 20.0  # a generous deadline against hanging: nothing here measures time


class Talker:
    """Inside the worker: what a test asks of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.later, self.order = settings, Future[Reply](), []
        self.num_worked, self.work_left = 0, settings.get("work", 0)
        self.methods = {
            name: getattr(self, name)
            for name in ("echo", "fail", "leave", "sleep", "flood", "promise", "keep", "remember", "bad", "fork")
        }
        self.immediate = {"ping": lambda body, tensors: {"pid": os.getpid()}, "worked": self.worked}

    def echo(self, body: dict[str, Any], tensors: dict[str, Any]) -> Reply:
        return Reply(body, tensors)

    def fail(self, body: dict[str, Any], tensors: Any) -> None:
        raise KeyError("no such row") if body.get("kind") == "KeyError" else ValueError("rows.jsonl:3 is empty")

    def leave(self, body: dict[str, Any], tensors: Any) -> None:
        print("these are my last words", flush=True)
        os._exit(body["code"]) if body.get("hard") else sys.exit(body["code"])

    def sleep(self, body: dict[str, Any], tensors: Any) -> None:
        time.sleep(body["s"])

    def flood(self, body: dict[str, Any], tensors: Any) -> None:
        for number in range(body["lines"]):
            print(f"line {number} " + "x" * 1000)

    def promise(self, body: dict[str, Any], tensors: Any) -> Future[Reply]:
        return self.later

    def keep(self, body: dict[str, Any], tensors: Any) -> None:
        self.later.set_exception(ValueError(body["no"])) if "no" in body else self.later.set_result(Reply(body))

    def remember(self, body: dict[str, Any], tensors: Any) -> dict[str, Any]:
        self.order.append(body["number"])
        return {"order": self.order}

    def bad(self, body: dict[str, Any], tensors: Any) -> dict[str, Any]:
        return {"self": self}

    def fork(self, body: dict[str, Any], tensors: Any) -> dict[str, Any]:
        """A process that holds the connection open after this one is gone."""
        if pid := os.fork():
            return {"pid": pid}
        os.setsid()
        time.sleep(body["s"])
        os._exit(0)

    def worked(self, body: dict[str, Any], tensors: Any) -> dict[str, Any]:
        return {"worked": self.num_worked}

    def has_work(self) -> bool:
        return self.work_left > 0

    def work(self) -> None:
        self.num_worked, self.work_left = self.num_worked + 1, self.work_left - 1
        time.sleep(0.005)
        assert self.num_worked < self.settings.get("breaks_at", 1 << 30), "this piece of work broke"

    def close(self) -> None:
        print("closed in peace", flush=True)
        if "closing_s" in self.settings:
            time.sleep(self.settings["closing_s"])


def start(settings: dict[str, Any]) -> Talker:
    if "problem" in settings:
        raise ValueError(settings["problem"])
    return Talker(settings)


Spawn = Callable[..., LocalWorker]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    started: list[LocalWorker] = []

    def one(name: str = "talker-0", entry: str = "test_workers:start", **settings: Any) -> LocalWorker:
        started.append(LocalWorker.spawn(name, entry, settings, log_path=tmp_path / f"{name}.log"))
        return started[-1]

    yield one
    for worker in started:
        worker.kill()
        assert not is_running(worker.pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {SOON:g} s"
        time.sleep(0.01)


def test_many_calls_at_once_from_many_threads_each_get_their_own_answer(spawn: Spawn) -> None:
    import torch

    worker = spawn()
    found: dict[int, int] = {}

    def ask(first: int) -> None:
        numbers = range(first, first + 25)
        futures = {n: worker.call("echo", {"n": n}, {"t": torch.full((n + 1,), n)}, timeout_s=SOON) for n in numbers}
        for number, future in futures.items():
            reply = future.result(SOON)
            assert torch.equal(reply.tensors["t"], torch.full((number + 1,), number))
            found[number] = reply.body["n"]

    threads = [threading.Thread(target=ask, args=(25 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: n for n in range(200)}


def test_large_and_odd_tensors_come_back_bit_for_bit(spawn: Spawn) -> None:
    import torch

    sent = {
        "large": torch.randn(8 << 20).to(torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "scalar": torch.tensor(-0.0, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
    }
    reply = spawn().call("echo", {"nothing": None, "small": 1e-300}, sent, timeout_s=SOON).result()
    assert reply.body == {"nothing": None, "small": 1e-300}
    assert list(reply.tensors) == list(sent)
    for name, tensor in sent.items():
        found = reply.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_methods_run_one_after_the_other_in_the_order_of_the_calls(spawn: Spawn) -> None:
    worker = spawn()
    futures = [worker.call("remember", {"number": n}, timeout_s=SOON) for n in range(50)]
    assert futures[-1].result().body["order"] == list(range(50))


def test_a_call_past_its_deadline_says_who_and_what_and_the_worker_goes_on(spawn: Spawn) -> None:
    worker = spawn()
    late = worker.call("sleep", {"s": 1.0}, timeout_s=0.2)
    with pytest.raises(WorkerTimedOut, match=r"^talker-0 gave no answer to sleep within 0\.2 s$") as caught:
        late.result(SOON)
    assert caught.value.worker == "talker-0"
    assert worker.call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}  # not the late answer


def test_an_immediate_method_is_answered_while_another_runs_and_after_work(spawn: Spawn) -> None:
    worker = spawn()
    worker.call("ping", timeout_s=SOON).result()
    busy = worker.call("sleep", {"s": 60}, timeout_s=SOON)
    assert worker.call("ping", timeout_s=SOON).result().body == {"pid": worker.pid}
    assert not busy.done()


def test_a_future_as_result_lets_the_next_method_begin(spawn: Spawn) -> None:
    worker = spawn()
    first = worker.call("promise", timeout_s=SOON)
    assert worker.call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}
    assert not first.done()
    worker.call("keep", {"kept": True}, timeout_s=SOON).result()
    assert first.result().body == {"kept": True}


def test_a_future_that_fails_fails_the_call(spawn: Spawn) -> None:
    worker = spawn()
    first = worker.call("promise", timeout_s=SOON)
    worker.call("keep", {"no": "the disk is full"}, timeout_s=SOON).result()
    with pytest.raises(WorkerFailed, match="promise failed: the disk is full"):
        first.result()


def test_what_a_method_raises_comes_back_with_its_kind_and_the_worker_goes_on(spawn: Spawn) -> None:
    worker = spawn()
    with pytest.raises(WorkerFailed, match=r"^talker-0: fail failed: rows\.jsonl:3 is empty$") as caught:
        worker.call("fail", timeout_s=SOON).result()
    assert (caught.value.kind, caught.value.reason) == ("ValueError", "rows.jsonl:3 is empty")
    assert "in fail" in caught.value.traceback
    with pytest.raises(WorkerFailed) as caught:
        worker.call("fail", {"kind": "KeyError"}, timeout_s=SOON).result()
    assert caught.value.kind == "KeyError"
    with pytest.raises(WorkerFailed, match="no method 'sing': known are bad, echo"):
        worker.call("sing", timeout_s=SOON).result()
    with pytest.raises(WorkerFailed, match="only what JSON can"):
        worker.call("bad", timeout_s=SOON).result()
    assert worker.is_alive()


def test_what_cannot_be_sent_is_raised_at_once_and_nothing_is_sent(spawn: Spawn) -> None:
    worker = spawn()
    with pytest.raises(ValueError, match="only what JSON can"):
        worker.call("echo", {"n": object()}, timeout_s=SOON)
    assert worker.call("echo", timeout_s=SOON).result().body == {}


@pytest.mark.parametrize(("entry", "words"), [("test_workers:start", "no weights"), ("test_workers:x", "has no 'x'")])
def test_an_entry_that_fails_fails_every_call(spawn: Spawn, entry: str, words: str) -> None:
    worker = spawn(entry=entry, problem="there are no weights")
    for method in ("echo", "ping"):
        with pytest.raises(WorkerFailed, match=words) as caught:
            worker.call(method, timeout_s=SOON).result()
        assert caught.value.kind == "ValueError"
    worker.close()


@pytest.mark.parametrize("hard", [True, False])
def test_a_worker_that_exits_fails_every_call_with_its_code_and_last_words(spawn: Spawn, hard: bool) -> None:
    worker = spawn()
    first = worker.call("leave", {"code": 3, "hard": hard}, timeout_s=SOON)
    second = worker.call("echo", timeout_s=SOON)
    for future in (first, second, worker.call("echo", timeout_s=SOON)):
        with pytest.raises(WorkerDied, match=r"^talker-0 ended with exit code 3\n(.|\n)*these are my last words"):
            future.result(SOON)
    assert not worker.is_alive()


def test_a_worker_that_is_killed_fails_every_call_and_names_the_signal(spawn: Spawn) -> None:
    worker = spawn()
    calls = [worker.call("sleep", {"s": 60}, timeout_s=60) for _ in range(3)]
    os.kill(worker.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(WorkerDied, match=r"^talker-0 was ended by signal 9 \(SIGKILL\)"):
            call.result(SOON)
    with pytest.raises(WorkerDied):
        worker.call("ping", timeout_s=60).result(SOON)


def test_a_stopped_worker_holds_nobody_up_and_can_be_killed(spawn: Spawn) -> None:
    import torch

    worker = spawn()
    worker.call("ping", timeout_s=SOON).result()
    os.kill(worker.pid, signal.SIGSTOP)
    # More than the socket holds: the thread that sends waits, whoever calls does not.
    calls = [worker.call("echo", {}, {"t": torch.zeros(1 << 20)}, timeout_s=0.5) for _ in range(3)]
    for call in [*calls, worker.call("ping", timeout_s=0.5)]:
        with pytest.raises(WorkerTimedOut):
            call.result(SOON)
    waiting = worker.call("ping", timeout_s=60)
    worker.kill()
    with pytest.raises(WorkerDied, match="was killed by its owner"):
        waiting.result(SOON)
    assert not worker.is_alive()


def test_a_worker_that_was_stopped_for_a_while_goes_on(spawn: Spawn) -> None:
    worker = spawn()
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimedOut):
        worker.call("echo", {"n": 0}, timeout_s=0.3).result(SOON)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}


def test_a_flood_of_words_stops_nobody_and_only_the_last_lines_are_told(spawn: Spawn) -> None:
    worker = spawn()
    worker.call("flood", {"lines": 20_000}, timeout_s=SOON).result()
    with pytest.raises(WorkerDied) as caught:
        worker.call("leave", {"code": 1}, timeout_s=SOON).result()
    assert "these are my last words" in str(caught.value)
    assert len(str(caught.value)) < 6000


def test_a_worker_that_sends_nonsense_is_killed(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = spawn(entry="test_workers:start_nonsense")
    with pytest.raises(WorkerDied, match="sent what cannot be read, and was killed: a header of"):
        worker.call("echo", timeout_s=SOON).result(SOON)
    assert not worker.is_alive()


def start_nonsense(settings: dict[str, Any]) -> Talker:
    """Writes on the connection past the loop that serves."""
    descriptor = int(sys.argv[2])
    os.write(descriptor, b"\xff" * 64)
    return Talker(settings)


def test_work_is_done_while_no_request_waits_and_what_breaks_it_is_told(spawn: Spawn) -> None:
    worker = spawn(work=30)
    assert worker.call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}  # not only after all of the work
    wait_until(lambda: worker.call("worked", timeout_s=SOON).result().body["worked"] == 30, "the work")
    broken = spawn("talker-1", work=30, breaks_at=5)
    wait_until(lambda: not broken.is_alive(), "the end of a worker whose work breaks")
    with pytest.raises(WorkerDied, match=r"^talker-1 ended with exit code 1\n(.|\n)*this piece of work broke"):
        broken.call("echo", timeout_s=SOON).result()


def test_close_lets_it_end_in_peace_and_kills_it_when_it_does_not(spawn: Spawn, tmp_path: Path) -> None:
    peaceful, stuck, busy = spawn("a"), spawn("b", closing_s=60), spawn("c")
    waiting = busy.call("sleep", {"s": 60}, timeout_s=60)
    stuck.call("ping", timeout_s=SOON).result()
    peaceful.close()
    stuck.close(grace_s=0.5)
    busy.close(grace_s=0.5)
    assert not any(is_running(worker.pid) for worker in (peaceful, stuck, busy))
    assert (tmp_path / "a.log").read_text() == (tmp_path / "b.log").read_text() == "closed in peace\n"
    with pytest.raises(WorkerDied, match="c has been closed"):
        waiting.result(SOON)
    with pytest.raises(WorkerDied, match="a has been closed"):
        peaceful.call("ping", timeout_s=SOON).result(SOON)
    peaceful.close()
    peaceful.kill()


def test_a_child_that_holds_the_connection_does_not_hide_the_death(spawn: Spawn) -> None:
    worker = spawn()
    child = worker.call("fork", {"s": 60}, timeout_s=SOON).result().body["pid"]
    waiting = worker.call("sleep", {"s": 60}, timeout_s=60)
    try:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            waiting.result(SOON)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_does_not_come_up_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    broken = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path)}
    with pytest.raises(WorkerDied, match=r"^lost ended with exit code 1"):
        LocalWorker.spawn("lost", "test_workers:start", {}, env=broken, log_path=tmp_path / "lost.log")
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)")
    slow = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with pytest.raises(WorkerTimedOut, match=r"^slow did not start within 0\.5 s$"):
        LocalWorker.spawn("slow", "test_workers:start", {}, env=slow, start_timeout_s=0.5)


def test_a_worker_outlives_the_thread_that_asked_for_it(spawn: Spawn) -> None:
    """Linux would end it with that thread, had it been the one that started the process."""
    found: list[LocalWorker] = []
    thread = threading.Thread(target=lambda: found.append(spawn()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert found[0].call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}


PARENT = """
    import signal, sys, time
    from lockstep.processes.local import LocalWorker
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits it ignored
    workers = [LocalWorker.spawn(f"w-{i}", "test_workers:start", {}) for i in range(2)]
    workers[1].call("ping", timeout_s=20).result()
    workers[1].call("sleep", {"s": 120}, timeout_s=120)
    print(*(worker.pid for worker in workers), flush=True)
    if sys.argv[1] == "waits":
        time.sleep(120)
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "returns"])
def test_workers_are_gone_soon_after_their_parent(end: str) -> None:
    """One of them is idle, the other in the middle of a long method."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), "waits" if end != "returns" else end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    if end != "returns":
        parent.send_signal(signal.Signals[end])
    parent.wait(SOON)
    parent.stdout.close()
    wait_until(lambda: not any(map(is_running, pids)), "the end of the workers")
