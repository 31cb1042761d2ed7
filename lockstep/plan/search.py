"""Layouts for a number of GPUs, ranked; and the changes that would make a plan fit, or faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.config.parallel import Degrees
from lockstep.config.schema import ConfigError
from lockstep.plan.description import ModelDescription
from lockstep.plan.estimate import RunPlan, estimate, with_recomputation
from lockstep.plan.hardware import GpuCluster
from lockstep.plan.work import Options, RankLayout, StepRows

_ROOM = 0.02
"""A plan that is slower by less than this is as good: then the simpler one is taken."""


@dataclass(frozen=True)
class PlanTask:
    """What is to be planned, whatever the layout. `pipelines`: whether stages are possible."""

    model: ModelDescription
    rows: StepRows
    options: Options
    cluster: GpuCluster
    budget: int
    recomputes: str = "none"
    pipelines: bool = True
    price_per_hour: float | None = None
    check: Callable[[str], object] = lambda change: None
    """Raises ConfigError for settings, as in overrides ("a.b=1 c.d=2"), that do not go with the others."""
    changed: Callable[[str], PlanTask] | None = None
    """The same with other settings: the model is described anew."""
    widens: bool = False
    """The model computes in more than bf16, which it need not."""

    def plan(self, layout: RankLayout, budget: int | None = None, *, recompute: str | None = None) -> RunPlan:
        model = self.model
        if recompute is not None and recompute != self.recomputes:
            model = with_recomputation(model, recompute == "full")
        return estimate(
            model, layout, self.rows, budget or self.budget, self.options, self.cluster,
            price_per_hour=self.price_per_hour,
        )  # fmt: skip


def legal_layouts(task: PlanTask) -> Iterator[RankLayout]:
    """Every way to place all GPUs on the axes that the model and the machines allow."""
    total, per_node = task.cluster.num_ranks, task.cluster.per_node
    refuses = task.model.refuses
    for tensor in _divisors(total) if "tensor" not in refuses else [1]:
        if tensor > per_node or not _heads_divide(task.model, tensor):
            continue
        for context in _divisors(total // tensor) if "context" not in refuses else [1]:
            if context > 8 or tensor * context > per_node or not _heads_divide(task.model, tensor, context):
                continue
            for pipeline in _divisors(total // tensor // context):
                stages = len(task.model.layers)
                if pipeline > min(stages, 16) or (pipeline > 1 and not (task.pipelines and "pipeline" not in refuses)):
                    continue
                yield from _data_layouts(task, tensor, context, pipeline)


def _data_layouts(task: PlanTask, tensor: int, context: int, pipeline: int) -> Iterator[RankLayout]:
    rest = task.cluster.num_ranks // tensor // context // pipeline
    for shard in _divisors(rest):
        degrees = Degrees(rest // shard, shard, tensor, pipeline, context)
        if degrees.data * task.rows.mean_length > task.rows.step_tokens * 1.01:
            continue  # some ranks would have no row
        for expert in _expert_degrees(task.model, degrees):
            base = RankLayout(degrees._replace(expert=expert), ranks_per_node=task.cluster.per_node)
            yield base
            if base.degrees.sharded and pipeline == 1:
                yield replace(base, keep_parameters=True)


def _expert_degrees(model: ModelDescription, degrees: Degrees) -> list[int]:
    """Over how many ranks of the data axes experts can be divided."""
    num_experts = 1 if "expert" in model.refuses else max(model.experts[0], 1)
    among = getattr(degrees, degrees.expert_axis)
    return [1, *(n for n in _divisors(among)[1:] if num_experts % (n * degrees.tensor) == 0)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _heads_divide(model: ModelDescription, tensor: int, context: int = 1) -> bool:
    for kind in model.kinds:
        if kind.attention is not None:
            queries, keys, _, _ = kind.attention
            if queries % tensor or keys % tensor or queries // tensor % context:
                return False
    return True


def budgets(rows: StepRows, degrees: Degrees, largest: int = 65536) -> list[int]:
    """Tokens of a micro-batch worth trying: from the longest row up, doubling, until a step is one micro-batch."""
    least = -(-rows.longest // degrees.context)
    found = [max(-(-least // 128) * 128, 128)]
    while found[-1] * 2 <= largest and found[-1] * degrees.context * degrees.data < rows.step_tokens:
        found.append(found[-1] * 2)
    return found


def search(task: PlanTask, *, exhaustive: bool = False) -> list[RunPlan]:
    """Plans that fit, the fastest first: the best of each layout. `exhaustive`: every micro-batch and both ways of
    recomputing for each; otherwise the largest micro-batch that fits, with recomputation only if nothing else does."""
    found: list[RunPlan] = []
    for layout in legal_layouts(task):
        plans = list(_tries(task, layout, exhaustive=exhaustive))
        if plans:
            found.append(min(plans, key=lambda plan: plan.time.total))
    return sorted(found, key=rank_plan)


def rank_plan(plan: RunPlan) -> tuple[float, int]:
    degrees = plan.layout.degrees
    axes = sum(size > 1 for size in degrees)
    return plan.time.total * (1 + _ROOM * axes / 5), axes


def _tries(task: PlanTask, layout: RankLayout, *, exhaustive: bool) -> Iterator[RunPlan]:
    sizes = budgets(task.rows, layout.degrees)
    for recompute in ("none", "full"):
        fitting = False
        for budget in sizes if exhaustive else reversed(sizes):
            try:
                plan = task.plan(layout, budget, recompute=recompute)
            except ConfigError:
                return
            if plan.fits != "yes":
                continue
            fitting = True
            yield plan
            if not exhaustive and plan.work.micro_batches > 1 and layout.degrees.pipeline == 1:
                break  # smaller ones take more passes; stages wait less for them
        if fitting and not exhaustive:
            return


def best_layout(task: PlanTask) -> RunPlan:
    found = search(task)
    if not found:
        raise ConfigError(
            f"no layout of {task.cluster.name} holds {task.model.name}: take more or larger GPUs, LoRA instead of all "
            "weights, or a shorter data.max_length"
        )
    return found[0]


def best_budget(task: PlanTask, layout: RankLayout) -> RunPlan:
    """The largest micro-batch that fits with certainty; the memory that more of it takes brings little time. Of stages,
    which wait less for small ones, the fastest."""
    fitting: list[RunPlan] = []
    for budget in reversed(budgets(task.rows, layout.degrees, largest=32768)):
        plan = task.plan(layout, budget)
        if plan.fits == "yes":
            fitting.append(plan)
            if layout.degrees.pipeline == 1:
                break
    if fitting:
        return min(fitting, key=lambda plan: plan.time.total)
    smallest = budgets(task.rows, layout.degrees)[0]
    raise ConfigError(
        f"batch.micro_batch_tokens auto: not even {smallest} tokens, the longest row, fit. "
        f"This {task.plan(layout, smallest).verdict()}"
    )


# --- advice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """A change to the configuration, and the plan with it."""

    change: str
    plan: RunPlan

    def effect(self, before: RunPlan) -> str:
        gib = (self.plan.worst.reserved - before.worst.reserved) / 2**30
        time = self.plan.time.total / before.time.total - 1
        size = f"{gib:+,.0f}" if abs(gib) >= 1000 else f"{gib:+.3g}"
        return f"{size} GiB, {time:+.0%} time (± {self.plan.errors.time:.0%})"


def advise(task: PlanTask, plan: RunPlan) -> list[Advice]:
    """At most three changes: of those that fit, or at least help, the fastest first."""
    found = _made(task, _changes(task, plan))
    if plan.fits == "yes":
        better = [a for a in found if a.plan.fits == "yes" and a.plan.time.total < plan.time.total * 0.98]
        return sorted(better, key=lambda a: a.plan.time.total)[:3]
    if plan.fits == "no" and not any(a.plan.fits == "yes" for a in found):
        found += _made(task, _several_changes(task, plan))
    fitting = [a for a in found if a.plan.fits == "yes"]
    helping = [a for a in found if a.plan.worst.reserved < plan.worst.reserved * 0.99 and a not in fitting]
    fitting.sort(key=lambda a: a.plan.time.total)
    return [*fitting, *sorted(helping, key=lambda a: a.plan.worst.reserved)][:3]


def last_resort(task: PlanTask, plan: RunPlan) -> str:
    """What is left where no setting makes it fit; empty where one does."""
    if plan.fits != "no" or any(advice.plan.fits != "no" for advice in advise(task, plan)):
        return ""
    adapt = "train an adapter (lora) instead of all weights, " if plan.model.trained == plan.model.parameters else ""
    return (
        f"No other setting makes it fit: {adapt}hold the frozen base in NF4 (model.quantization), or take more GPUs "
        "('lockstep plan --on GPU:NxM --search 5' compares layouts)"
    )


Change = tuple[str, Callable[[], RunPlan]]


def _made(task: PlanTask, changes: Iterable[Change]) -> list[Advice]:
    """Those that the configuration allows, each of another effect."""
    found: dict[tuple[float, float], Advice] = {}
    for change, make in changes:
        try:
            task.check(change)
            plan = make()
        except ConfigError:
            continue
        found.setdefault((plan.time.total, plan.worst.reserved), Advice(change, plan))
    return list(found.values())


def _changes(task: PlanTask, plan: RunPlan) -> Iterator[Change]:
    layout, budget = plan.layout, plan.budget
    for size in _other_budgets(task, plan):
        yield f"batch.micro_batch_tokens={size}", partial(task.plan, layout, size)
    other = "none" if task.recomputes == "full" else "full"
    yield f"model.activation_checkpointing={other}", partial(task.plan, layout, budget, recompute=other)
    yield from _layout_changes(task, plan)
    if task.options.logits_gib > 0.5:
        small = replace(task, options=replace(task.options, logits_gib=0.5))
        yield "model.logits_gib=0.5", partial(small.plan, layout, budget)
    if not task.options.activation_offload and task.options.device == "cuda":
        moved = replace(task, options=replace(task.options, activation_offload=True))
        yield "model.activation_offload=true", partial(moved.plan, layout, budget)
    yield from _precisions(task, plan)


def _layout_changes(task: PlanTask, plan: RunPlan) -> Iterator[Change]:
    layout, degrees = plan.layout, plan.layout.degrees
    if degrees.replicate > 1:
        sharded = replace(layout, degrees=degrees._replace(replicate=1, shard=degrees.data))
        yield f"parallel.replicate=1 parallel.shard={degrees.data}", partial(task.plan, sharded, plan.budget)
    if degrees.sharded:
        flipped = replace(layout, keep_parameters=not layout.keep_parameters)
        keeps = str(flipped.keep_parameters).lower()
        yield f"parallel.keep_parameters={keeps}", partial(task.plan, flipped, plan.budget)
        if not layout.offload and task.options.device == "cuda":
            yield "parallel.offload=true", partial(task.plan, replace(layout, offload=True), plan.budget)


def _precisions(task: PlanTask, plan: RunPlan) -> Iterator[Change]:
    """The model is described anew for these, which takes seconds: where they are needed."""
    if task.changed is None or task.options.device != "cuda":
        return
    changes = ["model.precision=bf16"] if task.widens else []
    if plan.fits == "no" and plan.model.trained < plan.model.parameters and plan.model.unlike == "":
        changes.append("model.quantization=nf4")
    for change in changes:
        yield change, partial(_changed_plan, task, plan, change)


def _changed_plan(task: PlanTask, plan: RunPlan, change: str) -> RunPlan:
    assert task.changed is not None
    return task.changed(change).plan(plan.layout, plan.budget)


def _several_changes(task: PlanTask, plan: RunPlan) -> Iterator[Change]:
    """At once, where no single one is enough: what takes the least memory of each kind."""
    layout, least = plan.layout, _least_budget(task, plan)
    changes = [] if task.recomputes == "full" else ["model.activation_checkpointing=full"]
    size = min(least, plan.budget)
    if size < plan.budget:
        changes.append(f"batch.micro_batch_tokens={size}")
    if len(changes) > 1:
        yield " ".join(changes), partial(task.plan, layout, size, recompute="full")
    if layout.degrees.sharded and not layout.offload and task.options.device == "cuda" and changes:
        moved = replace(layout, offload=True)
        yield " ".join([*changes, "parallel.offload=true"]), partial(task.plan, moved, size, recompute="full")


def _other_budgets(task: PlanTask, plan: RunPlan) -> Sequence[int]:
    least = -(-task.rows.longest // plan.layout.degrees.context)
    smaller = [size for size in (plan.budget // 2, plan.budget // 4) if size >= least]
    larger = [plan.budget * 2, plan.budget * 4] if plan.work.micro_batches > 1 else []
    return [*smaller, *larger]


def _least_budget(task: PlanTask, plan: RunPlan) -> int:
    return budgets(task.rows, plan.layout.degrees)[0]
