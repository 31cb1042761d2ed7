"""What a run has written, read a piece at a time and followed as server-sent events.

Every path that a reader names stays inside the run directory. The id of an event is the offset behind it, so a reader
that comes back with Last-Event-ID misses nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.responses import StreamingResponse

from lockstep.rundir import MetricRecord, RunDir
from lockstep.service.errors import Busy, NotFound
from lockstep.service.schemas import FINISHED, ArtifactView, CheckpointView, JobMetrics

PIECE_BYTES = 1 << 18
_MAX_TAIL_BYTES = 2 << 20
_TAIL_BYTES = 1 << 16
_MAX_ARTIFACTS = 10_000
_UNFINISHED = ("writing-", "deleting-")
_PRIVATE = ("launch.json", "slurm.sh", "slurm-failures", "engine-hosts.json")
_PRODUCTS = ("export", "published", "checkpoints", "samples")
_TEXT_ENDINGS = (".yaml", ".json", ".jsonl", ".log", ".txt")
_COMMITTED = re.compile(r"checkpoints/step-\d+/[^/]+$")
_PERIOD_S = 0.5
_HEARTBEAT_S = 15.0
_MAX_STREAMS = 1000
Message = tuple[Any, int]
Split = Callable[[bytes, int], Iterator[Message]]


def log_path(run: RunDir, rank: str | None) -> Path:
    """Of a rank, or what the launcher printed. Rank 0 unless it has none yet."""
    if rank is not None:
        return run.logs / ("launcher.log" if rank == "launcher" else f"rank-{int(rank)}.log")
    first = run.logs / "rank-0.log"
    return first if first.exists() else run.logs / "launcher.log"


def read_piece(path: Path, offset: int, size: int = PIECE_BYTES) -> bytes:
    """Nothing, if the file is not there yet."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""


def read_pieces(path: Path) -> Iterator[bytes]:
    """All that is there now, cut at the ends of lines."""
    offset, end = 0, path.stat().st_size
    while offset < end and (piece := read_whole_lines(path, offset, to_the_end=True)):
        offset += len(piece)
        yield piece


def read_whole_lines(path: Path, offset: int, *, to_the_end: bool) -> bytes:
    """Up to the last newline, so that neither a character nor a record is cut; a very long line is given in pieces.

    `to_the_end`: the writer has ended, so an unfinished last line belongs to it.
    """
    piece = read_piece(path, offset)
    end = piece.rfind(b"\n") + 1
    if to_the_end and len(piece) < PIECE_BYTES:
        return piece
    return piece[:end] if end or len(piece) < PIECE_BYTES else piece


def start_of_tail(path: Path, num_lines: int) -> int:
    """Where the last lines begin."""
    try:
        size = path.stat().st_size
    except OSError:
        return 0
    start = max(size - _MAX_TAIL_BYTES, 0)
    tail = read_piece(path, start, _MAX_TAIL_BYTES)
    place = len(tail) - tail.endswith(b"\n")  # a newline at the very end begins no line
    for _ in range(num_lines):
        place = tail.rfind(b"\n", 0, place)
        if place < 0:
            return start
    return start + place + 1


def parse_record(line: bytes) -> object:
    """A line of metrics or events; what is not a number for JSON (NaN, Infinity) is null for those who read."""
    return json.loads(line, parse_constant=lambda _: None)


def records_in(piece: bytes, offset: int) -> Iterator[tuple[dict[str, object], int]]:
    """Each record with the offset behind it. A line that a killed writer left unfinished is passed over."""
    for line in piece.splitlines(keepends=True):
        offset += len(line)
        try:
            record = parse_record(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record, offset


def list_records(path: Path, limit: int) -> list[dict[str, object]]:
    """The last ones."""
    start = start_of_tail(path, limit)
    return [record for record, _ in records_in(read_piece(path, start, _MAX_TAIL_BYTES), start)]


# --- artifacts and checkpoints ---------------------------------------------------------------------------------------


def list_artifacts(run: RunDir) -> list[ArtifactView]:
    """Every file that others may have: what is half written or only for the launcher is left out, links as well."""
    artifacts = []
    for folder, names, files in os.walk(run.path):
        here = Path(folder).relative_to(run.path)
        names[:] = sorted(name for name in names if not _is_hidden((here / name).as_posix()))
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(run.path).as_posix()
            if not _is_hidden(relative) and not path.is_symlink():
                stat = path.stat()
                artifacts.append(ArtifactView(path=relative, bytes=stat.st_size, modified_at=stat.st_mtime))
            if len(artifacts) == _MAX_ARTIFACTS:
                return artifacts
    return artifacts


def _is_hidden(name: str) -> bool:
    """What is half written or for the launcher. A dotfile of a committed checkpoint is a part of it."""
    parts = name.split("/")
    is_part = len(parts) == 3 and _COMMITTED.match(name) and parts[2] not in (".", "..")
    named = parts[:2] if is_part else parts
    return name in _PRIVATE or any(part.startswith((".", *_UNFINISHED)) or not part for part in named)


def find_artifact(run: RunDir, name: str) -> Path:
    path = run.path / name
    try:
        inside = not _is_hidden(name) and path.resolve() == run.path.resolve() / name and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        inside = False
    if not inside:
        raise NotFound("the job has no such artifact")
    return path


def is_about_the_run(name: str) -> bool:
    """Texts that a run writes about itself, which name files; not its products: weights, and the model's own words."""
    first = name.partition("/")[0]
    return not first.startswith(_PRODUCTS) and name.endswith(_TEXT_ENDINGS)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def list_checkpoints(run: RunDir) -> list[CheckpointView]:
    views = []
    for checkpoint in run.list_checkpoints():
        try:
            files = [path.stat() for path in checkpoint.path.rglob("*") if path.is_file()]
            created_at = checkpoint.path.stat().st_mtime
        except OSError:
            continue  # pruned meanwhile
        views.append(
            CheckpointView(
                step=checkpoint.step,
                path=checkpoint.path.relative_to(run.path).as_posix(),
                bytes=sum(stat.st_size for stat in files),
                created_at=created_at,
                validation_loss=_finite(checkpoint.validation_loss),
            )
        )
    return views


# --- followed until the job has ended --------------------------------------------------------------------------------


def split_log(piece: bytes, offset: int) -> Iterator[Message]:
    if piece:
        yield {"text": piece.decode(errors="replace")}, offset + len(piece)


def split_metrics(piece: bytes, offset: int) -> Iterator[Message]:
    yield from ((MetricRecord(record), after) for record, after in records_in(piece, offset))


class Streams:
    """Counts the open ones: each reads its file every half second."""

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
        sent_at = time.monotonic()
        try:
            yield b": follow\n\n"
            while True:
                text, offset, ended = await to_thread.run_sync(_read_new, path, state, split, offset)
                if text:
                    sent_at = time.monotonic()
                    yield text
                    continue
                if ended is not None:
                    yield f"event: end\ndata: {json.dumps({'state': ended})}\n\n".encode()
                    return
                if time.monotonic() - sent_at > _HEARTBEAT_S:
                    sent_at = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(_PERIOD_S)
        finally:
            self.num_open -= 1


def _read_new(path: Path, state: Callable[[], str | None], split: Split, offset: int) -> tuple[bytes, int, str | None]:
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


# --- the end of a file -----------------------------------------------------------------------------------------------


def last_metrics(path: Path) -> JobMetrics:
    latest: dict[str, dict[str, object]] = {}
    for line in reversed(_read_tail(path).split(b"\n")):
        try:
            record = parse_record(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            latest.setdefault(str(record.get("split", "train")), MetricRecord(record))
        if len(latest) >= 2:
            break
    return JobMetrics(train=latest.get("train"), validation=latest.get("validation"))


def _read_tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""


def traceback_of(run: RunDir, limit: int = 8000) -> str:
    """What the first rank that failed printed at its end, if it was an exception."""
    failures = run.failures()
    if not failures:
        return ""
    tail = _read_tail(run.logs / f"rank-{failures[0]['rank']}.log").decode(errors="replace")
    start = tail.rfind("Traceback (most recent call last)")
    # The sentence below it is the reason that this is added to.
    return tail[start:].partition("\nerror: rank ")[0].strip()[-limit:] if start >= 0 else ""
