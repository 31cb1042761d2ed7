"""Whether an engine may be used, and what to do about it: a state machine over events, for one engine and for all.

Pure: it gets the time as an argument, and returns the actions to take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

MAX_FAILED_STARTS = 3  # in a row in one slot, whatever max_replacements allows: what never served will not


class State(Enum):
    STARTING = "starting"  # has not replied yet
    LOADING = "loading"  # has not acknowledged the current weights
    SERVING = "serving"
    SUSPECT = "suspect"  # serves again when it replies
    LOST = "lost"  # for good: its replies are ignored


class Action(Enum):
    PING = "ping"
    SEND_WEIGHTS = "send weights"
    REMOVE = "remove"  # make sure that its process has ended, then call `removed`
    START = "start"


@dataclass(frozen=True)
class HealthLimits:
    """`stuck_s`: how long a busy engine may reply without progress."""

    check_interval_s: float
    deadline_s: float
    start_timeout_s: float
    stuck_s: float


@dataclass
class EngineHealth:
    """One engine, from its start until it is lost. `version`: the weights that it has verified and acknowledged."""

    limits: HealthLimits
    since: float
    state: State = State.STARTING
    version: int | None = None
    reason: str = ""
    _wanted: int | None = None
    _sending_since: float | None = None
    _num_rejected: int = 0
    _pinged_at: float | None = None  # while there is no reply
    _next_ping: float = 0.0
    _progress: int | None = None
    _progress_at: float = 0.0

    def serves(self, lowest: int, highest: int) -> bool:
        return self.state is State.SERVING and self.version is not None and lowest <= self.version <= highest

    # --- events -----------------------------------------------------------------------------------------------------

    def started(self, now: float) -> None:
        """It has replied for the first time."""
        if self.state is State.STARTING:
            self.state, self._next_ping = State.LOADING, now + self.limits.check_interval_s

    def announce(self, version: int) -> None:
        """There is a newer version to be sent. Until `require`, the engine may serve the one it has."""
        if version != self._wanted:
            self._wanted, self._num_rejected, self._sending_since = version, 0, None

    def require(self, version: int) -> None:
        """Nothing older may be served from now on."""
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
        """What arrived was not what was sent. Weights are sent again once."""
        self._num_rejected += 1
        self._sending_since = None
        if self._num_rejected > 1:
            self.failed(f"refused the weights twice: {reason}")

    def replied(self, now: float, *, progress: int, busy: bool) -> None:
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

    # --- actions ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        self._check_deadlines(now)
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

    def _check_deadlines(self, now: float) -> None:
        limits = self.limits
        if self.state is State.STARTING and now - self.since >= limits.start_timeout_s:
            self.failed(f"did not start within {limits.start_timeout_s:g} s")
        if self._sending_since is not None and now - self._sending_since >= limits.start_timeout_s:
            self.failed(f"did not load version {self._wanted} within {limits.start_timeout_s:g} s")
        if self._pinged_at is not None:
            silent_s = now - self._pinged_at
            if silent_s >= limits.deadline_s:
                self.failed(f"did not reply to a ping within {limits.deadline_s:g} s")
            elif silent_s >= limits.check_interval_s and self.state is State.SERVING:
                self.state = State.SUSPECT
        if self._progress is not None and now - self._progress_at >= limits.stuck_s and self._pinged_at is None:
            self.failed(f"is stuck: it replies to pings, and has made no progress for {limits.stuck_s:g} s")


class PatientClock:
    """Time while this process runs: if it was stopped itself, engines are not blamed for the pause.

    Between two readings at most `max_gap_s` count.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s, self._time = max_gap_s, 0.0
        self._last: float | None = None

    def read(self, now: float) -> float:
        self._time += min(now - self._last, self._max_gap_s) if self._last is not None else 0.0
        self._last = now
        return self._time


@dataclass
class EngineSlot:
    """One engine after another under one name. `generation` tells them apart."""

    health: EngineHealth
    generation: int = 1
    failed_starts: int = 0
    is_leaving: bool = False  # it is being removed
    is_given_up: bool = False
    history: list[str] = field(default_factory=list)  # why earlier engines were lost


class Fleet:
    """All engines by name, and how many may still be replaced."""

    def __init__(self, names: Iterable[str], limits: HealthLimits, max_replacements: int, now: float) -> None:
        self._limits, self._replacements_left = limits, max_replacements
        self._version: int | None = None
        self.slots = {name: EngineSlot(EngineHealth(limits, now)) for name in names}

    @property
    def is_lost(self) -> bool:
        return all(slot.is_given_up for slot in self.slots.values())

    def announce(self, version: int) -> None:
        self._version = version
        for slot in self.slots.values():
            slot.health.announce(version)

    def tick(self, now: float) -> list[tuple[str, Action]]:
        actions = []
        for name, slot in self.slots.items():
            actions += [(name, action) for action in slot.health.tick(now)]
            if slot.health.state is State.LOST and not slot.is_leaving and not slot.is_given_up:
                slot.is_leaving = True
                slot.failed_starts = slot.failed_starts + 1 if slot.health.version is None else 0
                slot.history.append(slot.health.reason)
                actions.append((name, Action.REMOVE))
        return actions

    def removed(self, name: str, now: float) -> list[tuple[str, Action]]:
        """Its process has ended: a replacement is started, if one is still allowed."""
        slot = self.slots[name]
        assert slot.is_leaving, f"{name} is {slot.health.state.value}"
        slot.is_leaving = False
        if not self._replacements_left or slot.failed_starts >= MAX_FAILED_STARTS:
            slot.is_given_up = True
            return []
        self._replacements_left -= 1
        slot.health, slot.generation = EngineHealth(self._limits, now), slot.generation + 1
        if self._version is not None:
            slot.health.announce(self._version)
        return [(name, Action.START)]

    def describe_losses(self) -> str:
        parts = []
        for name, slot in self.slots.items():
            parts += [f"{name} (number {number}) {reason}" for number, reason in enumerate(slot.history, start=1)]
        return "; ".join(parts)
