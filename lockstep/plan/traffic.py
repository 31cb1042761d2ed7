"""What one rank sends in a step, by axis: the formula of parallel/expected_traffic.py on a described model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.parallel.expected_traffic import RankWork, Sizes, Unit, least_traffic
from lockstep.plan.description import ModelDescription, ParameterShape
from lockstep.plan.stages import scheduled_micro_batches, stage_layers, stage_rest
from lockstep.plan.work import RankLayout, Workload


@dataclass(frozen=True)
class PlannedTraffic:
    """By axis: bytes that a rank sends, collectives, and ranks in each."""

    axes: dict[str, tuple[float, float, int]]

    def by_axis(self) -> dict[str, float]:
        return {axis: size for axis, (size, _, _) in self.axes.items()}


def count_traffic(model: ModelDescription, layout: RankLayout, work: Workload, stage: int) -> PlannedTraffic:
    degrees = layout.degrees
    if degrees.num_ranks == 1:
        return PlannedTraffic({})
    stages = len(stage_layers(model, layout))
    mine = range(stage, stages, degrees.pipeline)
    count = scheduled_micro_batches(layout, work.micro_batches)
    sizes = rank_sizes(model, layout, stage)
    count *= work.updates
    tokens, targets = work.tokens // degrees.context * count, work.targets // degrees.context * count
    sends = sum((i > 0) + (i < stages - 1) for i in mine)
    rank_work = RankWork(tokens, targets, count, sends)
    least = least_traffic(sizes, degrees, rank_work, keep_parameters=layout.keep_parameters)
    others = (work.reference_passes + work.extra_forwards) / work.updates
    found: dict[str, tuple[float, float, int]] = {}
    for (axis, kind), size in least.items():
        before = found.get(axis, (0.0, 0.0, 1))[0]
        size *= 1 + others * _forward_share(axis, kind, layout)
        found[axis] = (before + size, _calls(axis, layout, len(sizes.layers), count), _ranks(axis, layout))
    return PlannedTraffic(found)


def _forward_share(axis: str, kind: str, layout: RankLayout) -> float:
    """Of what forward and backward send, about what a pass without gradient sends."""
    if axis in ("tensor", "context", "expert", "pipeline"):
        return 0.5
    if kind != "all_gather":  # gradients
        return 0.0
    return 1.0 if layout.keep_parameters else 0.5


def _calls(axis: str, layout: RankLayout, num_layers: int, micro_batches: int) -> float:
    """Collectives of a step."""
    if axis in ("tensor", "context"):
        return 4.0 * num_layers * micro_batches
    if axis == "expert":  # how many rows go where; there and back, in both directions
        return 5.0 * num_layers * micro_batches
    if axis == "pipeline":
        return 2.0 * micro_batches
    return (3.0 if layout.degrees.sharded else 1.0) * num_layers * (micro_batches if layout.degrees.sharded else 1)


def _ranks(axis: str, layout: RankLayout) -> int:
    if axis == "expert_replicate":
        return layout.degrees.replicate // layout.degrees.expert
    if axis.startswith("expert_"):
        return layout.expert_sharding_ranks
    return layout.sharding_ranks if axis == "shard_context" else getattr(layout.degrees, axis, 1)


def rank_sizes(model: ModelDescription, layout: RankLayout, stage: int = 0, place: int = 0) -> Sizes:
    """Of the rank at `stage` of the pipeline axis and at `place` of the tensor axis, as it would measure them itself,
    but for what small sums and filling add."""
    tensor, ranks = (place, layout.degrees.tensor), layout.degrees.expert
    parts = stage_layers(model, layout)
    mine = range(stage, len(parts), layout.degrees.pipeline)
    layers = [layer for i in mine for layer in parts[i]]
    has_first, has_last = 0 in mine, len(parts) - 1 in mine

    def unit(parameters: Iterable[ParameterShape], *, divided: bool = False) -> Unit:
        """Of those that are divided over expert ranks, or of the others."""
        wanted = [p for p in parameters if (p.stacked and ranks > 1) == divided]
        sizes = [(p.part(tensor, experts=ranks), p.trained) for p in wanted]
        return Unit(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))

    rest = tuple(stage_rest(model, layout, has_first=has_first, has_last=has_last))
    attention = next((kind.attention for kind in model.kinds if kind.attention is not None), (0, 0, 0, None))
    heads, keys, size, _ = attention
    sums = _tensor_sums(model, layers, rest, has_first=has_first) if tensor[1] > 1 else {}
    keys = keys // tensor[1]
    apart = unit((p for i in layers for p in model.kind_of(i).parameters), divided=True)
    routing = sum(any(p.stacked for p in model.kind_of(i).parameters) for i in layers) * model.experts[1]
    return Sizes(
        tuple(unit(model.kind_of(i).parameters) for i in layers),
        unit(rest),
        model.hidden,
        heads // tensor[1] * size,
        (heads // tensor[1] if keys % layout.degrees.context else keys) * size,
        value_share=model.value_share,
        forward_sums=sums.get("forward_sums", 0),
        backward_sums=sums.get("backward_sums", 0),
        gathers=sums.get("gathers", 0),
        summed_parameters=sums.get("summed_parameters", 0),
        head_sums=model.hidden + 3 if has_last and tensor[1] > 1 else 0,
        experts=apart,
        routed=routing if ranks * tensor[1] > 1 else 0,
        expert_sends=4 * routing * model.hidden if ranks > 1 else 0,
        compute_bytes=model.compute_bytes,
        gradient_bytes=max(model.compute_bytes, 4),
    )


def _tensor_sums(
    model: ModelDescription, layers: Iterable[int], rest: Iterable[ParameterShape], *, has_first: bool
) -> dict[str, int]:
    sums = Counter[str]()
    for i in layers:
        sums.update(model.kind_of(i).sums)
    embedding = [p for p in rest if has_first and "embed" in p.name and p.split_dim is not None]
    if embedding:
        sums["forward_sums"] += model.hidden
        if not any(p.trained for p in embedding):  # the gradient of the first layer's input is not needed
            sums["backward_sums"] -= model.hidden
    return dict(sums)
