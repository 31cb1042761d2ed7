"""A run directory as lines of text, and back: what a pod prints is all that a machine far away sees of its run.

A line is either JSON with the key "lockstep", which names a file of the run directory, or for people.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.rundir import RunDir, open_log, write_atomically

_KEY = "lockstep"
_RECORDS = ("metrics.jsonl", "events.jsonl")
_MAX_BACKLOG = 2**20  # bytes of records that a new pod repeats
_MIRRORED = re.compile(r"status\.json|metrics\.jsonl|events\.jsonl|logs/rank-\d+\.error\.json")
_OFFSETS_FILE = ".echo.json"


class RunEcho:
    """Prints what is new in a run directory. `ranks` are those of this machine; `is_first`: it has rank 0."""

    def __init__(self, run: RunDir, ranks: Iterable[int] | None, *, is_first: bool, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._ranks, self._is_first = None if ranks is None else set(ranks), is_first
        self._offsets: dict[str, int] = {
            file.name: file.stat().st_size for file in run.logs.glob("rank-*.log")
        }  # of an earlier start
        self._texts: dict[str, str] = {}

    def show(self) -> None:
        for file in sorted(self._run.logs.glob("rank-*.log")):
            rank = file.stem.removeprefix("rank-")
            if self._ranks is None or (rank.isdecimal() and int(rank) in self._ranks):
                for _, line in self._new_lines(file, file.name):
                    shown = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar, its last state
                    self._say(f"rank {rank}: {shown}")
        if not self._is_first:
            return
        for name in _RECORDS:
            for offset, line in self._new_lines(self._run.path / name, name):
                self._say(json.dumps({_KEY: name, "at": offset, "line": line}))
        for file in (*sorted(self._run.logs.glob("rank-*.error.json")), self._run.path / "status.json"):
            self._show_text(file)

    def _show_text(self, file: Path) -> None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            return
        name = file.relative_to(self._run.path).as_posix()
        if self._texts.get(name) != text:
            self._texts[name] = text
            self._say(json.dumps({_KEY: name, "text": text}))

    def _new_lines(self, file: Path, name: str) -> list[tuple[int, str]]:
        """Whole lines since the last call, each with its offset."""
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, 2)
                start = self._offsets.setdefault(name, max(size - _MAX_BACKLOG, 0) if name in _RECORDS else 0)
                opened.seek(start)
                content = opened.read()
        except OSError:
            return []
        lines: list[tuple[int, str]] = []
        for raw in content.split(b"\n")[:-1]:  # the last has no end yet
            lines.append((self._offsets[name], raw.decode(errors="replace")))
            self._offsets[name] += len(raw) + 1
        return lines


class RunMirror:
    """A run directory here, written from lines of a pod. Lines may come again: what is known is passed over."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        try:
            self._next: dict[str, int] = json.loads((run.path / _OFFSETS_FILE).read_text())
        except (OSError, ValueError):
            self._next = {}

    def age_s(self) -> float | None:
        """Since somebody last followed the run; None: nobody has."""
        try:
            return max(time.time() - (self._run.path / _OFFSETS_FILE).stat().st_mtime, 0.0)
        except OSError:
            return None

    def take(self, line: str) -> bool:
        """False: it is for people."""
        record = _parse(line)
        if record is None:
            return False
        name = record[_KEY]
        if name in _RECORDS:
            self._append(name, record)
        elif isinstance(record.get("text"), str):
            self._replace(name, record["text"])
        return True

    def flush(self) -> None:
        write_atomically(self._run.path / _OFFSETS_FILE, json.dumps(self._next), durable=False)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        at, line = record.get("at"), record.get("line")
        if not isinstance(at, int) or not isinstance(line, str) or at < self._next.get(name, 0):
            return
        with open_log(self._run.path / name) as file:
            file.write(line.encode() + b"\n")
        self._next[name] = at + len(line.encode()) + 1

    def _replace(self, name: str, text: str) -> None:
        if name != "status.json":
            self._run.logs.mkdir(exist_ok=True)
            write_atomically(self._run.path / name, text, durable=False)
            return
        try:
            theirs = json.loads(text)
        except ValueError:
            return
        if isinstance(theirs, dict):
            theirs.pop("launch", None)  # which launch this is, is known here
            self._run.write_status(**theirs)


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    name = record.get(_KEY) if isinstance(record, dict) else None
    return record if isinstance(name, str) and _MIRRORED.fullmatch(name) else None
