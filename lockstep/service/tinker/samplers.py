"""Samplers: a base model, a checkpoint or unnamed weights, with any number of samples under way at a time."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lockstep.service.access import Caller
from lockstep.service.errors import NotFound, ServiceError, TooMany
from lockstep.service.tinker.errors import ProcessLost
from lockstep.service.tinker.process import TinkerProcess
from lockstep.service.tinker.results import PROTOBUF, Promise, Results, StoredResult
from lockstep.service.tinker.runs import Runs, SavedWeights, TrainingRun
from lockstep.service.tinker.sampling import as_sample_body, write_response
from lockstep.service.tinker.schemas import AskedSample, CreateSampler, read
from lockstep.service.tinker.sessions import TinkerSession, TinkerSessions
from lockstep.service.tinker.settings import TinkerSettings


@dataclass(eq=False)
class SamplingSession:
    """`run` and `saved` are those of a checkpoint; unnamed weights are in `unnamed`, and deleted with it."""

    id: str
    session_id: str
    owner: str
    process: TinkerProcess
    run: TrainingRun | None = None
    saved: SavedWeights | None = None
    unnamed: Path | None = None
    used_at: float = field(default_factory=time.monotonic)
    under_way: dict[Promise, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def model_path(self) -> str | None:
        return None if self.run is None or self.saved is None else self.run.path_of(self.saved)


class Samplers:
    """For the thread of the event loop alone."""

    def __init__(
        self,
        settings: TinkerSettings,
        processes: dict[str, TinkerProcess],
        runs: Runs,
        results: Results,
        sessions: TinkerSessions,
        folder: Path,
        discard: Callable[[Path], None],
    ) -> None:
        self._settings, self._processes, self._runs = settings, processes, runs
        self._results, self._sessions = results, sessions
        self._folder, self._discard = folder / "unnamed", discard
        self._samplers: dict[str, SamplingSession] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    def clear_folder(self) -> None:
        """Of the unnamed weights that an earlier service left."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)

    def create(self, caller: Caller, session: TinkerSession, payload: object) -> str:
        request = read(CreateSampler, payload)
        sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self._samplers:
            return sampler_id
        run = saved = None
        if request.model_path is not None:
            run, saved = self._runs.resolve(request.model_path)
            if not caller.may_see(run.owner):
                raise NotFound(f"there is no checkpoint {request.model_path}")
        name = run.base_model if run is not None else request.base_model
        if name is None:
            raise ServiceError("give base_model or model_path: what is to be sampled from?")
        process = self._processes.get(name)
        if process is None:
            raise ServiceError(
                f"there is no base model {name[:200]!r} here: this server has {', '.join(self._processes)}"
            )
        self._add(SamplingSession(sampler_id, session.id, session.owner, process, run, saved))
        return sampler_id

    def find(self, caller: Caller, sampler_id: str) -> SamplingSession:
        sampler = self._samplers.get(sampler_id)
        if sampler is None or not caller.may_see(sampler.owner):
            raise NotFound(
                f"there is no sampling session {sampler_id[:200]}: its session has ended, it was one of more "
                f"than {self._settings.max_unnamed} unnamed ones, or the service was started again; make a new client"
            )
        return sampler

    # --- unnamed weights ---------------------------------------------------------------------------------------------

    def unnamed_folder(self, session_id: str, number: int) -> Path:
        return self._folder / f"{session_id}-{number}"

    def add_unnamed(self, session_id: str, number: int, run: TrainingRun, folder: Path) -> str:
        sampler_id = f"{session_id}:sample:{number}"
        process = self._processes[run.base_model]
        self._add(SamplingSession(sampler_id, session_id, run.owner, process, unnamed=folder))
        mine = [each for each in self._samplers.values() if each.unnamed is not None and each.session_id == session_id]
        idle = sorted((each for each in mine if not each.under_way), key=lambda each: each.used_at)
        for sampler in idle[: max(len(mine) - self._settings.max_unnamed, 0)]:
            self.close(sampler.id)
        return sampler_id

    def close_folder(self, run: TrainingRun, folder: Path) -> None:
        """Its weights were deleted or replaced."""
        process = self._processes.get(run.base_model)
        if process is not None:
            process.send("close_adapter", {"adapter": str(folder)})

    def close(self, sampler_id: str) -> None:
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is None:
            return
        for promise in list(sampler.under_way):
            self._cancel(sampler, promise, "its session has ended")
        if sampler.unnamed is not None:
            sampler.process.send("close_adapter", {"adapter": str(sampler.unnamed)})
            deleting = asyncio.create_task(asyncio.to_thread(self._discard, sampler.unnamed))
            self._deleting.add(deleting)
            deleting.add_done_callback(self._deleting.discard)
        elif sampler.run is not None and sampler.saved is not None and not self._uses(sampler.saved):
            self.close_folder(sampler.run, self._runs.folder_of(sampler.run, sampler.saved))

    def _uses(self, saved: SavedWeights) -> bool:
        return any(sampler.saved is saved for sampler in self._samplers.values())

    # --- samples -----------------------------------------------------------------------------------------------------

    def sample(self, caller: Caller, request: AskedSample) -> str:
        """The id of the request: the same one when it is sent again."""
        sampler = self.find(caller, request.sampling_session_id)
        self._sessions.touch(sampler.session_id)
        sampler.used_at = time.monotonic()
        request_id = f"{sampler.id}:{request.seq_id}"
        if self._results.find(request_id) is not None or self._results.was_dropped(request_id):
            return request_id
        others = sum(len(each.under_way) for each in self._samplers.values() if each.process is sampler.process)
        if others >= self._settings.max_samples:
            raise TooMany(f"{others} samples of {sampler.process.served.name} are under way: send this again later")
        promise = self._results.add(request_id, "sample", sampler.owner)
        task = asyncio.create_task(self._perform(sampler, promise, request))
        sampler.under_way[promise] = task
        task.add_done_callback(lambda _: sampler.under_way.pop(promise, None))
        return request_id

    def cancel(self, promise: Promise) -> None:
        if promise.kind != "sample":
            raise ServiceError("only sampling can be cancelled")
        for sampler in self._samplers.values():
            if promise in sampler.under_way:
                self._cancel(sampler, promise, "its client asked for it")

    def _cancel(self, sampler: SamplingSession, promise: Promise, why: str) -> None:
        self._results.fail(promise, ServiceError(f"the sample was cancelled: {why}"))
        sampler.process.send("cancel", {"call": promise.id})

    async def _perform(self, sampler: SamplingSession, promise: Promise, request: AskedSample) -> None:
        try:
            await self._results.keep(promise, partial(self._sample, sampler, promise, request))
        except ProcessLost as error:
            self._results.fail(promise, error)

    async def _sample(self, sampler: SamplingSession, promise: Promise, request: AskedSample) -> StoredResult:
        body = as_sample_body(request)
        adapter = sampler.unnamed
        if sampler.run is not None and sampler.saved is not None:
            if sampler.saved.is_expired() or sampler.run.checkpoints.get(sampler.saved.id) is None:
                raise NotFound(f"the checkpoint {sampler.model_path} was deleted")
            adapter = self._runs.folder_of(sampler.run, sampler.saved)
        launch = await sampler.process.start()
        body |= {"call": promise.id, "adapter": str(adapter or "")}
        reply = await sampler.process.call("sample", body, launch)
        return StoredResult(await asyncio.to_thread(write_response, reply, request), PROTOBUF)

    def _add(self, sampler: SamplingSession) -> None:
        session = self._sessions.use(Caller(sampler.owner, "admin"), sampler.session_id)
        session.sampler_ids.append(sampler.id)
        self._samplers[sampler.id] = sampler
