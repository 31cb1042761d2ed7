"""Kill -9 the service and the ranks at any moment, lock, fill and close the database: no job is lost, none ends twice,
and every line of their logs is there.

LOCKSTEP_CHAOS=JOBS,KILLS,RANK_KILLS,FAULTS sets the size of the slow test, as 1000,100,100,30.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scripted_job import NUM_STEPS
from service_process import Service, job, processes_of, serving, wait_for
from tiny import write_rows

from lockstep.launch.local import is_running, read_handle
from lockstep.rundir import RunDir
from lockstep.service.client import Client, ServiceFault
from lockstep.service.schemas import FINISHED, JobRequest, JobView

FOLLOWED_LINES = 60


@dataclass
class Chaos:
    """How much of what happens to a service, and what has."""

    num_jobs: int
    num_kills: int
    num_rank_kills: int = 0
    num_faults: int = 0
    num_real: int = 0
    seed: int = 1
    killed: set[str] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)
    num_refused: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        kinds = {f"job-{i}": draw.choices(("quick", "bad", "flaky"), (8, 1, 1))[0] for i in range(self.num_jobs)}
        self.kinds = kinds | {f"job-{i}": "real" for i in draw.sample(range(self.num_jobs), self.num_real)}

    def submit_until_heard(self, client: Client, request: JobRequest) -> None:
        """As a careful user does: with an id, again and again until there is an answer."""

        def heard() -> bool:
            try:
                client.submit(request)
            except ServiceFault as fault:
                if fault.status not in (0, 503):
                    raise
                self.num_refused += fault.status == 503
                return False
            return True

        wait_for(heard, 300.0)


def all_jobs(client: Client) -> list[JobView] | None:
    """None while some have not ended, or the service is down."""
    jobs: list[JobView] = []
    try:
        while len(jobs) < (page := client.jobs(limit=1000, offset=len(jobs))).total:
            jobs += page.jobs
    except ServiceFault:
        return None
    return jobs if all(job.state in FINISHED for job in jobs) else None


def request_of(name: str, kind: str, data_dir: Path) -> JobRequest:
    if kind != "real":
        return job(kind, name, max_restarts=100)
    config = {"name": "real", "model": str(data_dir / "models" / "tiny"), "optim": {"max_steps": 2}}
    config |= {
        "data": {"train": "dataset:rows", "max_length": 64},
        "batch": {"samples": 2},
        "launch": {"device": "cpu"},
    }
    return JobRequest(id=name, config=config, max_restarts=100)


# --- what happens, each in a thread of its own -----------------------------------------------------------------------


def kill_services(chaos: Chaos, service: Service) -> None:
    draw = random.Random(chaos.seed + 1)
    for _ in range(chaos.num_kills):
        time.sleep(draw.uniform(0.05, 1.5))
        service.kill()
        service.start()
        if draw.random() < 0.7:  # otherwise it is killed again while it starts
            service.wait_until_up()


def kill_ranks(chaos: Chaos, service: Service) -> None:
    draw, left = random.Random(chaos.seed + 2), chaos.num_rank_kills
    deadline = time.monotonic() + 3600
    while left:
        assert time.monotonic() < deadline
        time.sleep(draw.uniform(0.05, 0.5))
        folders = [service.data_dir / "jobs" / name for name, kind in chaos.kinds.items() if kind in ("quick", "real")]
        running = [folder for folder in folders if is_running(folder)]
        if running and (handle := read_handle(folder := draw.choice(running))):
            chaos.killed.add(folder.name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.pid, signal.SIGKILL)
                left -= 1


def break_the_database(chaos: Chaos, service: Service) -> None:
    draw, pragma = random.Random(chaos.seed + 3), service.data_dir.parent / "pragma"
    for number in range(chaos.num_faults):
        time.sleep(draw.uniform(0.5, 3.0))
        fault = ("locked", "full", "read-only")[number % 3]
        chaos.faults[fault] += 1
        if fault == "locked":
            lock(service.data_dir / "service.db", draw.uniform(0.5, 7.0))
            continue
        pragma.write_text("max_page_count=1" if fault == "full" else "query_only=ON")
        time.sleep(draw.uniform(0.5, 3.0))
        pragma.write_text("max_page_count=1073741823" if fault == "full" else "query_only=OFF")


def lock(path: Path, for_s: float) -> None:
    other = sqlite3.connect(path, isolation_level=None, timeout=30)
    with contextlib.suppress(sqlite3.OperationalError):  # busy all the time: then it is the service that waits less
        other.execute("BEGIN IMMEDIATE")
        time.sleep(for_s)
        other.execute("ROLLBACK")
    other.close()


def run(chaos: Chaos, folder: Path, model: Path | None = None) -> None:
    followed: list[str] = []
    draw = random.Random(chaos.seed + 4)
    with serving(folder, procs="8") as service, Client(service.url) as client:
        if model is not None:
            shutil.copytree(model, service.data_dir / "models" / "tiny")
            client.upload("rows", write_rows(folder / "rows.jsonl", 8))
        chaos.submit_until_heard(client, job("slow", "followed"))

        def submit_all() -> None:
            for name, kind in chaos.kinds.items():
                chaos.submit_until_heard(client, request_of(name, kind, service.data_dir))
                time.sleep(draw.uniform(0, 0.2))

        def follow() -> None:
            with Client(service.url, patience_s=300.0) as reader:
                followed.extend(reader.logs("followed", follow=True))

        works: list[Callable[[], None]] = [submit_all, follow, lambda: kill_services(chaos, service)]
        works += [lambda: kill_ranks(chaos, service), lambda: break_the_database(chaos, service)]
        failed: list[BaseException] = []
        threads = [threading.Thread(target=_record, args=(work, failed), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3600)
            assert not thread.is_alive()
        assert not failed, failed
        service.wait_until_up()
        jobs = wait_for(lambda: all_jobs(client), 180.0 + 5 * chaos.num_jobs)
        check(service, chaos, {job.id: job for job in jobs}, followed)
        assert len(jobs) == len(chaos.kinds) + 1


def _record(work: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failed.append(error)


# --- what must have come of it ---------------------------------------------------------------------------------------


def check(service: Service, chaos: Chaos, jobs: dict[str, JobView], followed: list[str]) -> None:
    assert jobs.keys() == {*chaos.kinds, "followed"}, "each job is there once"
    for name, kind in chaos.kinds.items():
        run, view = RunDir(service.data_dir / "jobs" / name), jobs[name]
        assert processes_of(run.path) == []
        if kind == "bad":
            assert (view.state, num_lines(run, "starts.txt")) == ("failed", 1), view
            assert view.reason == "data.train is empty: name a file"
            continue
        assert view.state == run.status()["state"] == "completed", view
        if kind == "real":
            assert run.status()["step"] == 2
            assert (run.path / "export").is_dir()
        elif name in chaos.killed:  # perhaps before it began, perhaps between its end and its last word
            assert num_lines(run, "starts.txt") <= view.restarts + 1
            assert 1 <= num_lines(run, "ends.txt") <= 2
        else:
            check_undisturbed(run, view, kind)
    whole = (service.data_dir / "jobs" / "followed" / "logs" / "rank-0.log").read_text()
    assert "".join(followed) == whole
    assert len(whole.splitlines()) == FOLLOWED_LINES


def num_lines(run: RunDir, name: str) -> int:
    return len((run.path / name).read_text().splitlines())


def check_undisturbed(run: RunDir, view: JobView, kind: str) -> None:
    assert (num_lines(run, "starts.txt"), view.restarts) == ((2, 1) if kind == "flaky" else (1, 0)), view
    assert num_lines(run, "ends.txt") == 1
    lines = "".join(f"line {step} of {view.id}\n" for step in range(1, NUM_STEPS + 1))
    printed = (run.logs / "rank-0.log").read_text()
    assert printed == ("".join(lines.splitlines(True)[:2]) if kind == "flaky" else "") + lines
    assert [record["step"] for record in run.metrics()] == list(range(1, NUM_STEPS + 1))


def test_jobs_survive_a_service_that_is_killed_again_and_again(tmp_path: Path) -> None:
    run(Chaos(num_jobs=20, num_kills=5, num_rank_kills=3, num_faults=3), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_jobs_and_many_kills(tmp_path: Path, tiny_model: Path) -> None:
    sizes = [int(size) for size in os.environ.get("LOCKSTEP_CHAOS", "60,20,10,6").split(",")]
    chaos = Chaos(*sizes, num_real=max(sizes[0] // 100, 1), seed=2)
    began = time.monotonic()
    run(chaos, tmp_path, tiny_model)
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(chaos.kinds.values()).items())
    print(
        f"\n{chaos.num_jobs} jobs ({kinds}), {chaos.num_kills} kills of the service, {chaos.num_rank_kills} of ranks "
        f"(of {len(chaos.killed)} jobs); database {dict(chaos.faults)}; {chaos.num_refused} submissions repeated after "
        f"a 503: each job ended once, after {time.monotonic() - began:.0f} s"
    )


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_kill_in_the_middle_of_a_launch(moment: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", procs="1")
    try:
        service.start(kill_at=moment)
        with Client(service.url) as client:
            Chaos(0, 0).submit_until_heard(client, job("hangs", "only"))
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
