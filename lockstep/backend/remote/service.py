"""TrainingService: the backend's calls on ranks in other processes, on this machine or on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from lockstep.backend.remote import wire
from lockstep.backend.remote.ranks import RemoteRanks, TrainingFailed
from lockstep.config import LoraConfig, ModelConfig, ParallelConfig, PoolConfig
from lockstep.config.launch import Strategy
from lockstep.model.load import check_model_source
from lockstep.processes.local import LocalWorker
from lockstep.processes.ray import import_ray, reserve
from lockstep.processes.tree import num_cores
from lockstep.processes.worker import Reply, Worker
from lockstep.types import Datum, Logprobs, LossResult, LossSpec, NamedTensors, OptimResult, OptimStep

ENTRY = "lockstep.backend.remote.worker:start"
LAYOUTS: dict[str, dict[str, str | int]] = {"ddp": {"replicate": "auto", "shard": 1}, "fsdp": {"shard": "auto"}}
ModelSource = str | Path | ModelConfig | Mapping[str, Any]


@dataclass(frozen=True)
class ServiceOptions:
    """How a service runs. `timeout_s` is the deadline of every call, from when it is made, and of every collective.

    `parallel` describes a layout that `backend` has no word for. `health_timeout_s`: a rank that does not answer pings
    for so long is given up. `address`, `cpus`, `gpus`, `resources` and `strategy` are for Ray: the cluster to join
    (None: start one here), and what each rank needs of it.
    """

    procs: int = 1
    backend: str = "local"
    parallel: ParallelConfig | Mapping[str, Any] | None = None
    lora: LoraConfig | Mapping[str, Any] | None = None
    precision: str | None = None
    device: str = "auto"
    reference: str = "none"
    micro_batch_tokens: int = 4096
    seed: int = 0
    timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    health_timeout_s: float = 8.0
    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Strategy = "PACK"

    def __post_init__(self) -> None:
        if self.procs < 1:
            raise ValueError(f"procs is {self.procs}: a service needs at least one")
        self.layout().degrees(self.procs)

    async def as_service(
        self,
        model: ModelSource,
        optimizer: OptimStep | Mapping[str, Any] | None = None,
        checkpoint_dir: str | Path | None = None,
    ) -> TrainingService:
        """Start the ranks and return when each has its part of the model.

        `optimizer`: the settings of a step, for an optim_step that is called without one.
        """
        # A thread that no event loop owns: what it has started is ended even if the loop is gone by then.
        thread = ThreadPoolExecutor(1, thread_name_prefix="start-service")
        starting = thread.submit(self.start, model, optimizer, checkpoint_dir)
        thread.shutdown(wait=False)
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_unwanted)
            raise

    def start(
        self,
        model: ModelSource,
        optimizer: OptimStep | Mapping[str, Any] | None = None,
        checkpoint_dir: str | Path | None = None,
    ) -> TrainingService:
        """`as_service` for code without asyncio."""
        step = None if optimizer is None else wire.read_step(optimizer)
        folder = None if checkpoint_dir is None else Path(absolute(checkpoint_dir))
        config = read_model(model, self.precision)
        if self.place == "local":  # on a cluster, files may lie where this process cannot see them
            check_model_source(config)
        settings = self._settings(config, folder)
        workers, release = SPAWN[self.place](self, settings, None if folder is None else folder / "logs")
        ranks = RemoteRanks(workers, health_timeout_s=self.health_timeout_s, release=release)
        try:
            service = TrainingService(ranks, step, folder is not None, self.timeout_s)
            service.about = self._build(ranks)
        except BaseException:
            ranks.kill()
            raise
        ranks.start_pings()
        return service

    @property
    def place(self) -> str:
        return next((word for word in self._backend_parts() if word in SPAWN), "local")

    def layout(self) -> ParallelConfig:
        named = [word for word in self._backend_parts() if word in LAYOUTS]
        if self.parallel is None:
            return ParallelConfig.model_validate(LAYOUTS[named[0] if named else "ddp"])
        if named:
            raise ValueError(f"backend says {named[0]}, and parallel says how the model is laid out too: give one")
        parallel = self.parallel
        if not isinstance(parallel, ParallelConfig):
            parallel = ParallelConfig.model_validate(dict(parallel))
        if parallel.backend != "torch":
            raise ValueError(f"parallel.backend {parallel.backend} is not for a service: use torch")
        return parallel

    def _backend_parts(self) -> list[str]:
        parts = self.backend.split("+")
        for word in parts:
            if word not in SPAWN and word not in LAYOUTS:
                raise ValueError(
                    f"backend {self.backend!r}: {word!r} is unknown; a backend is one of {', '.join(SPAWN)}, "
                    f"one of {', '.join(LAYOUTS)}, or both with a + between them"
                )
        for kind in (SPAWN, LAYOUTS):
            if len([word for word in parts if word in kind]) > 1:
                raise ValueError(f"backend {self.backend!r} names more than one of {', '.join(kind)}")
        return parts

    def _settings(self, model: ModelConfig, folder: Path | None) -> dict[str, object]:
        lora = self.lora
        if lora is not None and not isinstance(lora, LoraConfig):
            lora = LoraConfig.model_validate(dict(lora))
        return {
            "place": self.place,
            "model": model.model_dump(mode="json"),
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "parallel": self.layout().model_dump(mode="json"),
            "checkpoint_dir": None if folder is None else str(folder),
            **{
                name: getattr(self, name) for name in ("device", "reference", "micro_batch_tokens", "seed", "timeout_s")
            },
        }

    def pool(self) -> PoolConfig:
        """What the ranks need of a Ray cluster."""
        return PoolConfig(
            pool="training",
            procs=self.procs,
            cpus=self.cpus,
            gpus=self.gpus if self.gpus is not None else float(self.device == "cuda"),
            resources=dict(self.resources),
            strategy=self.strategy,
        )

    def _build(self, ranks: RemoteRanks) -> dict[str, Any]:
        """Every rank reports its host, then all join the store that rank 0 has opened."""
        numbers = [{"rank": rank, "num_ranks": self.procs} for rank in range(self.procs)]
        places = ranks.call_each("meet", numbers, timeout_s=self.start_timeout_s, gather=True).result().body["ranks"]
        hosts = [place["host"] for place in places]
        bodies = []
        for rank, host in enumerate(hosts):
            # An actor of Ray sees only its own device; a process of this machine sees all.
            local_rank = 0 if self.place == "ray" else rank
            variables = {"RANK": rank, "WORLD_SIZE": self.procs, "LOCAL_RANK": local_rank, "MASTER_ADDR": hosts[0]}
            variables |= {"LOCAL_WORLD_SIZE": hosts.count(host), "MASTER_PORT": places[0]["port"]}
            bodies.append({"environment": {name: str(value) for name, value in variables.items()}})
        return ranks.call_each("build", bodies, timeout_s=self.timeout_s).result().body


# --- where the ranks run ---------------------------------------------------------------------------------------------

Spawned = tuple[list[Worker], Callable[[], None]]


def spawn_locally(options: ServiceOptions, settings: Mapping[str, object], log_dir: Path | None) -> Spawned:
    threads = os.environ.get("OMP_NUM_THREADS", str(max(num_cores() // options.procs, 1)))

    def spawn(rank: int) -> Worker:
        return LocalWorker.spawn(
            f"rank {rank}",
            ENTRY,
            settings,
            env={"OMP_NUM_THREADS": threads},
            log_path=log_dir / f"rank-{rank}.log" if log_dir else None,
            start_timeout_s=options.start_timeout_s,
        )

    return _spawn_all(spawn, options.procs), lambda: None


def spawn_on_ray(options: ServiceOptions, settings: Mapping[str, object], log_dir: Path | None) -> Spawned:
    """Resources for all ranks are reserved before the first is started. Joins the cluster unless this process has."""
    ray = import_ray()
    if not ray.is_initialized():
        # Without an address Ray would join whatever cluster this machine happens to belong to.
        ray.init(address=options.address or "local", include_dashboard=False)
    reservation = reserve(options.pool(), options.start_timeout_s, interrupted=lambda: False)

    def release() -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            reservation.release()

    def spawn(rank: int) -> Worker:
        start_timeout_s = options.start_timeout_s
        return reservation.spawn(f"rank {rank}", ENTRY, settings, bundle=rank, start_timeout_s=start_timeout_s)

    try:
        return _spawn_all(spawn, options.procs), release
    except BaseException:
        release()
        raise


SPAWN: dict[str, Callable[[ServiceOptions, Mapping[str, object], Path | None], Spawned]] = {
    "local": spawn_locally,
    "ray": spawn_on_ray,
}


def _spawn_all(spawn: Callable[[int], Worker], procs: int) -> list[Worker]:
    """In parallel; if one does not start, those that did are ended."""
    with ThreadPoolExecutor(procs, thread_name_prefix="spawn-ranks") as threads:
        futures = [threads.submit(spawn, rank) for rank in range(procs)]
    problem = next((error for error in (future.exception() for future in futures) if error is not None), None)
    if problem is None:
        return [future.result() for future in futures]
    for future in futures:
        if future.exception() is None:
            future.result().kill()
    raise problem


def read_model(model: ModelSource, precision: str | None) -> ModelConfig:
    if isinstance(model, (str, Path)):
        model = {"path": str(model)}
    values = model.model_dump() if isinstance(model, ModelConfig) else dict(model)
    if Path(values.get("path", "")).exists():  # ranks may have another working directory
        values["path"] = absolute(values["path"])
    return ModelConfig.model_validate(values | ({} if precision is None else {"precision": precision}))


def _kill_unwanted(starting: Future[TrainingService]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()


# --- the service -----------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

T = TypeVar("T")


class Handle(Generic[T]):
    """The result of a call: `await handle.result()`, or `handle.wait()` without asyncio.

    Raises ValueError for what the caller can correct, after which the service goes on, and TrainingFailed otherwise.
    """

    def __init__(self, answer: Future[Reply], read: Callable[[Reply], T]) -> None:
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()  # what was sent cannot be cancelled
        self._read = read
        self.seen = False
        answer.add_done_callback(self._settle)

    async def result(self) -> T:
        self.seen = True
        return await asyncio.wrap_future(self._future)

    def wait(self, timeout_s: float | None = None) -> T:
        """`timeout_s`: TimeoutError after it. The call has a deadline of its own."""
        self.seen = True
        return self._future.result(timeout_s)

    def done(self) -> bool:
        return self._future.done()

    def unseen_failure(self) -> BaseException | None:
        return self._future.exception() if self._future.done() and not self.seen else None

    def _settle(self, answer: Future[Reply]) -> None:
        try:
            self._future.set_result(self._read(answer.result()))
        except Exception as error:
            self._future.set_exception(error)


class TrainingService:
    """Made by `TrainingService.options(...).as_service(...)`. Thread-safe; calls are done in their order."""

    def __init__(self, ranks: RemoteRanks, step: OptimStep | None, has_checkpoints: bool, timeout_s: float) -> None:
        self._ranks, self._step, self._has_checkpoints, self._timeout_s = ranks, step, has_checkpoints, timeout_s
        self._lock = threading.Lock()
        self._handles: list[Handle[Any]] = []
        self.about: dict[str, Any] = {}

    @staticmethod
    def options(procs: int = 1, backend: str = "local", **options: Any) -> ServiceOptions:
        """`backend`: where the ranks run (local, ray), how the model lies over them (ddp, fsdp), or both ("ray+fsdp").

        The other options are the fields of ServiceOptions.
        """
        return ServiceOptions(procs, backend, **options)

    # --- the backend's calls ----------------------------------------------------------------------------------------

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> Handle[list[Logprobs]]:
        body, tensors = wire.encode_batch(batch)
        request = {"batch": body, "reference": bool(reference)}
        return self._call("forward", request, lambda reply: wire.decode_logprobs(reply.body, reply.tensors), tensors)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec | None = None) -> Handle[LossResult]:
        body, tensors = wire.encode_batch(batch)
        request = {"batch": body, "loss": wire.encode_loss(loss or LossSpec())}
        return self._call("forward_backward", request, lambda reply: wire.decode_loss_result(reply.body), tensors)

    def optim_step(self, step: OptimStep | Mapping[str, Any] | None = None) -> Handle[OptimResult]:
        """Without a step: with the settings that the service was given as its optimizer."""
        step = self._step if step is None else wire.read_step(step)
        if step is None:
            raise ValueError("optim_step needs a step: give it one, or give the service an optimizer")
        return self._call("optim_step", wire.encode_step(step), lambda reply: wire.decode_optim_result(reply.body))

    def mix_reference(self, share: float) -> Handle[None]:
        return self._call("mix_reference", {"share": float(share)}, _nothing)

    def save_state(self, path: str | Path) -> Handle[None]:
        """Into a folder that all ranks see. Not committed: for that there is `save`."""
        return self._call("save_state", {"path": absolute(path)}, _check_written)

    def load_state(self, path: str | Path, *, with_optimizer: bool = True) -> Handle[None]:
        return self._call("load_state", {"path": absolute(path), "with_optimizer": bool(with_optimizer)}, _nothing)

    def export_weights(self, path: str | Path) -> Handle[None]:
        return self._call("export_weights", {"path": absolute(path)}, _nothing)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, name: str) -> Handle[Path]:
        """Weights, optimizer and random generators under a name in checkpoint_dir: all of it or nothing.

        The state is that of this place in the order of calls; it is written while later calls run. What was saved
        under the name before stays until the new one is complete.
        """
        return self._call("save", {"name": self._checked(name)}, _read_saved)

    def load(self, name: str, *, with_optimizer: bool = True) -> Handle[None]:
        return self._call("load", {"name": self._checked(name), "with_optimizer": bool(with_optimizer)}, _nothing)

    def _checked(self, name: str) -> str:
        if not self._has_checkpoints:
            raise ValueError("this service has no place for checkpoints: give as_service a checkpoint_dir")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a checkpoint: use letters, digits, '.', '_' and '-'")
        return name

    # --- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """As `close`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish all calls, then end every process. Raises the first failure that no caller has seen."""
        try:
            self._call("leave", {}, _nothing).wait()
        except TrainingFailed:
            pass  # the callers have the reason
        finally:
            self._ranks.shut()
        with self._lock:
            handles, self._handles = self._handles, []
        failures = [failure for handle in handles if (failure := handle.unseen_failure()) is not None]
        if failures:
            raise failures[0]

    def kill(self) -> None:
        """End every process at once; open calls fail."""
        self._ranks.kill()
        with self._lock:
            self._handles = []

    async def __aenter__(self) -> TrainingService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.shutdown() if error is None else asyncio.to_thread(self.kill))

    def __enter__(self) -> TrainingService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self.kill()

    @property
    def pids(self) -> list[int | None]:
        """Of the ranks, where they are on this machine."""
        return [worker.pid for worker in self._ranks.workers]

    def _call(
        self, method: str, body: Mapping[str, object], read: Callable[[Reply], T], tensors: NamedTensors | None = None
    ) -> Handle[T]:
        handle = Handle(self._ranks.call(method, body, tensors, timeout_s=self._timeout_s), read)
        with self._lock:
            kept = [h for h in self._handles if not h.done() or h.unseen_failure() is not None]
            self._handles = [*kept, handle]
        return handle


def absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _nothing(reply: Reply) -> None:
    return None


def _check_written(reply: Reply) -> None:
    if "unwritten" in reply.body:
        raise RuntimeError(f"the checkpoint could not be written: {reply.body['unwritten']}; training can go on")


def _read_saved(reply: Reply) -> Path:
    _check_written(reply)
    return Path(reply.body["path"])
