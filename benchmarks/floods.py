"""How long /api/health takes while the service is flooded: costly configurations, large uploads, half-open connections.

    python benchmarks/floods.py [--seconds 20] [--json]

The service is `lockstep serve` with tokens. Each flood comes from processes of its own; one more asks for the health
twenty times a second, in turn over a kept connection and over a new one. All share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from lockstep.service.access import make_token

_PROBE_INTERVAL_S = 0.05
_TIMEOUT_S = 30.0
KEYS = "".join(f"key{number:05d}: 1\n" for number in range(9900))  # 119 KB
EMPTY_ROWS = b"[" + b",".join([b"{}"] * 19_000_000) + b"]"  # 57 MB
SHORT_ROWS = b"[" + b",".join([b'{"a":1}'] * 7_000_000) + b"]"  # 56 MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each flood")
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = serve_and_flood(Path(folder), arguments.seconds)
    print(json.dumps(results) if arguments.json else show(results))


def serve_and_flood(folder: Path, seconds: float) -> dict[str, Any]:
    token, line = make_token("ann", "submit")
    (folder / "tokens").write_text(line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--data-dir", folder / "data", "--port", port, "--token-file", folder / "tokens", "--procs", "1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", *map(str, options)], stderr=(folder / "service.log").open("wb")
    )
    floods: dict[str, list[tuple[Callable[..., None], Any]]] = {
        "nothing else": [],
        "6 senders of 119 KB of keys": [(send_keys, None)] * 6,
        "2 uploads of 57 MB of empty rows": [(upload, EMPTY_ROWS)] * 2,
        "2 uploads of 56 MB of short rows": [(upload, SHORT_ROWS)] * 2,
        "1,000 half-open connections, again and again": [(stay_half_open, 500)] * 2,
        "all of them": [(send_keys, None)] * 6 + [(upload, EMPTY_ROWS), (upload, SHORT_ROWS), (stay_half_open, 1000)],
    }
    try:
        wait_until_up(port, token)
        results: dict[str, Any] = {"cores": os.cpu_count()}
        for name, senders in floods.items():
            results[name] = flood(senders, port, token, seconds) | {"load": os.getloadavg()[0]}
            results[name]["peak_memory_mib"] = _peak_mib(server.pid)
        return results
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def flood(senders: list[tuple[Callable[..., None], Any]], port: int, token: str, seconds: float) -> dict[str, Any]:
    times: Queue[list[float]] = multiprocessing.Queue()
    running = [
        multiprocessing.Process(target=quietly, args=(send, port, token, what), daemon=True) for send, what in senders
    ]
    for process in running:
        process.start()
    time.sleep(1.0 if senders else 0.0)
    prober = multiprocessing.Process(target=ask_for_health, args=(port, token, seconds, times), daemon=True)
    prober.start()
    found = sorted(times.get())
    prober.join()
    for process in running:
        process.kill()
        process.join()
    failed = [one for one in found if one >= _TIMEOUT_S]
    return {
        "answers": len(found) - len(failed),
        "failed": len(failed),
        "p50_ms": 1000 * found[len(found) // 2],
        "p99_ms": 1000 * found[int(len(found) * 0.99)],
        "slowest_ms": 1000 * found[-1],
    }


def ask_for_health(port: int, token: str, seconds: float, times: Queue[list[float]]) -> None:
    found: list[float] = []
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        connection = kept if len(found) % 2 else http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/api/health", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            answer.read()
            found.append(time.monotonic() - began if answer.status == 200 else _TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            found.append(_TIMEOUT_S)
            kept.close()
        if connection is not kept:
            connection.close()
        time.sleep(max(_PROBE_INTERVAL_S - (time.monotonic() - began), 0))
    times.put(found)


def wait_until_up(port: int, token: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
            connection.request("GET", "/api/health", headers={"Authorization": f"Bearer {token}"})
            assert connection.getresponse().status == 200
            return
        except OSError:
            assert time.monotonic() < deadline, "the service does not start"
            time.sleep(0.2)


# --- floods, until they are killed -----------------------------------------------------------------------------------


def quietly(send: Callable[..., None], port: int, token: str, what: Any) -> None:
    while True:
        try:
            send(port, token, what)
        except (OSError, http.client.HTTPException):  # refused or cut off, as it should be
            time.sleep(0.01)


def send_keys(port: int, token: str, _: None) -> None:
    body = json.dumps({"config": KEYS})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    while True:
        connection.request("POST", "/api/jobs", body, headers)
        connection.getresponse().read()


def upload(port: int, token: str, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    name = f"rows-{time.monotonic_ns()}"
    connection.request("POST", f"/api/datasets/{name}", body, {"Authorization": f"Bearer {token}"})
    connection.getresponse().read()
    connection.request("DELETE", f"/api/datasets/{name}", headers={"Authorization": f"Bearer {token}"})
    connection.getresponse().read()
    connection.close()


def stay_half_open(port: int, _: str, number: int) -> None:
    """Each sends half a header and waits; after two seconds all come anew."""
    opened = []
    for _ in range(number):
        connection = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        opened.append(connection)
        with contextlib.suppress(OSError):  # thrown out already
            connection.sendall(b"GET /api/health HTTP/1.1\r\nHost: local")
    time.sleep(2.0)
    for connection in opened:
        connection.close()


# --- figures ---------------------------------------------------------------------------------------------------------


def _peak_mib(pid: int) -> float:
    """Since the service began."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def show(results: dict[str, Any]) -> str:
    lines = [
        "| flood | answers | failed | p50 | p99 | slowest | peak memory | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if isinstance(found, dict):
            times = " | ".join(f"{found[key]:.0f} ms" for key in ("p50_ms", "p99_ms", "slowest_ms"))
            memory = f"{found['peak_memory_mib']:.0f} MiB | {found['load']:.1f}"
            lines.append(f"| {name} | {found['answers']} | {found['failed']} | {times} | {memory} |")
    return "\n".join([f"{results['cores']} cores", "", *lines])


if __name__ == "__main__":
    main()
