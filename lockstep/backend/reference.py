"""The reference model: the policy without its adapters, or a copy of the trained parameters, sharded as they are.

While a reference is in place, the policy's module computes as the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.parallel.tensor import local


class ReferenceModel(Protocol):
    def in_place(self) -> contextlib.AbstractContextManager[None]: ...

    def mix(self, share: float) -> None: ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold after `mix`."""
        ...


class AdapterOff:
    """The base model, which training of an adapter does not change."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        self._layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
        if not self._layers:
            raise ValueError("the reference adapter_off needs a model with LoRA adapters: use copy")
        _refuse_trained_base(model, self._layers)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        # Only the flag: PEFT's own method also changes requires_grad, which breaks sharded parameters.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def mix(self, share: float) -> None:
        raise ValueError("a reference that follows the policy must be a copy: set algorithm.reference to copy")

    def state(self) -> dict[str, Tensor]:
        return {}


def _refuse_trained_base(model: nn.Module, layers: Sequence[Any]) -> None:
    """What is trained outside of adapters, such as biases, stays when they are switched off."""
    adapters = {
        id(p)
        for layer in layers
        for name in layer.adapter_layer_names
        if isinstance(held := getattr(layer, name, None), nn.Module)
        for p in held.parameters()
    }
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapters]
    if others:
        raise ValueError(
            f"the reference adapter_off would not be the base model: {len(others)} trained tensors are not of an "
            f"adapter, first {others[0]!r}. Use copy"
        )


class ParameterCopy:
    """The trained parameters at the time of construction: whole, or this rank's part."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept = {name: p.detach().clone() for name, p in parameters.items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def mix(self, share: float) -> None:
        for name, parameter in self._parameters.items():
            local(self._kept[name]).lerp_(local(parameter.detach()), share)

    def state(self) -> dict[str, Tensor]:
        return {f"reference.{name}": kept for name, kept in self._kept.items()}

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            kept = self._kept[name]
            if isinstance(parameter, DTensor):
                # Contents, not storage: FSDP2 gathers from its own storage.
                ours, theirs = local(parameter.detach()), local(kept)
                before = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(before)
            else:
                parameter.data, self._kept[name] = kept, parameter.data


def make_reference(kind: str, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> ReferenceModel | None:
    if kind == "none":
        return None
    if kind == "adapter_off":
        return AdapterOff(model)
    if kind == "copy":
        return ParameterCopy(parameters)
    raise ValueError(f"unknown reference {kind!r}: none, adapter_off or copy")
