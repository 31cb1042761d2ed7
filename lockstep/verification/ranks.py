"""The ranks of one layout as processes on this machine, and a deadline for all of them.

Forked from a server that has imported torch once, which otherwise is most of the time. Must not know what they
compute: they are told by a folder, and answer in it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from lockstep.verification.job import read_failures

WORKER_MODULE = "lockstep.verification.worker"
_GRACE_S = 2.0  # from the first failure to the end of all: time for the others to say what they saw
_LONGEST_LINE = 400
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([WORKER_MODULE, "transformers.models.auto.modeling_auto", "peft"])


def run_ranks(folder: Path, num_ranks: int, *, module: str, deadline_s: float) -> str:
    """Start them and wait. Why they failed, in a sentence; empty if all ended well. None is left running."""
    port, ranks = _free_port(), []
    try:
        for rank in range(num_ranks):
            arguments = (module, str(folder), _environment(rank, num_ranks, port))
            process = _CONTEXT.Process(target=_be_rank, args=arguments, daemon=True)
            with _without_main():
                process.start()
            ranks.append(process)
        codes, overdue = _wait(ranks, deadline_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return _explain(folder, codes, overdue, deadline_s)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A process that starts imports the main module of the one that starts it. Ranks need nothing of it, and a script
    without a guard around `verify` would begin again in each of them."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _be_rank(module: str, folder: str, environment: Mapping[str, str]) -> None:
    """In the new process: all it writes, also from C++, goes to a log of its own."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder) / f"rank-{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(importlib.import_module(module).main([folder]))


def _wait(ranks: Sequence[BaseProcess], deadline_s: float) -> tuple[list[int | None], bool]:
    """(exit codes, None for those that still run; whether the deadline passed)."""
    deadline = time.monotonic() + deadline_s
    failed_at: float | None = None
    while True:
        codes = [process.exitcode for process in ranks]
        now = time.monotonic()
        if all(code is not None for code in codes):
            return codes, False
        if failed_at is None and any(codes):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_S:
            return codes, False
        if now > deadline:
            return codes, True
        time.sleep(0.01)


def _explain(folder: Path, codes: list[int | None], overdue: bool, deadline_s: float) -> str:
    """What came first: a rank that is gone makes the others fail, too."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            hint = "; this is often the system running out of memory" if -code == signal.SIGKILL else ""
            return f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name}){hint}"
    said = read_failures(folder)
    if said:
        return f"rank {said[0]['rank']}: {said[0]['message']}"
    if overdue:
        waiting = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
        return f"not done after {deadline_s:g} s: rank {waiting} still ran and was ended"
    for rank, code in enumerate(codes):
        if code:
            return f"rank {rank} ended with exit code {code}: {_last_line(folder / f'rank-{rank}.log')}"
    return ""


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][:_LONGEST_LINE] if lines else "it said nothing"


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    numbers = {name: str(number) for name, number in {**places, "MASTER_PORT": port}.items()}
    return {**os.environ, **numbers, "MASTER_ADDR": "127.0.0.1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
