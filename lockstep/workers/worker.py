"""What a worker is to whoever started it: calls that always end, with an answer or with a reason.

Must not know where workers run.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reply:
    """`body` is plain JSON; arrays of numbers travel beside it."""

    body: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class WorkerError(RuntimeError):
    """`worker` is the name of the one it is about."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDied(WorkerError):
    """The process has ended, or its connection has. It answers nothing any more."""


class WorkerTimedOut(WorkerError):
    """No answer before the deadline. The worker may still be alive, and its late answer is dropped."""


class WorkerFailed(WorkerError):
    """The method raised in the worker, which goes on. `kind` and `traceback` are those of its exception."""

    def __init__(self, worker: str, method: str, kind: str, reason: str, traceback: str) -> None:
        super().__init__(worker, f"{worker}: {method} failed: {reason}")
        self.method, self.kind, self.reason, self.traceback = method, kind, reason, traceback


class Worker(Protocol):
    name: str

    @property
    def pid(self) -> int | None:
        """None where the process is on another machine, or not known."""
        ...

    def call(
        self,
        method: str,
        body: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float,
    ) -> Future[Reply]:
        """Ask, from any thread; calls are begun in the order in which they were made. What does not fit into a message
        is a ValueError here; everything else ends the future: Reply, WorkerFailed, WorkerTimedOut, WorkerDied.

        `tensors` must not be changed before the future ends. Its callbacks must be short: they hold up other answers.
        """
        ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """At once. Returns when the process is gone; calls under way end with WorkerDied."""
        ...

    def close(self, grace_s: float = 5.0) -> None:
        """Ask it to end, and kill it when it has not after `grace_s`."""
        ...
