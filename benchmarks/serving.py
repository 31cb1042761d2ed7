"""Tokens per second of `lockstep chat --serve` beside `transformers serve`: same model, requests and clients.

    python benchmarks/serving.py [--model FOLDER] [--clients 16 --requests 2 --tokens 32] [--repeats 2]

The model is SmolLM2-135M-Instruct in float32, on the CPU. Each server is a process of its own; while one is measured
the others are idle. Besides the time, the CPU time of the server is counted: it says more than the clock on a machine
that is shared.
Needs `transformers[serving]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

SMOLLM2 = Path.home() / ".cache/lockstep/models/SmolLM2-135M-Instruct"
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "What is a prime number?", "Who wrote Hamlet, and when?"]
START_S, REQUEST_S = 600.0, 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="of each client, one after the other")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"lockstep": [], "transformers": [], "transformers, continuous": []}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(start(name, options.model)) for name in found}
        for name, (process, url) in servers.items():
            wait_for(process, url)
            ask(name, url, options, 0)  # the first request loads and allocates
        for _ in range(options.repeats):
            for name, (process, url) in servers.items():
                found[name].append(measure(name, process, url, options))
                print(json.dumps({"server": name, **found[name][-1]}), flush=True)
    ours = {key: statistics.median(run[key] for run in found["lockstep"]) for key in found["lockstep"][0]}
    for name in list(found)[1:]:
        theirs = {key: statistics.median(run[key] for run in found[name]) for key in ours}
        ratios = {key: round(ours[key] / theirs[key], 2) for key in ("tokens_per_s", "tokens_per_cpu_s")}
        print(json.dumps({"beside": name, **ratios}))


@contextlib.contextmanager
def start(name: str, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name == "lockstep":
        command = [sys.executable, "-m", "lockstep", "chat", str(model), "--serve", str(port)]
    else:
        more = ["--continuous-batching"] if "continuous" in name else []
        program = str(Path(sys.executable).with_name("transformers"))
        command = [program, "serve", str(model), "--port", str(port), "--device", "cpu", "--dtype", "float32", *more]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"{process.args!r} did not start")


def ask(name: str, url: str, options: argparse.Namespace, number: int) -> int:
    """How many tokens came back."""
    turns = [{"role": "user", "content": f"{QUESTIONS[number % 4]} ({number})"}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": options.tokens, "temperature": 0, "stream": False}
    body["model"] = options.model.name if name == "lockstep" else str(options.model)
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_S)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def measure(name: str, process: subprocess.Popen[bytes], url: str, options: argparse.Namespace) -> dict[str, float]:
    def visit(client: int) -> int:
        first = client * options.requests
        return sum(ask(name, url, options, number) for number in range(first, first + options.requests))

    began, used = time.perf_counter(), cpu_seconds(process.pid)
    with ThreadPoolExecutor(options.clients) as pool:
        tokens = sum(pool.map(visit, range(options.clients)))
    seconds, used = time.perf_counter() - began, cpu_seconds(process.pid) - used
    requests = options.clients * options.requests
    return {
        "tokens": tokens, "s": round(seconds, 2), "cpu_s": round(used, 2), "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_cpu_s": round(tokens / used, 2), "requests_per_s": round(requests / seconds, 3),
    }  # fmt: skip


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
