"""What cannot fit into the GPUs' memory is refused when it is submitted, where these are known.

The plan is made in a process of its own (`lockstep plan --json`): the service itself never imports torch. It has a
deadline, and what it cannot say in time is left to the run, which plans itself with the rows that it learns from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig
from lockstep.plan.hardware import parse_cluster
from lockstep.service.errors import ServiceError

log = logging.getLogger(__name__)
DEADLINE_S = 30.0
_MAX_KEPT = 512
# Of a plan's parts, those that are there whatever the rows are.
_ALWAYS = ("weights", "optimizer", "computing copies")


@dataclass(frozen=True)
class PlannedMemory:
    """`refused`: why it cannot run, whatever its rows; `said`: what to know about it. Empty where there is nothing."""

    refused: str = ""
    said: str = ""


UNKNOWN = PlannedMemory()


class MemoryDoor:
    """`gpu`: what the operator calls the GPUs of jobs, as in `lockstep plan --on`; None: those of this machine."""

    def __init__(
        self,
        gpu: str | None,
        *,
        here: bool,
        environment: Mapping[str, str],
        folder: Path,
        deadline_s: float = DEADLINE_S,
        command: Sequence[str] = (sys.executable, "-m", "lockstep", "plan"),
    ) -> None:
        """`here`: this machine has GPUs. Raises ConfigError for a name that is none."""
        if gpu is not None and (":" in gpu or "@" in gpu):
            raise ConfigError(f"--gpu {gpu}: name the device alone, such as h100; jobs say how many they take")
        if gpu is not None:
            parse_cluster(gpu)
        self._gpu, self._knows = gpu, gpu is not None or here
        self._environment, self._folder = dict(environment), folder
        self._deadline_s, self._command = deadline_s, tuple(command)
        self._kept: OrderedDict[str, PlannedMemory] = OrderedDict()
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def check(self, config: RunConfig) -> PlannedMemory:
        """Raises ServiceError for what cannot fit; otherwise what is known of it."""
        if not self._knows or config.launch.device == "cpu" or config.parallel.backend == "deepspeed":
            return UNKNOWN
        if not config.launch.check_memory:  # nobody need wait for a plan that decides nothing
            return UNKNOWN
        key = _digest(config)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = self._ask(config)
            if found is None:
                return UNKNOWN
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        if found.refused:
            raise ServiceError(found.refused)
        return found

    @property
    def remembers(self) -> bool:
        return bool(self._kept)

    def known(self, config: RunConfig) -> PlannedMemory:
        """Without asking."""
        with self._lock:
            return self._kept.get(_digest(config), UNKNOWN)

    def _ask(self, config: RunConfig) -> PlannedMemory | None:
        """One at a time: planning takes a core for seconds. None: not in time, or there is no plan."""
        ends = time.monotonic() + self._deadline_s
        if not self._turn.acquire(timeout=self._deadline_s):
            return None
        try:
            return self._run(config, max(ends - time.monotonic(), 0.1))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            log.info("no plan at the door: %s", str(error)[:300])
            return None
        finally:
            self._turn.release()

    def _run(self, config: RunConfig, seconds: float) -> PlannedMemory | None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(config.to_yaml())
            file.flush()
            on = [] if self._gpu is None else ["--on", f"{self._gpu}:{_per_node(config)}x{_nodes(config)}"]
            done = subprocess.run(
                [*self._command, file.name, "--json", "--no-data", *on],
                capture_output=True,
                text=True,
                timeout=seconds,
                env=self._environment,
                cwd=self._folder,
                check=False,
            )
        if done.returncode not in (0, 1) or not done.stdout.strip():
            log.info("no plan at the door: %s", done.stderr.strip()[-300:])
            return None
        return judge(json.loads(done.stdout.strip().splitlines()[-1]))


def judge(plan: Mapping[str, Any]) -> PlannedMemory:
    """Of a plan whose rows are as long as they may be: what does not depend on them is certain, the rest is not."""
    if plan["cluster"].startswith("cpu"):
        return UNKNOWN
    fullest = max(plan["memory"], key=lambda rank: rank["reserved_gib"])
    parts = fullest["parts_gib"]
    certain = _ALWAYS if plan.get("reference_is_assumed") else (*_ALWAYS, "frozen copies")
    always = sum(float(parts.get(name, 0.0)) for name in certain)
    if always * (1 - plan["memory_error"]) > plan["capacity_gib"]:
        held = ", ".join(f"{name} {parts[name]:.3g}" for name in certain if parts.get(name))
        helps = [advice["change"] for advice in plan["advice"] if advice["fits"] != "no"]
        change = (
            f": try {' or '.join(helps)}" if helps else ": take more or larger GPUs, or LoRA instead of all weights"
        )
        return PlannedMemory(
            refused=f"the job cannot fit: it needs {always:.3g} of {plan['capacity_gib']:.3g} GiB on {fullest['rank']} "
            f"of {plan['cluster']} before the first row ({held}){change}. launch.check_memory false takes it all the "
            "same"
        )
    if plan["fits"] == "yes":
        return UNKNOWN
    return PlannedMemory(said=f"by its plan with rows of data.max_length tokens, this job {plan['verdict']}")


def _digest(config: RunConfig) -> str:
    """Of what a plan depends on."""
    tree = config.model_dump(mode="json", exclude={"name", "seed", "checkpoint", "evaluation", "logging"})
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _nodes(config: RunConfig) -> int:
    return int(getattr(config.launch, "nodes", 1))


def _per_node(config: RunConfig) -> int:
    return max(config.launch.procs // _nodes(config), 1)
