"""Server-sent events from files that grow: logs and metrics of a job, until it has ended.

Each message's id is the offset behind it, so a reader that comes back with Last-Event-ID misses nothing.
Files are looked at in threads, a few times a second; nothing is kept between looks but the offset.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.responses import StreamingResponse

from lockstep.rundir import MetricRecord
from lockstep.service.errors import Busy
from lockstep.service.reading import read_whole_lines, records_in
from lockstep.service.schemas import FINISHED

_PERIOD_S = 0.5
_HEARTBEAT_S = 15.0
_MAX_STREAMS = 1000
Message = tuple[Any, int]
Split = Callable[[bytes, int], Iterator[Message]]


def split_log(piece: bytes, offset: int) -> Iterator[Message]:
    if piece:
        yield {"text": piece.decode(errors="replace")}, offset + len(piece)


def split_metrics(piece: bytes, offset: int) -> Iterator[Message]:
    yield from ((MetricRecord(record), after) for record, after in records_in(piece, offset))


class Streams:
    """How many are open: each costs a look at a file every half second."""

    def __init__(self) -> None:
        self.num_open = 0

    def respond(self, path: Path, state: Callable[[], str | None], split: Split, start: int) -> StreamingResponse:
        if self.num_open >= _MAX_STREAMS:
            raise Busy("too many streams are open: try again later")
        return StreamingResponse(self._follow(path, state, split, start), media_type="text/event-stream")

    async def _follow(
        self, path: Path, state: Callable[[], str | None], split: Split, offset: int
    ) -> AsyncIterator[bytes]:
        self.num_open += 1
        spoke_at = time.monotonic()
        try:
            yield b": follow\n\n"
            while True:
                text, offset, ended = await to_thread.run_sync(_look, path, state, split, offset)
                if text:
                    spoke_at = time.monotonic()
                    yield text
                    continue
                if ended is not None:
                    yield f"event: end\ndata: {json.dumps({'state': ended})}\n\n".encode()
                    return
                if time.monotonic() - spoke_at > _HEARTBEAT_S:
                    spoke_at = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(_PERIOD_S)
        finally:
            self.num_open -= 1


def _look(path: Path, state: Callable[[], str | None], split: Split, offset: int) -> tuple[bytes, int, str | None]:
    """What is new, how far it goes, and the state if the job has ended. The state is asked first: whatever the job
    wrote before its end is then in the file."""
    now = state()
    ended = now or "deleted" if now is None or now in FINISHED else None
    piece = read_whole_lines(path, offset, to_the_end=ended is not None)
    lines = [
        f"id: {after}\ndata: {json.dumps(message, ensure_ascii=False)}\n\n" for message, after in split(piece, offset)
    ]
    return "".join(lines).encode(errors="replace"), offset + len(piece), ended


def start_from(last_event_id: str | None, otherwise: int = 0) -> int:
    """Where a reader left off."""
    return int(last_event_id) if last_event_id is not None and last_event_id.isdecimal() else otherwise
