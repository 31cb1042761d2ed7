"""What the operator decides about the Tinker API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from lockstep.config import ConfigError

TinkerDevice = Literal["auto", "cpu", "cuda"]
TinkerPrecision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True)
class TinkerModel:
    """A base model, under the name that clients ask for it by."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> TinkerModel:
        """MODEL, or NAME=PATH."""
        name, separator, path = text.partition("=")
        if not name.strip() or (separator and not path.strip()):
            raise ConfigError(f"--tinker {text!r}: write the model's folder or hub id, or NAME=MODEL")
        return cls(name.strip(), (path if separator else name).strip())


@dataclass(frozen=True)
class TinkerSettings:
    models: tuple[TinkerModel, ...]
    device: TinkerDevice = "auto"
    precision: TinkerPrecision = "auto"
    entry: str = "lockstep.tenants.worker:start"
    """What the process of a base model runs. It is started by name, so that the service never imports torch."""
    micro_batch_tokens: int = 4096
    max_models: int = 16
    """In memory at once, of each base model."""
    max_samples: int = 4096
    """Under way at once, of each base model."""
    max_unnamed: int = 32
    """Unnamed sampler weights of a session: beyond this the least recently used are deleted."""
    max_waiting_bytes: int = 4 << 30
    """Of training requests that wait for their turn, in all."""
    session_timeout_s: float = 1800.0
    """A session that is silent for so long is ended; its client sends a sign of life every 10 s."""
    order_timeout_s: float = 300.0
    """For a number that is missing among the requests of a model; a client sends a request again for so long."""
    poll_s: float = 30.0
    """How long a request for a result waits for it; the client gives up after 45 s."""
    kept_s: float = 600.0
    """How long a result is kept after it was first asked for."""
    max_kept: int = 100_000
    max_kept_bytes: int = 1 << 30
    start_timeout_s: float = 1800.0
    """For a base model to be loaded."""
    call_timeout_s: float = 3600.0
    """For anything else that the process of a base model is asked, with what waits before it."""

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError("--tinker names a model twice: give one of them another name with NAME=MODEL")

    @classmethod
    def parse(cls, models: Sequence[str], device: str, precision: str, max_models: int) -> TinkerSettings | None:
        """None: no model is named."""
        for option, given, known in (("device", device, TinkerDevice), ("precision", precision, TinkerPrecision)):
            if given not in get_args(known):
                raise ConfigError(f"--tinker-{option} {given}: choose one of {', '.join(get_args(known))}")
        served = tuple(TinkerModel.parse(text) for text in models)
        return (
            None
            if not served
            else cls(served, cast(TinkerDevice, device), cast(TinkerPrecision, precision), max_models=max_models)
        )
