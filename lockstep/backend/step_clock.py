"""When steps end on the device, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class StepClock:
    """Moments of a CUDA device as seconds of time.perf_counter().

    Each is counted from the one read before it, so that a long run does not lose digits (CUDA counts milliseconds in
    float32). One that the host has to wait for is set by the host's own clock: the two never drift apart.
    """

    def __init__(self) -> None:
        self._last = _record()
        self._last.synchronize()
        self._last_at = time.perf_counter()

    def mark(self) -> Callable[[], float]:
        """The moment at which the device will have done what it has been given so far. Reading it waits for that."""
        event = _record()
        return lambda: self._read(event)

    def _read(self, event: torch.cuda.Event) -> float:
        waits = not event.query()
        event.synchronize()
        now = time.perf_counter()
        passed_s = self._last.elapsed_time(event) / 1000
        self._last, self._last_at = event, now if waits else min(self._last_at + passed_s, now)
        return self._last_at


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
