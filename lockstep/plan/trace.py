"""From a model's configuration to its `ModelDescription`: built on the meta device, and each kind of layer run once.

Nothing is computed and no weight is read. An eager layer runs under a counter of every operation and allocation; a
compiled one is traced as torch.compile traces it, up to the kernels, and its graphs are counted.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.backend.build import EXPENSIVE, recomputed, settle_dtypes
from lockstep.config import ConfigError, RunConfig
from lockstep.model.experts import expert_parameters, split_problem
from lockstep.model.load import DTYPES, build_model
from lockstep.model.lora import speed_up_eager
from lockstep.model.policy import PackedTokens, Policy, causal_lm, decoder_layers, headless, tensor_plan
from lockstep.model.quantised_layers import QuantisedLinear
from lockstep.model.stages import pipeline_names
from lockstep.plan.description import (
    LayerCosts,
    LayerKind,
    ModelDescription,
    ParameterShape,
    PassCosts,
    Product,
)
from lockstep.plan.graph import PRODUCTS, TOKENS, LayerGraph, is_of_tokens, storage_of


@dataclass(frozen=True)
class _Call:
    """What a layer was called with."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    follows: bool = True
    """Whether the hidden states are what the layer before, or the embedding, has returned."""


def describe_model(config: RunConfig, precision: str, *, compiled: bool) -> ModelDescription:
    """`precision` and `compiled` as the run will have them, see model.precision and model.compile."""
    name = config.model.path
    with torch.device("meta"):
        model = build_model(config.model, config.lora, precision, with_weights=False)
    compute = DTYPES[precision]
    settle_dtypes(model, compute)
    held = {id(p): p.dtype.itemsize for p in model.parameters()}
    plan = _split_dims(model)
    layers = decoder_layers(model)
    shapes = [_shapes(layer, plan, held) for layer in layers]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    rest = tuple(
        _shape(n, p, plan, held) for n, p in model.named_parameters(remove_duplicate=True) if id(p) not in in_layers
    )
    causal = causal_lm(model)
    text = causal.config.get_text_config()
    head = causal.get_output_embeddings()
    recompute = config.model.activation_checkpointing
    for parameter in model.parameters():  # they are computed with in this dtype: as copies, or gathered
        if parameter.is_floating_point():  # what is quantised stays as it is held
            parameter.data = parameter.data.to(compute)
    policy = Policy(model)
    policy.variable_length = policy.attends_packed
    calls, rest_saved, rest_operations = _trace_rest(policy, layers)
    kinds, numbers = _trace_layers(policy, layers, calls, shapes, compiled=compiled, recompute=recompute)
    wide = torch.promote_types(compute, torch.float32)
    return ModelDescription(
        name=f"{type(causal).__name__} {name}",
        kinds=tuple(kinds),
        layers=tuple(numbers),
        rest=rest,
        hidden=text.hidden_size,
        vocabulary=head.weight.shape[0],
        tied=head.weight is causal.get_input_embeddings().weight,
        compute_bytes=compute.itemsize,
        wide_bytes=wide.itemsize,
        head_trained=bool(head.weight.requires_grad),
        compiled=compiled,
        max_positions=getattr(text, "max_position_embeddings", None),
        buffers=sum(b.nbytes for b in model.buffers()),
        rest_saved=rest_saved,
        rest_operations=rest_operations,
        refuses=_refused_axes(policy, calls),
    )


def _refused_axes(policy: Policy, calls: Sequence[_Call]) -> dict[str, str]:
    """As backend/build.py refuses them, as far as that shows without weights."""
    causal = causal_lm(policy.model)
    found: dict[str, str] = {}
    problem = next(filter(None, (split_problem(m) for m in policy.modules() if expert_parameters(m))), "")
    if any(isinstance(module, QuantisedLinear) for module in policy.modules()):
        found["tensor"] = "quantised matrices are not split over ranks"
    elif not isinstance(causal.get_output_embeddings(), nn.Linear):
        found["tensor"] = "an output head with an adapter is not split over ranks"
    elif any("magnitude" in name for name, _ in policy.named_parameters()):
        found["tensor"] = "DoRA adapters cannot be split over ranks"
    elif problem:
        found["tensor"] = problem
    else:
        try:
            tensor_plan(policy.model)
        except ValueError as error:
            found["tensor"] = str(error)
    if policy.mixers.parts or not policy.attends_packed:
        found["context"] = f"{type(causal).__name__} needs all tokens of a document on one rank"
    try:
        pipeline_names(causal)
    except ValueError as error:
        found["pipeline"] = str(error)
    else:
        if any(not call.follows for call in calls):
            found["pipeline"] = f"{type(causal).__name__} changes hidden states outside its layers"
    return found


# --- parameters -------------------------------------------------------------------------------------------------------


def _split_dims(model: nn.Module) -> dict[int, int]:
    """Of parameters that the model's own plan splits over the tensor axis: the dimension, by id."""
    try:
        plan = tensor_plan(model)
    except ValueError:  # it has no plan
        return {}
    dims: dict[int, int] = {}
    for module, style in plan.values():
        base: Any = getattr(module, "base_layer", module)
        if "colwise" not in style and "rowwise" not in style:
            continue
        by_columns = "colwise" in style
        sides = ("weight", "bias") if by_columns else ("weight",)
        adapter, dim = "lora_B" if by_columns else "lora_A", 0 if by_columns or style == "embedding_rowwise" else 1
        parts = [base, *getattr(module, adapter, {}).values()] if style != "embedding_rowwise" else [base]
        for part in parts:
            for side in sides:
                if getattr(part, side, None) is not None:
                    dims[id(getattr(part, side))] = dim
    head: Any = causal_lm(model).get_output_embeddings()
    dims.setdefault(id(head.weight), 0)
    return dims


def _shapes(layer: nn.Module, plan: Mapping[int, int], held: Mapping[int, int]) -> tuple[ParameterShape, ...]:
    return tuple(_shape(name, p, plan, held) for name, p in layer.named_parameters())


def _shape(name: str, p: nn.Parameter, plan: Mapping[int, int], held: Mapping[int, int]) -> ParameterShape:
    return ParameterShape(name, tuple(p.shape), p.requires_grad, plan.get(id(p)), held[id(p)])


# --- layers -----------------------------------------------------------------------------------------------------------


def _trace_layers(
    policy: Policy,
    layers: Sequence[nn.Module],
    calls: Sequence[_Call],
    shapes: Sequence[tuple[ParameterShape, ...]],
    *,
    compiled: bool,
    recompute: str,
) -> tuple[list[LayerKind], list[int]]:
    """(kinds, the kind of each layer)."""
    if not compiled and recompute != "selective":
        speed_up_eager(policy.model)
    known: dict[object, int] = {}
    kinds: list[LayerKind] = []
    numbers = []
    for layer, call, parameters in zip(layers, calls, shapes, strict=True):
        signature = (type(layer).__name__, parameters, _window(layer))
        if signature not in known:
            known[signature] = len(kinds)
            kinds.append(_trace_kind(policy, layer, call, parameters, compiled=compiled, recompute=recompute))
        numbers.append(known[signature])
    return kinds, numbers


def _trace_rest(policy: Policy, layers: Sequence[nn.Module]) -> tuple[list[_Call], float, float]:
    """(what each layer is called with; bytes for each token that the rest but the head saves, and its operations).

    From a pass in which no layer computes.
    """
    calls: dict[int, _Call] = {}
    own = [layer.__dict__.get("forward") for layer in layers]
    last: list[Tensor] = []  # what the embedding, or the layer before, has returned

    def record(number: int, hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls[number] = _Call(hidden, arguments, options, follows=bool(last) and hidden is last[-1])
        # A layer's output needs a gradient, also where everything before it is frozen.
        last.append(hidden if hidden.requires_grad else hidden.detach().requires_grad_())
        return last[-1]

    embedding = causal_lm(policy.model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, given, returned: last.append(returned))

    for number, layer in enumerate(layers):
        layer.forward = partial(record, number)
    tokens = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    packed = PackedTokens(tokens, tokens, (1000, TOKENS - 1000), tokens[:8], tokens[:8])
    name = type(causal_lm(policy.model)).__name__
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.nbytes() % (TOKENS * tensor.element_size()) == 0:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    counter = _Counter()
    try:
        body, inputs = headless(causal_lm(policy.model)), {"input_ids": packed.tokens[None]}
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with FakeTensorMode(allow_non_fake_inputs=True), counter, hooks:
            kept = policy.run_layers(body, packed, inputs)  # held, so that no two storages have one address
    except Exception as error:
        raise ConfigError(
            f"no plan for {name}: its forward pass cannot be traced without weights ({_first_line(error)})"
        ) from error
    finally:
        hook.remove()
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
    if len(calls) != len(layers):
        raise ConfigError(f"no plan for {name}: only {len(calls)} of its {len(layers)} layers are called for text")
    rest_saved = (sum(saved.values()) + kept.nbytes) / TOKENS
    return [_on_meta(calls[number]) for number in range(len(layers))], rest_saved, float(counter.operations)


def _on_meta(call: _Call) -> _Call:
    def plain(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    hidden, arguments, options = tree_map_only(Tensor, plain, (call.hidden, call.arguments, call.options))
    return replace(call, hidden=hidden, arguments=arguments, options=options)


def _trace_kind(
    policy: Policy,
    layer: nn.Module,
    call: _Call,
    parameters: tuple[ParameterShape, ...],
    *,
    compiled: bool,
    recompute: str,
) -> LayerKind:
    forward: Callable[..., Any] = layer.forward
    count = _count_compiled if compiled else _count_eager
    name = type(layer).__name__
    try:
        whole, products, attention = count(policy, layer, forward, call)
        costs = whole
        if recompute != "none":
            again = recomputed(forward, policy, selective=recompute == "selective")
            costs, *_ = count(policy, layer, again, call, keeps_results=recompute == "selective")
    except Exception as error:
        raise ConfigError(
            f"no plan for {type(causal_lm(policy.model)).__name__}: {name} cannot be traced without weights "
            f"({_first_line(error)})"
        ) from error
    return LayerKind(name, parameters, tuple(products), attention, costs, whole, recomputed=recompute != "none")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _window(layer: nn.Module) -> int | None:
    found = [getattr(m, "sliding_window", None) for m in layer.modules()]
    return next((int(w) for w in found if w), None)


def _attention_of(policy: Policy, layer: nn.Module, query: Tensor | None, key: Tensor | None) -> Any:
    """(query heads, key heads, head size, window) as the kernel was called, or None."""
    if query is None or key is None:
        return None
    return (query.shape[-2], key.shape[-2], query.shape[-1], _window(layer))


# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """Bytes for each token, by what they are of and by width; and those that are not of tokens."""

    hidden: int
    mlp: int
    by_kind: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    constant: float = 0.0

    def add(self, shape: Sequence[int], num_bytes: float) -> None:
        if math.prod(shape) % TOKENS:
            self.constant += num_bytes
            return
        per_token = num_bytes / TOKENS
        last = shape[-1] if shape else 1
        flat = [n for n in shape if n != 1 and n % TOKENS]
        if flat in ([], [self.hidden]) and (last == self.hidden or last == 1 or not flat):
            self.by_kind["norms and residual"]["whole"] += per_token
        elif last == self.mlp or (flat and flat[-1] % self.mlp == 0):
            self.by_kind["mlp"]["split"] += per_token
        else:
            self.by_kind["attention"]["split"] += per_token

    def plain(self) -> dict[str, dict[str, float]]:
        return {kind: dict(widths) for kind, widths in self.by_kind.items()}


def _empty_kept(policy: Policy) -> _Kept:
    text = causal_lm(policy.model).config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")]
    return _Kept(text.hidden_size, next((int(s) for s in sizes if s), 4 * text.hidden_size))


class _Counter(TorchDispatchMode):
    """Live bytes, operations, and bytes moved, of everything that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.moved = 0.0
        self.operations = 0
        self.products: list[tuple[int, int, int]] = []  # rows, inner, columns
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.kept_results: list[Tensor] | None = None
        """Where it is a list: of operations whose results selective recomputation keeps."""
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
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
            self.moved += sum(t.nbytes for t in inputs if t.numel() > 1) + sum(t.nbytes for t in outputs)
        return result

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Known from before: not counted."""
        self._seen |= {t.untyped_storage()._cdata for t in tensors}

    def _note_product(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        left, right = inputs[-2], inputs[-1]
        if left.ndim == 3 and right.ndim == 3 and name == "bmm":
            self.products += [(left.shape[1], left.shape[2], right.shape[2])] * left.shape[0]
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
        size = storage.nbytes() if of_tokens else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)
        return True

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def count_moved(work: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes that eager operations read and write, forward and backward, as they are counted in layers."""
    counter = _Counter()
    given = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    with counter:
        result = work(given)
        result.backward(torch.empty_like(result))
    return counter.moved


def _count_eager(
    policy: Policy, layer: nn.Module, forward: Callable[..., Any], call: _Call, *, keeps_results: bool = False
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

    counter = _Counter()
    counter.kept_results = [] if keeps_results else None
    counter.hold([hidden, *given, *parameters])
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(hidden, *call.arguments, **call.options)
    output = output[0] if isinstance(output, tuple) else output
    forward_products = counter.products
    for shape, size in saved.values():
        kept.add(shape, size)
    for result in counter.kept_results or ():  # by the recomputation itself: they are not among the saved tensors
        kept.add(tuple(result.shape), result.nbytes)
    counter.kept_results = None
    held = counter.live
    forward_extra = max(counter.peak - held, 0)
    passed = PassCosts(counter.moved / TOKENS, counter.operations)
    products = _as_products(policy, layer, forward_products)
    attention = _attention_of(policy, layer, counter.query, counter.key)
    gradient = torch.empty_like(output)
    again = counter
    again.peak, again.moved, again.operations, again.products = again.live, 0.0, 0, []
    with again:
        # What is given to backward belongs to the caller, and is freed as soon as it was used there too.
        torch.autograd.backward(output, gradient)
    backward_extra = max(again.peak - held, 0) + gradient.nbytes
    for p in parameters:
        p.grad = None
    back = PassCosts(again.moved / TOKENS, again.operations)
    costs = LayerCosts(kept.plain(), forward_extra / TOKENS, backward_extra / TOKENS, kept.constant, passed, back)
    return costs, products, attention


def _as_products(policy: Policy, layer: nn.Module, found: Sequence[tuple[int, int, int]]) -> list[Product]:
    """Of tokens alone. Trained: a matrix of that shape is, in this layer."""
    trained = {tuple(sorted(p.shape[-2:])) for p in layer.parameters() if p.requires_grad and p.ndim > 1}
    products = []
    for rows, inner, columns in found:
        if rows % TOKENS:
            continue
        is_trained = tuple(sorted((inner, columns))) in trained
        products.append(Product(inner, columns, is_trained, split=True, share=rows / TOKENS))
    return products


# --- compiled layers --------------------------------------------------------------------------------------------------


def _count_compiled(
    policy: Policy, layer: nn.Module, forward: Callable[..., Any], call: _Call, *, keeps_results: bool = False
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
