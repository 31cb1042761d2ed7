"""What jobs share on this machine: one slot for each GPU, or for each process on CPU. Counted without torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import ConfigError

_ANSWER_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Slots:
    """`devices` names the GPU of each slot; empty where there are none."""

    count: int
    devices: tuple[str, ...] = ()

    def free(self, taken: Iterable[int]) -> list[int]:
        held = set(taken)
        return [slot for slot in range(self.count) if slot not in held]

    def devices_of(self, slots: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.devices[slot] for slot in slots) if self.devices else ()

    @property
    def threads(self) -> int | None:
        """For each process on CPU, so that a machine full of jobs has one thread per core."""
        return None if self.devices else max(_num_cores() // self.count, 1)


def find_slots(procs: int | None) -> Slots:
    devices = find_gpus()
    if procs is not None and procs < 1:
        raise ConfigError(f"--procs {procs}: there must be at least one")
    if not devices:
        return Slots(procs or _num_cores())
    if procs is not None and procs > len(devices):
        raise ConfigError(
            f"--procs {procs} is more than the {len(devices)} GPUs here, and no two jobs may share one: ask for fewer, "
            "or set CUDA_VISIBLE_DEVICES to nothing to train on CPU"
        )
    return Slots(procs or len(devices), devices[:procs])


def find_gpus() -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves us, else all that the driver knows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=True
        )
        return tuple(re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):
        nodes = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
        return tuple(sorted((name for name in nodes if name.isdecimal()), key=int))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
