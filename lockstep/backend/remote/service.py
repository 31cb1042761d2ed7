"""How a training service is to run, and its start: words become places and layouts, and are checked at the door.

Must not know what the ranks are asked later.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from lockstep.backend.remote import wire
from lockstep.backend.remote.ranks import SPAWN, RemoteRanks, RemoteReservation, TrainingFailed
from lockstep.config import LoraConfig, ModelConfig, ParallelConfig
from lockstep.config.launch import Strategy
from lockstep.model.load import check_model_source
from lockstep.processes.worker import Reply
from lockstep.types import Datum, Logprobs, LossResult, LossSpec, OptimResult, OptimStep

LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {"replicate": "auto", "shard": 1}, "fsdp": {"shard": "auto"}}
ModelSource = str | Path | ModelConfig | Mapping[str, Any]


@dataclass(frozen=True)
class ServiceOptions:
    """How a service runs. `timeout_s` is the deadline of every call, from when it is made, and of every collective.

    `parallel` says more than a word about the layout. `health_timeout_s`: a rank that gives no sign of life for so long
    is given up. `address`, `cpus`, `gpus`, `resources` and `strategy` are for Ray: the cluster to join (None: start one
    here), and what each rank needs of it.
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
        # A thread that no event loop owns: what it has started is ended also when the loop is gone by then.
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
        workers, release = SPAWN[self.place](self._room(folder), settings)
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
        return next((word for word in self._words() if word in SPAWN), "local")

    def layout(self) -> ParallelConfig:
        named = [word for word in self._words() if word in LAYOUTS]
        if self.parallel is None:
            return ParallelConfig.model_validate(LAYOUTS[named[0] if named else "ddp"])
        if named:
            raise ValueError(f"backend says {named[0]}, and parallel says how the model is laid out too: give one")
        given = self.parallel
        parallel = given if isinstance(given, ParallelConfig) else ParallelConfig.model_validate(dict(given))
        if parallel.backend != "torch":
            raise ValueError(f"parallel.backend {parallel.backend} is not for a service: use torch")
        return parallel

    def _words(self) -> list[str]:
        words = self.backend.split("+")
        for word in words:
            if word not in SPAWN and word not in LAYOUTS:
                raise ValueError(
                    f"backend {self.backend!r}: {word!r} is unknown; a backend is one of {', '.join(SPAWN)}, "
                    f"one of {', '.join(LAYOUTS)}, or both with a + between them"
                )
        for kind in (SPAWN, LAYOUTS):
            if len([word for word in words if word in kind]) > 1:
                raise ValueError(f"backend {self.backend!r} names more than one of {', '.join(kind)}")
        return words

    def _settings(self, model: ModelConfig, folder: Path | None) -> dict[str, Any]:
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

    def _room(self, folder: Path | None) -> RemoteReservation:
        gpus = self.gpus if self.gpus is not None else float(self.device == "cuda")
        return RemoteReservation(
            self.procs,
            self.start_timeout_s,
            None if folder is None else folder / "logs",
            self.address,
            self.cpus,
            gpus,
            self.resources,
            self.strategy,
        )

    def _build(self, ranks: RemoteRanks) -> dict[str, Any]:
        """Every rank says where it is, then all meet where rank 0 is."""
        places = [{"rank": rank, "num_ranks": self.procs} for rank in range(self.procs)]
        found = ranks.ask_each("meet", places, timeout_s=self.start_timeout_s, gather=True).result().body["ranks"]
        hosts = [place["host"] for place in found]
        bodies = []
        for rank, host in enumerate(hosts):
            # An actor of Ray sees the one device that it was given; a process of this machine sees all.
            local_rank = 0 if self.place == "ray" else rank
            places_of_rank = {"RANK": rank, "WORLD_SIZE": self.procs, "LOCAL_RANK": local_rank}
            places_of_rank |= {"LOCAL_WORLD_SIZE": hosts.count(host), "MASTER_PORT": found[0]["port"]}
            environment = {name: str(value) for name, value in places_of_rank.items()} | {"MASTER_ADDR": hosts[0]}
            bodies.append({"environment": environment})
        return ranks.ask_each("build", bodies, timeout_s=self.timeout_s).result().body


def read_model(model: ModelSource, precision: str | None) -> ModelConfig:
    if isinstance(model, (str, Path)):
        model = {"path": str(model)}
    given = model.model_dump() if isinstance(model, ModelConfig) else dict(model)
    if Path(given.get("path", "")).exists():  # ranks may have another working directory
        given["path"] = absolute(given["path"])
    return ModelConfig.model_validate(given | ({} if precision is None else {"precision": precision}))


def _kill_unwanted(starting: Future[TrainingService]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()


__all__ = ["Handle", "TrainingFailed", "TrainingService"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

T = TypeVar("T")


class Handle(Generic[T]):
    """What a call will come to: `await handle.result()`, or `handle.wait()` without asyncio.

    Raises ValueError for what the caller can put right, after which the service goes on, and TrainingFailed otherwise.
    """

    def __init__(self, answer: Future[Reply], read: Callable[[Reply], T]) -> None:
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()  # nobody can take back what was asked
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
        from lockstep.backend.remote.service import ServiceOptions

        return ServiceOptions(procs, backend, **options)

    # --- the backend's calls ----------------------------------------------------------------------------------------

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> Handle[list[Logprobs]]:
        body, tensors = wire.encode_batch(batch)
        asked = {"batch": body, "reference": bool(reference)}
        return self._ask("forward", asked, lambda reply: wire.decode_logprobs(reply.body, reply.tensors), tensors)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec | None = None) -> Handle[LossResult]:
        body, tensors = wire.encode_batch(batch)
        asked = {"batch": body, "loss": wire.encode_loss(loss or LossSpec())}
        return self._ask("forward_backward", asked, lambda reply: wire.decode_loss_result(reply.body), tensors)

    def optim_step(self, step: OptimStep | Mapping[str, Any] | None = None) -> Handle[OptimResult]:
        """Without a step: with the settings that the service was given as its optimizer."""
        step = self._step if step is None else wire.read_step(step)
        if step is None:
            raise ValueError("optim_step needs a step: give it one, or give the service an optimizer")
        return self._ask("optim_step", wire.encode_step(step), lambda reply: wire.decode_optim_result(reply.body))

    def mix_reference(self, share: float) -> Handle[None]:
        return self._ask("mix_reference", {"share": float(share)}, _nothing)

    def save_state(self, path: str | Path) -> Handle[None]:
        """Into a folder that all ranks see. Not committed: for that there is `save`."""
        return self._ask("save_state", {"path": absolute(path)}, _check_written)

    def load_state(self, path: str | Path, *, with_optimizer: bool = True) -> Handle[None]:
        return self._ask("load_state", {"path": absolute(path), "with_optimizer": bool(with_optimizer)}, _nothing)

    def export_weights(self, path: str | Path) -> Handle[None]:
        return self._ask("export_weights", {"path": absolute(path)}, _nothing)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, name: str) -> Handle[Path]:
        """Weights, optimizer and random generators under a name in checkpoint_dir: all of it or nothing.

        The state is that of this place in the order of calls; it is written while later ones are done. What was saved
        under the name before stays until the new one is complete.
        """
        return self._ask("save", {"name": self._checked(name)}, _read_saved)

    def load(self, name: str, *, with_optimizer: bool = True) -> Handle[None]:
        return self._ask("load", {"name": self._checked(name), "with_optimizer": bool(with_optimizer)}, _nothing)

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
        """Do what was asked for, then end every process. Raises the first failure that nobody has looked at."""
        try:
            self._ask("leave", {}, _nothing).wait()
        except TrainingFailed:
            pass  # whoever waited for a call was told
        finally:
            self._ranks.shut()
        with self._lock:
            handles, self._handles = self._handles, []
        failures = [failure for handle in handles if (failure := handle.unseen_failure()) is not None]
        if failures:
            raise failures[0]

    def kill(self) -> None:
        """End every process at once; what is under way fails."""
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

    def _ask(
        self, method: str, body: dict[str, Any], read: Callable[[Reply], T], tensors: Mapping[str, Any] | None = None
    ) -> Handle[T]:
        handle = Handle(self._ranks.ask(method, body, tensors, timeout_s=self._timeout_s), read)
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
