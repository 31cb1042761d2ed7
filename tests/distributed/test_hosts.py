"""Workers on hosts that connect to us: as local ones, and nobody who does not know the secret gets in."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed.test_workers import is_running, wait_until

from lockstep.processes.connected import ConnectedWorker
from lockstep.processes.hosts import SECRET_VARIABLE, HostListener
from lockstep.processes.worker import WorkerDied, WorkerTimedOut

SECRET = secrets.token_hex(32)
SOON = 30.0
Spawn = Callable[[str], ConnectedWorker]


def start_host(file: Path, secret: str = SECRET) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {"PYTHONPATH": os.pathsep.join(paths), SECRET_VARIABLE: secret, "LOCKSTEP_SAVE_ON_SIGTERM": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep.processes.hosts", str(file)],
        env={**os.environ, **environment},
        stdout=file.with_suffix(".out").open("ab"),
    )


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[HostListener]:
    opened = HostListener(SECRET, "127.0.0.1", tmp_path / "hosts.json")
    yield opened
    opened.close()


@pytest.fixture
def host(tmp_path: Path, listener: HostListener) -> Iterator[subprocess.Popen[bytes]]:
    started = start_host(tmp_path / "hosts.json")
    yield started
    started.kill()
    started.wait()


def pid_of(worker: ConnectedWorker) -> int:
    return int(worker.call("ping", timeout_s=SOON).result().body["pid"])


@pytest.mark.slow
def test_a_host_has_one_worker_after_another(
    tmp_path: Path, listener: HostListener, host: subprocess.Popen[bytes]
) -> None:
    import torch

    def spawn(name: str) -> ConnectedWorker:
        return listener.spawn(name, "test_workers:start", {}, log_path=tmp_path / f"{name}.log", start_timeout_s=SOON)

    first = spawn("first")
    numbers = torch.arange(1 << 20)
    assert torch.equal(first.call("echo", {}, {"x": numbers}, timeout_s=SOON).result().tensors["x"], numbers)
    with pytest.raises(WorkerTimedOut, match="no process on the nodes for it has connected"):
        listener.spawn("second", "test_workers:start", {}, start_timeout_s=0.2)
    pid = pid_of(first)
    waiting = first.call("sleep", {"s": 60}, timeout_s=SOON)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"first on 127.0.0.1 has ended(.|\n)*"):
        waiting.result(SOON)
    assert not first.is_alive()

    # The signals of a job whose turn is over do not reach a worker; that ends with its owner's word, though stopped.
    second = spawn("second")
    pid = pid_of(second)
    host.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert pid_of(second) == pid
    os.kill(pid, signal.SIGSTOP)
    second.kill()
    wait_until(lambda: not is_running(pid), "the end of a stopped worker")
    assert host.wait(SOON) == 0
    assert "was ended by signal 9" in (tmp_path / "first.log").read_text()
    assert SECRET not in (tmp_path / "hosts.json").read_text()


def test_who_does_not_know_the_secret_gets_nothing(tmp_path: Path, listener: HostListener) -> None:
    file = tmp_path / "hosts.json"
    stranger = start_host(file, "another secret")
    said = file.with_suffix(".out")
    try:
        wait_until(lambda: "does not know the secret" in said.read_text(), "the refusal of an owner")
    finally:
        stranger.kill()
        stranger.wait()
    where = ("127.0.0.1", int(json.loads(file.read_text())["port"]))
    for answer in (b"", b"x" * 32, secrets.token_bytes(4096)):
        with socket.create_connection(where, timeout=SOON) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(secrets.token_bytes(32) + answer)
            if len(answer) < 32:
                connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):  # until we are turned away
                pass
    with pytest.raises(WorkerTimedOut):
        listener.spawn("worker", "test_workers:start", {}, start_timeout_s=0.2)
