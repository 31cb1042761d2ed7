"""How far the steps of a layout are from the plain ones, and where they first part.

Must not know how either was computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.verification.reference import StepValues

TOLERANCE = 1e-10
LOOSE_TOLERANCE = 1e-6  # for models that compute a part in float32 whatever they are in
# Errors are relative to a tensor's largest entry, but to no less than this share of the largest of all: an entry that
# is zero but for rounding has no relative error worth the name.
_FLOOR = 1e-4


@dataclass
class Errors:
    """The largest relative errors over all steps. `first` names the first thing that is further off than allowed.

    `reference` is of the reference's log-probs, `metrics` of rewards, margin, ratios and the like: neither is of sft.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    logprobs: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    reference: float = 0.0
    metrics: float = 0.0
    worst_parameter: str = ""
    first: str = ""
    by_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        first, second = (self.loss, self.grad_norm, self.logprobs), (self.gradients, self.weights)
        return max(*first, *second, self.reference, self.metrics)


def compare(found: Sequence[StepValues], expected: Sequence[StepValues], tolerance: float) -> Errors:
    errors = Errors()
    if len(found) != len(expected):
        errors.first = f"{len(found)} optimizer steps instead of {len(expected)}"
        errors.loss = math.inf
    for number, (ours, plain) in enumerate(zip(found, expected), start=1):
        _compare_step(errors, ours, plain, plain.where or f"batch {number}", tolerance)
    return errors


def _compare_step(errors: Errors, ours: StepValues, plain: StepValues, where: str, tolerance: float) -> None:
    def note(what: str, error: float) -> float:
        if not error <= tolerance and not errors.first:
            errors.first = f"{what} ({where}): off by {error:.2g}"
        return error

    if not errors.first:
        errors.first = _rows_differ(ours, plain, where)
    errors.logprobs = max(errors.logprobs, note("log-probs", _list_error(ours.logprobs, plain.logprobs)))
    error = note("log-probs of the reference", _list_error(ours.reference_logprobs, plain.reference_logprobs))
    errors.reference = max(errors.reference, error)
    for name, error in tensor_errors(_as_tensors(ours.metrics), _as_tensors(plain.metrics)).items():
        errors.metrics = max(errors.metrics, note(name, error))
    errors.loss = max(errors.loss, note("loss", relative_error(ours.loss, plain.loss)))
    for name, error in tensor_errors(ours.gradients, plain.gradients).items():
        errors.gradients = max(errors.gradients, note(f"gradient of {name}", error))
        errors.by_parameter[name] = max(errors.by_parameter.get(name, 0.0), error)
    errors.grad_norm = max(errors.grad_norm, note("gradient norm", relative_error(ours.norm, plain.norm)))
    for name, error in tensor_errors(ours.weights, plain.weights).items():
        errors.weights = max(errors.weights, note(f"weights of {name} after the step", error))
        errors.by_parameter[name] = max(errors.by_parameter.get(name, 0.0), error)
    errors.worst_parameter = max(errors.by_parameter, key=errors.by_parameter.__getitem__, default="")


def _rows_differ(ours: StepValues, plain: StepValues, where: str) -> str:
    for place, (one, other) in enumerate(zip(ours.names, plain.names), start=1):
        if one != other:
            return f"rows of {where}: place {place} has {one} instead of {other}"
    if len(ours.names) != len(plain.names):
        return f"rows of {where}: {len(ours.names)} instead of {len(plain.names)}"
    if ours.cursor != plain.cursor:
        return f"cursor after {where}: {ours.cursor} instead of {plain.cursor}"
    return ""


def relative_error(ours: float, plain: float) -> float:
    return _finite(abs(ours - plain) / max(abs(plain), 1e-30))


def _list_error(ours: Sequence[float], plain: Sequence[float]) -> float:
    if len(ours) != len(plain):
        return math.inf
    return max((relative_error(a, b) for a, b in zip(ours, plain)), default=0.0)


def _as_tensors(metrics: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def tensor_errors(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, float]:
    """By name, in the order of the model; infinite where one side has no such tensor or another shape."""
    largest = max((float(t.abs().max()) for t in plain.values()), default=0.0)
    errors = {name: math.inf for name in ours if name not in plain}
    for name, expected in plain.items():
        found = ours.get(name)
        if found is None or found.shape != expected.shape:
            errors[name] = math.inf
            continue
        size = max(float(expected.abs().max()), _FLOOR * largest, 1e-30)
        errors[name] = _finite(float(torch.sub(found, expected).abs().max()) / size)
    return errors


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
