"""Which rank is slow, and since when: a window over the seconds that each rank computes.

It is told and it answers. Must not know processes, files or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BUSY = "busy_s/"  # how the metrics of a step name these seconds: this, then peers/rank
WINDOW = 20  # steps that are logged
SLOW = 1.25  # times the median of its peers
QUIET_STEPS = 100  # after a rank was named

Seconds = dict[str, dict[int, float]]
"""Peers -> rank -> seconds. Peers do the same work: only they can be compared."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    times: float
    """Its seconds over the median of its peers', since it is slow."""
    since_step: int

    def as_event(self) -> dict[str, Any]:
        message = (
            f"rank {self.rank} computes {self.times:.2f} times as long as the median of the others, since step "
            f"{self.since_step}: they wait for it; look at what else runs on its machine or device"
        )
        facts = {"rank": self.rank, "times": round(self.times, 3), "since_step": self.since_step}
        return {"kind": "straggler", "message": message, **facts}


def take_seconds(record: Mapping[str, Any]) -> tuple[dict[str, Any], Seconds]:
    """A step's record without every rank's seconds, which would be most of it, and the seconds."""
    rest: dict[str, Any] = {}
    found: Seconds = {}
    for name, value in record.items():
        if name.startswith(BUSY):
            peers, _, rank = name.removeprefix(BUSY).partition("/")
            found.setdefault(peers, {})[int(rank)] = float(value)
        else:
            rest[name] = value
    return rest, found


class StragglerWatch:
    def __init__(self) -> None:
        self._window: deque[tuple[int, dict[int, tuple[float, float]]]] = deque(maxlen=WINDOW)
        self._named_at: dict[int, int] = {}

    def note(self, step: int, seconds: Seconds) -> list[Straggler]:
        """One more step; who is slow and was not named lately."""
        compared = {rank: pair for ranks in seconds.values() for rank, pair in compare_peers(ranks).items()}
        self._window.append((step, compared))
        if len(self._window) < WINDOW:
            return []
        found = []
        for rank in sorted(compared):
            pairs = [ranks[rank] for _, ranks in self._window if rank in ranks]
            is_quiet = step - self._named_at.get(rank, -QUIET_STEPS) < QUIET_STEPS
            if is_quiet or len(pairs) < WINDOW or not is_slow(pairs):
                continue
            first = find_onset(pairs)
            own, others = (sum(side) for side in zip(*pairs[first:], strict=True))
            found.append(Straggler(rank, own / max(others, 1e-9), self._window[first][0]))
            self._named_at[rank] = step
        return found


def compare_peers(seconds: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Rank -> its seconds and the median of the others'. Nothing for one that has no peers."""
    if len(seconds) < 2:
        return {}
    # The higher of the middle two, where there are two: one fast rank makes nobody slow.
    ordered, middle = sorted(seconds.values()), (len(seconds) - 1) // 2
    return {rank: (own, ordered[middle + (own <= ordered[middle])]) for rank, own in seconds.items()}


def is_slow(pairs: Sequence[tuple[float, float]]) -> bool:
    """Over all steps together, and in most of them: one very slow step is a hiccup."""
    own, others = (sum(side) for side in zip(*pairs, strict=True))
    return own > SLOW * others and 2 * sum(mine > SLOW * theirs for mine, theirs in pairs) > len(pairs)


def find_onset(pairs: Sequence[tuple[float, float]]) -> int:
    """The step from which the rank is most clearly slow: from there to the end, the excess adds up to most."""
    best, first, excess = 0.0, len(pairs) - 1, 0.0
    for place in reversed(range(len(pairs))):
        own, others = pairs[place]
        excess += own - SLOW * others
        if excess > best:
            best, first = excess, place
    return first
