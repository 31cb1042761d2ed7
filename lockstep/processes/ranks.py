"""The ranks of one process group as processes of this machine, with one deadline for all of them.

They are forked from a server that has imported torch once, which otherwise takes most of the time.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.processes.tree import describe_exit, free_port

_GRACE_S = 2.0  # from the first failure to the end of all: time for the others to report what they saw
_MAX_LINE = 400
_CONTEXT = multiprocessing.get_context("forkserver")

ReadFailures = Callable[[Path], Sequence[Mapping[str, Any]]]


def run_ranks(
    module: str,
    folder: Path,
    num_ranks: int,
    *,
    deadline_s: float,
    read_failures: ReadFailures,
    preload: Sequence[str] = (),
) -> str:
    """Run `main([folder])` of the module in every rank and wait. Returns why they failed; empty if all ended well.

    None is left running. `read_failures` gives what ranks have written into the folder, the earliest first: "rank" and
    "message". `preload` are modules that the server imports when it starts, with the first call.
    """
    _CONTEXT.set_forkserver_preload(list(preload))
    port, ranks = free_port("127.0.0.1"), []
    try:
        for rank in range(num_ranks):
            arguments = (module, str(folder), _environment(rank, num_ranks, port))
            process = _CONTEXT.Process(target=_run_rank, args=arguments, daemon=True)
            with _without_main():
                process.start()
            ranks.append(process)
        codes, overdue = _wait(ranks, deadline_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return _explain(folder, codes, read_failures(folder), f"{deadline_s:g} s" if overdue else "")


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """multiprocessing imports the parent's main module in a child. Ranks need nothing of it, and a script without a
    guard around its code would run again in each of them."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_rank(module: str, folder: str, environment: Mapping[str, str]) -> None:
    """In the new process: all output, also from C++, goes to a log of its own."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder) / f"rank-{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(importlib.import_module(module).main([folder]))


def _wait(ranks: Sequence[BaseProcess], deadline_s: float) -> tuple[list[int | None], bool]:
    """(exit codes, None for ranks that still run; whether the deadline passed)."""
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


def _explain(
    folder: Path, codes: Sequence[int | None], failures: Sequence[Mapping[str, object]], passed_deadline: str
) -> str:
    """The cause: a rank that is gone makes the others fail, too."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return describe_exit(f"rank {rank}", code)
    if failures:
        return f"rank {failures[0]['rank']}: {failures[0]['message']}"
    if passed_deadline:
        waiting = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
        return f"not done after {passed_deadline}: rank {waiting} still ran and was ended"
    for rank, code in enumerate(codes):
        if code:
            return f"{describe_exit(f'rank {rank}', code)}: {_last_line(folder / f'rank-{rank}.log')}"
    return ""


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][:_MAX_LINE] if lines else "it printed nothing"


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    numbers = {name: str(number) for name, number in {**places, "MASTER_PORT": port}.items()}
    return {**os.environ, **numbers, "MASTER_ADDR": "127.0.0.1"}
