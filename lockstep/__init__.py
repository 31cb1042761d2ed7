"""Lockstep post-trains language models. Heavy imports happen only when a name that needs them is used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep import train
from lockstep.types import Completion, Datum, LossResult, LossSpec, OptimResult, OptimStep

if TYPE_CHECKING:
    from lockstep.backend.remote.service import TrainingService
    from lockstep.backend.torch_backend import TorchBackend
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
# Where those are that bring torch with them.
_LAZY = {
    "TorchBackend": "lockstep.backend.torch_backend",
    "TrainingService": "lockstep.backend.remote.service",
    "Worker": "lockstep.processes.worker",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


class _CallableTrain(ModuleType):
    """`lockstep.train` is both the package of loops and the function that runs one."""

    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        from lockstep.launch.start import train as run

        return run(*arguments, **options)


train.__class__ = _CallableTrain
