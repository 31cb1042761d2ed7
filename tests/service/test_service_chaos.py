"""Kill -9 the service at any moment: no job is lost, none runs twice, and every line of their logs is there."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from scripted_job import NUM_STEPS
from service_process import Service, job, processes_of, serving, wait_for

from lockstep.rundir import RunDir
from lockstep.service.client import Client, ServiceFault
from lockstep.service.schemas import FINISHED, JobRequest, JobView


def submit_until_heard(client: Client, request: JobRequest) -> None:
    """As a careful user does: with an id, again and again until there is an answer."""

    def heard() -> bool:
        try:
            client.submit(request)
        except ServiceFault as fault:
            if fault.status:
                raise
            return False
        return True

    wait_for(heard, 120.0)


def all_jobs(client: Client) -> list[JobView] | None:
    """None while some have not ended, or the service is down."""
    try:
        jobs = client.jobs(limit=1000).jobs
    except ServiceFault:
        return None
    return jobs if all(job.state in FINISHED for job in jobs) else None


def chaos(folder: Path, num_jobs: int, num_kills: int, seed: int) -> None:
    draw = random.Random(seed)
    kinds = {f"job-{i}": draw.choices(("quick", "bad", "flaky"), (8, 1, 1))[0] for i in range(num_jobs)}
    followed: list[str] = []
    with serving(folder, procs="8") as service, Client(service.url) as client:
        submit_until_heard(client, job("slow", "followed"))

        def submit_all() -> None:
            for name, kind in kinds.items():
                submit_until_heard(client, job(kind, name, max_restarts=1))
                time.sleep(draw.uniform(0, 0.2))

        def follow() -> None:
            with Client(service.url, patience_s=120.0) as reader:
                followed.extend(reader.logs("followed", follow=True))

        threads = [threading.Thread(target=work, daemon=True) for work in (submit_all, follow)]
        for thread in threads:
            thread.start()
        for _ in range(num_kills):
            time.sleep(draw.uniform(0.05, 1.5))
            service.kill()
            service.start()
            if draw.random() < 0.7:  # otherwise it is killed again while it starts
                service.wait_until_up()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        jobs = wait_for(lambda: all_jobs(client), 180.0)
        check(service, kinds, {job.id: job for job in jobs}, followed)


def check(service: Service, kinds: dict[str, str], jobs: dict[str, JobView], followed: list[str]) -> None:
    assert jobs.keys() == {*kinds, "followed"}, "each job is there once"
    for name, kind in kinds.items():
        run, view = RunDir(service.data_dir / "jobs" / name), jobs[name]
        num_starts = len((run.path / "starts.txt").read_text().splitlines())
        printed = (run.logs / "rank-0.log").read_text()
        assert processes_of(run.path) == []
        if kind == "bad":
            assert (view.state, num_starts) == ("failed", 1), view
            assert view.reason == "data.train is empty: name a file"
            continue
        assert view.state == run.status()["state"] == "completed", view
        assert (num_starts, view.restarts) == ((2, 1) if kind == "flaky" else (1, 0)), name
        lines = "".join(f"line {step} of {name}\n" for step in range(1, NUM_STEPS + 1))
        assert printed == ("".join(lines.splitlines(True)[:2]) if kind == "flaky" else "") + lines
        assert [record["step"] for record in run.metrics()] == list(range(1, NUM_STEPS + 1))
    whole = (service.data_dir / "jobs" / "followed" / "logs" / "rank-0.log").read_text()
    assert "".join(followed) == whole
    assert len(whole.splitlines()) == 60


def test_jobs_survive_a_service_that_is_killed_again_and_again(tmp_path: Path) -> None:
    chaos(tmp_path, num_jobs=20, num_kills=5, seed=1)


@pytest.mark.slow
def test_sixty_jobs_and_many_kills(tmp_path: Path) -> None:
    chaos(tmp_path, num_jobs=60, num_kills=20, seed=2)


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_kill_in_the_middle_of_a_launch(moment: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", procs="1")
    try:
        service.start(kill_at=moment)
        with Client(service.url) as client:
            submit_until_heard(client, job("hangs", "only"))
            service.wait_for_death()
            service.start()
            service.wait_until_up()
            wait_for(lambda: client.job("only").state not in ("queued", "preparing"))
            assert client.job("only").state == "running"
            run_dir = tmp_path / "data" / "jobs" / "only"
            assert (run_dir / "starts.txt").read_text() == f"{processes_of(run_dir)[0]}\n", "one start, and it lives"
            client.cancel("only")
            assert client.wait("only", timeout_s=300).state == "cancelled"
            assert processes_of(run_dir) == []
    finally:
        service.end_everything()


def test_two_services_cannot_share_a_data_directory(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        second = Service(tmp_path / "data")
        second.start()
        second.wait_for_death()
        assert "another service already works on" in service.log()
