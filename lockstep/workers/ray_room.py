"""Workers in the room that whoever launched this process has reserved for them on a Ray cluster.

The environment says where; without it there is no such room, and workers are started here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.cluster import ROOM_VARIABLE
from lockstep.workers.ray_worker import RayWorker, import_ray

_JOINING = threading.Lock()  # workers are started side by side


@dataclass(frozen=True)
class ReservedRoom:
    """`placement_group` is a number in hex; the amounts are for each worker; `environment` is what they start with."""

    cluster: str
    placement_group: str
    cpus: float
    gpus: float
    resources: Mapping[str, float]
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> ReservedRoom | None:
        told = os.environ.get(ROOM_VARIABLE)
        return cls(**json.loads(told)) if told else None

    def spawn(self, name: str, entry: str, settings: Mapping[str, Any], *, start_timeout_s: float) -> RayWorker:
        """In any part of the room that is free, so that the one who replaces another finds its place."""
        ray = import_ray()
        with _JOINING:
            if not ray.is_initialized():
                ray.init(address=self.cluster, log_to_driver=False, logging_level=logging.WARNING)
        from ray.util.placement_group import PlacementGroup

        group = PlacementGroup(ray.PlacementGroupID.from_hex(self.placement_group))
        return RayWorker.spawn(
            name,
            entry,
            settings,
            env=self.environment,
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            resources=self.resources,
            placement=(group, -1),
            start_timeout_s=start_timeout_s,
        )
