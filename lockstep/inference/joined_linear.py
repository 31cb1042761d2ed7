"""Linear layers with one input as a single matrix product, on a GPU: their weights are copied side by side.

LoRA adapters are added into the copy, so that a step costs what it costs without them. The sum is taken in float32 and
rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class JoinedLinears:
    """`groups`: layers that are called with the same tensor, as `recorded_groups` finds them."""

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        places = {child: (parent, name) for parent in model.modules() for name, child in parent._modules.items()}
        self._groups = [list(layers) for layers in groups]
        self._places = [[places[layer] for layer in layers] for layers in groups]
        self._parts: list[list[_JoinedPart]] = []

    @property
    def num_bytes(self) -> int:
        return sum(base.weight.nbytes for layers in self._groups for base in map(_base, layers))

    def lay_out(self) -> None:
        """Call again whenever weights may have changed. The copies stay at the same addresses."""
        with torch.inference_mode():
            if not self._parts:
                self._parts = [_join(layers) for layers in self._groups]
            copies, weights = list[Tensor](), list[Tensor]()
            adapted: dict[Hashable, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
            for layers, parts in zip(self._groups, self._parts, strict=True):
                for layer, copy, bias in parts[0].product.slices(layers):
                    base = _base(layer)
                    if (adapter := _adapter(layer, base)) is not None:
                        down, up, scale = adapter
                        adapted.setdefault((up.shape, down.shape, scale), []).append((copy, base.weight, down, up))
                    else:
                        copies.append(copy)
                        weights.append(base.weight)
                    if bias is not None and base.bias is not None:
                        bias.copy_(base.bias)
            if copies:
                torch._foreach_copy_(copies, weights)
            _add_adapters(adapted)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The modules themselves are exchanged, not their forwards: compiled code of one layer then serves all."""
        places = [place for places in self._places for place in places]
        parts = [part for parts in self._parts for part in parts]
        own = [parent._modules[name] for parent, name in places]
        try:
            for (parent, name), part in zip(places, parts, strict=False):  # none before they are laid out
                parent._modules[name] = part
            yield
        finally:
            for (parent, name), layer in zip(places, own, strict=True):
                parent._modules[name] = layer


class _JoinedProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> None:
        self.weight, self.bias, self.sizes = weight, bias, sizes
        self.input: Tensor | None = None
        self.outputs: list[Tensor | None] = []

    def slices(self, layers: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Tensor, Tensor | None]]:
        """Each layer with its rows of weight and bias."""
        weights = self.weight.split(self.sizes)
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        yield from zip(layers, weights, biases, strict=True)


class _JoinedPart(nn.Module):
    """In the place of layer `number`. The outputs of the others are computed too, and kept until they are called."""

    def __init__(self, product: _JoinedProduct, number: int) -> None:
        super().__init__()
        self.product, self.number = product, number

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if x is not product.input or product.outputs[self.number] is None:
            product.input = x
            product.outputs = list(F.linear(x, product.weight, product.bias).split(product.sizes, dim=-1))
        output, product.outputs[self.number] = product.outputs[self.number], None
        if all(other is None for other in product.outputs):
            product.input = None  # the same tensor may have other values in a later call
        assert output is not None
        return output


def _join(layers: Sequence[nn.Module]) -> list[_JoinedPart]:
    bases = [_base(layer) for layer in layers]
    sizes, weight = [base.out_features for base in bases], bases[0].weight
    joined = torch.empty(sum(sizes), bases[0].in_features, dtype=weight.dtype, device=weight.device)
    biased = any(base.bias is not None for base in bases)
    product = _JoinedProduct(joined, joined.new_zeros(sum(sizes)) if biased else None, sizes)
    return [_JoinedPart(product, number) for number in range(len(bases))]


def _base(layer: Any) -> nn.Linear:
    base: nn.Linear = getattr(layer, "base_layer", layer)
    return base


def _adapter(layer: Any, base: nn.Linear) -> tuple[Tensor, Tensor, float] | None:
    """[rank, in], [out, rank] and the scale of a layer's active adapters; several are one of a higher rank."""
    if layer is base or layer.disable_adapters or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    downs, ups = [layer.lora_A[name].weight for name in names], [layer.lora_B[name].weight for name in names]
    scales = [layer.scaling[name] for name in names]
    if len(names) < 2:
        return (downs[0], ups[0], scales[0]) if names else None
    scaled = [down.float() * scale for down, scale in zip(downs, scales, strict=True)]
    return torch.cat(scaled), torch.cat(ups, dim=1), 1.0


def _add_adapters(adapted: Mapping[Any, list[tuple[Tensor, Tensor, Tensor, Tensor]]]) -> None:
    """Copies become weight + scale * up @ down. Layers of one shape are multiplied together: one by one they would be
    a thousand small operations."""
    for (*_, scale), entries in adapted.items():
        downs, ups = (torch.stack([entry[place] for entry in entries]).float() for place in (2, 3))
        for (copy, weight, *_), product in zip(entries, torch.bmm(ups, downs), strict=True):
            torch.add(weight, product, alpha=scale, out=copy)
