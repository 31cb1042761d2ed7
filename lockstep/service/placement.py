"""Jobs on a cluster instead of beside the service: the operator says where, and each job gets its share of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import ConfigError, RunConfig, SlurmLaunch, resolve_config
from lockstep.config.yaml_text import read_yaml
from lockstep.service.errors import ServiceError

SLOTS = 4096
"""Processes of all jobs, where --procs does not say: the cluster has a queue of its own."""
MAX_JOBS = 100
"""Submitted to the cluster at once, where --max-jobs does not say."""


@dataclass(frozen=True)
class JobPlacement:
    """`launch` is what the operator wrote: its `nodes` are the most that a job may have, its `procs_per_node` what fits
    on one; likewise those of `engines`. Everything else is as it stands there for every job."""

    launch: SlurmLaunch

    @classmethod
    def read(cls, file: Path) -> JobPlacement:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--launch: cannot read {file}: {error.strerror or error}") from error
        tree, lines = read_yaml(text, str(file))
        if not isinstance(tree, dict) or set(tree) != {"launch"}:
            raise ConfigError(f"--launch: {file} must hold a launch section, and nothing else")
        section = tree["launch"]
        if not isinstance(section, dict) or section.get("kind") != "slurm":
            raise ConfigError(f"--launch: {file}: launch.kind must be slurm, on which a service can start jobs")
        # The rest is a configuration that has these sections; engines are counted with each job.
        engines = section.get("engines")
        nodes = engines.get("nodes", 1) if isinstance(engines, dict) else 0
        whole = {"model": "m", "data": {"train": "rows"}, "launch": section}
        if isinstance(nodes, int) and nodes > 0:
            algorithm = {"kind": "grpo", "reward": [{"name": "length"}]}
            whole |= {"algorithm": algorithm, "rollouts": {"engines": nodes}}
        places = {key: f"{file}:{line}" for key, line in lines.items()}
        launch = resolve_config(whole, source=str(file), places=places).launch
        assert isinstance(launch, SlurmLaunch)
        return cls(launch)

    def place(self, config: RunConfig) -> RunConfig:
        """The same run as a job of the cluster. Raises ServiceError where it does not fit."""
        launch, ranks, engines = self.launch, config.launch.procs, config.rollouts.engines
        device = launch.device if config.launch.device == "auto" else config.launch.device
        beside = 0 if launch.engines is not None else engines
        nodes = _spread(ranks, launch.procs_per_node - beside, launch.nodes)
        if nodes is None:
            engines_too = f" and {beside} engines beside the first" if beside else ""
            raise ServiceError(
                f"launch.procs: {ranks} processes{engines_too} cannot be shared out equally among at most "
                f"{launch.nodes} nodes with room for {launch.procs_per_node}: ask for another number"
            )
        gpus = launch.gpus_per_node
        if gpus is None and device == "cuda":
            gpus = ranks // nodes + beside
        settings = {
            **launch.model_dump(mode="json"),
            "nodes": nodes,
            "procs_per_node": ranks // nodes,
            "procs": ranks,
            "device": device,
            "gpus_per_node": gpus if device != "cpu" else None,
            "timeout_s": config.launch.timeout_s,
            "max_restarts": 0,  # the service counts those, and starts jobs again through its queue
            "engines": self._place_engines(engines),
        }
        return RunConfig.model_validate({**config.model_dump(mode="json"), "launch": settings})

    def _place_engines(self, number: int) -> dict[str, object] | None:
        engines = self.launch.engines
        if engines is None or not number:
            return None
        room = engines.gpus_per_node or self.launch.procs_per_node
        nodes = _spread(number, room, engines.nodes)
        if nodes is None:
            raise ServiceError(
                f"rollouts.engines: {number} cannot be shared out equally among at most {engines.nodes} nodes with "
                f"room for {room}: ask for another number"
            )
        return {**engines.model_dump(mode="json"), "nodes": nodes}


def _spread(number: int, room: int, most: int) -> int | None:
    """The fewest nodes that take equally many each."""
    return next((nodes for nodes in range(1, most + 1) if number % nodes == 0 and number // nodes <= room), None)
