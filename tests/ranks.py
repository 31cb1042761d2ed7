"""The ranks of a run as real processes, without the seconds that importing torch costs each time.

A fork server imports once; every rank is forked from it and enters where torchrun's workers enter. They meet over
gloo, write into the run directory and can be stopped and killed like any other process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.rundir import RunDir

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "lockstep.train.worker",
        "lockstep.train.run",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.tokenization_llama",
        "peft",
    ]
)


class Ranks:
    """The processes of one start of a run."""

    def __init__(self, run: RunDir, num_ranks: int, environment: Mapping[str, str]) -> None:
        self.run = run
        port = free_port()
        self.processes: list[BaseProcess] = [
            _CONTEXT.Process(target=_be_rank, args=(str(run.path), rank, num_ranks, port, environment), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def signal(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, number)

    def are_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, timeout_s: float = 90.0) -> list[int | None]:
        """Exit codes by rank; -N for signal N."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert not self.are_alive(), f"ranks still run after {timeout_s} s"
        return [process.exitcode for process in self.processes]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        """Whether it came true while the ranks ran. Looked at every half millisecond."""
        deadline = time.monotonic() + timeout_s
        while self.are_alive():
            if condition():
                return True
            assert time.monotonic() < deadline, "this took too long"
            time.sleep(0.0005)
        return False


@contextlib.contextmanager
def start_ranks(run: RunDir, num_ranks: int, environment: Mapping[str, str] | None = None) -> Iterator[Ranks]:
    ranks = Ranks(run, num_ranks, environment or {})
    try:
        yield ranks
    finally:
        ranks.signal(signal.SIGKILL)
        for process in ranks.processes:
            process.join()


def run_to_the_end(run: RunDir, num_ranks: int) -> None:
    with start_ranks(run, num_ranks) as ranks:
        codes = ranks.wait()
    assert codes == [0] * num_ranks, [failure["message"] for failure in run.failures()]
    assert run.status()["state"] == "completed"


def run_together(num_ranks: int, body: Callable[..., None], *arguments: Any, timeout_s: float = 240.0) -> None:
    """`body(*arguments)` in each of as many processes that can meet."""
    port = free_port()
    members = [
        _CONTEXT.Process(target=_be_member, args=(rank, num_ranks, port, body, arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    try:
        for member in members:
            member.start()
        deadline = time.monotonic() + timeout_s
        while any(member.is_alive() for member in members) and not any(member.exitcode for member in members):
            assert time.monotonic() < deadline, f"ranks still run after {timeout_s} s"
            time.sleep(0.01)
        for member in members:
            member.join(5)  # one that failed takes the others with it
    finally:
        for member in members:
            member.kill()
            member.join()
    assert [member.exitcode for member in members] == [0] * num_ranks


def _be_member(rank: int, num_ranks: int, port: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _set_place(rank, num_ranks, port)
    import torch

    torch.set_num_threads(1)
    body(*arguments)


def _set_place(rank: int, num_ranks: int, port: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}


def _be_rank(run_dir: str, rank: int, num_ranks: int, port: int, environment: Mapping[str, str]) -> None:
    _set_place(rank, num_ranks, port)
    os.environ |= environment
    import torch

    from lockstep.train.worker import main

    torch.set_num_threads(1)
    sys.exit(main([run_dir]))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def newest_step(run: RunDir) -> int:
    """Of the last whole line in metrics.jsonl."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(record["step"]) for record in run.metrics()), default=0)
    return 0


def exported(run: RunDir) -> Path:
    return Path(run.status()["export"])
