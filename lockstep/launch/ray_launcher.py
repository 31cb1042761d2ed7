"""Runs on a Ray cluster: one process here, the driver, that reserves room there, starts the ranks and watches them.

Seen from here the driver is the run: it is started, polled and ended like the one process of a local run.
Must not import ray: the driver does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.launch.launcher import Resources, RunHandle
from lockstep.launch.local import MARK_VARIABLE, LocalLauncher, end_gently

DRIVER_MODULE = "lockstep.launch.ray_driver"
DRIVER = "the Ray driver"


class RayLauncher(LocalLauncher):
    kind = "ray"
    patience_s = 30.0  # the driver itself ends the ranks when one has failed, and finds out why

    def __init__(
        self, worker_module: str | None = None, grace_s: float = 20.0, working_dir: Path | None = None
    ) -> None:
        super().__init__(worker_module, grace_s, working_dir)

    def _command(self, run_dir: Path, procs: int) -> list[str]:
        return [sys.executable, "-m", DRIVER_MODULE, str(run_dir), self.worker_module]

    def _environment(self, mark: str, resources: Resources) -> dict[str, str]:
        return {**os.environ, MARK_VARIABLE: mark, "PYTHONUNBUFFERED": "1"}

    def _watched(self, handle: RunHandle) -> dict[str, tuple[int, int]]:
        return {DRIVER: (0, handle.pid)}

    def _first_process(self, num_ranks: int) -> str:
        return DRIVER

    def _end(self, handle: RunHandle, hurry: Callable[[], bool] = lambda: False) -> None:
        """The driver first, alone: it ends what runs on all nodes, for which it needs the cluster."""
        if self._is_alive(handle):
            end_gently([handle.pid])
            deadline = time.monotonic() + self.grace_s
            while self._is_alive(handle) and time.monotonic() < deadline and not hurry():
                time.sleep(0.05)
        super()._end(handle, hurry)
