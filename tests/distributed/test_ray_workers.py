"""Workers and the training service on a Ray cluster of this machine: the tests of the local ones, and what Ray says."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

import test_training_service as on_processes  # noqa: E402
from test_training_service import (  # noqa: E402, F401
    expected,
    gpt2,
    start,
    test_the_promised_lines_work_as_they_are_written,
)
from test_workers import (  # noqa: E402, F401
    SOON,
    is_running,
    test_a_call_past_its_deadline_says_who_and_what_and_the_worker_goes_on,
    test_a_future_as_result_lets_the_next_method_begin,
    test_a_future_that_fails_fails_the_call,
    test_an_entry_that_fails_fails_every_call,
    test_an_immediate_method_is_answered_while_another_runs_and_after_work,
    test_large_and_odd_tensors_come_back_bit_for_bit,
    test_many_calls_at_once_from_many_threads_each_get_their_own_answer,
    test_methods_run_one_after_the_other_in_the_order_of_the_calls,
    test_what_a_method_raises_comes_back_with_its_kind_and_the_worker_goes_on,
    test_what_cannot_be_sent_is_raised_at_once_and_nothing_is_sent,
    wait_until,
)

from lockstep.backend.remote.service import TrainingService  # noqa: E402
from lockstep.processes import ray as processes_ray  # noqa: E402
from lockstep.processes.ray import RayWorker, describe_loss  # noqa: E402
from lockstep.processes.worker import WorkerDied, WorkerTimedOut  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    found = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}}  # entries of these tests
    memory = 150 << 20
    ray.init(
        "local", num_cpus=4, include_dashboard=False, object_store_memory=memory, log_to_driver=False, runtime_env=found
    )
    yield
    ray.shutdown()


@pytest.fixture
def place() -> str:
    return "ray"


@pytest.fixture
def spawn() -> Iterator[Any]:
    started: list[RayWorker] = []

    def one(name: str = "talker-0", entry: str = "test_workers:start", **settings: Any) -> RayWorker:
        started.append(RayWorker.spawn(name, entry, settings, num_cpus=0.5))
        return started[-1]

    yield one
    for worker in started:
        worker.kill()
        assert worker.pid is not None
        assert not is_running(worker.pid)


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_steps_on_ray_are_those_of_the_backend(start: Any, layout: str, expected: Any, tmp_path: Path) -> None:  # noqa: F811
    on_processes.test_steps_through_the_service_are_those_of_the_backend(start, 2, layout, expected, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_on_ray_brings_everything_back(start: Any, tmp_path: Path) -> None:  # noqa: F811
    on_processes.test_a_checkpoint_brings_weights_and_optimizer_back_and_survives_the_service(start, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_on_ray_that_is_lost_fails_everything(start: Any, number: signal.Signals) -> None:  # noqa: F811
    on_processes.test_a_rank_that_dies_or_is_stopped_fails_everything_and_is_named(start, number)


def test_an_actor_that_is_killed_or_exits_fails_every_call_with_one_sentence(spawn: Any) -> None:
    killed, leaving = spawn("killed"), spawn("leaving")
    calls = [killed.call("sleep", {"s": 60}, timeout_s=60) for _ in range(3)]
    os.kill(killed.pid, signal.SIGKILL)
    calls += [leaving.call("sleep", {"s": 0}, timeout_s=SOON), leaving.call("leave", {"code": 3}, timeout_s=60)][1:]
    for call in calls:
        with pytest.raises(WorkerDied, match=r"^\w+ is lost: its worker process has died \(.*\)$"):
            call.result(SOON)
    wait_until(lambda: not killed.is_alive() and not leaving.is_alive(), "the loss of both")
    with pytest.raises(WorkerDied):
        killed.call("echo", timeout_s=SOON).result(SOON)


def test_a_stopped_actor_is_timed_out_and_can_be_killed(spawn: Any) -> None:
    worker = spawn()
    worker.call("ping", timeout_s=SOON).result()
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimedOut, match=r"^talker-0 gave no answer to echo within 0\.5 s$"):
        worker.call("echo", timeout_s=0.5).result(SOON)
    waiting = worker.call("echo", timeout_s=60)
    worker.kill()
    assert not is_running(worker.pid)
    with pytest.raises(WorkerDied, match="was killed by its owner"):
        waiting.result(SOON)


def test_work_is_done_and_a_closed_actor_is_gone(spawn: Any) -> None:
    worker = spawn(work=20)
    wait_until(lambda: worker.call("worked", timeout_s=SOON).result().body["worked"] == 20, "the work")
    waiting = worker.call("promise", timeout_s=60)
    worker.close()
    assert not is_running(worker.pid)
    with pytest.raises(WorkerDied, match="talker-0 has been closed"):
        waiting.result(SOON)
    worker.close()


def test_where_there_is_no_room_the_wait_ends_and_says_what_was_requested(tmp_path: Path, gpt2: Path) -> None:  # noqa: F811
    with pytest.raises(WorkerTimedOut, match=r"^far did not start within 1 s: is there a free node with moon 1\?$"):
        RayWorker.spawn("far", "test_workers:start", {}, num_cpus=0, resources={"moon": 1}, start_timeout_s=1)
    options = TrainingService.options(3, "ray", cpus=2, start_timeout_s=1, device="cpu")
    with pytest.raises(
        ValueError, match=r"no room for the training pool within 1 s\. Requested: 3 x CPU 2 .*room for 2"
    ):
        options.start(gpt2)


def test_a_placement_says_where_an_actor_goes() -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="PACK")
    assert group.wait(SOON)
    worker = RayWorker.spawn("placed", "test_workers:start", {}, placement=(group, 1), env={"OMP_NUM_THREADS": "1"})
    assert worker.call("echo", {"n": 1}, timeout_s=SOON).result().body == {"n": 1}
    worker.kill()
    ray.util.remove_placement_group(group)


def test_rays_many_words_become_one_sentence() -> None:
    node = (
        "The actor died unexpectedly before finishing this task.\nThe actor died because its node has died. Node Id: 1"
    )
    assert describe_loss(RuntimeError(node)) == "its node has died"
    far = "The actor 98 is unavailable: The actor is temporarily unavailable: RPC error: Socket closed rpc_code: 1"
    assert describe_loss(RuntimeError(far)) == "its process or its node is out of reach (Socket closed)"
    assert describe_loss(RuntimeError("something else\nand more")) == "something else"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'lockstep\[ray\]'"):
        processes_ray.import_ray()
