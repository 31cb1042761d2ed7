"""How a training service is to run, and its start: words become places and layouts, and are checked at the door.

Must not know what the ranks are asked later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.backend import wire
from lockstep.backend.service import TrainingService, absolute
from lockstep.backend.service_places import SPAWN, Room
from lockstep.backend.service_ranks import Ranks
from lockstep.config import LoraConfig, ModelConfig, ParallelConfig
from lockstep.config.cluster import Strategy
from lockstep.model.load import check_model_source
from lockstep.types import OptimStep

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
        ranks = Ranks(workers, health_timeout_s=self.health_timeout_s, release=release)
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

    def _room(self, folder: Path | None) -> Room:
        gpus = self.gpus if self.gpus is not None else float(self.device == "cuda")
        return Room(
            self.procs,
            self.start_timeout_s,
            None if folder is None else folder / "logs",
            self.address,
            self.cpus,
            gpus,
            self.resources,
            self.strategy,
        )

    def _build(self, ranks: Ranks) -> dict[str, Any]:
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
