"""Lockstep post-trains language models. Heavy imports happen only when a name that needs them is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.types import Completion, Datum, LossResult, LossSpec, OptimResult, OptimStep

if TYPE_CHECKING:
    from lockstep.backend.torch_backend import TorchBackend
    from lockstep.train.run import train

__version__ = "0.1.0"
__all__ = ["Completion", "Datum", "LossResult", "LossSpec", "OptimResult", "OptimStep", "TorchBackend", "train"]


def __getattr__(name: str) -> Any:
    if name == "TorchBackend":
        from lockstep.backend.torch_backend import TorchBackend

        return TorchBackend
    if name == "train":
        from lockstep.train.run import train

        return train
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
