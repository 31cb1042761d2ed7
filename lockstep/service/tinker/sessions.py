"""Sessions: what a client opens first. It owns models and samplers, which end with it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from lockstep.service.access import Caller
from lockstep.service.tinker.errors import Gone
from lockstep.service.tinker.schemas import CreateSession, read


@dataclass(eq=False)
class TinkerSession:
    id: str
    owner: str
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    seen_at: float = field(default_factory=time.monotonic)
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


class TinkerSessions:
    """For the thread of the event loop alone."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sessions: dict[str, TinkerSession] = {}

    def open(self, caller: Caller, payload: object) -> TinkerSession:
        request = read(CreateSession, payload)
        session = TinkerSession(uuid.uuid4().hex, caller.name, request.display_name, request.user_metadata)
        self._sessions[session.id] = session
        return session

    def find(self, caller: Caller, session_id: str) -> TinkerSession | None:
        session = self._sessions.get(session_id)
        return session if session is not None and caller.may_see(session.owner) else None

    def use(self, caller: Caller, session_id: str) -> TinkerSession:
        """A sign of life of it."""
        session = self._sessions.get(session_id)
        if session is None or not caller.may_change(session.owner):
            raise Gone(
                f"there is no session {session_id[:100]}: it was finished, was silent for {self._timeout_s / 60:g} "
                "minutes, or the service was started again; make a new ServiceClient"
            )
        session.seen_at = time.monotonic()
        return session

    def touch(self, session_id: str) -> None:
        if session_id in self._sessions:
            self._sessions[session_id].seen_at = time.monotonic()

    def seen_by(self, caller: Caller) -> list[TinkerSession]:
        return [session for session in self._sessions.values() if caller.may_see(session.owner)]

    def silent(self) -> list[TinkerSession]:
        before = time.monotonic() - self._timeout_s
        return [session for session in self._sessions.values() if session.seen_at <= before]

    def forget(self, session: TinkerSession) -> None:
        self._sessions.pop(session.id, None)
