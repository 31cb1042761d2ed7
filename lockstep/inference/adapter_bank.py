"""Several LoRA adapters of one base model in one pass: each token goes through its own, or through none.

All adapters of a layer are stacked into two thin products; between them every token keeps only what is its own. Shapes
do not depend on who asks for what, so that company changes no rounding, and a CUDA graph serves every mixture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.inference.forwards import Forward, replaced_forwards
from lockstep.model.adapters import LoraAdapter, LowRankPair
from lockstep.model.policy import CausalLM, causal_lm

NO_ADAPTER = 0  # the number of the base model alone


@dataclass(frozen=True)
class StackedPairs:
    """Of one layer. `owners`: the number of the adapter that each column of the narrow product belongs to."""

    down: Tensor  # [in, ranks]
    up: Tensor  # [ranks, out]
    owners: Tensor  # [ranks]

    def narrow(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """[tokens, ranks]: a row has zeros in the columns of other adapters."""
        if len(numbers) != len(rows):
            raise ValueError("a layer with adapters gets only some of the tokens: adapters cannot be told apart there")
        return torch.where(self.owners == numbers[:, None], rows @ self.down, 0)


class AdapterBank:
    """The adapters that are loaded, by name. Change it between passes only, and tell the decoder (`check_model`)."""

    def __init__(self, model: CausalLM) -> None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                "the model has an adapter already: name its base model, and the run as one of the adapters"
            )
        self._linears = {name: m for name, m in causal_lm(model).named_modules() if type(m) is nn.Linear}
        self._adapters: dict[str, tuple[int, LoraAdapter]] = {}
        self._num_added = 0
        self.revision = 0
        """Counts changes: what was captured or laid out for an earlier one no longer counts."""
        self._stacked: dict[nn.Module, StackedPairs] = {}
        self._forwards: dict[nn.Module, Forward | None] = {}
        self._numbers = torch.zeros(0, dtype=torch.int64)  # of the tokens of the pass that is being computed

    @property
    def names(self) -> list[str]:
        return list(self._adapters)

    def number(self, name: str | None) -> int:
        """What rows of this adapter are marked with. It is never given to another adapter."""
        if name is None:
            return NO_ADAPTER
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}: there is {', '.join(self._adapters) or 'none'}")
        return self._adapters[name][0]

    def add(self, name: str, adapter: LoraAdapter) -> None:
        """An adapter of the same name is replaced. One that does not fit the model raises, and nothing changes."""
        for layer, pair in adapter.layers.items():
            self._check(layer, pair)
        self._num_added += 1
        self._adapters[name] = (self._num_added, adapter)
        self._stack()

    def remove(self, name: str) -> None:
        """Nobody may name it any more, nor be decoded with it."""
        del self._adapters[name]
        self._stack()

    def stacked(self, layer: nn.Module) -> StackedPairs | None:
        return self._stacked.get(layer)

    @property
    def numbers(self) -> Tensor:
        """[tokens] of the pass that is being computed: the adapter of each."""
        return self._numbers

    @contextlib.contextmanager
    def applied(self, numbers: Tensor) -> Iterator[None]:
        """Around a pass over as many tokens. Layers that are computed in another way meanwhile add their own part."""
        self._numbers = numbers
        with replaced_forwards(self._forwards):
            yield

    def _forward(self, pairs: StackedPairs, own: Forward, x: Tensor) -> Tensor:
        output: Any = own(x)
        narrow = pairs.narrow(x.reshape(-1, x.shape[-1]), self._numbers)
        return output + (narrow @ pairs.up).view_as(output)

    def _check(self, layer: str, pair: LowRankPair) -> None:
        linear = self._linears.get(layer)
        if linear is None:
            raise ValueError(
                f"it adapts {layer!r}, which is no linear layer of this model: is it of another base model?"
            )
        shape, own = (pair.up.shape[0], pair.down.shape[1]), tuple(linear.weight.shape)
        if shape != own:
            raise ValueError(f"it is for a {layer!r} of the shape {shape}, and that of this model is {own}")

    def _stack(self) -> None:
        self.revision += 1
        pairs: dict[str, list[tuple[int, LowRankPair]]] = {}
        for number, adapter in self._adapters.values():
            for name, pair in adapter.layers.items():
                pairs.setdefault(name, []).append((number, pair))
        self._stacked = {self._linears[name]: _stack_layer(self._linears[name], found) for name, found in pairs.items()}
        self._forwards = {
            layer: functools.partial(self._forward, stacked, layer.forward) for layer, stacked in self._stacked.items()
        }


def _stack_layer(linear: nn.Linear, pairs: list[tuple[int, LowRankPair]]) -> StackedPairs:
    weight = linear.weight
    owners = [number for number, pair in pairs for _ in range(pair.down.shape[0])]
    downs = torch.cat([pair.down.to(weight.device, weight.dtype) * pair.scale for _, pair in pairs])
    ups = torch.cat([pair.up.to(weight.device, weight.dtype) for _, pair in pairs], dim=1)
    return StackedPairs(downs.T.contiguous(), ups.T.contiguous(), torch.tensor(owners, device=weight.device))
