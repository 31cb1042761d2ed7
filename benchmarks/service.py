"""The job service under load: a long queue, many clients that poll, many that follow a stream, on one machine.

    python benchmarks/service.py [--jobs 1000] [--clients 100] [--followers 50] [--seconds 20] [--json]

The service is a process of its own; one job runs and writes five metrics a second, the others wait. Clients ask for the
status of a random job over kept-alive connections: first once a second each, then as fast as they get answers. What
clients and service need of the cores is counted together, so the second figure says little about the service alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.launch import LocalLauncher
from lockstep.launch.local import read_handle

_SETTLE_S = 3.0  # followers first read all that was written before they came
# A job that writes metrics until it is ended.
WORKER = """
import sys, time
from lockstep.rundir import RunDir
run = RunDir(sys.argv[1], owner=True)
run.write_status(state="running", total_steps=100_000)
for step in range(1, 100_000):
    run.log_metrics({"step": step, "split": "train", "time": time.time(), "loss": 1 / step, "step_time_s": 0.2})
    run.write_status(step=step)
    time.sleep(0.2)
"""
SERVER = """
import sys
from pathlib import Path
from lockstep.launch import LocalLauncher
from lockstep.service.app import make_manager
from lockstep.service.app import run_server
from lockstep.service.settings import ServiceSettings
settings = ServiceSettings(Path(sys.argv[1]), port=int(sys.argv[2]), procs=1)
run_server(settings, make_manager(settings, LocalLauncher("endless_worker")))
"""


@dataclass
class Counts:
    """`times_s` of answers; `late_s` is how long after it was written a record reached its follower."""

    times_s: list[float] = field(default_factory=list)
    errors: int = 0
    records: int = 0
    late_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--followers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = serve_and_measure(arguments, Path(folder))
    print(json.dumps(results) if arguments.json else show(results))


def serve_and_measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "endless_worker.py").write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder / "data"), str(port)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stderr=(folder / "service.log").open("wb"),
    )
    try:
        results = asyncio.run(measure(arguments, port, server.pid))
        results["service_memory_mib"] = _memory_mib(server.pid)
        return results
    finally:
        server.send_signal(signal.SIGKILL)  # before the job: otherwise the next one would begin
        server.wait()
        handle = read_handle(folder / "data" / "jobs" / "running")
        if handle is not None:
            LocalLauncher().stop(handle)


async def measure(arguments: argparse.Namespace, port: int, server_pid: int) -> dict[str, Any]:
    await _wait_until_up(port)
    results: dict[str, Any] = {"cores": os.cpu_count(), "jobs": arguments.jobs}
    began = time.monotonic()
    connection = await Connection.open(port)
    names = [f"job-{number}" for number in range(arguments.jobs)]
    for name in ("running", *names):
        config = {"model": "some/model", "data": {"train": "some/rows"}, "launch": {"device": "cpu"}}
        status, _ = await connection.ask("POST", "/api/jobs", {"id": name, "config": config})
        assert status == 201, status
    results["submitted_per_s"] = arguments.jobs / (time.monotonic() - began)
    for phase, pause_s in (("paced", 1.0), ("as fast as possible", 0.0)):
        counts = Counts()
        until = time.monotonic() + _SETTLE_S + arguments.seconds
        followers = [asyncio.create_task(follow(port, counts, until)) for _ in range(arguments.followers)]
        await asyncio.sleep(_SETTLE_S)
        before, cpu_before = time.monotonic(), _cpu_s(server_pid)
        pollers = [poll(port, names, counts, until, pause_s, random.Random(n)) for n in range(arguments.clients)]
        await asyncio.gather(*pollers, *followers)
        results[phase] = _figures(counts, time.monotonic() - before, arguments)
        results[phase]["cpu_ms_per_request"] = 1000 * (_cpu_s(server_pid) - cpu_before) / max(len(counts.times_s), 1)
    lists, connection = Counts(), await Connection.open(port)
    for _ in range(50):
        await _timed(connection, "/api/jobs?limit=50", lists)
    results["list of 50"] = {"p50_ms": _quantile(lists.times_s, 0.5), "p99_ms": _quantile(lists.times_s, 0.99)}
    results["client_cpu_s"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    return results


async def poll(port: int, names: list[str], counts: Counts, until: float, pause_s: float, draw: random.Random) -> None:
    connection = await Connection.open(port)
    await asyncio.sleep(draw.uniform(0, pause_s))
    await connection.ask("GET", "/api/health")
    while time.monotonic() < until:
        began = time.monotonic()
        await _timed(connection, f"/api/jobs/{draw.choice(names)}", counts)
        await asyncio.sleep(max(pause_s - (time.monotonic() - began), 0))
    connection.close()


async def _timed(connection: Connection, path: str, counts: Counts) -> None:
    began = time.perf_counter()
    try:
        status, _ = await connection.ask("GET", path)
    except (OSError, ValueError, EOFError):
        status = 0
    counts.times_s.append(time.perf_counter() - began)
    counts.errors += status != 200


async def follow(port: int, counts: Counts, until: float) -> None:
    """Every record of the running job, in order and without a gap."""
    connection = await Connection.open(port)
    last, opened_at = 0, time.time()
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0)):
            async for record in connection.events("/api/jobs/running/metrics/stream"):
                counts.errors += record["step"] != last + 1
                counts.records += 1
                last = record["step"]
                if record["time"] > opened_at:
                    counts.late_s.append(time.time() - record["time"])
            counts.errors += 1  # the job runs on: its stream must not end
    except TimeoutError:
        pass
    connection.close()


class Connection:
    """HTTP/1.1 with little work for the client: the cores are for the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        status, headers = await self._send(method, path, body)
        length = int(next(h.split(b":")[1] for h in headers if h.lower().startswith(b"content-length")))
        return status, await self._reader.readexactly(length)

    async def events(self, path: str) -> AsyncIterator[Any]:
        status, _ = await self._send("GET", path, None)
        assert status == 200, status
        while line := await self._reader.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, list[bytes]]:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        return int(answer[0].split()[1]), answer[1:]

    def close(self) -> None:
        self._writer.close()


async def _ask_once(port: int, method: str, path: str) -> int:
    connection = await Connection.open(port)
    status, _ = await connection.ask(method, path)
    connection.close()
    return status


async def _wait_until_up(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if await _ask_once(port, "GET", "/api/health") == 200:
                return
        except OSError:
            await asyncio.sleep(0.2)
    raise RuntimeError("the service does not start")


def _figures(counts: Counts, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "requests_per_s": len(counts.times_s) / seconds,
        "p50_ms": _quantile(counts.times_s, 0.5),
        "p99_ms": _quantile(counts.times_s, 0.99),
        "max_ms": _quantile(counts.times_s, 1.0),
        "errors": counts.errors,
        "records_per_follower": counts.records / max(arguments.followers, 1),
        "late_p50_ms": _quantile(counts.late_s, 0.5),
        "late_p99_ms": _quantile(counts.late_s, 0.99),
    }


def _quantile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def _cpu_s(pid: int) -> float:
    """Of the service, its streams included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def show(results: dict[str, Any]) -> str:
    lines = [
        f"{results['jobs']:,} jobs submitted one after the other at {results['submitted_per_s']:.0f} per second;",
        f"a list of 50 in {results['list of 50']['p50_ms']:.0f} ms (p99 {results['list of 50']['p99_ms']:.0f} ms);",
        f"{results['service_memory_mib']:.0f} MiB of memory at most; {results['cores']} cores\n",
        "| polling | requests/s | p50 | p99 | slowest | errors | CPU per request | stream late by p50 | p99 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in ("paced", "as fast as possible"):
        f = results[phase]
        lines.append(
            f"| {phase} | {f['requests_per_s']:.0f} | {f['p50_ms']:.1f} ms | {f['p99_ms']:.1f} ms | "
            f"{f['max_ms']:.0f} ms | {f['errors']} | {f['cpu_ms_per_request']:.1f} ms | "
            f"{f['late_p50_ms']:.0f} ms | {f['late_p99_ms']:.0f} ms |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
