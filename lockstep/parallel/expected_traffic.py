"""What a rank of a layout sends in one step, by mesh axis and kind of collective: the least, and to the byte.

In the unit of parallel/traffic.py, which counts: bytes that a rank of a ring sends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.config.parallel import AXES, Degrees

Bytes = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, of this rank's part of the matrices: all, and those that are trained."""

    parameters: float
    trained: int
    filling: float = 0.0
    """Beside the parameters: what FSDP2 adds so that the parts of all ranks are equally long."""
    trained_filling: int = 0

    def filled(self) -> Unit:
        return Unit(self.parameters + self.filling, self.trained + self.trained_filling)


class HeadSizes(NamedTuple):
    """Of one layer: how many heads of queries and of keys, and how large keys and values are."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Sizes:
    """A model as one rank has it: its stage and its part of each matrix. Widths are values per token."""

    layers: tuple[Unit, ...]
    rest: Unit
    hidden: int
    split_queries: float = 0
    """Heads x dim of the queries that one rank computes, on average over layers."""
    split_keys: float = 0
    """The same of keys, repeated where ranks outnumber them."""
    value_share: float = 1.0
    """The size of a value, and of what is attended, for each number of a key."""
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
    routed: int = 0
    """Numbers of experts that each token chooses, over the layers whose experts are divided."""
    expert_sends: int = 0
    """Widths sent over the expert axis per token, to experts and back, in both directions together."""
    compute_bytes: int = 4
    gradient_bytes: int = 4
    norm_axes: tuple[tuple[str, ...], ...] = ()
    """Over which axes trained parameters are split: each kind of them adds to the norm of the gradient."""
    tied_bytes: int = 0
    """Of gradients that the first and the last stage exchange, because they share their matrix."""


@dataclass(frozen=True)
class RankWork:
    """One rank's share of a step. `tokens` are those that it computes itself, padding included."""

    tokens: int
    targets: int
    micro_batches: int
    stage_sends: int = 0
    """Hidden states and gradients that leave this rank's stages, per micro-batch."""
    gathered_tokens: int | None = None
    """As `tokens`, where norms compute a part of them: each micro-batch is filled up to equal parts."""
    summed_numbers: int = 0
    """What all ranks sum: losses, metrics, and facts of each rank."""
    weight_bytes: int | None = None
    """Of the weight of a chosen expert, where routers give it in another dtype than that of the computation."""


@dataclass(frozen=True)
class DividedExperts:
    """In how many layers of a rank experts are divided, how many a token chooses, and the parameters of adapters on
    them, which every rank has."""

    num_layers: int
    top_k: int
    adapters: int


NOT_DIVIDED = DividedExperts(0, 0, 0)


@dataclass(frozen=True)
class ExpertTrips:
    """Of one layer in a step: rows that this rank sends to experts, and those of others that it sends back. `numbers`
    say before how many rows there are for each."""

    rows: int
    numbers: int
    num_layers: int


def least_traffic(sizes: Sizes, degrees: Degrees, work: RankWork, *, keep_parameters: bool = False) -> Bytes:
    """Axes of one rank are left out."""
    traffic: Bytes = {}
    if degrees.sharded:
        traffic |= _sharded(sizes, degrees, work, keep_parameters)
    elif degrees.replicate > 1:
        traffic["replicate", "all_reduce"] = _twice(degrees.replicate) * _trained(sizes) * sizes.gradient_bytes
    if degrees.expert > 1:
        for flow, count in _divided(sizes, degrees, work, keep_parameters).items():
            traffic[flow] = traffic.get(flow, 0.0) + count  # replicas sum what is divided and what is not
    if degrees.tensor > 1:
        numbers = work.tokens * (sizes.forward_sums + sizes.backward_sums) + work.targets * sizes.head_sums
        numbers += work.micro_batches * sizes.summed_parameters
        traffic["tensor", "all_reduce"] = _twice(degrees.tensor) * numbers * sizes.compute_bytes
        if sizes.gathers:
            gathered = work.tokens * sizes.gathers * sizes.compute_bytes
            traffic["tensor", "all_gather"] = _once(degrees.tensor) * gathered
    if degrees.context > 1:
        # Queries, keys and values go out and what was attended comes back; the gradients the other way.
        widths = 2 * (1 + sizes.value_share) * (sizes.split_queries + sizes.split_keys) * len(sizes.layers)
        traffic["context", "all_to_all"] = _once(degrees.context) * work.tokens * widths * sizes.compute_bytes
    if degrees.pipeline > 1:
        traffic["pipeline", "send"] = float(work.tokens * work.stage_sends * sizes.hidden * sizes.compute_bytes)
    return traffic


def exact_traffic(
    sizes: Sizes,
    degrees: Degrees,
    work: RankWork,
    *,
    keep_parameters: bool = False,
    trips: ExpertTrips | None = None,
) -> Bytes:
    """To the byte, of a loss that each micro-batch computes by itself, from the second step on: before it, stages and
    DDP agree on shapes. Without `trips`, rows go to divided experts as if all were chosen equally often."""
    filled = replace(sizes, layers=tuple(unit.filled() for unit in sizes.layers), rest=sizes.rest.filled())
    traffic = defaultdict(float, least_traffic(filled, degrees, work, keep_parameters=keep_parameters))
    if degrees.tensor > 1 and sizes.gathers and work.gathered_tokens is not None:
        added = (work.gathered_tokens - work.tokens) * sizes.gathers * sizes.compute_bytes
        traffic["tensor", "all_gather"] += _once(degrees.tensor) * added
    if degrees.tensor > 1:
        wider = max(_NARROWEST_SUM - sizes.compute_bytes, 0) * _HEAD_NUMBERS * work.targets * (sizes.head_sums > 0)
        wider += work.tokens * sizes.routed * ((work.weight_bytes or sizes.compute_bytes) - sizes.compute_bytes)
        traffic["tensor", "all_reduce"] += _twice(degrees.tensor) * wider
    if degrees.expert > 1 and trips is not None:
        sent = 2 * trips.rows * sizes.hidden * sizes.compute_bytes + trips.numbers * _WIDE  # gradients go the same ways
        traffic["expert", "all_to_all"] = _once(degrees.expert) * sent * trips.num_layers
    for axis, count in _small_sums(sizes, degrees, work):
        num_ranks = _num_ranks(degrees, axis)
        traffic[axis, "all_reduce"] += _twice(num_ranks) * count * _WIDE
    if degrees.pipeline > 1:
        traffic["pipeline", "send"] += sizes.tied_bytes
    return {flow: count for flow, count in traffic.items() if count}


_WIDE = 8  # bytes of a number in sums over ranks
_NARROWEST_SUM = 4  # bytes of a number of the head's, in whatever dtype it computes
_HEAD_NUMBERS = 3  # of each target: the largest logit, the sum of all, the target's


# --- experts that are chosen as somebody says ------------------------------------------------------------------------


def favouring_tokens(num_tokens: int, top_k: int, num_experts: int, imbalance: float) -> int:
    """Of so many tokens, those that choose the first experts, so that these get `imbalance` times their share."""
    if top_k == num_experts:
        return 0
    return round(num_tokens * (imbalance - 1) / (num_experts / top_k - 1))


def assumed_counts(num_tokens: int, top_k: int, num_experts: int, imbalance: float = 1.0) -> list[int]:
    """How many tokens choose each expert, where all but the favouring ones take turns."""
    favouring = favouring_tokens(num_tokens, top_k, num_experts, imbalance)
    turns, left = divmod((num_tokens - favouring) * top_k, num_experts)
    return [turns + (e < left) + favouring * (e < top_k) for e in range(num_experts)]


def count_trips(
    num_tokens: Sequence[Sequence[int]],
    place: int,
    column: int,
    degrees: Degrees,
    experts: tuple[int, int],
    num_layers: int,
    imbalance: float = 1.0,
) -> ExpertTrips:
    """`num_tokens` of each micro-batch, of each rank that shares the experts with this one, which is the one at `place`
    and at `column` of the tensor axis. `experts`: how many there are, and how many a token chooses."""
    num_experts, top_k = experts
    share = num_experts // (degrees.expert * degrees.tensor)
    mine = (place * degrees.tensor + column) * share
    rows = 0
    for of_ranks in num_tokens:
        chosen = [assumed_counts(count, top_k, num_experts, imbalance) for count in of_ranks]
        rows += sum(count for e, count in enumerate(chosen[place]) if e // share % degrees.tensor == column)
        rows += sum(sum(counts[mine : mine + share]) for counts in chosen)
    return ExpertTrips(rows, len(num_tokens) * share * degrees.expert, num_layers)


# --- small sums ------------------------------------------------------------------------------------------------------


def _small_sums(sizes: Sizes, degrees: Degrees, work: RankWork) -> Iterator[tuple[str, int]]:
    """(axis, numbers) of sums of losses, and of squares for the norm."""
    large = [axis for axis in AXES if getattr(degrees, axis) > 1]
    is_shards = len(large) == 1 or large == ["shard", "context"]  # torch has one group where the same ranks are in both
    yield "_".join(large) if is_shards else "world", work.summed_numbers
    for axes in sizes.norm_axes:
        for axis in axes:
            yield _group_name(degrees, axis), 1
    if degrees.pipeline > 1:
        yield "pipeline", 1


def _group_name(degrees: Degrees, axis: str) -> str:
    """As AxisNames of parallel/traffic.py calls the group: torch has one where two axes have all ranks."""
    if axis == "expert" and degrees.expert == degrees.num_ranks:
        return degrees.expert_axis
    is_context = axis == "shard_context" and degrees.shard == 1
    is_context |= axis == "expert_shard_context" and degrees.shard == degrees.expert
    return "context" if is_context else axis


def _num_ranks(degrees: Degrees, axis: str) -> int:
    if axis == "world":
        return degrees.num_ranks
    if axis == "shard_context":
        return degrees.shard * degrees.context
    if axis.startswith("expert_"):
        parts = axis.removeprefix("expert_").split("_")
        return math.prod(getattr(degrees, part) for part in parts) // degrees.expert
    return int(getattr(degrees, axis))


class ExpectedTraffic:
    """`least_traffic` and `exact_traffic` step by step. `stages` are this rank's pipeline stages, by number."""

    def __init__(
        self,
        sizes: Sizes,
        degrees: Degrees,
        *,
        keep_parameters: bool = False,
        stages: Collection[int] = (),
        num_stages: int = 0,
    ) -> None:
        self.sizes, self._degrees, self._keep_parameters = sizes, degrees, keep_parameters
        self._stage_sends = sum((i > 0) + (i < num_stages - 1) for i in stages)

    def metrics(self, tokens: int, targets: int, micro_batches: int) -> dict[str, float]:
        """`tokens` as this rank computes them."""
        work = RankWork(tokens, targets, micro_batches, self._stage_sends)
        least = least_traffic(self.sizes, self._degrees, work, keep_parameters=self._keep_parameters)
        return {f"traffic_least/{axis}/{kind}": count for (axis, kind), count in sorted(least.items())}

    def exact(
        self,
        tokens: Sequence[int],
        targets: int,
        summed_numbers: int,
        trips: ExpertTrips | None = None,
        weight_bytes: int | None = None,
    ) -> Bytes:
        """`tokens` of each micro-batch, as this rank computes them. See `RankWork` for the others."""
        parts = self._degrees.tensor
        gathered = sum(-(-count // parts) * parts for count in tokens)
        work = RankWork(sum(tokens), targets, len(tokens), self._stage_sends, gathered, summed_numbers, weight_bytes)
        return exact_traffic(self.sizes, self._degrees, work, keep_parameters=self._keep_parameters, trips=trips)


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
    heads: Sequence[HeadSizes],
    tensor_plan: Mapping[str, tuple[nn.Module, str]],
    degrees: Degrees,
    *,
    compute_bytes: int,
    gradient_bytes: int,
    divided: DividedExperts = NOT_DIVIDED,
    tied: Iterable[nn.Parameter] = (),
    ends: tuple[bool, bool] = (True, True),
) -> Sizes:
    """What this rank has of a policy that is built around `causal`. `heads`: layer by layer, or those of
    all. `tensor_plan`: name -> (module, style), empty where matrices are not split. `tied`: what this rank's stage
    shares with another. `ends`: whether it embeds tokens, and whether it has the head."""
    config = causal.config.get_text_config()
    apart = [p for p in policy.parameters() if _num_parts(p, "expert") > 1]
    layers = [[p for p in layer.parameters() if p not in set(apart)] for layer in _layers(causal)]
    in_layers = {p for parameters in [apart, *layers] for p in parameters}
    rest = [p for p in policy.parameters() if p not in in_layers]
    sums = measure_sums(tensor_plan, causal, config.hidden_size, divided, *ends) if degrees.tensor > 1 else {}
    # Hidden states to each chosen expert and back, and their gradients.
    sends = 4 * divided.num_layers * divided.top_k * config.hidden_size if degrees.expert > 1 else 0
    num_shards = degrees.shard * degrees.context if degrees.sharded else 1
    return Sizes(
        tuple(_unit(parameters, compute_bytes, num_shards) for parameters in layers if parameters),
        _unit(rest, compute_bytes, num_shards),
        config.hidden_size,
        *_split_heads(heads, degrees),
        **sums,
        experts=_unit(apart, compute_bytes),
        routed=divided.num_layers * divided.top_k,
        expert_sends=sends,
        compute_bytes=compute_bytes,
        gradient_bytes=gradient_bytes,
        norm_axes=tuple(sorted({_split_axes(p) for p in policy.parameters() if p.requires_grad})),
        tied_bytes=sum(_local(p).nbytes for p in tied),
    )


def _split_heads(layers: Sequence[HeadSizes], degrees: Degrees) -> tuple[float, float, float]:
    """(split_queries, split_keys, value_share) of a rank of the tensor axis; keys are repeated where ranks outnumber
    them."""
    queries, keys, values = 0, 0, 0
    for layer in layers:
        num_queries, num_keys = layer.queries // degrees.tensor, layer.keys // degrees.tensor
        num_keys = num_queries if num_keys % degrees.context else num_keys
        queries += num_queries * layer.key_dim
        keys += num_keys * layer.key_dim
        values += (num_queries + num_keys) * layer.value_dim
    return (queries / len(layers), keys / len(layers), values / (queries + keys)) if layers else (0, 0, 1)


def _layers(causal: Any) -> list[nn.Module]:
    """FSDP2 makes a subclass of each layer's class."""
    names = set(causal._no_split_modules or ())
    return [m for m in causal.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def _unit(parameters: Iterable[nn.Parameter], compute_bytes: int, num_shards: int = 1) -> Unit:
    """Quantised ones, which are not gathered in the dtype of computation, count by their bytes."""
    listed = [(p, _size(p), _filling(p, num_shards)) for p in parameters]
    shares = [1 if p.is_floating_point() else p.itemsize / compute_bytes for p, _, _ in listed]
    return Unit(
        sum(size * share for (_, size, _), share in zip(listed, shares, strict=True)),
        sum(size for p, size, _ in listed if p.requires_grad),
        sum(filling * share for (_, _, filling), share in zip(listed, shares, strict=True)),
        sum(filling for p, _, filling in listed if p.requires_grad),
    )


def _size(parameter: Any) -> int:
    """Of a split matrix the part that one rank of the tensor and expert axes has, whatever FSDP2 made of it."""
    rows = len(parameter) if parameter.ndim else 1
    whole = int(parameter.numel()) // (_num_parts(parameter, "tensor") * _num_parts(parameter, "expert"))
    return whole if rows % _num_row_parts(parameter) == 0 else _num_rows(parameter) * (parameter.numel() // rows)


def _filling(parameter: Any, num_shards: int) -> int:
    """FSDP2 cuts rows into equal parts, and fills the last ones up."""
    rows = _num_rows(parameter)
    return -rows % num_shards * (_size(parameter) // rows) if rows else 0


def _num_rows(parameter: Any) -> int:
    """Of this rank of the tensor axis: equal parts, of which the last ones may be short."""
    parts, rows = _num_row_parts(parameter), len(parameter) if parameter.ndim else 1
    if parts == 1:
        return rows
    part, place = -(-rows // parts), parameter.device_mesh.get_local_rank("tensor")
    return max(min(part, rows - place * part), 0)


def _num_row_parts(parameter: Any) -> int:
    """Over the tensor axis."""
    if _num_parts(parameter, "tensor") == 1:
        return 1
    place = parameter.device_mesh.mesh_dim_names.index("tensor")
    return _num_parts(parameter, "tensor") if parameter.placements[place].dim == 0 else 1


def _split_axes(parameter: Any) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    names = mesh.mesh_dim_names or ()
    return tuple(name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate())


def _local(parameter: Any) -> Tensor:
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own


def _num_parts(parameter: Any, axis: str) -> int:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 1
    place = mesh.mesh_dim_names.index(axis)
    return int(mesh.size(place)) if parameter.placements[place].is_shard() else 1


def measure_sums(
    plan: Mapping[str, tuple[nn.Module, str]],
    causal: Any,
    hidden: int,
    divided: DividedExperts,
    embeds: bool,
    has_head: bool,
) -> dict[str, int]:
    """Where the model's own plan makes ranks communicate. Matrices that read the same input need one sum together."""
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    readers, forward, backward, gathers, parameters = set(), 0, 0, 0, 0
    frozen = embeds and getattr(embedding, "weight", None) is not None and not embedding.weight.requires_grad
    plan = {name: (module, style) for name, (module, style) in plan.items() if any(True for _ in module.parameters())}
    for name, (module, style) in plan.items():
        if style == "embedding_rowwise":
            forward += hidden * embeds
        elif style == "rowwise":
            forward += hidden + _adapter_ranks(module, "lora_A")
        elif style == "colwise" and module is not head:
            readers.add(name.rpartition(".")[0])
            backward += _adapter_ranks(module, "lora_B")
        elif style.startswith("mla_kv_a_proj "):
            backward += int(style.partition(" ")[2])
        elif style in ("replicated_with_grad_allreduce", "sequence_parallel"):
            parameters += sum(p.numel() for p in module.parameters() if p.requires_grad)
        if style == "sequence_parallel":
            # The output; backward, the gradient of the input, if it is needed.
            gathers += hidden * (1 if frozen and not gathers else 2)
    backward += hidden * len(readers)
    # Experts are divided over the tensor axis too: what they get, with the weights of a token's choice, what they give.
    forward += hidden * divided.num_layers
    backward += (hidden + divided.top_k) * divided.num_layers
    parameters += divided.adapters
    if frozen and readers:
        backward -= hidden  # the gradient of the first layer's input is not needed
    return {
        "forward_sums": forward,
        "backward_sums": backward,
        "head_sums": (hidden + _HEAD_NUMBERS) * has_head,  # with hidden's gradient
        "gathers": gathers,
        "summed_parameters": parameters,
    }


def _adapter_ranks(module: nn.Module, half: str) -> int:
    """Of LoRA's matrices on the split side, together."""
    adapters = getattr(module, half, {}).values()
    return sum(min(linear.in_features, linear.out_features) for linear in adapters)
