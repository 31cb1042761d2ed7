"""Models that are trained: created, stepped, saved and loaded, each by its requests in their order."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.service.access import Caller
from lockstep.service.errors import NotFound, ServiceError, TooMany
from lockstep.service.tinker.errors import Gone, ProcessFailed, ProcessLost
from lockstep.service.tinker.forward_backward import as_training_body, write_output
from lockstep.service.tinker.process import TinkerProcess
from lockstep.service.tinker.results import PROTOBUF, Promise, Results, StoredResult
from lockstep.service.tinker.runs import Kind, Runs, SavedWeights, TrainingRun
from lockstep.service.tinker.samplers import Samplers
from lockstep.service.tinker.schemas import AdapterChoice, CreateModel, LoadWeights, OptimizerStep, SaveWeights, read
from lockstep.service.tinker.sessions import TinkerSession
from lockstep.service.tinker.settings import TinkerSettings
from lockstep.service.tinker.turns import MAX_AHEAD, Operation, Turns

_MISSING = "missing"  # the kind of a request that did not arrive in time
_SAVED_AS: dict[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


@dataclass(eq=False)
class ModelInTraining:
    """In the memory of a process. `launch` and `run` are there once it has been created."""

    id: str
    session_id: str
    owner: str
    process: TinkerProcess
    adapter: AdapterChoice
    turns: Turns
    user_metadata: dict[str, Any] | None = None
    launch: int | None = None
    run: TrainingRun | None = None

    @property
    def is_there(self) -> bool:
        return self.launch is None or self.process.has(self.launch)

    async def call(self, method: str, **body: object) -> dict[str, Any]:
        assert self.launch is not None, "a request runs after the creation of its model"
        return await self.process.call(method, {"model_id": self.id, **body}, self.launch)

    @property
    def saved_run(self) -> TrainingRun:
        if self.run is None:
            raise ServiceError(f"model {self.id} was not created")
        return self.run


class Training:
    """For the thread of the event loop alone. Requests are checked at their turn: one that is refused at the door would
    be a hole in the order."""

    def __init__(
        self,
        settings: TinkerSettings,
        processes: dict[str, TinkerProcess],
        runs: Runs,
        results: Results,
        samplers: Samplers,
    ) -> None:
        self._settings, self._processes, self._runs = settings, processes, runs
        self._results, self._samplers = results, samplers
        self._models: dict[str, ModelInTraining] = {}
        self._ends: dict[str, str] = {}  # why a model of this service's life is not in memory any more

    # --- models ------------------------------------------------------------------------------------------------------

    def create(self, session: TinkerSession, payload: object) -> str:
        """The id of the request."""
        request = read(CreateModel, payload)
        model_id = f"{session.id}:train:{request.model_seq_id}"
        request_id = f"{model_id}:0"
        if self._results.find(request_id) is not None or self._results.was_dropped(request_id):
            return request_id
        process = self._processes.get(request.base_model)
        if process is None:
            raise ServiceError(
                f"there is no base model {request.base_model[:200]!r} here: this server has "
                + ", ".join(self._processes)
            )
        if request.lora_config is None:
            raise ServiceError("lora_config is missing: this server trains adapters only")
        _check_optimizer(request.optimizer_config.type)
        self._check_room(process)
        perform, refuse = partial(self._perform, model_id), partial(self._refuse, session.owner, model_id)
        turns = Turns(f"model {model_id}", self._settings.order_timeout_s, perform, refuse)
        model = ModelInTraining(
            model_id, session.id, session.owner, process, request.lora_config, turns, request.user_metadata
        )
        self._models[model_id] = model
        session.model_ids.append(model_id)
        promise = self._results.add(request_id, "create_model", session.owner)
        turns.add(0, promise, partial(self._create, model))
        return request_id

    def find(self, caller: Caller, model_id: str) -> ModelInTraining:
        """One that is in memory; for others the error says where to go on."""
        model = self._models.get(model_id)
        if model is not None and not model.is_there:
            self._end(model, "the process of its base model has ended")
            model = None
        if model is not None and caller.may_change(model.owner):
            return model
        run = self._runs.find(model_id)
        if model is None and run is not None and caller.may_see(run.owner):
            raise self.lost(run)
        raise NotFound(f"there is no model {model_id[:200]}")

    def has(self, model_id: str) -> bool:
        return model_id in self._models and self._models[model_id].is_there

    def lost(self, run: TrainingRun) -> Gone:
        why = self._ends.get(run.id, "the service was started again")
        newest = run.newest("weights") or run.newest()  # those for sampling can be trained on too, with a new optimizer
        advice = (
            "it has no checkpoint, so its training starts again with a new model"
            if newest is None
            else f"its newest checkpoint is {run.path_of(newest)}: make a new training client from it"
        )
        return Gone(f"model {run.id} is not in memory any more, because {why}; {advice}")

    def unload(self, model_id: str, why: str) -> None:
        model = self._models.get(model_id)
        if model is None:
            return
        self._end(model, why)
        if model.launch is not None and model.process.has(model.launch):
            model.process.send("unload_model", {"model_id": model_id})

    # --- requests ----------------------------------------------------------------------------------------------------

    def known(self, caller: Caller, model_id: str, number: int, kind: str) -> str | None:
        """The id of a request that was sent before."""
        request_id = f"{model_id}:{number}"
        promise = self._results.find(request_id)
        if promise is None:
            return request_id if self._results.was_dropped(request_id) else None
        if not caller.may_change(promise.owner):
            raise NotFound(f"there is no model {model_id[:200]}")
        if promise.kind not in (kind, _MISSING):
            raise ServiceError(f"seq_id {number} of model {model_id} is taken by another request: {promise.kind}")
        return request_id

    def submit(
        self,
        caller: Caller,
        model_id: str,
        number: int,
        kind: str,
        operation: Callable[[ModelInTraining], Operation],
        num_bytes: int = 0,
    ) -> str:
        """The id of the request: the same one when it is sent again."""
        if (request_id := self.known(caller, model_id, number, kind)) is not None:
            return request_id
        model = self.find(caller, model_id)
        if not model.turns.next <= number <= model.turns.next + MAX_AHEAD or number < 1:
            raise ServiceError(
                f"seq_id {number} is out of order: the next one of model {model_id} is {model.turns.next}"
            )
        if num_bytes and self._results.waiting_bytes + num_bytes > self._settings.max_waiting_bytes:
            raise TooMany("too much training data waits for its turn: send this again later")
        promise = self._results.add(f"{model_id}:{number}", kind, model.owner, num_bytes)
        model.turns.add(number, promise, operation(model))
        return promise.id

    def forward_backward(self, request: Any) -> Callable[[ModelInTraining], Operation]:
        async def run(model: ModelInTraining, reading: asyncio.Task[dict[str, Any] | ServiceError]) -> StoredResult:
            body = await reading
            if isinstance(body, ServiceError):
                raise body
            reply = await model.call("forward_backward", **body)
            content = await asyncio.to_thread(write_output, reply, body["shapes"])
            return StoredResult(content, PROTOBUF)

        # It is read while others have their turn.
        return lambda model: partial(run, model, asyncio.create_task(asyncio.to_thread(_read_request, request)))

    def optim_step(self, payload: object) -> Callable[[ModelInTraining], Operation]:
        async def run(model: ModelInTraining) -> StoredResult:
            request = read(OptimizerStep, payload)
            if request.optimizer_params is not None:
                _check_optimizer(request.optimizer_params.type)
            if request.adam_params is None:
                raise ServiceError("adam_params is missing")
            adam = request.adam_params.model_dump()
            clip = adam.pop("grad_clip_norm")
            reply = await model.call("optim_step", **adam, max_grad_norm=clip if clip > 0 else None)
            # JSON has no NaN; the client reads the word as one.
            metrics = {name: value if math.isfinite(value) else str(value) for name, value in reply["metrics"].items()}
            return StoredResult.of({"metrics": metrics})

        return lambda model: partial(run, model)

    def save(self, payload: object, kind: Kind) -> Callable[[ModelInTraining], Operation]:
        return lambda model: partial(self._save, model, payload, kind)

    def load(self, caller: Caller, payload: object) -> Callable[[ModelInTraining], Operation]:
        return lambda model: partial(self._load, model, caller, payload)

    # --- what requests do --------------------------------------------------------------------------------------------

    async def _create(self, model: ModelInTraining) -> StoredResult:
        adapter, now = model.adapter, time.time()
        run = TrainingRun(
            model.id,
            model.session_id,
            model.owner,
            model.process.served.name,
            adapter.rank,
            adapter.train_unembed,
            adapter.train_mlp,
            adapter.train_attn,
            created_at=now,
            last_request_at=now,
            user_metadata=model.user_metadata,
        )
        try:
            model.launch = await model.process.start()
            await model.call("create_model", **adapter.model_dump())
            await asyncio.to_thread(self._runs.add, run)
        except BaseException:
            self.unload(model.id, "it could not be created")
            raise
        model.run = run
        if self._models.get(model.id) is not model:  # its session ended meanwhile
            model.process.send("unload_model", {"model_id": model.id})
        return StoredResult.of({"model_id": model.id, "type": "create_model"})

    async def _save(self, model: ModelInTraining, payload: object, kind: Kind) -> StoredResult:
        request = read(SaveWeights, payload)
        if request.age_encryption_recipients:
            raise ServiceError("age_encryption_recipients: this server does not encrypt weights")
        run = model.saved_run
        if request.path is None and kind == "sampler_weights" and request.sampling_session_seq_id is not None:
            folder = self._samplers.unnamed_folder(model.session_id, request.sampling_session_seq_id)
            await model.call("save_weights", folder=str(folder), with_optimizer=False)
            sampler_id = self._samplers.add_unnamed(model.session_id, request.sampling_session_seq_id, run, folder)
            return StoredResult.of({"sampling_session_id": sampler_id, "type": _SAVED_AS[kind]})
        if request.path is None:
            raise ServiceError("path is missing: give the checkpoint a name")
        overwrite = request.overwrite and kind == "weights"
        folder = await asyncio.to_thread(self._runs.prepare, run, kind, request.path, overwrite=overwrite)
        try:
            reply = await model.call("save_weights", folder=str(folder), with_optimizer=kind == "weights")
            life = request.ttl_seconds
            now = time.time()
            expires_at = None if life is None else now + life
            saved = SavedWeights(kind, request.path, now, reply["size_bytes"], expires_at, request.user_metadata)
            await asyncio.to_thread(self._runs.commit, run, saved, folder)
        except BaseException:
            _remove_unfinished(folder)
            raise
        if overwrite:
            self._samplers.close_folder(run, self._runs.folder_of(run, saved))
        return StoredResult.of({"path": run.path_of(saved), "type": _SAVED_AS[kind]})

    async def _load(self, model: ModelInTraining, caller: Caller, payload: object) -> StoredResult:
        request = read(LoadWeights, payload)
        if request.weights_access_token is not None:
            raise ServiceError("weights_access_token: this server knows no other accounts' checkpoints")
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        run, saved = self._runs.resolve(request.path)
        if not caller.may_see(run.owner):
            raise NotFound(f"there is no checkpoint {request.path}")
        if run.base_model != model.process.served.name:
            raise ServiceError(
                f"{request.path} is a checkpoint of {run.base_model}, and the model one of {model.process.served.name}"
            )
        if request.optimizer and saved.kind != "weights":
            raise ServiceError(
                f"{request.path} holds no optimizer state: load it without, or load tinker://RUN/weights/NAME"
            )
        await model.call("load_weights", folder=str(self._runs.folder_of(run, saved)), with_optimizer=request.optimizer)
        return StoredResult.of({"path": request.path, "model_id": model.id, "type": "load_weights"})

    # --- how they end ------------------------------------------------------------------------------------------------

    async def _perform(self, model_id: str, promise: Promise, operation: Operation) -> None:
        model = self._models.get(model_id)
        if model is not None and model.run is not None:
            model.run.last_request_at = time.time()
        try:
            await self._results.keep(promise, operation)
        except ProcessLost as error:
            if model is not None:
                self._end(model, str(error))
            run = self._runs.find(model_id)
            self._results.fail(promise, error if run is None else self.lost(run))

    def _refuse(self, owner: str, model_id: str, number: int, error: ServiceError) -> None:
        request_id = f"{model_id}:{number}"
        promise = self._results.find(request_id) or self._results.add(request_id, _MISSING, owner)
        self._results.fail(promise, error)

    def _end(self, model: ModelInTraining, why: str) -> None:
        if self._models.get(model.id) is model:
            del self._models[model.id]
            self._ends[model.id] = why
        missing = ProcessFailed(f"model {model.id} is not there: {why}")
        model.turns.fail_all(missing if model.run is None else self.lost(model.run))

    def _check_room(self, process: TinkerProcess) -> None:
        """Refused for good, not for later: the client would wait for minutes without a word."""
        there = [model for model in self._models.values() if model.process is process and model.is_there]
        if len(there) >= self._settings.max_models:
            raise ServiceError(
                f"{len(there)} models of {process.served.name} are in memory, as many as this server holds at once: "
                "finish a session that is not needed any more, and try again"
            )


def _read_request(request: Any) -> dict[str, Any] | ServiceError:
    """What is wrong with it is said at its turn."""
    try:
        return as_training_body(request)
    except ServiceError as error:
        return error


def _remove_unfinished(folder: Path) -> None:
    shutil.rmtree(folder.parent, ignore_errors=True)


def _check_optimizer(name: str) -> None:
    if name != "adamw":
        raise ServiceError(f"this server has the optimizer adamw, and no {name[:100]!r}")
