"""A service in a process of its own, for tests: started on a free port, killed, started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.launch.local import launched_processes, read_handle
from lockstep.service.client import Client, ServiceFault
from lockstep.service.schemas import JobRequest

HERE = Path(__file__).parent


def python_path() -> str:
    """For processes that import scripted_job."""
    return os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


def tree(name: str = "quick", **sections: Any) -> dict[str, Any]:
    """A configuration for scripted_job: its name says which script to follow."""
    return {
        "name": name,
        "model": "some/model",
        "data": {"train": "some/rows"},
        "launch": {"device": "cpu"},
        **sections,
    }


def job(name: str = "quick", id: str | None = None, procs: int = 1, **fields: Any) -> JobRequest:
    return JobRequest(id=id, config=tree(name, launch={"device": "cpu", "procs": procs}), **fields)


def wait_for(condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "this took too long"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(run_dir: Path) -> list[int]:
    handle = read_handle(run_dir)
    return [] if handle is None else launched_processes(handle.launch_id)


class Service:
    def __init__(self, data_dir: Path, **settings: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = [f"{key}={value}" for key, value in settings.items()]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, kill_at: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_scripted.py"), str(self.data_dir), str(self.port), *self._settings],
            env={**os.environ, "PYTHONPATH": python_path(), "LOCKSTEP_TEST_KILL": kill_at},
            stderr=(self.data_dir.parent / "service.log").open("ab"),
        )

    def wait_until_up(self) -> None:
        with Client(self.url, "none") as client:
            wait_for(lambda: _answers(client))

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait_for_death(self) -> None:
        assert self._process is not None
        self._process.wait(60)

    def log(self) -> str:
        return (self.data_dir.parent / "service.log").read_text(errors="replace")

    def end_everything(self) -> None:
        """Also the jobs: they outlive their service."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for run_dir in (self.data_dir / "jobs").glob("*"):
            for pid in processes_of(run_dir):
                os.kill(pid, signal.SIGKILL)


def _answers(client: Client) -> bool:
    try:
        client.health()
    except ServiceFault as fault:
        return fault.status == 401
    return True


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[Service]:
    service = Service(folder / "data", **settings)
    try:
        service.start()
        service.wait_until_up()
        yield service
    finally:
        service.end_everything()
