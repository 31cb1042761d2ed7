"""The least that a rank of a layout must send in one step, by mesh axis and kind of collective.

In the unit of parallel/traffic.py, which counts: bytes that a rank of a ring sends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.config.parallel import Degrees

Bytes = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, of this rank's part of the matrices: all, and those that are trained."""

    parameters: float
    trained: int


@dataclass(frozen=True)
class Sizes:
    """A model as one rank has it: its stage and its part of each matrix. Widths are values per token."""

    layers: tuple[Unit, ...]
    rest: Unit
    hidden: int
    split_queries: int = 0
    """Heads x dim of the queries that one rank computes."""
    split_keys: int = 0
    """The same of keys, repeated where ranks outnumber them."""
    forward_sums: int = 0
    """Widths summed over the tensor axis in forward, per token."""
    backward_sums: int = 0
    """The same in backward."""
    head_sums: int = 0
    """The same per target, in both directions together."""
    gathers: int = 0
    """Widths gathered over the tensor axis per token, in both directions together."""
    summed_parameters: int = 0
    """Trained parameters that every rank of the tensor axis has, each with a part of the gradient."""
    experts: Unit = Unit(0, 0)
    """Of the experts that are divided over ranks, those of this one."""
    expert_sends: int = 0
    """Widths sent over the expert axis per token, to experts and back, in both directions together."""
    compute_bytes: int = 4
    gradient_bytes: int = 4


@dataclass(frozen=True)
class RankWork:
    """One rank's share of a step. `tokens` are those that it computes itself, padding included."""

    tokens: int
    targets: int
    micro_batches: int
    stage_sends: int = 0
    """Hidden states and gradients that leave this rank's stages, per micro-batch."""


def least_traffic(sizes: Sizes, degrees: Degrees, work: RankWork, *, keep_parameters: bool = False) -> Bytes:
    """Axes of one rank are left out."""
    traffic: Bytes = {}
    if degrees.sharded:
        traffic |= _sharded(sizes, degrees, work, keep_parameters)
    elif degrees.replicate > 1:
        traffic["replicate", "all_reduce"] = _twice(degrees.replicate) * _trained(sizes) * sizes.gradient_bytes
    if degrees.expert > 1:
        traffic |= _divided(sizes, degrees, work, keep_parameters)
    if degrees.tensor > 1:
        numbers = work.tokens * (sizes.forward_sums + sizes.backward_sums) + work.targets * sizes.head_sums
        numbers += work.micro_batches * sizes.summed_parameters
        traffic["tensor", "all_reduce"] = _twice(degrees.tensor) * numbers * sizes.compute_bytes
        if sizes.gathers:
            gathered = work.tokens * sizes.gathers * sizes.compute_bytes
            traffic["tensor", "all_gather"] = _once(degrees.tensor) * gathered
    if degrees.context > 1:
        # Queries, keys and values go out and what was attended comes back; the gradients the other way.
        widths = 2 * 2 * (sizes.split_queries + sizes.split_keys) * len(sizes.layers)
        traffic["context", "all_to_all"] = _once(degrees.context) * work.tokens * widths * sizes.compute_bytes
    if degrees.pipeline > 1:
        traffic["pipeline", "send"] = float(work.tokens * work.stage_sends * sizes.hidden * sizes.compute_bytes)
    return traffic


class ExpectedTraffic:
    """`least_traffic` step by step. `stages` are this rank's pipeline stages, by number."""

    def __init__(
        self,
        sizes: Sizes,
        degrees: Degrees,
        *,
        keep_parameters: bool = False,
        stages: Collection[int] = (),
        num_stages: int = 0,
    ) -> None:
        self._sizes, self._degrees, self._keep_parameters = sizes, degrees, keep_parameters
        self._stage_sends = sum((i > 0) + (i < num_stages - 1) for i in stages)

    def metrics(self, tokens: int, targets: int, micro_batches: int) -> dict[str, float]:
        """`tokens` as this rank computes them."""
        work = RankWork(tokens, targets, micro_batches, self._stage_sends)
        least = least_traffic(self._sizes, self._degrees, work, keep_parameters=self._keep_parameters)
        return {f"traffic_least/{axis}/{kind}": count for (axis, kind), count in sorted(least.items())}


def _sharded(sizes: Sizes, degrees: Degrees, work: RankWork, keep_parameters: bool) -> Bytes:
    in_layers = sum(unit.parameters for unit in sizes.layers)
    gathered = sizes.rest.parameters + in_layers * _gathers(degrees, keep_parameters)
    counts = {"shard": degrees.shard, "context": degrees.context}
    return _gathered(sizes, degrees, work, counts, ("replicate", degrees.replicate), gathered, _trained(sizes))


def _divided(sizes: Sizes, degrees: Degrees, work: RankWork, keep_parameters: bool) -> Bytes:
    """What experts add that are divided over ranks, were they chosen equally often."""
    gathered = sizes.experts.parameters * _gathers(degrees, keep_parameters)
    counts, replicas = {"shard": degrees.shard, "context": degrees.context}, ("replicate", degrees.replicate)
    if degrees.expert_axis == "shard":
        counts = {"expert_shard": degrees.shard // degrees.expert, "context": degrees.context}
    else:
        replicas = ("expert_replicate", degrees.replicate // degrees.expert)
    traffic = _gathered(sizes, degrees, work, counts, replicas, gathered, sizes.experts.trained)
    sent = work.tokens * sizes.expert_sends * sizes.compute_bytes / degrees.tensor
    return {**traffic, ("expert", "all_to_all"): _once(degrees.expert) * sent}


def _gathers(degrees: Degrees, keep_parameters: bool) -> int:
    """How often a pass gathers a layer: a schedule of stages holds what it gathered."""
    return 1 if keep_parameters or degrees.pipeline > 1 else 2


def _gathered(
    sizes: Sizes,
    degrees: Degrees,
    work: RankWork,
    counts: Mapping[str, int],
    replicas: tuple[str, int],
    gathered: float,
    trained: int,
) -> Bytes:
    """Of FSDP2: `gathered` and `trained` parameters in each pass, over axes with `counts` of ranks."""
    ranks = math.prod(counts.values())
    axis = "_".join(axis for axis, count in counts.items() if count > 1)
    passes = 1 if degrees.pipeline > 1 else work.micro_batches
    traffic: Bytes = {}
    if ranks > 1:
        traffic[axis, "all_gather"] = _once(ranks) * passes * gathered * sizes.compute_bytes
        traffic[axis, "reduce_scatter"] = _once(ranks) * passes * trained * sizes.gradient_bytes
    if replicas[1] > 1:
        shards = trained / ranks
        traffic[replicas[0], "all_reduce"] = _twice(replicas[1]) * passes * shards * sizes.gradient_bytes
    return traffic


def _trained(sizes: Sizes) -> int:
    return sizes.rest.trained + sum(unit.trained for unit in sizes.layers)


def _once(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice(num_ranks: int) -> float:
    return 2 * _once(num_ranks)


# --- from a model ---------------------------------------------------------------------------------------------------


def measure_sizes(
    policy: nn.Module,
    causal: Any,
    head_dim: int,
    tensor_plan: Mapping[str, tuple[nn.Module, str]],
    degrees: Degrees,
    *,
    compute_bytes: int,
    gradient_bytes: int,
    expert_sends: int = 0,
) -> Sizes:
    """What this rank has of a policy that is built around `causal`. `tensor_plan`: name -> (module, style), empty where
    matrices are not split."""
    config = causal.config.get_text_config()
    divided = [p for p in policy.parameters() if _num_parts(p, "expert") > 1]
    layers = [[p for p in layer.parameters() if p not in set(divided)] for layer in _layers(causal)]
    in_layers = {p for parameters in [divided, *layers] for p in parameters}
    rest = [p for p in policy.parameters() if p not in in_layers]
    heads, keys = _heads(config, degrees)
    sums = _sums(tensor_plan, causal, config.hidden_size) if degrees.tensor > 1 else {}
    return Sizes(
        tuple(_unit(parameters, compute_bytes) for parameters in layers if parameters),
        _unit(rest, compute_bytes),
        config.hidden_size,
        heads * head_dim,
        keys * head_dim,
        **sums,
        experts=_unit(divided, compute_bytes),
        expert_sends=expert_sends,
        compute_bytes=compute_bytes,
        gradient_bytes=gradient_bytes,
    )


def _heads(config: Any, degrees: Degrees) -> tuple[int, int]:
    """(query heads, key heads) that a rank of the tensor axis has; keys are repeated where ranks outnumber them."""
    queries = config.num_attention_heads // degrees.tensor
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // degrees.tensor
    return queries, queries if keys % degrees.context else keys


def _layers(causal: Any) -> list[nn.Module]:
    """FSDP2 makes a subclass of each layer's class."""
    names = set(causal._no_split_modules or ())
    return [m for m in causal.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def _unit(parameters: Iterable[nn.Parameter], compute_bytes: int) -> Unit:
    """Quantised ones, which are not gathered in the dtype of computation, count by their bytes."""
    listed = list(parameters)
    gathered = sum(_size(p) * (1 if p.is_floating_point() else p.itemsize / compute_bytes) for p in listed)
    return Unit(gathered, sum(_size(p) for p in listed if p.requires_grad))


def _size(parameter: Any) -> int:
    """Of a split matrix the part that one rank of the tensor and expert axes has, whatever FSDP2 made of it."""
    return int(parameter.numel()) // (_num_parts(parameter, "tensor") * _num_parts(parameter, "expert"))


def _num_parts(parameter: Any, axis: str) -> int:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 1
    place = mesh.mesh_dim_names.index(axis)
    return int(mesh.size(place)) if parameter.placements[place].is_shard() else 1


def _sums(plan: Mapping[str, tuple[nn.Module, str]], causal: Any, hidden: int) -> dict[str, int]:
    """Where the model's own plan makes ranks communicate. Matrices that read the same input need one sum together."""
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    readers, forward, backward, gathers, parameters = set(), 0, 0, 0, 0
    frozen = getattr(embedding, "weight", None) is not None and not embedding.weight.requires_grad
    for name, (module, style) in plan.items():
        if style == "embedding_rowwise":
            forward += hidden
        elif style == "rowwise":
            forward += hidden + _adapter_ranks(module, "lora_A")
        elif style == "colwise" and module is not head:
            readers.add(name.rpartition(".")[0])
            backward += _adapter_ranks(module, "lora_B")
        elif style in ("replicated_with_grad_allreduce", "sequence_parallel"):
            parameters += sum(p.numel() for p in module.parameters() if p.requires_grad)
        if style == "sequence_parallel":
            # The output; backward, the gradient of the input, if it is needed.
            gathers += hidden * (1 if frozen and not gathers else 2)
    backward += hidden * len(readers)
    if frozen and readers:
        backward -= hidden  # the gradient of the first layer's input is not needed
    return {
        "forward_sums": forward,
        "backward_sums": backward,
        "head_sums": hidden + 3,  # hidden's gradient; the largest logit, the sum of all, the target's
        "gathers": gathers,
        "summed_parameters": parameters,
    }


def _adapter_ranks(module: nn.Module, half: str) -> int:
    """Of LoRA's matrices on the split side, together."""
    adapters = getattr(module, half, {}).values()
    return sum(min(linear.in_features, linear.out_features) for linear in adapters)
