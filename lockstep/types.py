"""The words every layer shares: what is trained on, what is asked of a backend, what comes back.

Must not know torch, files or processes. Token sequences are any `Sequence` of numbers
(lists, tuples, numpy arrays); a backend turns them into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that follow a prompt. `weights[i]` weighs the log-prob of `tokens[i]`; zero means "context only".

    `values` holds one side value per token under a name (`reference_logprobs`, `advantages`, ...).
    """

    tokens: Sequence[int]
    weights: Sequence[float]
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.tokens):
            raise ValueError(f"a completion of {len(self.tokens)} tokens has {len(self.weights)} weights")
        for name, values in self.values.items():
            if len(values) != len(self.tokens):
                raise ValueError(f"a completion of {len(self.tokens)} tokens has {len(values)} values of {name!r}")


@dataclass(frozen=True, slots=True)
class Datum:
    """One prompt with one or more completions. The prompt is never supervised and never empty.

    `origin` says where the row came from ("train.jsonl:17"), so that errors can name it.
    """

    prompt: Sequence[int]
    completions: Sequence[Completion]
    origin: str = ""

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError(f"{self.origin or 'a datum'} has an empty prompt: nothing predicts its first token")
        if not self.completions:
            raise ValueError(f"{self.origin or 'a datum'} has no completion")

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed when the prompt is repeated for each completion."""
        return sum(len(self.prompt) + len(c.tokens) for c in self.completions)

    @property
    def total_weight(self) -> float:
        return float(sum(sum(c.weights) for c in self.completions))

    @property
    def num_supervised(self) -> int:
        return sum(sum(1 for w in c.weights if w != 0) for c in self.completions)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss, and the one number that normalises it.

    Losses are sums over tokens; every weight is multiplied by `scale`, which the loop decides once per
    global batch (for SFT: one over the supervised tokens). Micro-batches and ranks can then not change it.
    `options` are plain JSON. With `reference` the backend also computes every token's log-prob under its reference and
    hands it to the loss; without, a loss that needs one finds it among the completions' values.
    """

    kind: str = "cross_entropy"
    scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    reference: bool = False


T = TypeVar("T")


class Pending(Generic[T]):
    """A result that a device may still be computing: `result()` waits for it.

    `deferred` says whether it pays to read it later. The same on every rank, because reading may be collective.
    """

    def __init__(self, read: Callable[[], T], *, deferred: bool = False) -> None:
        self._read: Callable[[], T] | None = read
        self._value: T | None = None
        self.deferred = deferred

    def result(self) -> T:
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class LossValues:
    loss: float
    metrics: Metrics = field(default_factory=dict)
    nonfinite_origins: tuple[str, ...] = ()


class LossResult(Pending[LossValues]):
    """What one `forward_backward` computed, summed over the global batch: the same on every rank.

    Token counts are known at once; reading the loss waits for the device.
    """

    def __init__(
        self,
        read: Callable[[], LossValues],
        *,
        num_tokens: int,
        num_supervised: int,
        deferred: bool = False,
    ) -> None:
        super().__init__(read, deferred=deferred)
        self.num_tokens = num_tokens
        self.num_supervised = num_supervised

    @property
    def loss(self) -> float:
        return self.result().loss

    @property
    def metrics(self) -> Metrics:
        return self.result().metrics

    @property
    def nonfinite_origins(self) -> tuple[str, ...]:
        """Rows whose own log-probs are not finite."""
        return self.result().nonfinite_origins


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One optimizer step. The learning rate arrives here: there is no scheduler object to save."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


class OptimResult(Pending[float]):
    """`grad_norm` is of the whole gradient before clipping; a step whose norm is not finite is not applied.

    `peak_memory_gib` is this rank's, since the backend was built: device memory on CUDA, otherwise the process's.
    """

    def __init__(
        self,
        read: Callable[[], float],
        *,
        peak_memory_gib: float = 0.0,
        loss_scale: float | None = None,
        deferred: bool = False,
    ) -> None:
        """`loss_scale`: of fp16, for the next step. It has been lowered where this one overflowed."""
        super().__init__(read, deferred=deferred)
        self.peak_memory_gib = peak_memory_gib
        self.loss_scale = loss_scale

    @property
    def grad_norm(self) -> float:
        return self.result()

    @property
    def applied(self) -> bool:
        return math.isfinite(self.result())

    @property
    def overflowed(self) -> bool:
        """Left out because fp16 could not hold the gradient: the next step tries with a smaller scale."""
        return not self.applied and self.loss_scale is not None and self.loss_scale >= 1


# One float per completion token, per completion; 0.0 where the token's weight is zero (not computed).
Logprobs = Sequence[Sequence[float]]


class TrainingBackend(Protocol):
    """The seam between loops and machines. Every rank calls every method, with the global batch."""

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        """Of the policy, or of the reference that the backend was built with."""
        ...

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult: ...

    def optim_step(self, step: OptimStep) -> OptimResult: ...

    def mix_reference(self, share: float) -> None:
        """Move the reference towards the policy: reference = share * policy + (1 - share) * reference."""
        ...

    def save_state(self, path: Path) -> Future[None]:
        """Snapshot now, write in the background. On rank 0 the future ends when every rank's part is on disk."""
        ...

    def load_state(self, path: Path, *, with_optimizer: bool) -> None: ...

    def export_weights(self, path: Path) -> None: ...

    def read_weights(self) -> Mapping[str, Any]:
        """What an engine needs to sample as this model would, by the model's own names: whole tensors in the dtype that
        is sampled with, copied to rank 0's CPU; only the adapters where there are some. Nothing on other ranks."""
        ...

    def close(self) -> None: ...
