"""Real servers in processes of their own: `llama stack run` on one of the examples, and `lockstep serve`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "llama_stack"
LLAMA = Path(sys.executable).parent / "llama"
PATIENCE_S = 180.0  # against hanging; a server is there in seconds
FINISHED = ("completed", "failed", "cancelled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} did not come")


class Server:
    """A command that answers on a port. What it prints goes to a file."""

    def __init__(self, command: list[str], port: int, probe: str, log: Path, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda: self._answers(probe), f"an answer of {command[0]} (its output is in {log})")

    def _answers(self, probe: str) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + probe).status_code < 500
        return False

    def end(self, number: int = signal.SIGTERM) -> None:
        """The server alone: its jobs are in sessions of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_stack(
    example: str, folder: Path, port: int | None = None, config: dict[str, Any] | None = None, **environment: str
) -> Server:
    """`example` is inline or remote; everything it keeps is in `folder`. `config`: more of the provider's own."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    stack = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    stack["providers"]["post_training"][0]["config"] |= config or {}
    (folder / "run.yaml").write_text(yaml.safe_dump(stack))
    command = [str(LLAMA), "stack", "run", str(folder / "run.yaml"), "--port", str(port)]
    known = {"STACK_DIR": str(folder), "PROVIDERS_DIR": str(EXAMPLES / "providers.d")}
    return Server(command, port, "/v1/version", folder / "stack.log", **known, **environment)


def start_service(folder: Path, port: int, *options: str) -> Server:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lockstep", "serve", "--port", str(port), "--data-dir", str(folder), *options]
    return Server(command, port, "/api/health", folder.with_suffix(".log"))


@contextlib.contextmanager
def ending(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.end()


def put_model(model: Path, data_dir: Path) -> str:
    """Where every service lets requests name a model without further permission."""
    place = data_dir / "models" / model.name
    shutil.copytree(model, place)
    return str(place)
