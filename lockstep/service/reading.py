"""Logs, metrics and artifacts of a run, read a piece at a time: never more in memory than one piece.

Must not know HTTP. Every path that a reader names stays inside the run directory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.rundir import RunDir
from lockstep.service.errors import NotFound
from lockstep.service.schemas import ArtifactView, CheckpointView
from lockstep.service.views import parse_record

PIECE_BYTES = 1 << 18
_MAX_TAIL_BYTES = 2 << 20
_MAX_ARTIFACTS = 10_000
_UNFINISHED = ("writing-", "deleting-")
_PRIVATE = ("launch.json",)


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


def read_whole_lines(path: Path, offset: int, *, to_the_end: bool) -> bytes:
    """Up to the last newline, so that neither a character nor a record is cut; a very long line is given in pieces.

    `to_the_end`: nobody writes any more, so the rest belongs to it.
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


def records_in(piece: bytes, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Each record with the offset behind it. A line that a killed writer left unfinished is passed over."""
    for line in piece.splitlines(keepends=True):
        offset += len(line)
        try:
            record = parse_record(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record, offset


def list_records(path: Path, limit: int) -> list[dict[str, Any]]:
    """The last ones."""
    start = start_of_tail(path, limit)
    return [record for record, _ in records_in(read_piece(path, start, _MAX_TAIL_BYTES), start)]


def list_artifacts(run: RunDir) -> list[ArtifactView]:
    """Every file that others may have: what is half written or only for the launcher is left out, links as well."""
    found = []
    for folder, names, files in os.walk(run.path):
        names[:] = sorted(name for name in names if not name.startswith((".", *_UNFINISHED)))
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(run.path).as_posix()
            if not name.startswith(".") and relative not in _PRIVATE and not path.is_symlink():
                stat = path.stat()
                found.append(ArtifactView(path=relative, bytes=stat.st_size, modified_at=stat.st_mtime))
            if len(found) == _MAX_ARTIFACTS:
                return found
    return found


def find_artifact(run: RunDir, name: str) -> Path:
    parts = name.split("/")
    path = run.path / name
    hidden = any(part.startswith((".", *_UNFINISHED)) or not part for part in parts) or name in _PRIVATE
    try:
        inside = not hidden and path.resolve() == run.path.resolve() / name and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        inside = False
    if not inside:
        raise NotFound("the job has no such artifact")
    return path


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def list_checkpoints(run: RunDir) -> list[CheckpointView]:
    found = []
    for checkpoint in run.list_checkpoints():
        try:
            files = [path.stat() for path in checkpoint.path.rglob("*") if path.is_file()]
            created_at = checkpoint.path.stat().st_mtime
        except OSError:
            continue  # pruned meanwhile
        found.append(
            CheckpointView(
                step=checkpoint.step,
                path=checkpoint.path.relative_to(run.path).as_posix(),
                bytes=sum(stat.st_size for stat in files),
                created_at=created_at,
                validation_loss=_finite(checkpoint.validation_loss),
            )
        )
    return found
