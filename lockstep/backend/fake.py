"""A TrainingBackend without a model, for tests of loops: one number learns to be near the tokens of its batches.

Deterministic and pure Python. It records every call, and can return a loss that is not finite or fail at a given step.
Its reference is a second number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.types import (
    Completion,
    Datum,
    Logprobs,
    LossResult,
    LossSpec,
    LossValues,
    OptimResult,
    OptimStep,
    SavedState,
)

_STATE = "state.json"


@dataclass(frozen=True)
class RecordedCall:
    """One call, `step` optimizer steps after the start. The call "read" is the loop reading a step's loss."""

    name: str
    step: int
    batch: tuple[Datum, ...] = ()
    argument: LossSpec | OptimStep | Path | float | None = None
    reference: bool = False

    @property
    def origins(self) -> list[str]:
        return [datum.origin for datum in self.batch]


class FakeBackend:
    """The log-prob of token t is -(weight - t % 7)^2 / 2; the optimizer is SGD with momentum `beta1`.

    Of the preference losses it has sigmoid on pairs and kto without weights, of policy gradients the clipped one.

    `failures` maps (method, steps made before the call) to what it raises; save_state puts it into its future.
    `nonfinite_at` are steps, counted from 1, whose loss and gradient are nan because of the first row.
    """

    def __init__(
        self,
        *,
        deferred: bool = False,
        nonfinite_at: Sequence[int] = (),
        failures: Mapping[tuple[str, int], Exception] | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.weight, self.momentum, self.step = 20.0, 0.0, 0
        self.reference = self.weight
        self.calls: list[RecordedCall] = []
        self._deferred, self._nonfinite_at, self._failures = deferred, nonfinite_at, failures or {}
        self._gradient = 0.0
        self._asked_to_stop = asked_to_stop

    def calls_of(self, name: str) -> list[RecordedCall]:
        return [call for call in self.calls if call.name == name]

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        self._record(RecordedCall("forward", self.step, tuple(batch), reference=reference))
        weight = self.reference if reference else self.weight
        return [[_logprobs(weight, c.tokens, c.weights) for c in datum.completions] for datum in batch]

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        self._record(RecordedCall("forward_backward", self.step, tuple(batch), loss))
        losses = [self._LOSSES[loss.kind](self, datum, loss) for datum in batch]
        metrics = {name: sum(m[name] for _, _, m in losses) for name in losses[0][2]}
        asked = self._asked_to_stop()
        values = LossValues(loss.scale * sum(value for value, _, _ in losses), metrics, asked_to_stop=asked)
        self._gradient += loss.scale * sum(gradient for _, gradient, _ in losses)
        if self.step + 1 in self._nonfinite_at:
            values = LossValues(math.nan, metrics, nonfinite_origins=(batch[0].origin,))
            self._gradient = math.nan
        seen = RecordedCall("read", self.step)

        def read() -> LossValues:
            self._record(seen)
            return values

        num_tokens = sum(len(datum.prompt) + sum(len(c.tokens) for c in datum.completions) for datum in batch)
        num_supervised = sum(datum.num_supervised for datum in batch)
        return LossResult(read, num_tokens=num_tokens, num_supervised=num_supervised, deferred=self._deferred)

    def optim_step(self, step: OptimStep) -> OptimResult:
        self._record(RecordedCall("optim_step", self.step, argument=step))
        norm, self._gradient = self._gradient, 0.0
        if math.isfinite(norm):
            limit = step.max_grad_norm or math.inf
            self.momentum = step.beta1 * self.momentum + max(-limit, min(limit, norm))
            self.weight -= step.learning_rate * self.momentum
        self.step += 1
        return OptimResult(lambda: abs(norm), deferred=self._deferred)

    def mix_reference(self, share: float) -> None:
        self._record(RecordedCall("mix_reference", self.step, argument=share))
        self.reference = share * self.weight + (1 - share) * self.reference

    def save_state(self, path: Path) -> Future[SavedState]:
        written: Future[SavedState] = Future()
        try:
            self._record(RecordedCall("save_state", self.step, argument=path))
            names = ("weight", "momentum", "step", "reference")
            state = {name: getattr(self, name) for name in names}
            (path / _STATE).write_text(json.dumps(state))
            written.set_result(SavedState())
        except Exception as error:
            written.set_exception(error)
        return written

    def load_state(self, path: Path, *, with_optimizer: bool) -> None:
        self._record(RecordedCall("load_state", self.step, argument=path))
        state = json.loads((path / _STATE).read_text())
        self.weight, self.reference = state["weight"], state["reference"]
        if with_optimizer:
            self.momentum, self.step = state["momentum"], state["step"]

    def export_weights(self, path: Path) -> None:
        self._record(RecordedCall("export_weights", self.step, argument=path))
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights.json").write_text(json.dumps({"weight": self.weight}))

    def read_weights(self, *, on_device: bool = False) -> dict[str, float]:
        self._record(RecordedCall("read_weights", self.step))
        return {"weight": self.weight}

    def close(self) -> None:
        self._record(RecordedCall("close", self.step))

    def _record(self, call: RecordedCall) -> None:
        self.calls.append(call)
        if (call.name, call.step) in self._failures:
            raise self._failures[(call.name, call.step)]

    # --- losses of one datum: (value, its gradient with respect to the weight, metrics) ----------------------------

    def _cross_entropy(self, datum: Datum, loss: LossSpec) -> tuple[float, float, dict[str, float]]:
        sums = [self._sum(completion) for completion in datum.completions]
        return -sum(value for value, _ in sums), -sum(gradient for _, gradient in sums), {}

    def _preference(self, datum: Datum, loss: LossSpec) -> tuple[float, float, dict[str, float]]:
        beta = loss.options["beta"]
        (chosen, up), (rejected, down) = (self._sum(completion) for completion in datum.completions)
        rewards = [
            beta * (value - self._reference_sum(completion))
            for value, completion in zip((chosen, rejected), datum.completions, strict=True)
        ]
        margin = rewards[0] - rewards[1]
        metrics = {"chosen_reward": rewards[0], "rejected_reward": rewards[1], "margin": margin}
        metrics |= {"accuracy": float(margin > 0), "chosen_logprob": chosen, "rejected_logprob": rejected}
        return _softplus(-margin), -beta * _sigmoid(-margin) * (up - down), metrics

    def _kto(self, datum: Datum, loss: LossSpec) -> tuple[float, float, dict[str, float]]:
        beta, kl = loss.options["beta"], loss.options["kl"]
        (completion,) = datum.completions
        value, gradient = self._sum(completion)
        ratio = value - self._reference_sum(completion)
        desirable = float(completion.values["label"][0])
        sign = 1 if desirable else -1
        right = _sigmoid(sign * beta * (ratio - kl))
        reward = beta * ratio
        metrics = {"chosen_reward": desirable * reward, "rejected_reward": (1 - desirable) * reward, "kl": kl}
        metrics |= {"chosen_logprob": desirable * value, "rejected_logprob": (1 - desirable) * value}
        metrics |= {"num_chosen": desirable, "num_rejected": 1 - desirable}
        return 1 - right, -sign * beta * right * (1 - right) * gradient, metrics

    def _policy_gradient(self, datum: Datum, loss: LossSpec) -> tuple[float, float, dict[str, float]]:
        low, high = 1 - loss.options["clip_low"], 1 + loss.options["clip_high"]
        value = gradient = 0.0
        on_policy = loss.options.get("on_policy", False)
        names = (
            "ratio",
            "clipped_low",
            "clipped_high",
            "policy_shift",
            *(("sampler_trainer_logprob_diff", "stale_logprob_diff") if on_policy else ()),
        )
        metrics = dict.fromkeys(names, 0.0)
        for c in datum.completions:
            now = _logprobs(self.weight, c.tokens, c.weights)
            if on_policy:
                fresh = c.values["fresh"] if loss.options.get("stale_apart") else [1.0] * len(now)
                for one, other, weight, is_fresh in zip(
                    now, c.values["behaviour_logprobs"], c.weights, fresh, strict=True
                ):
                    name = "sampler_trainer_logprob_diff" if is_fresh else "stale_logprob_diff"
                    metrics[name] += abs(one - other) if weight else 0.0
            before = now if on_policy else c.values["old_logprobs"]
            columns = (c.tokens, c.weights, now, before, c.values["advantages"])
            for token, weight, logprob, old, advantage in zip(*columns, strict=True):
                ratio = math.exp(min(logprob - old, 50.0))
                limit = high if advantage > 0 else low
                is_clipped = ratio > high if advantage > 0 else ratio < low
                value -= weight * advantage * (limit if is_clipped else ratio)
                gradient += 0.0 if is_clipped else weight * advantage * ratio * (self.weight - token % 7)
                if weight:
                    metrics["ratio"] += ratio
                    metrics["policy_shift"] += ratio - 1 - (logprob - old)
                    metrics["clipped_high" if advantage > 0 else "clipped_low"] += is_clipped
        return value, gradient, metrics

    _LOSSES: ClassVar = {
        "cross_entropy": _cross_entropy,
        "preference": _preference,
        "kto": _kto,
        "policy_gradient": _policy_gradient,
    }

    def _sum(self, completion: Completion) -> tuple[float, float]:
        """The weighted log-prob of an answer, and its gradient with respect to the weight."""
        pairs = [(float(w), self.weight - t % 7) for t, w in zip(completion.tokens, completion.weights, strict=True)]
        return -sum(w * d * d / 2 for w, d in pairs), -sum(w * d for w, d in pairs)

    def _reference_sum(self, completion: Completion) -> float:
        own = _logprobs(self.reference, completion.tokens, completion.weights)
        logprobs = completion.values.get("reference_logprobs", own)
        return sum(float(w) * float(lp) for w, lp in zip(completion.weights, logprobs, strict=True))


def _logprobs(weight: float, tokens: Sequence[int], weights: Sequence[float]) -> list[float]:
    return [-((weight - t % 7) ** 2) / 2 if w else 0.0 for t, w in zip(tokens, weights, strict=True)]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
