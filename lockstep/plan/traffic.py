"""What one rank sends in a step, by axis: the formula of parallel/expected_traffic.py on a described model."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.parallel.expected_traffic import RankWork, Sizes, Unit, least_traffic
from lockstep.plan.description import ModelDescription, ParameterShape
from lockstep.plan.stages import scheduled_micro_batches, stage_layers
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
    parts = stage_layers(model, layout)
    mine = [i for i in range(len(parts)) if i % degrees.pipeline == stage]
    layers = [layer for i in mine for layer in parts[i]]
    count = scheduled_micro_batches(layout, work.micro_batches)
    sizes = _sizes(model, layout, layers, has_first=0 in mine, has_last=len(parts) - 1 in mine)
    tokens, targets = work.tokens // degrees.context * count, work.targets // degrees.context * count
    sends = sum((i > 0) + (i < len(parts) - 1) for i in mine)
    rank_work = RankWork(tokens, targets, count, sends)
    least = least_traffic(sizes, degrees, rank_work, keep_parameters=layout.keep_parameters)
    found: dict[str, tuple[float, float, int]] = {}
    for (axis, _), size in least.items():
        before = found.get(axis, (0.0, 0.0, 1))[0]
        found[axis] = (before + size, _calls(axis, layout, len(layers), count), _ranks(axis, layout))
    return PlannedTraffic(found)


def _calls(axis: str, layout: RankLayout, num_layers: int, micro_batches: int) -> float:
    """Collectives of a step."""
    if axis in ("tensor", "context"):
        return 4.0 * num_layers * micro_batches
    if axis == "pipeline":
        return 2.0 * micro_batches
    return (3.0 if layout.degrees.sharded else 1.0) * num_layers * (micro_batches if layout.degrees.sharded else 1)


def _ranks(axis: str, layout: RankLayout) -> int:
    return layout.sharding_ranks if axis == "shard_context" else getattr(layout.degrees, axis, 1)


def _sizes(model: ModelDescription, layout: RankLayout, layers: list[int], *, has_first: bool, has_last: bool) -> Sizes:
    tensor = (0, layout.degrees.tensor)

    def unit(parameters: tuple[ParameterShape, ...]) -> Unit:
        return Unit(sum(p.part(tensor) for p in parameters), sum(p.part(tensor) for p in parameters if p.trained))

    rest = tuple(
        p for p in model.rest if layout.degrees.pipeline == 1 or (has_last or ("embed" in p.name and has_first))
    )
    attention = next((kind.attention for kind in model.kinds if kind.attention is not None), (0, 0, 0, None))
    heads, keys, size, _ = attention
    frozen = not any(p.trained and "embed" in p.name for p in model.rest)
    forward = len(layers) * 2 * model.hidden + model.hidden * has_first
    backward = len(layers) * 2 * model.hidden - (model.hidden if frozen and has_first else 0)
    keys = keys // tensor[1]
    return Sizes(
        tuple(unit(model.kind_of(i).parameters) for i in layers),
        unit(rest),
        model.hidden,
        heads // tensor[1] * size,
        (heads // tensor[1] if keys % layout.degrees.context else keys) * size,
        forward_sums=forward if tensor[1] > 1 else 0,
        backward_sums=backward if tensor[1] > 1 else 0,
        head_sums=model.hidden + 3 if has_last else 0,
        compute_bytes=model.compute_bytes,
        gradient_bytes=max(model.compute_bytes, 4),
    )
