"""`lockstep serve` with scripted jobs: python serve_scripted.py DATA_DIR PORT [key=value of the settings ...].

LOCKSTEP_TEST_KILL names a moment of the first launch at which this process kills itself: before, between (the job's
process is there, its handle is not written), after. A file `pragma` beside the data directory is what SQLite is told
whenever a connection is used: a test makes the database full or read-only with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lockstep.launch import LocalLauncher, Resources, RunHandle, local
from lockstep.rundir import write_atomically
from lockstep.service.app import make_manager, run_server
from lockstep.service.settings import ServiceSettings


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_handle(path: Path, text: str, *, durable: bool = True) -> None:
    if path.name == local.HANDLE_FILE:
        die()
    write_atomically(path, text, durable=durable)


class DyingLauncher(LocalLauncher):
    moment = ""

    def start(self, run_dir: Path, resources: Resources, *, launch_id: str | None = None) -> RunHandle:
        if self.moment == "before":
            die()
        if self.moment == "between":
            local.write_atomically = die_at_handle  # type: ignore[attr-defined]
        handle = super().start(run_dir, resources, launch_id=launch_id)
        if self.moment == "after":
            die()
        return handle


def obey(path: Path) -> None:
    def tell(connection: sqlite3.Connection, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            connection.execute(f"PRAGMA {path.read_text()}")

    sa.event.listen(sa.Pool, "checkout", tell)


def main() -> None:
    data_dir, port, *rest = sys.argv[1:]
    obey(Path(data_dir).parent / "pragma")
    given: dict[str, Any] = dict(pair.split("=", 1) for pair in rest)
    changes = {
        key: Path(value) if key in ("token_file", "tls_cert", "tls_key") else json.loads(value)
        for key, value in given.items()
    }
    launcher = DyingLauncher("scripted_job", grace_s=2.0)
    launcher.moment = os.environ.get("LOCKSTEP_TEST_KILL", "")
    changes.setdefault("restart_delay_s", 0.1)
    settings = ServiceSettings(data_dir=Path(data_dir), port=int(port), **changes)
    run_server(settings, make_manager(settings, launcher))


if __name__ == "__main__":
    main()
