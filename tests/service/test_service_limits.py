"""What one job may start and one user may have; the time between restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from service_process import job, tree, wait_for

from lockstep.config import resolve_config
from lockstep.service.errors import Forbidden, ServiceError, TooMany
from lockstep.service.jobs import JobManager
from lockstep.service.limits import UserLimits, count_slots
from lockstep.service.scheduler import Slots, restart_delay
from lockstep.service.schemas import FINISHED, JobRequest


def grpo(**sections: Any) -> dict[str, Any]:
    return tree(**{"algorithm": {"kind": "grpo", "reward": "exact"}, **sections})


@pytest.mark.parametrize(
    ("sections", "slots", "expected"),
    [
        ({}, Slots(2), 1),
        ({"launch": {"procs": 2}}, Slots(2), 2),
        ({"launch": {"procs": 3}}, Slots(2), "needs 3 processes, and this service has 2"),
        ({"rollouts": {"engines": 2}}, Slots(4), 3),
        ({"rollouts": {"engines": 2}}, Slots(2), "1 processes and 2 of rollouts.engines, and this service has 2"),
        ({"rollouts": {"engines": 2}}, Slots(2, ("0", "1")), 2),  # they share the GPUs
        ({"rollouts": {"engines": 500}}, Slots(8), "500 of rollouts.engines"),
        ({"rollouts": {"engines": 500}}, Slots(8, tuple("01234567")), "500 of rollouts.engines"),
        ({"rollouts": {"threads": 100_000}}, Slots(8), "rollouts.threads: 100000 are more than"),
        ({"data": {"train": "x/y", "procs": 9}}, Slots(8), "data.procs: 9 processes are more than the 8"),
        ({"data": {"train": "x/y", "procs": 8}}, Slots(8), 1),
        (
            {"algorithm": {"kind": "grpo", "reward": "exact", "reward_procs": 100_000}},
            Slots(8),
            "algorithm.reward_procs: 100000 processes are more than the 8",
        ),
    ],
)
def test_every_process_is_counted_or_bounded(sections: dict[str, Any], slots: Slots, expected: int | str) -> None:
    config = resolve_config(grpo(**sections))
    if isinstance(expected, int):
        assert count_slots(config, slots, max_helpers=8) == expected
    else:
        with pytest.raises(ServiceError, match=expected):
            count_slots(config, slots, max_helpers=8)


def test_engines_take_slots(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(procs=3)
    with_engines = JobRequest(id="engines", config={**grpo(rollouts={"engines": 2}), "name": "hangs"})
    view = manager.submit(with_engines)
    assert (view.procs, view.num_slots) == (1, 3)
    manager.submit(job("quick", "behind"))
    manager.start()
    wait_for(lambda: manager.get("engines").state == "running")
    assert manager.num_free() == 0
    assert manager.get("behind").state == "queued"
    manager.cancel("engines")
    wait_for(lambda: manager.get("behind").state == "completed")


def test_what_a_submitter_may_have(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(user_limits=UserLimits(max_priority=5, max_queued=2))
    with pytest.raises(Forbidden, match="priority: 6 is more than the 5"):
        manager.submit(job(priority=6), owner="ann")
    manager.submit(job(id="first", priority=5), owner="ann")
    manager.submit(job(priority=-1000), owner="ann")
    with pytest.raises(TooMany, match="2 of your jobs wait"):
        manager.submit(job(), owner="ann")
    assert manager.submit(job(id="first", priority=5), owner="ann").id == "first", "the same again is no new one"
    manager.submit(job(), owner="bob")
    for owner, admin in (("eve", True), ("", False)):
        manager.submit(job(priority=1000), owner=owner, admin=admin)
    manager.cancel("first")
    assert manager.submit(job(), owner="ann").state == "queued"


def test_a_user_at_the_limit_does_not_hold_the_others_up(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(procs=4, user_limits=UserLimits(max_running=1))
    for number in range(3):
        manager.submit(job("hangs", f"ann-{number}", priority=5), owner="ann")
    manager.submit(job("hangs", "bob"), owner="bob")
    manager.start()
    wait_for(lambda: manager.get("bob").state == "running")
    states = [manager.get(f"ann-{number}").state for number in range(3)]
    assert states[1:] == ["queued", "queued"]
    assert manager.num_free() == 2
    wait_for(lambda: manager.get("ann-0").state == "running")
    manager.cancel("ann-0")
    wait_for(lambda: manager.get("ann-1").state in ("preparing", "running"))
    assert manager.get("ann-2").state == "queued"


def test_restarts_wait_longer_and_longer(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(restart_delay_s=0.5)
    manager.submit(job("dies", "mine", max_restarts=2))
    manager.submit(job("quick", "other"))
    manager.start()
    delays, seen = [], 0
    while (view := manager.get("mine")).state not in FINISHED:
        if view.state == "queued" and view.restarts > seen:
            seen = view.restarts
            assert view.restart_at is not None
            delays.append(view.restart_at - view.queued_at)
        time.sleep(0.01)
    assert (view.state, view.restarts, view.restart_at) == ("failed", 2, None)
    assert delays == pytest.approx([0.5, 1.0], abs=0.2)
    assert manager.get("other").state == "completed", "one that waits for its restart holds nobody up"


def test_the_wait_is_capped_and_survives_a_clock_that_was_set_back(make_manager: Callable[..., JobManager]) -> None:
    assert [restart_delay(5.0, restarts) for restarts in (0, 1, 2, 20, 100)] == [5.0, 10.0, 20.0, 300.0, 300.0]
    manager = make_manager()
    manager.submit(job(id="mine"))
    assert manager.store.change(manager.store.get("mine"), restart_at=time.time() + 10_000)
    manager.start()
    wait_for(lambda: manager.get("mine").state == "completed", 60)
