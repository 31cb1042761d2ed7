"""What one layer costs: run on the meta device under a counter of every operation and allocation, or traced as
torch.compile traces it, up to the kernels, and its graphs counted."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.backend.build import EXPENSIVE
from lockstep.model.policy import Policy, causal_lm, setting_by_layer
from lockstep.plan.description import LayerCosts, PassCosts, Product
from lockstep.plan.graph import OWN_PRODUCTS, PRODUCTS, TOKENS, LayerGraph, is_of_tokens, storage_of


@dataclass(frozen=True)
class LayerCall:
    """What a layer was called with."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    follows: bool = True
    """Whether the hidden states are what the layer before, or the embedding, has returned."""


def window_of(layer: nn.Module) -> int | None:
    found = [getattr(m, "sliding_window", None) for m in layer.modules()]
    return next((int(w) for w in found if w), None)


def _attention_of(policy: Policy, layer: nn.Module, query: Tensor | None, key: Tensor | None) -> object:
    """(query heads, key heads, head size, window) as the kernel was called, or None."""
    if query is None or key is None:
        return None
    keys = key.shape[-2]
    if key is query:  # of a product, for which keys were repeated
        text = causal_lm(policy.model).config.get_text_config()
        numbers = [getattr(m, "layer_idx", None) for m in layer.modules()]
        every = setting_by_layer(text, "num_key_value_heads")
        keys = every[next((n for n in numbers if n is not None), 0) % len(every)] or keys
    return (query.shape[-2], keys, query.shape[-1], window_of(layer))


@dataclass
class _Kept:
    """Bytes for each token, by what they are of and by width; and those that are not of tokens."""

    hidden: int
    mlp: int
    experts: tuple[int, ...] = ()
    """Widths inside of an expert."""
    by_kind: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    constant: float = 0.0
    scores: float = 0.0

    def add(self, shape: Sequence[int], num_bytes: float) -> None:
        if is_of_pairs(shape, num_bytes):
            self.scores += num_bytes / TOKENS**2
            return
        if math.prod(shape) % TOKENS:
            self.constant += num_bytes
            return
        per_token = num_bytes / TOKENS
        last = shape[-1] if shape else 1
        flat = [n for n in shape if n != 1 and n % TOKENS]
        num_rows = next((n // TOKENS for n in shape if n % TOKENS == 0), 1)
        if num_rows > 1 and flat == [self.hidden]:  # of every expert that a token chose
            self.by_kind["experts"]["split"] += per_token
        elif flat in ([], [self.hidden]) and (last == self.hidden or last == 1 or not flat):
            self.by_kind["norms and residual"]["whole"] += per_token
        elif last in self.experts or last == self.mlp or (flat and flat[-1] % self.mlp == 0):
            self.by_kind["mlp"]["split"] += per_token
        else:
            self.by_kind["attention"]["split"] += per_token

    def plain(self) -> dict[str, dict[str, float]]:
        return {kind: dict(widths) for kind, widths in self.by_kind.items()}


def _empty_kept(policy: Policy) -> _Kept:
    text = causal_lm(policy.model).config.get_text_config()
    names = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
    sizes = [setting_by_layer(text, name)[0] for name in names]
    inner = int(sizes[1] or 0)
    return _Kept(text.hidden_size, next((int(s) for s in sizes if s), 4 * text.hidden_size), (inner, 2 * inner))


def is_of_pairs(shape: Sequence[int], num_bytes: float) -> bool:
    """Whether it has an entry for each two tokens of a document, or also for a sink beside them."""
    return sum(n in (TOKENS, TOKENS + 1) for n in shape) >= 2 and num_bytes >= TOKENS**2


@dataclass
class _Bytes:
    tokens: float = 0
    pairs: float = 0

    @property
    def total(self) -> float:
        return self.tokens + self.pairs

    def copy(self) -> _Bytes:
        return _Bytes(self.tokens, self.pairs)

    def above(self, other: _Bytes) -> _Bytes:
        return _Bytes(max(self.tokens - other.tokens, 0), max(self.pairs - other.pairs, 0))


class OperationCounter(TorchDispatchMode):
    """Live bytes, operations, and bytes moved, of everything that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.moved = _Bytes(), _Bytes(), _Bytes()
        self.operations = 0
        self.products: list[tuple[int, int, int]] = []  # rows, inner, columns
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.kept_results: list[Tensor] | None = None
        """Where it is a list: of operations whose results selective recomputation keeps."""
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        name = func.overloadpacket.__name__
        result = _grouped_result(*args, **(kwargs or {})) if name == "_grouped_mm" else func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in outputs if self._take(t)]
        changes = name.endswith("_") or bool(fresh)
        if not changes or name in ("empty", "empty_like", "new_empty", "empty_strided", "detach"):
            return result
        self.operations += 1
        if self.kept_results is not None and func in EXPENSIVE:
            self.kept_results += outputs
        if name in PRODUCTS:
            self._note_product(name, inputs, outputs)
        elif "varlen_attn" in name or "scaled_dot_product" in name:
            self.query, self.key = (inputs[0], inputs[1]) if self.query is None else (self.query, self.key)
        else:
            for tensor in [*(t for t in inputs if t.numel() > 1), *outputs]:
                if is_of_pairs(tensor.shape, tensor.nbytes):
                    self.moved.pairs += tensor.nbytes
                else:
                    self.moved.tokens += tensor.nbytes
        return result

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Known from before: not counted."""
        self._seen |= {t.untyped_storage()._cdata for t in tensors}

    def _note_product(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if name in OWN_PRODUCTS:
            left = inputs[0]
            self.products.append((math.prod(left.shape[:-1]), left.shape[-1], outputs[0].shape[-1]))
            return
        left, right = inputs[:2] if name == "_grouped_mm" else inputs[-2:]
        if left.ndim == 3 and right.ndim == 3 and name == "bmm":
            self.products += [(left.shape[1], left.shape[2], right.shape[2])] * left.shape[0]
            if self.query is None and left.shape[1] == right.shape[2] == TOKENS:  # scores of all heads
                self.query = self.key = left.transpose(0, 1)
        elif right.ndim >= 2:
            self.products.append((math.prod(left.shape[:-1]), left.shape[-1], outputs[0].shape[-1]))

    def _take(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or tensor.device.type != "meta":
            return False
        self._seen.add(key)
        # What is not of tokens, such as gradients of matrices, is counted where parameters are.
        of_tokens = tensor.numel() > 0 and storage.nbytes() % (TOKENS * tensor.element_size()) == 0
        of_pairs = is_of_pairs(tensor.shape, storage.nbytes())
        size = _Bytes(pairs=storage.nbytes()) if of_pairs else _Bytes(storage.nbytes() if of_tokens else 0)
        self._add(size, 1)
        if self.live.total > self.peak.total:
            self.peak = self.live.copy()
        weakref.finalize(storage, self._release, key, size)
        return True

    def _add(self, size: _Bytes, sign: int) -> None:
        self.live.tokens += sign * size.tokens
        self.live.pairs += sign * size.pairs

    def _release(self, key: int, size: _Bytes) -> None:
        self._seen.discard(key)
        self._add(size, -1)


class FusedAttention(TorchFunctionMode):
    """Attention over one document is one kernel, as on a GPU: torch has none for tensors without contents."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        self._counter.query, self._counter.key = query.transpose(1, 2), key.transpose(1, 2)
        return _Attended.apply(query, key, value)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, attended, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _grouped_result(left: Tensor, right: Tensor, offs: Tensor | None = None, **_options: Any) -> Tensor:
    """Of a product for each expert; torch (2.13) knows the shape in bf16 alone."""
    if left.ndim == 2 and right.ndim == 2:  # the gradient of the matrices
        assert offs is not None
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def count_moved(work: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes that eager operations read and write, forward and backward, as they are counted in layers."""
    counter = OperationCounter()
    given = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    with counter:
        result = work(given)
        result.backward(torch.empty_like(result))
    return counter.moved.total


def count_eager(
    policy: Policy, layer: nn.Module, forward: Callable[..., Any], call: LayerCall, *, keeps_results: bool = False
) -> tuple[LayerCosts, list[Product], Any]:
    kept = _empty_kept(policy)
    hidden = call.hidden.detach().requires_grad_()
    given = [t for t in tree_leaves((call.arguments, call.options)) if isinstance(t, Tensor)]
    parameters = list(layer.parameters())
    outside = {t.untyped_storage()._cdata for t in [*given, *parameters]}
    saved: dict[int, tuple[tuple[int, ...], int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside and tensor.device.type == "meta":
            saved.setdefault(storage._cdata, (tuple(tensor.shape), storage.nbytes()))
        return tensor

    counter = OperationCounter()
    counter.kept_results = [] if keeps_results else None
    counter.hold([hidden, *given, *parameters])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with counter, hooks, FusedAttention(counter):
        output = forward(hidden, *call.arguments, **call.options)
    output = output[0] if isinstance(output, tuple) else output
    forward_products = counter.products
    for shape, size in saved.values():
        kept.add(shape, size)
    for result in counter.kept_results or ():  # by the recomputation itself: they are not among the saved tensors
        kept.add(tuple(result.shape), result.nbytes)
    counter.kept_results = None
    held = counter.live.copy()
    forward_extra = counter.peak.above(held)
    passed = _pass_costs(counter)
    products = _as_products(policy, layer, forward_products)
    attention = _attention_of(policy, layer, counter.query, counter.key)
    gradient = torch.empty_like(output)
    again = counter
    again.peak, again.moved, again.operations, again.products = again.live.copy(), _Bytes(), 0, []
    with again, FusedAttention(again):  # recomputation calls it again
        # What is given to backward belongs to the caller, and is freed as soon as it was used there too.
        torch.autograd.backward(output, gradient)
    backward_extra = again.peak.above(held)
    for p in parameters:
        p.grad = None
    costs = LayerCosts(
        kept.plain(),
        forward_extra.tokens / TOKENS,
        (backward_extra.tokens + gradient.nbytes) / TOKENS,
        kept.constant,
        passed,
        _pass_costs(again),
        kept.scores,
        max(forward_extra.pairs, backward_extra.pairs) / TOKENS**2,
    )
    return costs, products, attention


def _pass_costs(counter: OperationCounter) -> PassCosts:
    return PassCosts(counter.moved.tokens / TOKENS, counter.operations, counter.moved.pairs / TOKENS**2)


def _as_products(policy: Policy, layer: nn.Module, found: Sequence[tuple[int, int, int]]) -> list[Product]:
    """Of tokens alone. Trained: a matrix of that shape is, in this layer."""
    trained = {tuple(sorted(p.shape[-2:])) for p in layer.parameters() if p.requires_grad and p.ndim > 1}
    stacks = {tuple(sorted(p.shape[-2:])): p.shape[0] for p in layer.parameters() if p.ndim == 3}
    products = []
    for rows, inner, columns in found:
        if rows % TOKENS or TOKENS in (inner, columns) or TOKENS + 1 in (inner, columns):
            continue  # not of tokens, or scores: attention's own
        shape = tuple(sorted((inner, columns)))
        share = rows / TOKENS
        matrices = stacks.get(shape, 1) if share == policy.routers.top_k else 1
        products.append(Product(inner, columns, shape in trained, split=True, share=share, matrices=matrices))
    return products


# --- compiled layers --------------------------------------------------------------------------------------------------


def count_compiled(
    policy: Policy, layer: nn.Module, forward: Callable[..., Any], call: LayerCall, *, keeps_results: bool = False
) -> tuple[LayerCosts, list[Product], Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, torch.fx.GraphModule] = {}

    def take(which: str, graph: torch.fx.GraphModule, _examples: object) -> Any:
        graphs[which] = graph
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=partial(take, "forward"),
        bw_compiler=partial(take, "backward"),
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    torch._dynamo.reset()
    hidden = call.hidden.detach().requires_grad_()
    output = torch.compile(forward, backend=backend, dynamic=False)(hidden, *call.arguments, **call.options)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.empty_like(output))
    for p in layer.parameters():
        p.grad = None
    torch._dynamo.reset()
    kept = _empty_kept(policy)
    forth, back = LayerGraph(graphs["forward"]), LayerGraph(graphs["backward"])
    saved = forth.outputs[1:]
    seen: set[int] = {storage_of(forth.outputs[0])}
    held = 0.0
    for node in saved:
        value = node.meta.get("val")
        is_hidden = node.op == "placeholder" and isinstance(value, Tensor) and value.shape == hidden.shape
        if not isinstance(value, Tensor) or (node.op == "placeholder" and not is_hidden) or storage_of(node) in seen:
            continue
        seen.add(storage_of(node))
        size = value.untyped_storage().nbytes()
        held += 0 if is_hidden else size
        kept.add(tuple(value.shape), size)
    forward_extra = max(forth.peak() - held, 0)
    backward_extra = back.peak(frees={id(n) for n in back.inputs if is_of_tokens(n)})
    costs = LayerCosts(
        kept.plain(),
        forward_extra / TOKENS,
        max(backward_extra, 0) / TOKENS,
        kept.constant,
        PassCosts(forth.moved() / TOKENS, forth.kernels()),
        PassCosts(back.moved() / TOKENS, back.kernels()),
    )
    products = _as_products(policy, layer, forth.products())
    query, key = forth.attention_inputs()
    return costs, products, _attention_of(policy, layer, query, key)
