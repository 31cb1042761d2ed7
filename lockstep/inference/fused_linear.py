"""Other forwards for some modules, for a while."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.model.lora import is_sped_up


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """None: that of the module's class. Afterwards everything is as it was, also after an exception."""
    held = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            _set_forward(module, forward)
        yield
    finally:
        for module, forward in held.items():
            _set_forward(module, forward)


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    # Past nn.Module's own bookkeeping: this is done for hundreds of modules in every step.
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


MIN_ROWS, MAX_ROWS = 4, 64  # a single token is as fast in a plain product, and so are many
_ROW_STEP = 8
_NUM_COMPARED = 64  # numbers of each weight


class FusedLinears:
    """`groups`: layers that are called with one and the same tensor, as `recorded_groups` finds them.

    A layer that gets another tensor than its neighbours is still right: the whole product is then computed for it.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        self._groups = [_Group(layers) for layers in groups]
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}

    @property
    def num_bytes(self) -> int:
        """What all weights laid out take, at most."""
        return sum(base.weight.nbytes for group in self._groups for base in group.bases)

    def lay_out(self, num_rows: int) -> None:
        """For passes of at most `num_rows` tokens. Before them, whenever weights may have changed."""
        self._forwards = {}
        if MIN_ROWS <= num_rows <= MAX_ROWS:
            with torch.inference_mode():
                for group in self._groups:
                    if all(map(_is_joinable, group.layers)):
                        group.lay_out(-(-num_rows // _ROW_STEP) * _ROW_STEP)
                        self._forwards |= group.forwards

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with replaced_forwards(self._forwards):
            yield


@contextlib.contextmanager
def recorded_groups(model: nn.Module) -> Iterator[list[list[nn.Module]]]:
    """Filled at the end by what the model does meanwhile, which must be one pass."""
    calls: list[tuple[nn.Module, Tensor]] = []  # with their inputs: an address must not be given out again
    others: set[nn.Module] = set()  # that are called in another way

    def record(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(arguments) != 1 or options or any(layer is known for known, _ in calls):
            others.add(layer)
        else:
            calls.append((layer, arguments[0]))

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in _joinable_layers(model)]
    groups: list[list[nn.Module]] = []
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    for _, same in itertools.groupby(calls, key=lambda call: id(call[1])):
        groups.append([layer for layer, _ in same if layer not in others])
    groups[:] = filter(None, groups)


def _joinable_layers(model: nn.Module) -> list[nn.Module]:
    inside = {part for layer in model.modules() if _has_adapter(layer) for part in layer.modules() if part is not layer}
    return [layer for layer in model.modules() if layer not in inside and _is_joinable(layer)]


def _is_joinable(layer: nn.Module) -> bool:
    """Whether what it does is known, and nobody has put another forward in its place."""
    if "forward" in layer.__dict__ and not is_sped_up(layer):
        return False
    return _has_plain_adapter(layer) if _has_adapter(layer) else _is_plain(layer)


def _has_adapter(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and hasattr(layer, "base_layer")


def _has_plain_adapter(layer: Any) -> bool:
    """Two products and a factor, beside a plain layer of the same dtype."""
    parts = [*layer.lora_A.values(), *layer.lora_B.values()]
    dtypes = {layer.base_layer.weight.dtype, *(part.weight.dtype for part in parts if hasattr(part, "weight"))}
    bare = all(type(part) is nn.Linear and part.bias is None for part in parts)
    return bare and len(dtypes) == 1 and not layer.lora_variant and _is_plain(layer.base_layer)


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Linear or isinstance(layer.weight, DTensor):
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype in (torch.float32, torch.float64)


class _Group:
    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.bases: list[nn.Linear] = [getattr(layer, "base_layer", layer) for layer in layers]
        self.forwards = {layer: functools.partial(self.call, number) for number, layer in enumerate(self.layers)}
        self._sizes = [base.out_features for base in self.bases]
        self._made_of: list[Any] = []
        self._multiply: Callable[[Tensor], Tensor]
        self._down: Tensor | None = None
        self._up: Tensor | None = None
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def lay_out(self, num_rows: int) -> None:
        self._stack_adapters()
        made_of = [num_rows, *(_trace(tensor) for base in self.bases for tensor in (base.weight, base.bias))]
        if self._made_of and all(map(_is_same, made_of, self._made_of)):
            return
        weights, biases = [base.weight for base in self.bases], [base.bias for base in self.bases]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        self._multiply = _make_product(weight, bias, num_rows)
        self._made_of = made_of

    def call(self, number: int, x: Tensor) -> Tensor:
        """What layer `number` gives for `x`: for its neighbours it is computed too, and waits for them."""
        if x is not self._input or self._outputs[number] is None:
            self._compute(x)
        found, self._outputs[number] = self._outputs[number], None
        assert found is not None
        if all(output is None for output in self._outputs):
            self._input = None  # whoever comes with the same tensor later may have changed what is in it
        return found

    def _compute(self, x: Tensor) -> None:
        if x.shape[-1] != self.bases[0].in_features:  # packed products would read beyond the end
            raise ValueError(f"{x.shape[-1]} numbers a token, and the layer takes {self.bases[0].in_features}")
        rows = x.reshape(-1, x.shape[-1])
        product = self._multiply(rows)
        if self._down is not None and self._up is not None:
            product.addmm_(rows @ self._down, self._up)
        parts = product.view(*x.shape[:-1], -1).split(self._sizes, dim=-1)
        self._input, self._outputs = x, list(parts)

    def _stack_adapters(self) -> None:
        """A block for each layer: one narrow product, and one sum."""
        pairs = [_adapter_of(layer, base) for layer, base in zip(self.layers, self.bases, strict=True)]
        if any(len(down) for down, _ in pairs):
            self._down = torch.cat([down for down, _ in pairs]).T.contiguous()
            self._up = torch.block_diag(*(up for _, up in pairs)).T.contiguous()
        else:
            self._down = self._up = None


def _adapter_of(layer: Any, base: nn.Linear) -> tuple[Tensor, Tensor]:
    """([rank, in], [out, rank]) of what is added to a layer now, scaled; of no rank where nothing is."""
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
    shape = weight.new_empty(1).expand(weight.shape)  # the numbers are all in the packed one

    def multiply(rows: Tensor) -> Tensor:
        if len(rows) > num_rows:
            return torch.cat([multiply(part) for part in rows.split(num_rows)])
        # Always as many rows as were planned for: the product is for no other number, and rounds alike for all.
        missing = num_rows - len(rows)
        full = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        product = torch.ops.mkl._mkl_linear(full.contiguous(), packed, shape, bias, num_rows)
        return product[: len(rows)] if missing else product

    return multiply


def _trace(tensor: Tensor | None) -> Any:
    """What shows that a tensor is another, or has other numbers. Writes through `.data` are not counted as versions."""
    if tensor is None:
        return None
    some = tensor.detach().flatten()[:: max(tensor.numel() // _NUM_COMPARED, 1)].clone()
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version, some


def _is_same(trace: Any, other: Any) -> bool:
    if not isinstance(trace, tuple):
        return trace == other
    known = trace[1] is not None and trace[:2] == other[:2]
    return known and torch.equal(trace[2], other[2])
