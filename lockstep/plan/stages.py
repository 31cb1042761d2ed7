"""Pipeline stages in a plan: which layers each has, how many micro-batches it holds, how long it waits. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

from lockstep.config.schema import ConfigError
from lockstep.plan.description import ModelDescription, ParameterShape
from lockstep.plan.work import RankLayout


def stages_per_rank(schedule: str) -> int:
    return 1 if schedule in ("gpipe", "1f1b") else 2


def stage_layers(model: ModelDescription, layout: RankLayout) -> list[range]:
    """The layers of each stage, cut as parallel/pipeline.py cuts them."""
    num_ranks = layout.degrees.pipeline
    if num_ranks == 1:
        return [range(len(model.layers))]
    num_stages = num_ranks * stages_per_rank(layout.schedule)
    if num_stages > len(model.layers):
        raise ConfigError(
            f"parallel.pipeline {num_ranks} needs {num_stages} stages, and the model has {len(model.layers)} layers: "
            "every stage needs one"
        )
    costs = [float(sum(p.numel for p in model.kind_of(i).parameters)) for i in range(len(model.layers))]
    return list(cut(tuple(costs), float(model.vocabulary * model.hidden), num_stages))


def stage_rest(
    model: ModelDescription, layout: RankLayout, *, has_first: bool, has_last: bool
) -> Iterator[ParameterShape]:
    """What a rank has outside of layers: the embedding on the first stage, norm and head on the last; a tied one on
    both."""
    for p in model.rest:
        is_embedding = "embed" in p.name or p.name.endswith("wte.weight") or p.name.endswith("wpe.weight")
        here = has_first or (has_last and model.tied) if is_embedding else has_last
        if here or layout.degrees.pipeline == 1:
            yield p


@functools.lru_cache(maxsize=256)  # a search asks again and again
def cut(costs: tuple[float, ...], head_cost: float, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers, such that the most expensive stage is as cheap as possible; the head is on the last."""
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, num_stages + 1):
        row: dict[int, tuple[float, int]] = {}
        extra = head_cost if k == num_stages else 0.0
        for end in range(k, len(costs) - (num_stages - k) + 1):
            options = [(max(best[k - 1][s][0], before[end] - before[s] + extra), s) for s in best[k - 1] if s < end]
            if options:
                row[end] = min(options)
        best.append(row)
    bounds = [len(costs)]
    for k in range(num_stages, 0, -1):
        bounds.append(best[k][bounds[-1]][1])
    bounds.reverse()
    return tuple(range(a, b) for a, b in pairwise(bounds))


def scheduled_micro_batches(layout: RankLayout, wanted: int) -> int:
    """At least as many as ranks of the pipeline axis, and a multiple of them where the schedule needs that."""
    ranks = layout.degrees.pipeline
    if ranks == 1:
        return wanted
    if stages_per_rank(layout.schedule) == 1:
        return max(wanted, ranks)
    return -(-max(wanted, ranks) // ranks) * ranks


def held_micro_batches(layout: RankLayout, wanted: int, stage: int) -> float:
    """Of how many micro-batches a rank holds the activations of its layers at once, at most."""
    ranks = layout.degrees.pipeline
    if ranks == 1:
        return 1.0
    total = scheduled_micro_batches(layout, wanted)
    if layout.schedule == "gpipe":
        return float(total)
    if layout.schedule == "1f1b":
        return float(min(ranks - stage, total))
    # Two stages of half the layers each: the first ones run ahead of the last.
    warm = 2 * (ranks - stage - 1) + ranks + 1
    return min(warm / 2, float(total))


def bubble_share(layout: RankLayout, wanted: int) -> float:
    """Idle time of a rank over its busy time."""
    ranks = layout.degrees.pipeline
    if ranks == 1:
        return 0.0
    total = scheduled_micro_batches(layout, wanted)
    stages = stages_per_rank(layout.schedule)
    share = (ranks - 1) / (total * stages)
    return share / 3 if layout.schedule == "zero_bubble" else share
