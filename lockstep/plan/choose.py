"""`parallel: auto`: of the layouts that model, ranks and configuration allow, the one with the fastest step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from lockstep.config import ConfigError, RunConfig
from lockstep.plan.estimate import RunPlan, short
from lockstep.plan.from_config import precision_of
from lockstep.plan.search import PlanTask, best_budget, legal_layouts, rank_plan
from lockstep.plan.work import RankLayout

_ORDER = {"yes": 0, "close": 1, "no": 2}


@dataclass(frozen=True)
class ChosenLayout:
    """The configuration with the layout in numbers, its plan, and in a sentence what was taken and why."""

    config: RunConfig
    plan: RunPlan
    why: str


def choose_layout(
    config: RunConfig, task: PlanTask, *, has_images: bool = False, num_rows: int | None = None
) -> ChosenLayout:
    """Recomputation and, unless batch.fit_memory, the micro-batch stay as configured. Where nothing fits, the one that
    needs least memory: whether that may start is decided elsewhere."""
    found = sorted(_plans(config, task, has_images, num_rows), key=lambda p: (_ORDER[p.fits], *rank_plan(p)))
    if not found:
        raise ConfigError(
            f"parallel auto: no layout of {task.cluster.num_ranks} ranks is possible for this model with "
            f"{task.rows.step_tokens:,} tokens in a step: change launch.procs or the batch"
        )
    best = found[0] if found[0].fits != "no" else min(found, key=lambda plan: plan.worst.reserved)
    return ChosenLayout(with_layout(config, best.layout), best, _why(best, found))


def with_layout(config: RunConfig, layout: RankLayout) -> RunConfig:
    """The same run in this layout. Raises ConfigError where the two do not go together."""
    chosen = {**layout.degrees._asdict(), "keep_parameters": layout.keep_parameters, "schedule": layout.schedule}
    tree = config.model_dump(mode="json")
    try:
        return RunConfig.model_validate({**tree, "parallel": {**tree["parallel"], **chosen}})
    except ValidationError as error:
        raise ConfigError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from error


def _plans(config: RunConfig, task: PlanTask, has_images: bool, num_rows: int | None) -> Iterator[RunPlan]:
    parallel = config.parallel
    for legal in legal_layouts(task):
        layout = replace(legal, prefetch=parallel.prefetch, offload=parallel.offload, schedule=parallel.schedule)
        if not _has_rows(config, layout, num_rows) or (has_images and _splits_texts(layout)):
            continue
        if config.evaluation.metrics and layout.degrees.pipeline > 1:  # answers need the whole model
            continue
        try:
            tried = with_layout(config, layout).parallel
            tried.degrees(task.cluster.num_ranks)
            tried.check_precision(precision_of(config, task.cluster))
            yield plan_layout(config, task, layout)
        except ConfigError:
            continue


def plan_layout(config: RunConfig, task: PlanTask, layout: RankLayout) -> RunPlan:
    """With the micro-batch that a run would take."""
    if config.batch.fit_memory and task.options.device == "cuda":
        try:
            return best_budget(task, layout)
        except ConfigError:  # none fits: judged by the one that is given
            pass
    return task.plan(layout)


def _has_rows(config: RunConfig, layout: RankLayout, num_rows: int | None) -> bool:
    """As train/prepare.py refuses ranks without rows."""
    known = [count for count in (config.batch.samples_per_step, num_rows) if count is not None]
    return all(layout.degrees.data <= count for count in known)


def _splits_texts(layout: RankLayout) -> bool:
    degrees = layout.degrees
    return degrees.tensor * degrees.context * degrees.pipeline > 1


def _why(best: RunPlan, found: list[RunPlan]) -> str:
    gib = best.worst.reserved / 2**30
    text = (
        f"parallel auto: {best.layout} on {best.cluster.name}, the fastest of {len(found)} by the plan: a step of "
        f"{best.time.total:.3g} s (± {best.errors.time:.0%}), {short(gib)} of {short(best.capacity / 2**30)} GiB"
    )
    if best.fits == "no":
        return f"{text}; none of them fits, and this one needs least"
    others = [plan for plan in found if plan.layout.degrees != best.layout.degrees]
    return f"{text}; next {others[0].layout}, {others[0].time.total:.3g} s" if others else text
