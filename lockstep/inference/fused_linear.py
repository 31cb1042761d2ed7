"""Linear layers with one input as a single matrix product, on CPU: weights are packed once, LoRA adapters stacked."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.inference.adapter_bank import AdapterBank, StackedPairs
from lockstep.inference.forwards import Forward, replaced_forwards
from lockstep.model.lora import is_sped_up

MIN_ROWS, MAX_ROWS = 4, 64  # outside of this range a plain product is as fast
_ROW_STEP = 8
_NUM_COMPARED = 64  # values of each weight


class FusedLinears:
    """`groups`: layers that are called with the same tensor, as `recorded_groups` finds them. `bank`: adapters of rows.

    A layer that is called with another tensor is still right: the whole product is then computed for it.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Module]], bank: AdapterBank | None = None) -> None:
        self._groups = [_FusedGroup(layers, bank) for layers in groups]
        self._forwards: dict[nn.Module, Forward] = {}

    @property
    def groups(self) -> list[list[nn.Module]]:
        return [group.layers for group in self._groups]

    @property
    def is_laid_out(self) -> bool:
        """Whether passes use it: a plain product is as fast for few or many tokens."""
        return bool(self._forwards)

    @property
    def num_bytes(self) -> int:
        """Of all packed weights, at most."""
        return sum(base.weight.nbytes for group in self._groups for base in group.bases)

    def lay_out(self, num_rows: int) -> None:
        """For passes of at most `num_rows` tokens. Call again whenever weights may have changed."""
        self._forwards = {}
        if MIN_ROWS <= num_rows <= MAX_ROWS:
            with torch.inference_mode():
                for group in self._groups:
                    if all(map(_is_fusable, group.layers)):
                        group.lay_out(-(-num_rows // _ROW_STEP) * _ROW_STEP)
                        self._forwards |= group.forwards

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with replaced_forwards(self._forwards):
            yield


@contextlib.contextmanager
def recorded_groups(model: nn.Module) -> Iterator[list[list[nn.Module]]]:
    """The list is filled at the end. The model must make exactly one pass inside."""
    calls: list[tuple[nn.Module, Tensor]] = []  # inputs are held, so that no address is reused
    others: set[nn.Module] = set()  # layers that are called in another way

    def record(layer: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, object]) -> None:
        if len(arguments) != 1 or options or any(layer is known for known, _ in calls):
            others.add(layer)
        else:
            calls.append((layer, arguments[0]))

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in _fusable_layers(model)]
    groups: list[list[nn.Module]] = []
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    for _, same_input in itertools.groupby(calls, key=lambda call: id(call[1])):
        groups.append([layer for layer, _ in same_input if layer not in others])
    groups[:] = filter(None, groups)


def _fusable_layers(model: nn.Module) -> list[nn.Module]:
    inside = {part for layer in model.modules() if _has_adapter(layer) for part in layer.modules() if part is not layer}
    return [layer for layer in model.modules() if layer not in inside and _is_fusable(layer)]


def _is_fusable(layer: nn.Module) -> bool:
    """A plain or LoRA linear layer whose forward is its own."""
    if "forward" in layer.__dict__ and not is_sped_up(layer):
        return False
    return _has_plain_adapter(layer) if _has_adapter(layer) else _is_plain(layer)


def _has_adapter(layer: nn.Module) -> bool:
    return hasattr(layer, "lora_A") and hasattr(layer, "base_layer")


def _has_plain_adapter(layer: Any) -> bool:
    """LoRA without variants or biases, on a plain layer of the same dtype."""
    if not _is_plain(layer.base_layer):
        return False
    parts = [*layer.lora_A.values(), *layer.lora_B.values()]
    dtypes = {layer.base_layer.weight.dtype, *(part.weight.dtype for part in parts if hasattr(part, "weight"))}
    bare = all(type(part) is nn.Linear and part.bias is None for part in parts)
    return bare and len(dtypes) == 1 and not layer.lora_variant


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or isinstance(layer.weight, DTensor):
        return False
    if layer.weight.device.type == "cuda":
        return layer.weight.is_floating_point()
    return layer.weight.device.type == "cpu" and layer.weight.dtype in (torch.float32, torch.float64)


class _FusedGroup:
    def __init__(self, layers: Sequence[Any], bank: AdapterBank | None) -> None:
        self.layers = list(layers)
        self._bank = bank
        self.bases: list[nn.Linear] = [getattr(layer, "base_layer", layer) for layer in layers]
        self.forwards = {layer: functools.partial(self.call, number) for number, layer in enumerate(self.layers)}
        self._sizes = [base.out_features for base in self.bases]
        self._packed_from: list[Any] = []
        self._multiply: Callable[[Tensor], Tensor]
        self._down: Tensor | None = None
        self._up: Tensor | None = None
        self._of_rows: StackedPairs | None = None
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def lay_out(self, num_rows: int) -> None:
        self._stack_adapters()
        packed_from = [num_rows, *(_fingerprint(tensor) for base in self.bases for tensor in (base.weight, base.bias))]
        if self._packed_from and all(map(_is_same, packed_from, self._packed_from)):
            return
        weights, biases = [base.weight for base in self.bases], [base.bias for base in self.bases]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        self._multiply = _make_product(weight, bias, num_rows)
        self._packed_from = packed_from

    def call(self, number: int, x: Tensor) -> Tensor:
        """The output of layer `number`. Those of the other layers are computed too, and kept until they are called."""
        if x is not self._input or self._outputs[number] is None:
            self._compute(x)
        output, self._outputs[number] = self._outputs[number], None
        assert output is not None
        if all(other is None for other in self._outputs):
            self._input = None  # the same tensor may have other values in a later call
        return output

    def _compute(self, x: Tensor) -> None:
        if x.shape[-1] != self.bases[0].in_features:  # packed products would read beyond the end
            raise ValueError(f"{x.shape[-1]} features a token, and the layer takes {self.bases[0].in_features}")
        rows = x.reshape(-1, x.shape[-1])
        product = self._multiply(rows)
        if self._down is not None and self._up is not None:
            product.addmm_(rows @ self._down, self._up)
        if self._of_rows is not None and self._bank is not None:
            product.addmm_(self._of_rows.narrow(rows, self._bank.numbers), self._of_rows.up)
        parts = product.view(*x.shape[:-1], -1).split(self._sizes, dim=-1)
        self._input, self._outputs = x, list(parts)

    def _stack_adapters(self) -> None:
        """One block for each layer, so that all adapters are two products."""
        pairs = [_adapter_of(layer, base) for layer, base in zip(self.layers, self.bases, strict=True)]
        if any(len(down) for down, _ in pairs):
            self._down = torch.cat([down for down, _ in pairs]).T.contiguous()
            self._up = torch.block_diag(*(up for _, up in pairs)).T.contiguous()
        else:
            self._down = self._up = None
        if self._bank is not None:
            self._of_rows = self._stack_rows(self._bank)

    def _stack_rows(self, bank: AdapterBank) -> StackedPairs | None:
        """Those of the bank, in the same way."""
        found = [bank.stacked(layer) for layer in self.layers]
        known = [pairs for pairs in found if pairs is not None]
        if not known:
            return None
        ups = [
            base.weight.new_empty(0, base.out_features) if pairs is None else pairs.up
            for base, pairs in zip(self.bases, found, strict=True)
        ]
        return StackedPairs(
            torch.cat([pairs.down for pairs in known], dim=1),
            torch.block_diag(*ups),
            torch.cat([pairs.owners for pairs in known]),
        )


def _adapter_of(layer: Any, base: nn.Linear) -> tuple[Tensor, Tensor]:
    """([rank, in], [out, rank]) of the active adapters of a layer, scaled; rank 0 where there is none."""
    weight = base.weight
    downs, ups = [weight.new_empty(0, base.in_features)], [weight.new_empty(base.out_features, 0)]
    if layer is not base and not layer.disable_adapters and not layer.merged:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                downs.append(layer.lora_A[name].weight * layer.scaling[name])
                ups.append(layer.lora_B[name].weight)
    return torch.cat(downs), torch.cat(ups, dim=1)


def _make_product(weight: Tensor, bias: Tensor | None, num_rows: int) -> Callable[[Tensor], Tensor]:
    if weight.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return lambda rows: F.linear(rows, weight, bias)
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, num_rows)
    shape = weight.new_empty(1).expand(weight.shape)  # only its shape is read

    def multiply(rows: Tensor) -> Tensor:
        if len(rows) > num_rows:
            return torch.cat([multiply(part) for part in rows.split(num_rows)])
        # Always `num_rows` rows: the packed weight is for no other number, and every batch size then rounds alike.
        missing = num_rows - len(rows)
        full = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        product = torch.ops.mkl._mkl_linear(full.contiguous(), packed, shape, bias, num_rows)
        return product[: len(rows)] if missing else product

    return multiply


def _fingerprint(tensor: Tensor | None) -> object:
    """Changes when the tensor is replaced or written. Some values too: writes through `.data` count no version."""
    if tensor is None:
        return None
    values = tensor.detach().flatten()[:: max(tensor.numel() // _NUM_COMPARED, 1)].clone()
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version, values


def _is_same(fingerprint: Any, other: Any) -> bool:
    if not isinstance(fingerprint, tuple):
        return fingerprint == other
    known = fingerprint[1] is not None and fingerprint[:2] == other[:2]
    return known and torch.equal(fingerprint[2], other[2])
