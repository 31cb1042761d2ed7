"""A TrainingBackend without a model, for tests of loops: one number learns to be near the tokens it is shown.

Deterministic and pure Python. It remembers every call, and can be told to give a loss that is not a number or to
fail at a step. Must not know torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from lockstep.types import Datum, Logprobs, LossResult, LossSpec, LossValues, OptimResult, OptimStep

_STATE = "state.json"


@dataclass(frozen=True)
class Call:
    """One call, `step` optimizer steps after the start. `read` is the loop looking at a step's loss."""

    name: str
    step: int
    batch: tuple[Datum, ...] = ()
    argument: LossSpec | OptimStep | Path | None = None

    @property
    def origins(self) -> list[str]:
        return [datum.origin for datum in self.batch]


class FakeBackend:
    """The log-prob of token t is -(weight - t % 7)^2 / 2; the optimizer is SGD with momentum `beta1`.

    `failures` maps (method, steps made before the call) to what it raises; save_state puts it into its future.
    `nonfinite_at` are steps, counted from 1, whose loss and gradient are nan because of the first row.
    """

    def __init__(
        self,
        *,
        deferred: bool = False,
        nonfinite_at: Sequence[int] = (),
        failures: Mapping[tuple[str, int], Exception] | None = None,
    ) -> None:
        self.weight, self.momentum, self.step = 20.0, 0.0, 0
        self.calls: list[Call] = []
        self._deferred, self._nonfinite_at, self._failures = deferred, nonfinite_at, failures or {}
        self._gradient = 0.0

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def forward(self, batch: Sequence[Datum]) -> list[Logprobs]:
        self._note(Call("forward", self.step, tuple(batch)))
        return [[self._logprobs(c.tokens, c.weights) for c in datum.completions] for datum in batch]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        self._note(Call("forward_backward", self.step, tuple(batch), loss))
        supervised = [
            (float(w), self.weight - t % 7)
            for datum in batch
            for completion in datum.completions
            for t, w in zip(completion.tokens, completion.weights, strict=True)
            if w
        ]
        values = LossValues(loss.scale * sum(w * d * d / 2 for w, d in supervised))
        self._gradient += loss.scale * sum(w * d for w, d in supervised)
        if self.step + 1 in self._nonfinite_at:
            values = LossValues(math.nan, nonfinite_origins=(batch[0].origin,))
            self._gradient = math.nan
        seen = Call("read", self.step)

        def read() -> LossValues:
            self._note(seen)
            return values

        num_tokens = sum(datum.num_tokens for datum in batch)
        return LossResult(read, num_tokens=num_tokens, num_supervised=len(supervised), deferred=self._deferred)

    def optim_step(self, step: OptimStep) -> OptimResult:
        self._note(Call("optim_step", self.step, argument=step))
        norm, self._gradient = self._gradient, 0.0
        if math.isfinite(norm):
            limit = step.max_grad_norm or math.inf
            self.momentum = step.beta1 * self.momentum + max(-limit, min(limit, norm))
            self.weight -= step.learning_rate * self.momentum
        self.step += 1
        return OptimResult(lambda: abs(norm), deferred=self._deferred)

    def save_state(self, path: Path) -> Future[None]:
        written: Future[None] = Future()
        try:
            self._note(Call("save_state", self.step, argument=path))
            state = {"weight": self.weight, "momentum": self.momentum, "step": self.step}
            (path / _STATE).write_text(json.dumps(state))
            written.set_result(None)
        except Exception as error:
            written.set_exception(error)
        return written

    def load_state(self, path: Path, *, with_optimizer: bool) -> None:
        self._note(Call("load_state", self.step, argument=path))
        state = json.loads((path / _STATE).read_text())
        self.weight = state["weight"]
        if with_optimizer:
            self.momentum, self.step = state["momentum"], state["step"]

    def export_weights(self, path: Path) -> None:
        self._note(Call("export_weights", self.step, argument=path))
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights.json").write_text(json.dumps({"weight": self.weight}))

    def close(self) -> None:
        self._note(Call("close", self.step))

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        if (call.name, call.step) in self._failures:
            raise self._failures[(call.name, call.step)]

    def _logprobs(self, tokens: Sequence[int], weights: Sequence[float]) -> list[float]:
        return [-((self.weight - t % 7) ** 2) / 2 if w else 0.0 for t, w in zip(tokens, weights, strict=True)]
