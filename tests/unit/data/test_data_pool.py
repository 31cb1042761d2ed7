"""Compiling in processes: what goes wrong in one is reported with what to do about it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.data.compile import compile_in_pool
from lockstep.processes.pool import WorkerPool
from lockstep.processes.worker import WorkerError


@dataclass(frozen=True)
class Faulty:
    """In place of the compiler: chunks ask for faults."""

    def prepare(self) -> Callable[[Any], Any]:
        return self.compile

    def compile(self, chunk: Any) -> Any:
        match chunk:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "fail":
                raise KeyError("no such thing")
            case "hang":
                time.sleep(600)
        return chunk


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        ("die", "was killed, most likely because memory ran out: use fewer data.procs"),
        ("exit", "ended with code 3"),
        ("fail", "failed: KeyError: 'no such thing'"),
        ("hang", "has given no answer for 0.5 s"),
    ],
)
def test_a_fault_in_a_process_ends_compiling_and_says_what_to_do(chunk: str, words: str) -> None:
    with WorkerPool("data", Faulty(), 1, timeout_s=60) as pool:
        assert list(compile_in_pool(pool, ["first"])) == ["first"]
        pool.timeout_s = 0.5 if chunk == "hang" else 60
        with pytest.raises(WorkerError, match=f"a process that compiles rows {words}"):
            list(compile_in_pool(pool, [chunk, 1, 2, 3]))
