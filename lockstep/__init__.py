"""Lockstep post-trains language models. Heavy imports happen only when a name that needs them is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.types import Completion, Datum, LossResult, LossSpec, OptimResult, OptimStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lockstep.backend.remote.service import TrainingService
    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.config import RunConfig
    from lockstep.processes.worker import Worker

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Datum",
    "LossResult",
    "LossSpec",
    "OptimResult",
    "OptimStep",
    "TorchBackend",
    "TrainingService",
    "Worker",
    "train",
]
# Names whose modules bring torch with them.
_LAZY = {
    "TorchBackend": "lockstep.backend.torch_backend",
    "TrainingService": "lockstep.backend.remote.service",
    "Worker": "lockstep.processes.worker",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


# The package of loops first: the import system binds a package in its parent when it is first imported, and would
# replace the function of the same name. `from lockstep.train import sft` finds the package in sys.modules.
importlib.import_module("lockstep.train")


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    start_over: bool = False,
) -> dict[str, Any]:
    """Train in `launch.procs` worker processes and wait. Returns what `lockstep train --json` prints.

    `config` is a file, a mapping or a RunConfig. `resume` continues a run from its last checkpoint instead; `overrides`
    may then change its layout and its processes, and `start_over` lets it begin at step 0.
    """
    from lockstep.launch import start

    return start.train(config, overrides=overrides, run_dir=run_dir, resume=resume, start_over=start_over)
