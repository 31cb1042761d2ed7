"""From a model's configuration to its `ModelDescription`: built on the meta device, and each kind of layer run once.

Nothing is computed and no weight is read. An eager layer runs under a counter of every operation and allocation; a
compiled one is traced as torch.compile traces it, up to the kernels, and its graphs are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lockstep.backend.build import recomputed, settle_dtypes
from lockstep.config import ConfigError, RunConfig
from lockstep.model.experts import divide_experts, expert_parameters, split_problem, stacked_parameters
from lockstep.model.load import DTYPES, build_model
from lockstep.model.lora import speed_up_eager
from lockstep.model.policy import (
    PackedTokens,
    Policy,
    causal_lm,
    decoder_layers,
    headless,
    setting_by_layer,
    tensor_plan,
)
from lockstep.model.quantised_layers import QuantisedLinear
from lockstep.model.stages import pipeline_names
from lockstep.model.vision import vision_modules
from lockstep.parallel.expected_traffic import DividedExperts, measure_sums
from lockstep.parallel.tensor import plan_problem
from lockstep.plan.count import LayerCall, OperationCounter, count_compiled, count_eager, window_of
from lockstep.plan.description import (
    LayerCosts,
    LayerKind,
    ModelDescription,
    ParameterShape,
)
from lockstep.plan.graph import TOKENS


def describe_model(config: RunConfig, precision: str, *, compiled: bool) -> ModelDescription:
    """`precision` and `compiled` as the run will have them, see model.precision and model.compile."""
    name = config.model.path
    with torch.device("meta"):
        model = build_model(config.model, config.lora, precision, with_weights=False)
    compute = DTYPES[precision]
    settle_dtypes(model, compute)
    held = {id(p): p.dtype.itemsize for p in model.parameters()}
    plan, stacked = _split_dims(model), _stacked_ids(model)
    layers = decoder_layers(model)
    shapes = [_shapes(layer, plan, held, stacked) for layer in layers]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    outside = [(n, p) for n, p in model.named_parameters(remove_duplicate=True) if id(p) not in in_layers]
    rest = tuple(_shape(n, p, plan, held, stacked) for n, p in outside)
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
    if policy.variable_length and not _can_be_traced(policy, layers[0], calls[0]):
        # As in a run whose attention no kernel computes over packed documents: one after another, not compiled.
        policy.variable_length = compiled = False
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
        value_share=_value_share(text),
        unlike=_find_unlike(policy),
        experts=(policy.routers.num_experts, policy.routers.top_k) if policy.routers else (0, 0),
    )


def _value_share(config: Any) -> float:
    """As backend/build.py measures it."""
    value, key = (setting_by_layer(config, name)[0] for name in ("v_head_dim", "qk_head_dim"))
    return value / key if value and key else 1.0


def _find_unlike(policy: Policy) -> str:
    found = {
        "a mixture of experts": bool(policy.routers),
        "a quantised base": any(isinstance(module, QuantisedLinear) for module in policy.modules()),
        "attention over one document after another": not policy.variable_length,
        "a model that sees images, which are not in it": bool(vision_modules(causal_lm(policy.model))),
    }
    return " and ".join(words for words, is_so in found.items() if is_so)


def _refused_axes(policy: Policy, calls: Sequence[LayerCall]) -> dict[str, str]:
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
            unknown = plan_problem(tensor_plan(policy.model))
        except ValueError as error:
            unknown = str(error)
        found |= {"tensor": unknown} if unknown else {}
    if problem:
        found["expert"] = problem
    elif not any(expert_parameters(m) for m in policy.modules()):
        found["expert"] = f"{type(causal).__name__} has no experts in stacked matrices to divide over ranks"
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
    return dims | dict.fromkeys(_stacked_ids(model), 0)  # ranks of this axis have whole experts


def _stacked_ids(model: nn.Module) -> set[int]:
    """Of parameters with a part for each expert."""
    holders = [module for module in model.modules() if expert_parameters(module)]
    return {id(getattr(module, name)) for module in holders for name in stacked_parameters(module)}


def _shapes(
    layer: nn.Module, plan: Mapping[int, int], held: Mapping[int, int], stacked: set[int]
) -> tuple[ParameterShape, ...]:
    return tuple(_shape(name, p, plan, held, stacked) for name, p in layer.named_parameters())


def _shape(
    name: str, p: nn.Parameter, plan: Mapping[int, int], held: Mapping[int, int], stacked: set[int]
) -> ParameterShape:
    return ParameterShape(name, tuple(p.shape), p.requires_grad, plan.get(id(p)), held[id(p)], id(p) in stacked)


# --- layers -----------------------------------------------------------------------------------------------------------


def _trace_layers(
    policy: Policy,
    layers: Sequence[nn.Module],
    calls: Sequence[LayerCall],
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
        signature = (type(layer).__name__, parameters, window_of(layer))
        if signature not in known:
            known[signature] = len(kinds)
            kind = _trace_kind(policy, layer, call, parameters, compiled=compiled, recompute=recompute)
            kinds.append(replace(kind, sums=_tensor_sums(policy, layer)))
        numbers.append(known[signature])
    return kinds, numbers


def _trace_rest(policy: Policy, layers: Sequence[nn.Module]) -> tuple[list[LayerCall], float, float]:
    """(what each layer is called with; bytes for each token that the rest but the head saves, and its operations).

    From a pass in which no layer computes.
    """
    calls: dict[int, LayerCall] = {}
    own = [layer.__dict__.get("forward") for layer in layers]
    last: list[Tensor] = []  # what the embedding, or the layer before, has returned

    def record(number: int, hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls[number] = LayerCall(hidden, arguments, options, follows=bool(last) and hidden is last[-1])
        # A layer's output needs a gradient, also where everything before it is frozen.
        last.append(hidden if hidden.requires_grad else hidden.detach().requires_grad_())
        return last[-1]

    embedding = causal_lm(policy.model).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, given, returned: last.append(returned))

    for number, layer in enumerate(layers):
        layer.forward = partial(record, number)
    tokens = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    lengths = (1000, TOKENS - 1000) if policy.variable_length else (TOKENS,)
    packed = PackedTokens(tokens, tokens, lengths, tokens[:8], tokens[:8])
    name = type(causal_lm(policy.model)).__name__
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.nbytes() % (TOKENS * tensor.element_size()) == 0:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    counter = OperationCounter()
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


def _on_meta(call: LayerCall) -> LayerCall:
    def plain(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    hidden, arguments, options = tree_map_only(Tensor, plain, (call.hidden, call.arguments, call.options))
    return replace(call, hidden=hidden, arguments=arguments, options=options)


def _can_be_traced(policy: Policy, layer: nn.Module, call: LayerCall) -> bool:
    try:
        count_eager(policy, layer, layer.forward, call)
    except Exception:  # of scores that no kernel computes, of heads whose values have another size: whatever it is
        return False
    return True


def _trace_kind(
    policy: Policy,
    layer: nn.Module,
    call: LayerCall,
    parameters: tuple[ParameterShape, ...],
    *,
    compiled: bool,
    recompute: str,
) -> LayerKind:
    forward: Callable[..., Any] = layer.forward
    count = count_compiled if compiled else count_eager
    name = type(layer).__name__
    try:
        whole, products, attention = count(policy, layer, forward, call)
        costs, divided = whole, _trace_divided(policy, layer, call, whole)
        if recompute != "none":
            again = recomputed(forward, policy, selective=recompute == "selective")
            costs, *_ = count(policy, layer, again, call, keeps_results=recompute == "selective")
    except Exception as error:
        raise ConfigError(
            f"no plan for {type(causal_lm(policy.model)).__name__}: {name} cannot be traced without weights "
            f"({_first_line(error)})"
        ) from error
    return LayerKind(name, parameters, tuple(products), attention, costs, whole, recompute != "none", divided,
                     plain_attention=whole.forward.moved_scores > 0)  # fmt: skip


def _tensor_sums(policy: Policy, layer: nn.Module) -> dict[str, int]:
    try:
        plan = tensor_plan(policy.model)
    except ValueError:  # it is not split
        return {}
    inside = set(layer.modules())
    mine = {name: how for name, how in plan.items() if how[0] in inside}
    causal, experts = causal_lm(policy.model), [module for module in inside if expert_parameters(module)]
    layers: list[Any] = [module for module in inside if hasattr(module, "lora_A")]
    wrapped = [module for module in layers if module.get_base_layer() in experts]
    adapters = [p for m in wrapped for half in (m.lora_A, m.lora_B) for p in half.parameters() if p.requires_grad]
    divided = DividedExperts(len(experts), policy.routers.top_k, sum(p.numel() for p in adapters))
    sums = measure_sums(mine, causal, causal.config.get_text_config().hidden_size, divided, False, False)
    return {name: size for name, size in sums.items() if name != "head_sums"}


# --- divided experts --------------------------------------------------------------------------------------------------


def _trace_divided(policy: Policy, layer: nn.Module, call: LayerCall, whole: LayerCosts) -> LayerCosts | None:
    """As `whole`, where experts are divided over ranks; None without experts that can be. They are computed by code of
    their own then, which is never compiled: what that adds is counted on the eager layer."""
    experts = [module for module in layer.modules() if expert_parameters(module)]
    if not experts or any(map(split_problem, experts)):
        return None
    before, *_ = count_eager(policy, layer, layer.forward, call)
    own: list[Any] = [vars(module).get("forward") for module in experts]
    try:
        for module in experts:
            divide_experts(module, _TracedRanks(len(next(iter(expert_parameters(module).values())))))
        after, *_ = count_eager(policy, layer, layer.forward, call)
    finally:
        for module, forward in zip(experts, own, strict=True):
            del module.forward, module.is_divided
            if forward is not None:
                module.forward = forward
    return whole.plus(after.minus(before))


class _TracedRanks:
    """SplitExperts that are not split: as many rows come as go, which is so where all experts are chosen alike."""

    def __init__(self, num_experts: int) -> None:
        self.first, self.count = 0, num_experts

    def local(self, parameter: Tensor) -> Tensor:
        return parameter

    def enter(self, value: Tensor) -> Tensor:
        return value

    leave = enter

    def is_sent(self, expert: Tensor) -> Any:
        return slice(None)

    def send(self, rows: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.empty_like(expert)
        return _Sent.apply(rows)[order], torch.empty_like(expert), order

    def send_back(self, rows: Tensor, trip: Tensor) -> Tensor:
        return _Sent.apply(rows[torch.empty_like(trip)])


class _Sent(torch.autograd.Function):
    """Rows of others, as many."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
