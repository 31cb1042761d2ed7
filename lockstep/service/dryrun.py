"""What needs a tokenizer or a model's configuration is asked of the command, in a process of its own with a deadline.

The service itself never loads torch. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from anyio import to_thread

from lockstep.config import RunConfig
from lockstep.service.errors import Busy, ServiceError
from lockstep.service.layout import DataDir

_AT_ONCE = 2
_MAX_WAITING = 8
_LOOK_EVERY_S = 0.5
IsUnwanted = Callable[[], Awaitable[bool]]


class DryRuns:
    def __init__(self, data_dir: DataDir, timeout_s: float) -> None:
        self._data_dir = data_dir
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def plan(self, config: RunConfig, is_unwanted: IsUnwanted) -> dict[str, Any]:
        """What `lockstep train --dry-run --json` prints."""
        return await self._ask(config, ["train"], ["--dry-run", "--json"], is_unwanted)

    async def preview(self, config: RunConfig, num_rows: int, is_unwanted: IsUnwanted) -> dict[str, Any]:
        """What `lockstep data --json` prints."""
        return await self._ask(config, ["data"], ["--json", "--random", str(num_rows)], is_unwanted)

    async def _ask(
        self, config: RunConfig, command: list[str], options: list[str], is_unwanted: IsUnwanted
    ) -> dict[str, Any]:
        if self._waiting >= _MAX_WAITING:
            raise Busy("too many dry runs are under way: try again in a minute")
        self._waiting += 1
        file = self._data_dir.uploads / f"{uuid.uuid4().hex}.yaml"
        try:
            async with self._room:
                await to_thread.run_sync(_write, file, config.to_yaml())
                return await self._run([*command, str(file), *options], file, is_unwanted)
        finally:
            self._waiting -= 1
            file.unlink(missing_ok=True)

    async def _run(self, arguments: list[str], file: Path, is_unwanted: IsUnwanted) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lockstep",
            *arguments,
            cwd=self._data_dir.empty,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        printed = asyncio.create_task(process.communicate())
        deadline = time.monotonic() + self._timeout_s
        try:
            while not (await asyncio.wait({printed}, timeout=_LOOK_EVERY_S))[0]:
                if await is_unwanted():
                    raise Busy("nobody waits for the dry run any more")
                if time.monotonic() > deadline:
                    raise Busy(f"the dry run took longer than {self._timeout_s:.0f} s and was ended")
            out, err = printed.result()
        finally:
            printed.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also those that tokenise
            with contextlib.suppress(ProcessLookupError):
                await process.wait()
        if process.returncode != 0:
            raise ServiceError(_sentence(err.decode(errors="replace")).replace(str(file), "the configuration"))
        return json.loads(out, parse_constant=lambda _: None)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sentence(printed: str) -> str:
    """The command's own error, or the last line of a traceback."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["the dry run ended without a word"])[-1]
