"""The process of a base model as the service sees it: started when needed, asked with deadlines, started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import ModelConfig
from lockstep.processes.local import LocalWorker
from lockstep.processes.worker import WorkerError, WorkerFailed, WorkerTimedOut
from lockstep.service.errors import ServiceError
from lockstep.service.tinker.errors import ProcessFailed, ProcessLost
from lockstep.service.tinker.settings import TinkerModel, TinkerSettings

_START_TIMEOUT_S = 60.0  # for the process itself, before it loads anything
_PING_TIMEOUT_S = 60.0
log = logging.getLogger(__name__)


class TinkerProcess:
    """For the thread of the event loop alone."""

    def __init__(self, served: TinkerModel, settings: TinkerSettings, log_path: Path) -> None:
        self.served = served
        self._settings, self._log_path = settings, log_path
        self._worker: LocalWorker | None = None
        self._starting: asyncio.Task[None] | None = None
        self.launch = 0
        """Which process this is. Models are in the memory of one process, and lost with it."""
        self.max_context_length: int | None = None
        self._told: set[str] = set()  # fast ways that it said it could not take

    def has(self, launch: int) -> bool:
        """Whether the process that was started as this one is still there."""
        return self.launch == launch and self._worker is not None and self._worker.is_alive()

    async def start(self) -> int:
        """Returns the number of the launch, at once where it runs already."""
        if self._worker is not None and self._worker.is_alive():
            return self.launch
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # others wait for it too
        return self.launch

    async def call(self, method: str, body: Mapping[str, object], launch: int) -> dict[str, Any]:
        """A mistake of the caller is a ServiceError. `launch`: the process it is meant for."""
        worker = self._worker
        if worker is None or not self.has(launch):
            raise ProcessLost(f"the process of {self.served.name} has ended")
        return await self._ask(worker, method, body, self._settings.call_timeout_s)

    def send(self, method: str, body: Mapping[str, object]) -> None:
        """Without waiting for the answer, to a process that may be gone."""
        if self._worker is not None and self._worker.is_alive():
            self._worker.call(method, body, timeout_s=self._settings.call_timeout_s)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)

    async def _start(self) -> None:
        model = ModelConfig(path=self.served.path, precision=self._settings.precision).model_dump(mode="json")
        settings = {
            "model": model,
            "batch_size": None,
            "micro_batch_tokens": self._settings.micro_batch_tokens,
            "device": self._settings.device,
        }
        name = f"tinker {self.served.name}"
        try:
            worker = await asyncio.to_thread(
                lambda: LocalWorker.spawn(
                    name,
                    self._settings.entry,
                    settings,
                    log_path=self._log_path,
                    start_timeout_s=_START_TIMEOUT_S,
                )
            )
        except WorkerError as error:
            log.error("%s", error)
            raise ProcessLost(f"the process of {self.served.name} cannot be started: {_first_line(error)}") from error
        try:
            described = await self._ask(worker, "describe", {}, self._settings.start_timeout_s)
        except BaseException as error:
            await asyncio.to_thread(worker.kill)
            if isinstance(error, ProcessFailed):
                raise ProcessFailed(f"{self.served.name} cannot be loaded: {error}") from error
            raise
        self.max_context_length = described.get("max_context_length")
        self._worker = worker
        self.launch += 1
        log.info("%s is ready on %s in %s", self.served.name, described.get("device"), described.get("precision"))
        self._tell(described.get("slow", ()))

    async def look(self) -> None:
        """For what it has found slow since."""
        if self._worker is not None and self._worker.is_alive():
            with contextlib.suppress(WorkerError):
                reply = await asyncio.wrap_future(self._worker.call("ping", {}, timeout_s=_PING_TIMEOUT_S))
                self._tell(reply.body.get("slow", ()))

    def _tell(self, slow: Iterable[str]) -> None:
        for message in slow:
            if message not in self._told:
                self._told.add(message)
                log.warning("%s: %s", self.served.name, message)

    async def _ask(
        self, worker: LocalWorker, method: str, body: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        try:
            reply = await asyncio.wrap_future(worker.call(method, body, timeout_s=timeout_s))
        except WorkerFailed as error:
            log.error("%s\n%s", error, error.traceback)
            raise ProcessFailed(error.reason if method == "describe" else f"{method} failed: {error.reason}") from error
        except WorkerError as error:
            log.error("%s", error)
            if isinstance(error, WorkerTimedOut) and method == "sample":
                await self._give_up_sample(worker, body)
                raise ProcessFailed(_first_line(error)) from error
            await asyncio.to_thread(worker.kill)  # one that gives no answer holds models that nobody can reach
            raise ProcessLost(_first_line(error)) from error
        if "mistake" in reply.body:
            raise ServiceError(str(reply.body["mistake"]))
        return reply.body

    async def _give_up_sample(self, worker: LocalWorker, body: Mapping[str, object]) -> None:
        """It may have waited behind many others: the process is lost only if it answers nothing else either."""
        worker.call("cancel", {"call": body["call"]}, timeout_s=self._settings.call_timeout_s)
        await self._ask(worker, "describe", {}, self._settings.call_timeout_s)


def _first_line(error: Exception) -> str:
    """The rest is the end of a log, for the operator."""
    return str(error).splitlines()[0]
