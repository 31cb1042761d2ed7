"""Batches, losses and steps as JSON and tensors for other processes, and back: numbers arrive bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.types import (
    Completion,
    Datum,
    Logprobs,
    LossResult,
    LossSpec,
    LossValues,
    OptimResult,
    OptimStep,
)

T = TypeVar("T")
Message = tuple[dict[str, object], dict[str, Tensor]]
_Column = list[np.ndarray]


def encode_batch(batch: Sequence[Datum]) -> Message:
    """All lists of a kind are one concatenated array, with the lengths beside it."""
    prompts: _Column = []
    tokens: _Column = []
    weights: _Column = []
    values: dict[str, _Column] = {}
    owners: dict[str, list[int]] = {}
    for row, datum in enumerate(batch):
        if not isinstance(datum, Datum):
            raise ValueError(f"row {row} of the batch is a {type(datum).__name__}, not a Datum")
        where = f"row {row} of the batch" + (f" ({datum.origin})" if datum.origin else "")
        prompts.append(_whole(datum.prompt, f"{where}: prompt"))
        for completion in datum.completions:
            if completion.targets is not None:
                raise ValueError(f"{where}: targets other than the tokens are not sent to other processes")
            for name, numbers in completion.values.items():
                values.setdefault(name, []).append(_real(numbers, f"{where}: values[{name!r}]"))
                owners.setdefault(name, []).append(len(tokens))
            tokens.append(_whole(completion.tokens, f"{where}: tokens"))
            weights.append(_real(completion.weights, f"{where}: weights"))
    body = {
        "origins": [datum.origin for datum in batch],
        "completions": [len(datum.completions) for datum in batch],
        "values": list(values),
    }
    tensors = _join("prompts", prompts) | _join("tokens", tokens) | {"weights": _flat(weights, np.float64)}
    for number, name in enumerate(values):
        tensors[f"values.{number}"] = _flat(values[name], np.float64)
        tensors[f"owners.{number}"] = torch.tensor(owners[name], dtype=torch.int64)
    return body, tensors


def decode_batch(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Datum]:
    prompts, (tokens, ends) = _cut(tensors, "prompts")[0], _cut(tensors, "tokens")
    weights = _split(tensors["weights"].tolist(), ends)
    values: list[dict[str, list[float]]] = [{} for _ in tokens]
    for number, name in enumerate(body["values"]):
        owners = tensors[f"owners.{number}"].tolist()
        lengths = [len(tokens[owner]) for owner in owners]
        for owner, numbers in zip(owners, _split(tensors[f"values.{number}"].tolist(), _ends(lengths)), strict=True):
            values[owner][name] = numbers
    completions = [Completion(*parts) for parts in zip(tokens, weights, values, strict=True)]
    groups = _split(completions, _ends(body["completions"]))
    return [Datum(*parts) for parts in zip(prompts, groups, body["origins"], strict=True)]


def encode_loss(loss: LossSpec) -> dict[str, object]:
    if not isinstance(loss, LossSpec):
        raise ValueError(f"the loss is a {type(loss).__name__}, not a LossSpec")
    for name, value in loss.options.items():
        try:
            same = isinstance(name, str) and json.loads(json.dumps(value)) == _with_lists(value)
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(f"loss.options[{name!r}] is not plain JSON: {value!r}")
    return {
        "kind": loss.kind,
        "scale": _number(loss.scale, "loss.scale"),
        "options": dict(loss.options),
    }


def decode_loss(body: Mapping[str, Any]) -> LossSpec:
    return LossSpec(**body)


def encode_step(step: OptimStep) -> dict[str, float | None]:
    if not isinstance(step, OptimStep):
        raise ValueError(f"the step is a {type(step).__name__}, not an OptimStep")
    values = asdict(step)
    return {name: None if value is None else _number(value, f"step.{name}") for name, value in values.items()}


def read_step(step: OptimStep | Mapping[str, Any]) -> OptimStep:
    """From a mapping of its fields too."""
    if isinstance(step, OptimStep):
        return step
    known = [field.name for field in fields(OptimStep)]
    unknown = sorted(set(step) - set(known))
    if unknown:
        raise ValueError(f"an optimizer step has no {unknown[0]!r}: it has {', '.join(known)}")
    if "learning_rate" not in step:
        raise ValueError("an optimizer step needs a learning_rate")
    return OptimStep(**step)


def encode_loss_result(result: LossResult) -> dict[str, object]:
    """Reads the result, which may wait for the device. All ranks."""
    values = result.result()
    return {
        "loss": values.loss,
        "metrics": {name: float(value) for name, value in values.metrics.items()},
        "nonfinite_origins": list(values.nonfinite_origins),
        "num_tokens": result.num_tokens,
        "num_supervised": result.num_supervised,
    }


def decode_loss_result(body: Mapping[str, Any]) -> LossResult:
    values = LossValues(body["loss"], dict(body["metrics"]), tuple(body["nonfinite_origins"]))
    return LossResult(lambda: values, num_tokens=body["num_tokens"], num_supervised=body["num_supervised"])


def encode_optim_result(result: OptimResult) -> dict[str, object]:
    """Reads the result. All ranks."""
    return {
        "grad_norm": result.grad_norm,
        "peak_memory_gib": result.peak_memory_gib,
        "loss_scale": result.loss_scale,
    }


def decode_optim_result(body: Mapping[str, Any]) -> OptimResult:
    norm = body["grad_norm"]
    return OptimResult(lambda: norm, peak_memory_gib=body["peak_memory_gib"], loss_scale=body["loss_scale"])


def encode_logprobs(logprobs: Sequence[Logprobs]) -> Message:
    lists = [np.asarray(numbers, dtype=np.float64) for row in logprobs for numbers in row]
    return {"completions": [len(row) for row in logprobs]}, _join("logprobs", lists, np.float64)


def decode_logprobs(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Logprobs]:
    lists: list[Sequence[float]] = [*_cut(tensors, "logprobs")[0]]
    return list(_split(lists, _ends(body["completions"])))


# --- lists of numbers -----------------------------------------------------------------------------------------------


def _whole(numbers: npt.ArrayLike, where: str) -> np.ndarray:
    array = _array(numbers, where)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where} are not whole numbers: {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{where} has {int(array.max())}, which is too large")
    return array.astype(np.int64)


def _real(numbers: npt.ArrayLike, where: str) -> np.ndarray:
    array = _array(numbers, where)
    if array.size and array.dtype.kind not in "iufb":
        raise ValueError(f"{where} are not numbers: {array.dtype}")
    return array.astype(np.float64)


def _array(numbers: npt.ArrayLike, where: str) -> np.ndarray:
    try:
        array = np.asarray(numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} is not a list of numbers: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{where} is not a list of numbers: it has {array.ndim} dimensions")
    return array


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{where} is not a number: {value!r}")
    return float(value)


def _with_lists(value: object) -> object:
    """JSON has no tuples; a loss does not mind which it gets."""
    if isinstance(value, (list, tuple)):
        return [_with_lists(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _with_lists(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _join(name: str, column: _Column, dtype: npt.DTypeLike = np.int64) -> dict[str, Tensor]:
    lengths = torch.tensor([len(array) for array in column], dtype=torch.int64)
    return {name: _flat(column, dtype), f"{name}.lengths": lengths}


def _flat(column: _Column, dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *column]))


def _cut(tensors: Mapping[str, Tensor], name: str) -> tuple[list[list[Any]], list[int]]:
    """(the lists, where each begins and the last ends)."""
    ends = _ends(tensors[f"{name}.lengths"].tolist())
    return _split(tensors[name].tolist(), ends), ends


def _ends(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _split(items: list[T], ends: Sequence[int]) -> list[list[T]]:
    assert ends[-1] == len(items), f"{len(items)} items for {ends[-1]} places"
    return [items[begin:end] for begin, end in pairwise(ends)]
