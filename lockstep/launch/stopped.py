"""How long the processes of a run have been stopped by a signal. Pure: it is told what is seen, and when.

Only time between two looks that are close to each other counts. A watcher that was stopped itself, together with all
that it watches, does not blame the others when it goes on.
"""

from __future__ import annotations

from collections.abc import Collection

STOPPED_LIMIT_S = 5.0  # a shorter stop changes nothing
_LONGEST_GAP_S = 1.0


class StoppedTimes:
    def __init__(self, limit_s: float = STOPPED_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._looked_at: float | None = None
        self._stopped_s: dict[str, float] = {}

    def look(self, stopped: Collection[str], now: float) -> list[str]:
        """`stopped` are the names of those that stand still now. Returns those that have for too long."""
        gap_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_GAP_S)
        self._looked_at = now
        before = self._stopped_s
        self._stopped_s = {name: before[name] + gap_s if name in before else 0.0 for name in stopped}
        return [name for name, stopped_s in self._stopped_s.items() if stopped_s >= self.limit_s]


def say_stopped(who: str, pid: int) -> str:
    return f"{who} (process {pid}) was stopped by a signal and did not go on within {STOPPED_LIMIT_S:g} s"
