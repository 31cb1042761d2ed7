"""Newer weights into a model that is there already: all tensors are checked first, then all are copied.

Must not know where weights come from, nor versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def apply_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """In place, by the model's own names: every tensor of it, or of a model with adapters every tensor of these.

    Of tied tensors one name is enough. Anything that does not fit is a ValueError, and nothing is changed.
    """
    held: dict[str, Tensor] = model.state_dict(keep_vars=True)
    _refuse_unknown(held, weights)
    _refuse_missing(held, weights, _adapter_names(model, held))
    for name, tensor in weights.items():
        _check(name, tensor, held[name])
    _refuse_contradictions(held, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            held[name].copy_(tensor)


def _refuse_unknown(held: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    unknown = sorted(weights.keys() - held.keys())
    if unknown:
        raise ValueError(f"{len(unknown)} of {len(weights)} tensors are not of this model, first {unknown[0]!r}")


def _refuse_missing(held: Mapping[str, Tensor], weights: Mapping[str, Any], adapter: set[str]) -> None:
    wanted = adapter if weights and weights.keys() <= adapter else held.keys()
    given = {id(held[name]) for name in weights}
    missing = sorted(name for name in wanted if id(held[name]) not in given)
    if missing:
        raise ValueError(f"{len(missing)} of {len(wanted)} tensors of the model are missing, first {missing[0]!r}")


def _check(name: str, tensor: Any, held: Tensor) -> None:
    if isinstance(held, DTensor):
        raise ValueError("the model is spread over several processes: it cannot take weights from memory")
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.shape != held.shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}: the model's is {list(held.shape)}")
    if tensor.dtype != held.dtype:
        raise ValueError(f"{name} is {tensor.dtype}: the model holds {held.dtype}, convert it first")


def _refuse_contradictions(held: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Two names of one tensor must bring the same numbers."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        other = first.setdefault(id(held[name]), name)
        if other != name and not torch.equal(tensor, weights[other]):
            raise ValueError(f"{name} and {other} are one tensor in the model, and two different ones here")


def _adapter_names(model: Any, held: Mapping[str, Tensor]) -> set[str]:
    """Of a PEFT model the tensors that its adapters brought, otherwise none."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None) if hasattr(model, "peft_config") else None
    return {name for name in held if prefix and (prefix in name or ".modules_to_save." in name)}
