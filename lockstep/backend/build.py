"""From a plain model to one that trains on this group, in one fixed order:
experts and tensors divided, pipeline stages, activation checkpointing, compile, sharding or replication, weights.

The only place where parallelism meets the model. All ranks call it together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.config import ParallelConfig
from lockstep.model import attention
from lockstep.model.compiled_code import any_number_of_tokens, keep_compiled_code
from lockstep.model.expert_ops import PRODUCTS as EXPERT_PRODUCTS
from lockstep.model.experts import (
    compute_experts_exactly,
    divide_experts,
    expert_parameters,
    held_in_nf4,
    is_divided,
    split_problem,
    stacked_parameters,
)
from lockstep.model.lora import AdapterCoverage, measure_coverage, speed_up_eager
from lockstep.model.parts import Part, measure_parts
from lockstep.model.policy import PackedTokens, Policy, causal_lm, decoder_layers, setting_by_layer, tensor_plan
from lockstep.model.quantised import describe_rest
from lockstep.model.quantised_layers import PRODUCTS, QuantisedLinear, describe_fp8
from lockstep.model.replay import RoutingRows, replay_choices
from lockstep.model.stages import PassThrough, Stage, check_divisible, keep_layers, layer_costs
from lockstep.parallel import expert, pipeline, tensor
from lockstep.parallel.context import HeadExchange
from lockstep.parallel.expected_traffic import DividedExperts, ExpectedTraffic, HeadSizes, measure_sizes
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.replicate import replicate
from lockstep.parallel.shard import shard


@dataclass(frozen=True)
class Built:
    """`module` is what is called: the policy or its DDP wrapper; with pipeline parallelism `stages` are, by number.

    `parts`: what is trained of the whole model, by kind. `warnings`: what a person should know before the first step.
    `eager`: of compiled layers, the forward before that. `routing`: how choices of routers are given, if they are.
    """

    policy: Policy
    module: nn.Module
    stages: dict[int, Stage]
    num_stages: int
    parts: dict[str, Part]
    warnings: tuple[str, ...] = ()
    eager: dict[nn.Module, Callable[..., object]] = field(default_factory=dict)
    routing: RoutingRows | None = None

    def leave_loops_uncompiled(self) -> None:
        """A loop over documents in a layer would be compiled anew for every batch."""
        for layer, forward in self.eager.items() if self.policy.mixers.parts else ():
            layer.forward = forward


def build_policy(
    model: nn.Module,
    group: ProcessGroup,
    *,
    compute_dtype: torch.dtype | None,
    activation_checkpointing: str,
    compile_layers: bool,
    parallel: ParallelConfig,
    logits_gib: float = 2.5,
    router_replay: bool = False,
) -> Built:
    """Rank 0's weights are used. `logits_gib`: the most memory for logits; with less the head takes more passes.
    `router_replay`: routers take choices that are given."""
    dtype = compute_dtype or next(model.parameters()).dtype
    coverage, parts = measure_coverage(model), measure_parts(model)
    notes = [describe_rest(model), describe_fp8(model, group.device), _describe_offload(parallel, group)]
    policy = Policy(model, **_head_memory(model, group.device, dtype, logits_gib))
    # Before anything is split: every rank gets its part of the whole tensors.
    weights = _full_weights(policy) if group.rank == 0 else None
    routing = replay_choices(model, policy.routers) if router_replay else None
    divided = split_experts(policy, group)
    if group.degrees.tensor > 1:
        split_tensors(policy, group)
    stages, num_stages = cut_stages(policy, group, parallel.schedule)
    experts = [module for module in policy.modules() if module in divided]  # of this rank's stages
    layers = [layer for layer in decoder_layers(model) if not isinstance(layer, PassThrough)]
    if activation_checkpointing != "none":
        for layer in layers:
            selective = activation_checkpointing == "selective"
            layer.forward = recomputed(layer.forward, policy, selective=selective)
    eager = _compile(layers, policy, group.device) if compile_layers else {}
    # Adds to products in place: wrong for split layers and for kept activations.
    if not compile_layers and group.degrees.tensor == 1 and activation_checkpointing != "selective":
        speed_up_eager(model)
    policy.use_variable_length(group.device, dtype)
    if group.degrees.sharded:
        assert group.mesh is not None
        roots: list[nn.Module] = [*stages.values()] or [policy]
        shard(
            roots,
            layers,
            group.mesh,
            compute_dtype,
            experts=experts,
            expert_mesh=group.expert_mesh,
            # torch's schedules hold what a backward pass gathered until the last one: it need not be gathered for each.
            keep_parameters=parallel.keep_parameters or group.degrees.pipeline > 1,
            prefetch=parallel.prefetch,
            offload=parallel.offload,
        )
    if group.device.type != "cpu" and not (group.degrees.sharded and parallel.offload):
        policy.to(group.device)  # models are loaded on the CPU
    if group.num_ranks > 1:
        _distribute_weights(policy, weights, group)
    module: nn.Module = policy
    if group.degrees.replicate > 1 and not group.degrees.sharded:
        # As rank 0 finds them: a router that rounds otherwise on another device would give ranks buckets that differ.
        idle = group.broadcast_object(find_idle(policy, group.device, compute_dtype) if group.rank == 0 else None)
        module = replicate(policy, group.device, parallel.compression, idle)
    warnings = tuple(_describe(policy, coverage, notes, group.device))
    return Built(policy.train(), module, stages, num_stages, parts, warnings, eager, routing)


def find_idle(policy: Policy, device: torch.device, compute_dtype: torch.dtype | None) -> set[str]:
    """Names of what is trained and takes no part in computing a text, such as an encoder, an indexer, or an expert in a
    module of its own that no token chose. As in autograd's graph of a small pass."""
    places = torch.arange(8, device=device)
    tokens = places % causal_lm(policy.model).config.get_text_config().vocab_size
    packed = PackedTokens(tokens, places, (8,), places[:-1], tokens[1:])
    narrow = torch.autocast(device.type, compute_dtype, enabled=compute_dtype is not None)
    try:
        with torch.enable_grad(), narrow, torch.compiler.set_stance("force_eager"):
            waiting = [policy(packed, plain=True).grad_fn]
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
        return set()  # the probe of the finished policy says why
    seen, used = set(), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            used.add(id(getattr(node, "variable", None)))
            waiting += [following for following, _ in node.next_functions]
    return {name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in used}


def _describe(
    policy: Policy, coverage: AdapterCoverage | None, notes: list[str], device: torch.device
) -> Iterator[str]:
    """What is left out of training, or computed in another way than the model's own."""
    name = type(causal_lm(policy.model)).__name__
    if coverage is not None and coverage.is_partial:
        yield str(coverage)
    yield from filter(None, notes)
    if policy.noisy_routers:
        yield (
            f"{name} draws experts or noise at random while it trains: left out, experts are chosen as in inference, "
            "so that the same batch gives the same step"
        )
    if policy.why_not_fused and device.type == "cuda":
        yield f"packed documents attend one after another, slower than in one fused kernel: {policy.why_not_fused}"
    elif policy.why_not_tiles:
        yield (
            f"packed documents attend in torch's variable-length kernel, not in our own, which {policy.why_not_tiles}: "
            "about half as fast over short ones"
        )


def _describe_offload(parallel: ParallelConfig, group: ProcessGroup) -> str:
    if not parallel.offload or group.degrees.sharded:
        return ""
    return "parallel.offload does nothing here: only weights that ranks share (parallel.shard) are kept in host memory"


def _compile(layers: list[nn.Module], policy: Policy, device: torch.device) -> dict[nn.Module, Callable[..., object]]:
    """What each of the layers computed with before."""
    keep_compiled_code()
    # Numbers such as LoRA's scale are constants of a layer: as inputs they become tensors on the host, and a C++
    # kernel for them takes most of a minute to build.
    torch._dynamo.config.specialize_float = True
    _ask_for_input_gradients(policy)
    eager, options = {layer: layer.forward for layer in layers}, any_number_of_tokens(device)
    for layer, forward in eager.items():
        layer.forward = torch.compile(forward, dynamic=True, options=options)
    return eager


def _ask_for_input_gradients(policy: Policy) -> None:
    """The first layer's input needs a gradient like that of all others: it would be compiled for itself otherwise.

    Where the embedding is frozen, as under LoRA. The gradient is not used.
    """

    def ask(_module: nn.Module, _inputs: object, hidden: Tensor) -> None:
        if torch.is_grad_enabled() and hidden.is_leaf and not hidden.is_inference():
            hidden.requires_grad_()

    embedding = causal_lm(policy.model).get_input_embeddings()
    if embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
        embedding.register_forward_hook(ask)


def _head_memory(model: nn.Module, device: torch.device, dtype: torch.dtype, gib: float) -> dict[str, int]:
    """Large products keep a GPU busy; a CPU is fastest if a chunk fits into its caches."""
    granted = int(gib * 2**30)
    fits = granted // (causal_lm(model).config.get_text_config().vocab_size * dtype.itemsize)
    return {"chunk_tokens": min(8192 if device.type == "cuda" else 512, max(fits, 128)), "kept_bytes": granted}


def cut_stages(policy: Policy, group: ProcessGroup, schedule: str) -> tuple[dict[int, Stage], int]:
    """This rank's stages, by number, and how many there are; none without pipeline parallelism."""
    num_ranks = group.degrees.pipeline
    if num_ranks == 1:
        return {}, 0
    _check_ends(policy)
    check_divisible(policy)
    num_stages = num_ranks * pipeline.stages_per_rank(schedule)
    costs, head_cost = layer_costs(policy)
    cuts = pipeline.cut(costs, head_cost, num_stages)
    mine = pipeline.stages_of(group.place("pipeline"), num_ranks, num_stages)
    keep_layers(policy, [cuts[i] for i in mine], len(costs))
    policy.head_options = replace(policy.head_options, backward_again=schedule == "zero_bubble")
    return {i: Stage(policy, cuts[i], len(costs)) for i in mine}, num_stages


def _check_ends(policy: Policy) -> None:
    """First and last stage both have the matrix of a head that is also the embedding, and one of its names each."""
    causal = causal_lm(policy.model)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    shared = {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}
    if shared and (not isinstance(head, nn.Linear) or hasattr(embedding, "modules_to_save")):
        raise ValueError(
            "a head that shares its matrix with the embedding is not adapted or trained alone in stages: set "
            "parallel.pipeline to 1, or take lm_head and the embedding out of lora.targets and lora.modules_to_save"
        )


def split_experts(policy: Policy, group: ProcessGroup) -> set[nn.Module]:
    """Divide experts over the ranks of the expert axis, and over those of the tensor axis, which have the same tokens.
    Returns the modules that FSDP2 must not take for parts of their layers."""
    axes = tuple(axis for axis in ("expert", "tensor") if getattr(group.degrees, axis) > 1)
    found = {name: module for name, module in policy.model.named_modules() if expert_parameters(module)}
    if group.degrees.expert > 1 and not found:
        name = type(causal_lm(policy.model)).__name__
        raise ValueError(f"{name} has no experts in stacked matrices to divide over ranks: set parallel.expert to 1")
    for name, module in found.items() if axes else ():
        if problem := split_problem(module):
            raise ValueError(f"{name} cannot be divided over ranks: {problem}; set parallel.{axes[0]} to 1")
        mesh = group.expert_mesh or group.mesh
        assert mesh is not None
        divide_experts(module, expert.split(name, module, stacked_parameters(module), mesh[axes]))
    return set(found.values()) if group.degrees.expert > 1 else set()


def split_tensors(policy: Policy, group: ProcessGroup) -> None:
    assert group.mesh is not None
    if any(isinstance(module, QuantisedLinear) or held_in_nf4(module) for module in policy.modules()):
        raise ValueError("quantised matrices are not split over ranks: set parallel.tensor to 1")
    if not isinstance(causal_lm(policy.model).get_output_embeddings(), nn.Linear):
        raise ValueError("an output head with an adapter is not split over ranks: set parallel.tensor to 1")
    check_heads(policy, group.degrees.tensor)
    tensor.split(tensor_plan(policy.model), group.mesh["tensor"])
    head = causal_lm(policy.model).get_output_embeddings()
    policy.split_vocabulary(tensor.SplitVocabulary(head.weight, group.mesh["tensor"]))


def split_tokens(policy: Policy, group: ProcessGroup) -> None:
    """Each rank of the context axis computes a part of every micro-batch's tokens from here on."""
    name = type(causal_lm(policy.model)).__name__
    if policy.mixers.parts:
        raise ValueError(
            f"{', '.join(policy.mixers.names)} of {name} need all tokens of a document: set parallel.context to 1"
        )
    if not policy.attends_packed:
        raise ValueError(f"{name} does not take packed attention, which parallel.context needs: set it to 1")
    assert group.mesh is not None
    policy.split_tokens = HeadExchange(group.mesh["context"])


def expect_traffic(
    built: Built, group: ProcessGroup, parallel: ParallelConfig, compute_bytes: int
) -> ExpectedTraffic | None:
    """None on one rank, and for PowerSGD, whose traffic depends on the shapes of gradients."""
    if group.degrees.num_ranks == 1 or parallel.compression == "powersgd":
        return None
    causal = causal_lm(built.policy.model)
    sizes = measure_sizes(
        built.policy,
        causal,
        _head_sizes(causal),
        tensor_plan(built.policy.model) if group.degrees.tensor > 1 else {},
        group.degrees,
        compute_bytes=compute_bytes,
        gradient_bytes={"bf16": 2, "fp16": 2}.get(parallel.compression, _sum_bytes(built.policy, group)),
        divided=_divided_experts(built.policy),
        tied=find_tied(causal, built.stages, built.num_stages),
        ends=(0 in built.stages, built.num_stages - 1 in built.stages) if built.stages else (True, True),
    )
    return ExpectedTraffic(
        sizes,
        group.degrees,
        keep_parameters=parallel.keep_parameters,
        stages=built.stages,
        num_stages=built.num_stages,
    )


def _head_sizes(causal: Any) -> list[HeadSizes]:
    """Values have another size where keys have a part for positions (DeepSeek's). None of a model without attention."""
    config = causal.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "qk_head_dim", "head_dim", "v_head_dim")
    found = []
    for queries, keys, whole_dim, own_dim, value_dim in zip(*(setting_by_layer(config, n) for n in names), strict=True):
        if queries:
            dim = whole_dim or own_dim or config.hidden_size // queries
            found.append(HeadSizes(queries, keys or queries, dim, value_dim or dim))
    return found


def find_tied(causal: Any, stages: Collection[int], num_stages: int) -> list[nn.Parameter]:
    """What is trained of the embedding, its adapters too, on the two ranks that both have it because it is also the
    head. `stages`: of this rank, by number."""
    has_first, has_last = 0 in stages, num_stages - 1 in stages
    if has_first == has_last or not getattr(causal.config.get_text_config(), "tie_word_embeddings", False):
        return []
    return [p for p in causal.get_input_embeddings().parameters() if p.requires_grad]


def _divided_experts(policy: Policy) -> DividedExperts:
    experts = [module for module in policy.modules() if expert_parameters(module) and is_divided(module)]
    layers: list[Any] = [module for module in policy.modules() if hasattr(module, "lora_A")]
    around = [layer for layer in layers if layer.get_base_layer() in experts]
    trained = [p for m in around for half in (m.lora_A, m.lora_B) for p in half.parameters() if p.requires_grad]
    return DividedExperts(len(experts), policy.routers.top_k, sum(p.numel() for p in trained))


def _sum_bytes(policy: Policy, group: ProcessGroup) -> int:
    """Of each number of a gradient that ranks add up: as it is held, and by FSDP2 in float32 at least."""
    held = max((p.itemsize for p in policy.parameters() if p.requires_grad), default=4)
    return max(held, 4) if group.degrees.sharded else held


def check_heads(policy: Policy, degree: int) -> None:
    config = causal_lm(policy.model).config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        every = setting_by_layer(config, name)
        if heads := next((heads for heads in every if heads is not None and heads % degree), None):
            raise ValueError(f"parallel.tensor {degree} does not divide the model's {name} {heads}")


def settle_dtypes(model: nn.Module, compute: torch.dtype, trained: torch.dtype | None = None) -> None:
    """Trained parameters in float32 or wider, or as given; frozen ones in the dtype of the computation. In place.

    A model loaded in bf16 would otherwise be stepped in bf16, where small updates vanish.
    """
    compute_experts_exactly(causal_lm(model), compute)
    wide = trained or torch.promote_types(compute, torch.float32)
    for parameter in model.parameters():
        wanted = wide if parameter.requires_grad else compute
        if parameter.is_floating_point() and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)


def recomputed(forward: Callable[..., object], policy: Policy, *, selective: bool) -> Callable[..., object]:
    contexts: dict[str, Any] = (
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep)} if selective else {}
    )
    again = policy.routers.remembering_tokens(functools.partial(checkpoint, use_reentrant=False, **contexts))
    return policy.mixers.remembering_row(forward, again)


# Expensive to recompute: matrix products and attention.
EXPENSIVE = {
    *PRODUCTS,
    *EXPERT_PRODUCTS,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    *attention.KERNELS,
}


def _keep(_context: object, operation: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _full_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole.detach() for name, whole in _all_tensors(module)}


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


@torch.no_grad()
def _distribute_weights(module: nn.Module, weights: dict[str, Tensor] | None, group: ProcessGroup) -> None:
    """Give every rank its part of rank 0's parameters and buffers, one tensor at a time."""
    mine = dict(_all_tensors(module))
    layout = None if weights is None else [(name, w.shape, w.dtype) for name, w in weights.items()]
    layout = group.broadcast_object(layout)
    known = {name: tuple(shape) for name, shape, _ in layout}
    if any(known.get(name) != tuple(target.shape) for name, target in mine.items()):
        raise ValueError(f"rank {group.rank} built another model than rank 0: give every rank the same")
    misplaced = list[tuple[str, int]]()
    for name, shape, dtype in layout:
        target = mine.get(name)
        if weights is not None:
            full = weights.pop(name).to(group.device, dtype)
        else:
            full = torch.empty(shape, dtype=dtype, device=group.device)
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            part = distribute_tensor(full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
            if part.to_local().shape != target.to_local().shape:
                misplaced.append((name, shape[0]))
            else:
                target.to_local().copy_(part.to_local())  # also where parameters are offloaded
        elif target is not None:
            target.copy_(full)
    # FSDP2 cuts what a tensor rank holds; DTensor, and with it a checkpoint, takes other pieces where that is uneven.
    for name, num_rows in itertools.chain.from_iterable(group.gather_objects(misplaced)):
        raise ValueError(
            f"the {num_rows} rows of {name} cannot be divided over tensor ranks and then shard ranks: choose "
            "parallel.tensor and parallel.shard whose product divides them"
        )
