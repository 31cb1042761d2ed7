"""Whether an engine may be used, and what is to be done about it: a state machine over events, for one and for all.

Pure: time is told, and what is to be done is returned. Must not know processes, threads or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

MAX_FAILED_STARTS = 3  # in a row at one place, whatever else is allowed: what never came to serve will not


class State(Enum):
    STARTING = "starting"  # no answer yet
    LOADING = "loading"  # has not acknowledged the weights that are to be served
    SERVING = "serving"
    SUSPECT = "suspect"  # serves when it answers again
    LOST = "lost"  # for good: what it still says is not heard


class Action(Enum):
    PING = "ping"
    SEND_WEIGHTS = "send weights"
    TAKE_OUT = "take out"  # make sure that it is gone, then say so
    START = "start"


@dataclass(frozen=True)
class HealthLimits:
    """`stuck_s`: how long an engine that has something to do may answer without getting on."""

    check_interval_s: float
    deadline_s: float
    start_timeout_s: float
    stuck_s: float


@dataclass
class EngineHealth:
    """One engine, from its start until it is lost. `version` is what it has verified and acknowledged."""

    limits: HealthLimits
    since: float
    state: State = State.STARTING
    version: int | None = None
    reason: str = ""
    _wanted: int | None = None
    _sending_since: float | None = None
    _num_rejected: int = 0
    _pinged_at: float | None = None  # while there is no answer
    _next_ping: float = 0.0
    _progress: int | None = None
    _progress_at: float = 0.0

    def serves(self, lowest: int, highest: int) -> bool:
        return self.state is State.SERVING and self.version is not None and lowest <= self.version <= highest

    # --- what happened ----------------------------------------------------------------------------------------------

    def started(self, now: float) -> None:
        """It has answered for the first time."""
        if self.state is State.STARTING:
            self.state, self._next_ping = State.LOADING, now + self.limits.check_interval_s

    def announce(self, version: int) -> None:
        """There is a newer version to be sent. What it has, it may serve until this is `require`d."""
        if version != self._wanted:
            self._wanted, self._num_rejected, self._sending_since = version, 0, None

    def require(self, version: int) -> None:
        """Nothing older is to be served from now on."""
        if self.state in (State.SERVING, State.SUSPECT) and (self.version is None or self.version < version):
            self.state = State.LOADING

    def acknowledged(self, version: int) -> None:
        """It has verified all weights of this version and uses them."""
        if self.state is State.LOST:
            return
        self.version = version
        if version == self._wanted:
            self._sending_since, self._num_rejected = None, 0
            if self.state is State.LOADING:
                self.state = State.SERVING

    def rejected(self, reason: str) -> None:
        """What arrived was not what was sent. Once may be chance: it is sent again."""
        self._num_rejected += 1
        self._sending_since = None
        if self._num_rejected > 1:
            self.failed(f"refused the weights twice: {reason}")

    def answered(self, now: float, *, progress: int, busy: bool) -> None:
        if self.state is State.LOST:
            return
        self._pinged_at, self._next_ping = None, now + self.limits.check_interval_s
        if not busy or progress != self._progress:
            self._progress, self._progress_at = progress, now
        if self.state is State.SUSPECT:
            self.state = State.SERVING

    def failed(self, reason: str) -> None:
        """The first reason stays."""
        if self.state is not State.LOST:
            self.state, self.reason = State.LOST, reason

    # --- what is to be done -----------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        self._look_at_deadlines(now)
        if self.state in (State.STARTING, State.LOST):
            return []
        actions = []
        if self._pinged_at is None and now >= self._next_ping:
            self._pinged_at = now
            actions.append(Action.PING)
        if self._wanted is not None and self.version != self._wanted and self._sending_since is None:
            self._sending_since = now
            actions.append(Action.SEND_WEIGHTS)
        return actions

    def _look_at_deadlines(self, now: float) -> None:
        limits = self.limits
        if self.state is State.STARTING and now - self.since >= limits.start_timeout_s:
            self.failed(f"did not start within {limits.start_timeout_s:g} s")
        if self._sending_since is not None and now - self._sending_since >= limits.start_timeout_s:
            self.failed(f"did not take over version {self._wanted} within {limits.start_timeout_s:g} s")
        if self._pinged_at is not None:
            silent = now - self._pinged_at
            if silent >= limits.deadline_s:
                self.failed(f"gave no sign of life within {limits.deadline_s:g} s")
            elif silent >= limits.check_interval_s and self.state is State.SERVING:
                self.state = State.SUSPECT
        if self._progress is not None and now - self._progress_at >= limits.stuck_s and self._pinged_at is None:
            self.failed(f"is stuck: it answers, and has not got on for {limits.stuck_s:g} s")


class PatientClock:
    """Time as far as somebody looked: whoever was stopped himself does not hold it against the others.

    Between two looks at most `longest_s` count, so that those who are silent are still found out.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._time = longest_s, 0.0
        self._last: float | None = None

    def look(self, now: float) -> float:
        self._time += min(now - self._last, self._longest_s) if self._last is not None else 0.0
        self._last = now
        return self._time


@dataclass
class Place:
    """Where an engine runs, and after it another. `generation` tells them apart."""

    health: EngineHealth
    generation: int = 1
    failed_starts: int = 0
    is_leaving: bool = False  # it is being taken out
    is_given_up: bool = False
    history: list[str] = field(default_factory=list)  # why those before are gone


class Fleet:
    """All engines by name, and how many may still be replaced."""

    def __init__(self, names: Iterable[str], limits: HealthLimits, max_replacements: int, now: float) -> None:
        self._limits, self._replacements_left = limits, max_replacements
        self._version: int | None = None
        self.places = {name: Place(EngineHealth(limits, now)) for name in names}

    @property
    def is_lost(self) -> bool:
        return all(place.is_given_up for place in self.places.values())

    def announce(self, version: int) -> None:
        self._version = version
        for place in self.places.values():
            place.health.announce(version)

    def tick(self, now: float) -> list[tuple[str, Action]]:
        actions = []
        for name, place in self.places.items():
            actions += [(name, action) for action in place.health.tick(now)]
            if place.health.state is State.LOST and not place.is_leaving and not place.is_given_up:
                place.is_leaving = True
                place.failed_starts = place.failed_starts + 1 if place.health.version is None else 0
                place.history.append(place.health.reason)
                actions.append((name, Action.TAKE_OUT))
        return actions

    def taken_out(self, name: str, now: float) -> list[tuple[str, Action]]:
        """Its process is gone: another takes its place, if that is still allowed."""
        place = self.places[name]
        assert place.is_leaving, f"{name} is {place.health.state.value}"
        place.is_leaving = False
        if not self._replacements_left or place.failed_starts >= MAX_FAILED_STARTS:
            place.is_given_up = True
            return []
        self._replacements_left -= 1
        place.health, place.generation = EngineHealth(self._limits, now), place.generation + 1
        if self._version is not None:
            place.health.announce(self._version)
        return [(name, Action.START)]

    def describe_losses(self) -> str:
        parts = []
        for name, place in self.places.items():
            parts += [f"{name} (number {number}) {reason}" for number, reason in enumerate(place.history, start=1)]
        return "; ".join(parts)
