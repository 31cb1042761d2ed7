"""JobManager with real processes: states, order, slots, cancel, restarts, delete, and finding it all again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from service_process import job, processes_of, tree, wait_for

from lockstep.service.errors import Conflict, JobConflict, NotFound, ServiceError
from lockstep.service.jobs import JobManager, numbers_of
from lockstep.service.memory_door import UNKNOWN, MemoryDoor
from lockstep.service.scheduler import Slots, find_slots
from lockstep.service.schemas import FINISHED, JobRequest, JobView


def wait(manager: JobManager, job_id: str, *states: str) -> JobView:
    def reached() -> JobView | None:
        view = manager.get(job_id)
        return view if view.state in (states or FINISHED) else None

    found: JobView = wait_for(reached)
    return found


def test_of_what_a_run_says_about_its_time_only_numbers_are_taken() -> None:
    assert numbers_of({"start": 8, "training": 3.5}) == {"start": 8.0, "training": 3.5}
    assert numbers_of({"start": "8", "export": float("nan"), "x": None, "y": [1], "z": float("inf")}) == {}
    for odd in (None, [], "training", 3, [("a", 1)]):
        assert numbers_of(odd) == {}


def test_a_job_from_submission_to_its_end(manager: JobManager) -> None:
    view = manager.submit(job(), owner="ann")
    assert (view.state, view.owner, view.kind, view.model, view.name) == ("queued", "ann", "sft", "some/model", "quick")
    done = wait(manager, view.id)
    assert (done.state, done.reason, done.restarts) == ("completed", "", 0)
    times = [done.created_at, done.queued_at, done.prepared_at, done.started_at, done.finished_at]
    assert times == sorted(times), "in the order in which they happen"
    assert (done.progress.step, done.progress.total_steps, done.progress.fraction) == (5, 5, 1.0)
    assert done.metrics.train is not None
    assert done.metrics.train["loss"] == 0.2
    assert manager.run_dir(view.id).status()["state"] == "completed"


def test_the_same_submission_twice_is_one_job(manager: JobManager) -> None:
    first = manager.submit(job(id="mine"), owner="ann")
    assert manager.submit(job(id="mine"), owner="ann").created_at == first.created_at
    for other, owner in ((job("slow", "mine"), "ann"), (job(id="mine", priority=1), "ann"), (job(id="mine"), "bob")):
        with pytest.raises(JobConflict, match="already a job mine"):
            manager.submit(other, owner=owner)
    assert manager.list()[1] == 1
    wait(manager, "mine")
    assert manager.submit(job(id="mine"), owner="ann").state == "completed"


def test_a_configuration_as_text_is_the_same_as_sections(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager()
    text = "name: quick\nmodel: some/model\ndata: {train: some/rows}\nlaunch: {device: cpu, procs: 1}\n"
    first = manager.submit(JobRequest(id="same", config=text))
    assert manager.submit(job(id="same")).created_at == first.created_at
    with pytest.raises(ValueError, match="the configuration:2: unknown key 'modell'"):
        manager.submit(JobRequest(config="name: quick\nmodell: x\n"))


def test_a_job_that_can_never_start_is_refused(manager: JobManager) -> None:
    with pytest.raises(ServiceError, match="needs 3 processes, and this service has 2"):
        manager.submit(job(procs=3))


def test_urgent_jobs_go_first_and_a_large_one_is_not_overtaken(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(procs=2)
    manager.submit(job("hangs", "first"))
    manager.start()
    wait(manager, "first", "running")
    manager.submit(job(id="large", procs=2))  # does not fit beside the first
    manager.submit(job(id="small"))
    time.sleep(1.0)
    large, small = manager.get("large"), manager.get("small")
    assert (large.state, large.queue_position) == ("queued", 1)
    assert (small.state, small.queue_position) == ("queued", 2), "it would fit, and waits its turn"
    manager.submit(job(id="urgent", priority=1))
    assert wait(manager, "urgent").state == "completed"
    manager.cancel("first")
    wait(manager, "large", "preparing")
    assert manager.get("small").state == "queued"
    manager.cancel("large")
    assert wait(manager, "small").state == "completed"


def test_no_slot_is_given_twice(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager(procs=2, max_jobs=2)
    for number in range(3):
        manager.submit(job("hangs", f"job-{number}"))
    manager.start()
    wait(manager, "job-0", "running")
    wait(manager, "job-1", "running")
    assert sorted(slot for job in manager.store.active() for slot in job.slots) == [0, 1]
    assert (manager.get("job-2").state, manager.num_free()) == ("queued", 0)
    manager.cancel("job-0")
    wait(manager, "job-2", "running")
    assert sorted(slot for job in manager.store.active() for slot in job.slots) == [0, 1]


def test_cancel_ends_every_process_also_the_stubborn(manager: JobManager) -> None:
    manager.submit(job("stubborn", "deaf"))
    run = manager.run_dir("deaf")
    wait_for((run.path / "ready").exists)
    wait_for(lambda: len(processes_of(run.path)) == 2)
    view = manager.cancel("deaf")
    assert (view.cancelling, view.reason) == (True, "being cancelled")
    assert wait(manager, "deaf").state == "cancelled"
    assert processes_of(run.path) == []
    assert run.status()["state"] == "cancelled"
    assert manager.cancel("deaf").state == "cancelled", "again changes nothing"


def test_cancelling_one_does_not_hold_up_others(make_manager: Callable[..., JobManager]) -> None:
    from lockstep.launch import LocalLauncher

    manager = make_manager(procs=2, launcher=LocalLauncher("scripted_job", grace_s=30.0))
    manager.start()
    manager.submit(job("stubborn", "deaf"))
    wait_for((manager.run_dir("deaf").path / "ready").exists)
    manager.cancel("deaf")
    manager.submit(job(id="other"))
    assert wait(manager, "other").state == "completed"
    assert manager.get("deaf").state not in FINISHED
    for pid in processes_of(manager.run_dir("deaf").path):
        os.kill(pid, signal.SIGKILL)


def test_cancelling_a_job_that_waits(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager()
    manager.submit(job(id="early"))
    assert manager.cancel("early").state == "cancelled"
    manager.start()
    time.sleep(0.5)
    assert manager.get("early").state == "cancelled"
    assert not manager.run_dir("early").path.exists(), "it was never started"
    with pytest.raises(NotFound):
        manager.cancel("none")


def test_a_failure_says_why(manager: JobManager) -> None:
    manager.submit(job("dies", "dies"))
    manager.submit(job("bad", "bad", max_restarts=3))
    dies, bad = wait(manager, "dies"), wait(manager, "bad")
    assert (dies.state, bad.state) == ("failed", "failed")
    assert dies.reason.splitlines()[0] == "RuntimeError: the gradient exploded"
    assert "Traceback (most recent call last)" in dies.reason
    assert 'raise RuntimeError("the gradient exploded")' in dies.reason
    assert (bad.reason, bad.restarts) == ("data.train is empty: name a file", 0), "what its user must mend"


def test_a_rank_that_dies_fails_the_job_and_ends_the_others(manager: JobManager) -> None:
    manager.submit(job("dies-on-rank-1", "ranks", procs=2))
    view = wait(manager, "ranks")
    assert view.state == "failed"
    assert view.reason.startswith("RuntimeError: the gradient exploded\nTraceback")
    assert processes_of(manager.run_dir("ranks").path) == []


def test_a_job_is_started_again_from_where_it_was(manager: JobManager) -> None:
    manager.submit(job("flaky", "twice", max_restarts=2))
    view = wait(manager, "twice")
    assert (view.state, view.restarts, view.reason) == ("completed", 1, "")
    assert len((manager.run_dir("twice").path / "starts.txt").read_text().splitlines()) == 2


def test_a_job_that_was_asked_to_stop_goes_on_and_that_is_no_restart(manager: JobManager) -> None:
    manager.submit(job("evicted", "evicted"))
    view = wait(manager, "evicted")
    assert (view.state, view.restarts, view.reason) == ("completed", 0, "")
    assert len((manager.run_dir("evicted").path / "starts.txt").read_text().splitlines()) == 2


def test_restarts_have_an_end(manager: JobManager) -> None:
    manager.submit(job("dies", "again", max_restarts=2))
    view = wait(manager, "again")
    assert (view.state, view.restarts) == ("failed", 2)
    assert len((manager.run_dir("again").path / "starts.txt").read_text().splitlines()) == 3


def test_delete_takes_files_and_processes_along(manager: JobManager) -> None:
    manager.submit(job("hangs", "gone"))
    path = manager.run_dir("gone").path
    wait_for((path / "ready").exists)
    (pid,) = processes_of(path)
    manager.delete("gone")
    assert not path.exists()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(NotFound):
        manager.get("gone")
    assert manager.submit(job(id="gone")).state == "queued", "the id is free again"


def test_running_jobs_are_found_again(make_manager: Callable[..., JobManager]) -> None:
    first = make_manager()
    first.start()
    first.submit(job("hangs", "long"))
    wait(first, "long", "running")
    first.close()
    (pid,) = processes_of(first.data_dir.jobs / "long")
    second = make_manager()
    second.start()
    time.sleep(0.5)
    assert second.get("long").state == "running"
    assert processes_of(second.run_dir("long").path) == [pid]
    second.cancel("long")
    assert wait(second, "long").state == "cancelled"


def test_one_manager_for_a_data_directory(make_manager: Callable[..., JobManager]) -> None:
    make_manager()
    with pytest.raises(ServiceError, match="another service already works on"):
        make_manager()


def test_data_sets_of_waiting_jobs_stay(make_manager: Callable[..., JobManager]) -> None:
    manager = make_manager()
    manager.datasets.add_rows("rows", [{"prompt": "a", "completion": "b"}])
    view = manager.submit(JobRequest(id="needs", config=tree(data={"train": ["dataset:rows"]})))
    assert str(manager.datasets.path("rows")) in manager.store.get(view.id).config
    with pytest.raises(Conflict, match="job needs still needs the data set rows"):
        manager.datasets.delete("rows")
    manager.cancel("needs")
    manager.datasets.delete("rows")
    assert manager.datasets.list() == []


def test_slots_are_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,GPU-abc")
    slots = find_slots(None)
    assert (slots.count, slots.devices) == (3, ("2", "5", "GPU-abc"))
    assert slots.devices_of([0, 2]) == ("2", "GPU-abc")
    assert find_slots(1).devices == ("2",)
    with pytest.raises(ValueError, match="more than the 3 GPUs"):
        find_slots(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_slots(3) == Slots(3)
    assert find_slots(3).free([0, 2]) == [1]


def test_a_job_sees_only_its_gpus(make_manager: Callable[..., JobManager], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    # There is no such model to plan: the door would look for it on the Hub until its deadline.
    monkeypatch.setattr(MemoryDoor, "check", lambda door, config: UNKNOWN)
    manager = make_manager(procs=None)
    manager.start()
    manager.submit(job("hangs", "other"))
    manager.submit(JobRequest(id="on-gpu", config=tree("hangs", launch={"device": "auto"})))
    wait(manager, "other", "running")
    view = wait(manager, "on-gpu", "running")
    (pid,) = processes_of(manager.run_dir("on-gpu").path)
    assert view.devices == ["7"], "the first has the other slot"
    assert b"CUDA_VISIBLE_DEVICES=7" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
