"""The state behind the Tinker API, put together: sessions, models, samplers, results, runs, and what sweeps them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time

from lockstep.service.access import Caller
from lockstep.service.data_dir import DataDir
from lockstep.service.errors import NotFound, ServiceError
from lockstep.service.tinker.process import TinkerProcess
from lockstep.service.tinker.results import Promise, Results, StoredResult
from lockstep.service.tinker.runs import Runs, SavedWeights, TrainingRun
from lockstep.service.tinker.samplers import Samplers
from lockstep.service.tinker.sessions import TinkerSession, TinkerSessions
from lockstep.service.tinker.settings import TinkerSettings
from lockstep.service.tinker.training import Training

_SWEEP_S = 5.0
log = logging.getLogger(__name__)


class TinkerServer:
    """`start` and all else on the thread of the event loop."""

    def __init__(self, settings: TinkerSettings, data_dir: DataDir) -> None:
        self.settings = settings
        self.secret = secrets.token_bytes(32)
        """Signs the addresses of downloads, for the life of the service."""
        folder = data_dir.path / "tinker"
        self.processes = {
            served.name: TinkerProcess(served, settings, folder / "logs" / f"{_as_file_name(served.name)}.log")
            for served in settings.models
        }
        self.runs = Runs(folder, data_dir.discard)
        self.results = Results(settings)
        self.sessions = TinkerSessions(settings.session_timeout_s)
        self.samplers = Samplers(
            settings, self.processes, self.runs, self.results, self.sessions, folder, data_dir.discard
        )
        self.training = Training(settings, self.processes, self.runs, self.results, self.samplers)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await asyncio.to_thread(self.runs.load)
        await asyncio.to_thread(self.samplers.clear_folder)
        self._tasks = [asyncio.create_task(self._sweep_again_and_again())]
        self._tasks += [asyncio.create_task(_load_early(process)) for process in self.processes.values()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self.processes.values()))

    # --- sessions ----------------------------------------------------------------------------------------------------

    def end_session(self, session: TinkerSession, why: str) -> None:
        self.sessions.forget(session)
        for model_id in session.model_ids:
            self.training.unload(model_id, why)
        for sampler_id in session.sampler_ids:
            self.samplers.close(sampler_id)

    # --- results -----------------------------------------------------------------------------------------------------

    def find_result(self, caller: Caller, request_id: str) -> Promise | StoredResult:
        """Of a request to a model that an earlier service had in memory, that it is lost."""
        promise = self.results.find(request_id)
        if promise is not None and caller.may_see(promise.owner):
            self.sessions.touch(request_id.partition(":")[0])
            return promise
        run = self.runs.find(request_id.rpartition(":")[0])
        is_lost = promise is None and not self.results.was_dropped(request_id)
        if is_lost and run is not None and caller.may_see(run.owner) and not self.training.has(run.id):
            return StoredResult.of({"error": str(self.training.lost(run)), "category": "server"})
        raise self.results.refuse_unknown(request_id[:200])

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def find_run(self, caller: Caller, run_id: str) -> TrainingRun:
        run = self.runs.find(run_id)
        if run is None or not caller.may_see(run.owner):
            raise NotFound(f"there is no training run {run_id[:200]}")
        return run

    def find_checkpoint(self, caller: Caller, path: str) -> tuple[TrainingRun, SavedWeights]:
        run, saved = self.runs.resolve(path)
        if not caller.may_see(run.owner):
            raise NotFound(f"there is no checkpoint {path}")
        return run, saved

    async def delete_checkpoint(self, run: TrainingRun, saved: SavedWeights) -> None:
        self.samplers.close_folder(run, self.runs.folder_of(run, saved))
        await asyncio.to_thread(self.runs.delete, run, saved)

    def sign(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    # --- what time does ----------------------------------------------------------------------------------------------

    async def _sweep_again_and_again(self) -> None:
        pause_s = min(_SWEEP_S, self.settings.session_timeout_s / 4, self.settings.kept_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._sweep()
            except Exception:
                log.exception("the sweep of the Tinker API failed, and is tried again")

    async def _sweep(self) -> None:
        self.results.sweep()
        for process in self.processes.values():
            await process.look()
        for session in self.sessions.silent():
            minutes = (time.monotonic() - session.seen_at) / 60
            self.end_session(session, f"its session was silent for {minutes:.0f} minutes")
        for run, saved in self.runs.expired():
            await self.delete_checkpoint(run, saved)


async def _load_early(process: TinkerProcess) -> None:
    """So that the first request does not wait for it; what is wrong with it is in the log."""
    with contextlib.suppress(ServiceError):
        await process.start()


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-") or "model"
