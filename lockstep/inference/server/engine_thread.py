"""The thread that decodes, and the tickets by which the event loop follows what it does.

Requests join and leave the running batch. How many rows may be in it or wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.inference.continuous_engine import ContinuousEngine, SampleCall
from lockstep.inference.engine import LocalEngine
from lockstep.inference.sequence import SequenceOptions, TokenSequence
from lockstep.inference.server.errors import ApiError, closing
from lockstep.types import SamplingParams

_RETRY_AFTER_S = 2
_JOIN_S = 10.0  # for a step that is being computed to end
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeRequest:
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    options: SequenceOptions

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.params.num_samples


class Ticket:
    """One request on its way. Made and read on the event loop; the engine's thread writes `call` and `error`."""

    def __init__(self, request: DecodeRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.woken = asyncio.Event()
        self.call: SampleCall | None = None
        self.error: Exception | None = None
        self.ended = False
        self.gone = False  # the client has left
        self.joined_at = time.monotonic()

    @property
    def sequences(self) -> list[TokenSequence]:
        return [] if self.call is None else self.call.sequences

    def leave(self) -> None:
        self.gone = True
        self.woken.set()


class EngineThread:
    """`max_waiting`: rows beyond those that are decoded at once. Counters are read by anybody."""

    def __init__(self, engine: LocalEngine, max_waiting: int) -> None:
        self.engine = engine
        self.num_slots = engine.batch_size
        self.counts: Counter[str] = Counter()
        self._continuous = ContinuousEngine(engine, min_slots=engine.batch_size)
        self._max_rows = self.num_slots + max_waiting
        self._inbox: deque[tuple[str, Ticket]] = deque()
        self._tickets: set[Ticket] = set()  # of the event loop: not ended
        self._running: dict[SampleCall, Ticket] = {}  # of the thread
        self._wake = threading.Condition()
        self._stopped = self._closing = False
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- on the event loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def num_rows(self) -> int:
        """Of all requests that are decoded or wait."""
        return sum(ticket.request.num_rows for ticket in self._tickets)

    @property
    def stuck_s(self) -> float:
        """How long the thread has been in one slice of decoding, with somebody waiting; infinity once it is dead."""
        if not self._thread.is_alive():
            return float("inf")
        return time.monotonic() - self._turned_at if self._tickets else 0.0

    def submit(self, request: DecodeRequest) -> Ticket:
        if self._closing:
            raise closing()
        if not self._thread.is_alive():
            raise ApiError(503, "the engine has failed: the server must be started again", code="engine_failed")
        if request.num_rows > self._max_rows:
            raise ApiError(
                400, f"{request.num_rows} answers: at most {self._max_rows} are decoded or wait here", param="n"
            )
        if self.num_rows + request.num_rows > self._max_rows:
            self.counts["refused"] += 1
            message = f"{self.num_rows} answers are being written or wait: try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=_RETRY_AFTER_S)
        ticket = Ticket(request)
        self._tickets.add(ticket)
        self._send("submit", ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Must be called once for every ticket; what is unfinished is given up."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        self.counts["prompt_tokens"] += sum(map(len, ticket.request.prompts)) if ticket.call is not None else 0
        self.counts["completion_tokens"] += sum(sequence.num_sampled for sequence in ticket.sequences)
        if not ticket.ended:
            self.counts["cancelled"] += 1
            for sequence in ticket.sequences:
                sequence.cancel()  # at once, also where transformers' generate is at work
            self._send("cancel", ticket)

    async def close(self, grace_s: float) -> None:
        """New requests are refused, those in progress may end within `grace_s`, then they are cut."""
        self._closing = True
        end = time.monotonic() + grace_s
        while self._tickets and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for ticket in self._tickets:
            ticket.error = ticket.error or closing()
            ticket.woken.set()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(_JOIN_S)

    def _send(self, what: str, ticket: Ticket) -> None:
        with self._wake:
            self._inbox.append((what, ticket))
            self._wake.notify()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            self._turned_at = time.monotonic()
            with self._wake:
                if not self._inbox and not self._continuous.has_work and not self._stopped:
                    self._wake.wait(timeout=1.0)
            try:
                self._take_inbox()
                ended = self._continuous.advance() if self._continuous.has_work else []
            except Exception as error:
                log.exception("a step of the engine failed: every answer in progress is lost")
                ended = self._continuous.reset(error)
            self._publish(ended)

    def _take_inbox(self) -> None:
        while self._inbox:
            what, ticket = self._inbox.popleft()
            if what == "cancel":
                self._running = {call: other for call, other in self._running.items() if other is not ticket}
                if ticket.call is not None:
                    self._continuous.cancel(ticket.call)
            elif not ticket.gone:
                self._accept(ticket)

    def _accept(self, ticket: Ticket) -> None:
        request = ticket.request
        try:
            ticket.call = self._continuous.submit(request.prompts, request.params, options=request.options)
            self._running[ticket.call] = ticket
        except Exception as error:  # of the request itself; what is no ValueError is a fault of ours
            ticket.error = error
        _wake([ticket])

    def _publish(self, ended: Sequence[SampleCall]) -> None:
        """Streams learn of every slice, the others of their end."""
        woken = [ticket for call, ticket in self._running.items() if call.options.streams]
        for call in ended:
            ticket = self._running.pop(call, None)
            if ticket is not None:
                ticket.error, ticket.ended = ticket.error or call.error, True
                woken.append(ticket)
        _wake(woken)


def _wake(tickets: Sequence[Ticket]) -> None:
    """From the engine's thread."""

    def wake() -> None:
        for ticket in tickets:
            ticket.woken.set()

    if tickets:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            tickets[0].loop.call_soon_threadsafe(wake)  # a server has one loop
