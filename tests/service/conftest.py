"""Fixtures of the service's tests: a manager with scripted jobs, and a real PostgreSQL where there is one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import processes_of, python_path

from lockstep.launch import LocalLauncher
from lockstep.service.jobs import JobManager


@pytest.fixture
def make_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., JobManager]]:
    """Managers of one data directory; whatever their jobs left running is ended."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    made: list[JobManager] = []

    def make(**options: Any) -> JobManager:
        options.setdefault("procs", 2)
        options.setdefault("restart_delay_s", 0.1)
        options.setdefault("launcher", LocalLauncher("scripted_job", grace_s=1.0))
        made.append(JobManager(tmp_path / "data", **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()
    for run_dir in (tmp_path / "data" / "jobs").glob("*"):
        for pid in processes_of(run_dir):
            os.kill(pid, 9)


@pytest.fixture
def manager(make_manager: Callable[..., JobManager]) -> JobManager:
    """It runs."""
    made = make_manager()
    made.start()
    return made


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A cluster of its own, on a socket, as a user without rights."""
    programs = [Path(found).resolve().parent for found in (shutil.which("postgres"),) if found]
    programs += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("there is no PostgreSQL here")
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    if user:
        shutil.chown(folder, "nobody", "nogroup")
    run: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
    initdb = [programs[-1] / "initdb", "-D", folder / "db", "-U", "lockstep", "-A", "trust", "--no-sync"]
    subprocess.run(initdb, check=True, **run)
    server = subprocess.Popen(
        [programs[-1] / "postgres", "-D", folder / "db", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"],
        **run,
    )
    try:
        url = f"postgresql+psycopg://lockstep@/postgres?host={folder}"
        _wait_for_database(url)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # at once; SIGTERM would wait for its clients
        server.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_database(url: str) -> None:
    import sqlalchemy as sa

    deadline = time.monotonic() + 300
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.1)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    import sqlalchemy as sa

    url = request.getfixturevalue("postgres_url")
    yield url
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in ("lockstep_jobs", "lockstep_datasets", "lockstep_facts"):
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
    engine.dispose()
