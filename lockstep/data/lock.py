"""A lock among processes and machines that share a folder: a file created exclusively, with a heartbeat.

The holder keeps rewriting it and others time the changes by their own clocks: no clocks are compared, and no flock is
needed, which network file systems often lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

_BEAT_S = 2.0
_SIZE = 1024  # bytes of a lock file: one write replaces them all


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lock file. `space` names the running system in which `pid` is valid."""

    token: str
    host: str
    pid: int
    space: str
    beat: int
    rows: int

    @property
    def is_gone(self) -> bool:
        """Whether its process certainly no longer runs; False where that is unknown, as on another machine."""
        if self.space != _own_space():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def _own_space() -> str:
    """Containers may share a host's name but not its process numbers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


class Lock:
    """A held lock. The holder sets `rows` as it makes progress; a thread writes it into the file."""

    def __init__(self, path: Path, descriptor: int, beat_s: float) -> None:
        self.path = path
        self.token = uuid.uuid4().hex
        self.rows = 0
        self._beat = 0
        self._descriptor = descriptor
        self._released = threading.Event()
        self.beat()
        self._thread = threading.Thread(target=self._keep_beating, args=(beat_s,), daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        holder = read_holder(self.path)
        if holder is not None and holder.token == self.token:  # else another process thought us dead and took over
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)

    def _keep_beating(self, beat_s: float) -> None:
        while not self._released.wait(beat_s):
            self._beat += 1
            with contextlib.suppress(OSError):  # a full disk or a lost server: others will take over
                self.beat()

    def beat(self) -> None:
        """Writes into the open file, never by name: if another process has taken over, its lock stays untouched."""
        holder = Holder(self.token, socket.gethostname(), os.getpid(), _own_space(), self._beat, self.rows)
        text = json.dumps({name: getattr(holder, name) for name in Holder.__slots__})
        os.pwrite(self._descriptor, text.ljust(_SIZE).encode(), 0)
        os.fsync(self._descriptor)


def try_lock(path: Path, *, beat_s: float = _BEAT_S) -> Lock | None:
    """The lock, or None while another process holds it."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    except FileExistsError:
        return None
    try:
        return Lock(path, descriptor, beat_s)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def read_holder(path: Path) -> Holder | None:
    """None where there is no lock, or it is being written right now."""
    return parse_holder(_read_bytes(path))


def parse_holder(text: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def break_lock(path: Path, dead: Holder | None) -> None:
    """Remove the lock of a dead holder. Several processes may try: one that moved a newer lock puts it back."""
    if read_holder(path) != dead:
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    moved = read_holder(aside)
    if (moved and moved.token) != (dead and dead.token):
        # Not restored where there are no hard links, or where a third process has locked since. Two then build the same
        # entry, each in its own folder, and the second finds the first one's entry: only work is lost.
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


class Watch:
    """A lock as seen by a waiting process, timed by its own clock. `holder` is None until it could be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder: Holder | None = None
        self._text = b""
        self._changed_at = self._advanced_at = time.monotonic()
        self.look()

    def look(self) -> None:
        now, text = time.monotonic(), _read_bytes(self.path)
        if text != self._text:
            self._text, self._changed_at = text, now
        seen = parse_holder(text)
        if seen is None:
            return
        if self.holder is None or (seen.token, seen.rows) != (self.holder.token, self.holder.rows):
            self._advanced_at = now
        self.holder = seen

    @property
    def silent_s(self) -> float:
        """Seconds since the lock last changed."""
        return time.monotonic() - self._changed_at

    @property
    def stuck_s(self) -> float:
        """Seconds since the holder last reported new rows."""
        return time.monotonic() - self._advanced_at
