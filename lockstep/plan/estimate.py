"""A plan: memory, time and traffic of a configuration on a cluster, how sure each figure is, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config.schema import ConfigError
from lockstep.plan.description import LayerCosts, LayerKind, ModelDescription
from lockstep.plan.hardware import GpuCluster
from lockstep.plan.memory import RankMemory, host_bytes, plan_engine, plan_memory
from lockstep.plan.sampling import CONTEXT_GIB, GIB
from lockstep.plan.time import StepTime, plan_time
from lockstep.plan.work import Options, RankLayout, Sampling, StepRows, Workload


@dataclass(frozen=True)
class Errors:
    """Within which share a figure is expected, and from what that is known."""

    memory: float
    time: float
    why: str


# The worst of the configurations that were measured, rounded up: docs/plan.md.
_ONE_GPU = Errors(0.04, 0.15, "28 configurations on one H200, calibrated there")
_FROM_TABLE = Errors(0.04, 0.30, "the table of devices, not this machine: calibrate for less")
_SEVERAL = Errors(0.12, 0.35, "published runs of others on up to 512 GPUs")
_HOST = Errors(0.50, 0.60, "a CPU, for which activations and speed are rough")
_SHARED_SAMPLING = Errors(0.12, 0.60, "answers sampled by ranks that hold the model together: never measured")
_UNLIKE = Errors(0.12, 0.5, "no such model was compared with a GPU")


def errors_of(
    model: ModelDescription, cluster: GpuCluster, layout: RankLayout, options: Options, sampling: Sampling | None = None
) -> Errors:
    if options.device != "cuda":
        return _HOST
    if sampling is not None and sampling.colocated and sampling.shards > 1:
        return _SHARED_SAMPLING
    if model.unlike:
        return replace(_UNLIKE, why=f"{model.unlike}: {_UNLIKE.why}")
    if layout.degrees.num_ranks > 1:
        return _SEVERAL
    return _ONE_GPU if cluster.calibration is not None else _FROM_TABLE


@dataclass(frozen=True)
class RunPlan:
    """One configuration on one cluster. `memory`: of each stage of the pipeline axis, the fullest rank; and of a GPU
    that samples alone, if there is one."""

    model: ModelDescription
    layout: RankLayout
    work: Workload
    options: Options
    cluster: GpuCluster
    budget: int
    memory: tuple[RankMemory, ...]
    time: StepTime
    errors: Errors
    rows: StepRows
    price_per_hour: float | None = None
    """Of one GPU."""
    host: dict[str, float] = field(default_factory=dict)
    """Bytes of each machine's own memory, by what they are for."""

    @property
    def worst(self) -> RankMemory:
        return max(self.memory, key=lambda rank: rank.reserved)

    @property
    def capacity(self) -> float:
        context = CONTEXT_GIB if self.options.device == "cuda" else 0.0
        return (self.cluster.device.memory_gib - context) * GIB

    @property
    def fits(self) -> str:
        """yes, close (within the plan's own error), or no."""
        worst = self.worst
        if worst.allocated * (1 - self.errors.memory) > self.capacity:
            return "no"
        return "close" if worst.reserved * (1 + self.errors.memory) > self.capacity else "yes"

    @property
    def run_s(self) -> float | None:
        """Its steps, and what is computed once before them."""
        if self.rows.steps is None:
            return None
        return self.rows.steps * self.time.total + self.rows.precomputed_steps * self.time.forward_s

    @property
    def num_gpus(self) -> int:
        return self.cluster.num_ranks + (self.rows.sampling.engines if self.rows.sampling is not None else 0)

    @property
    def cost(self) -> float | None:
        if self.run_s is None or self.price_per_hour is None:
            return None
        return self.run_s / 3600 * self.price_per_hour * self.num_gpus

    def largest_gib(self) -> dict[str, float]:
        """What holds most of the memory at the worst moment."""
        parts = sorted(self.worst.parts.items(), key=lambda part: -part[1])[:4]
        return {name: size / GIB for name, size in parts}

    def verdict(self) -> str:
        """One sentence: 'needs 93 of 79 GiB: optimizer 60, weights 30, ...'."""
        worst = self.worst
        shown = ", ".join(f"{name} {short(size)}" for name, size in self.largest_gib().items())
        needs = f"{short(worst.reserved / GIB)} of {short(self.capacity / GIB)} GiB"
        words = {"yes": "fits", "close": "is close to the limit", "no": "does not fit"}[self.fits]
        return f"{words}: needs {needs} (± {self.errors.memory:.0%}) on {worst.rank}: {shown}"

    def as_overrides(self) -> str:
        """Settings that make a run of this plan, as the command takes them."""
        layout = self.layout
        degrees = {name: size for name, size in layout.degrees._asdict().items() if size > 1 or name == "shard"}
        found = [f"parallel.{name}={size}" for name, size in degrees.items()]
        found += ["parallel.keep_parameters=true"] if layout.keep_parameters else []
        found += [f"parallel.schedule={layout.schedule}"] if layout.degrees.pipeline > 1 else []
        recomputes = "full" if self.model.kinds[0].recomputed else "none"
        found += [f"batch.micro_batch_tokens={self.budget}", f"model.activation_checkpointing={recomputes}"]
        return " ".join(found)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "trained": self.model.trained,
            "cluster": self.cluster.name,
            "layout": str(self.layout),
            "degrees": self.layout.degrees._asdict(),
            "micro_batch_tokens": self.budget,
            "micro_batches": self.work.micro_batches,
            "fits": self.fits,
            "capacity_gib": self.capacity / GIB,
            "memory_error": self.errors.memory,
            "time_error": self.errors.time,
            "errors_from": self.errors.why,
            "assumed": self.rows.assumed,
            "reference": self.rows.reference,
            "reference_is_assumed": self.rows.reference_is_assumed,
            "host_gib": {name: size / GIB for name, size in self.host.items()},
            "memory": [
                {
                    "rank": rank.rank,
                    "moment": rank.moment,
                    "allocated_gib": rank.allocated / GIB,
                    "reserved_gib": rank.reserved / GIB,
                    "parts_gib": {name: size / GIB for name, size in rank.parts.items()} | {"slack": rank.slack / GIB},
                }
                for rank in self.memory
            ],
            "step_s": self.time.total,
            "step_parts_s": self.time.parts,
            "hidden_s": self.time.hidden,
            "tokens_per_step": self.time.tokens,
            "tokens_per_s": self.time.tokens_per_s,
            "traffic_bytes": self.time.traffic,
            "steps": self.rows.steps,
            "run_s": self.run_s,
            "cost": self.cost,
        }


def estimate(
    model: ModelDescription,
    layout: RankLayout,
    rows: StepRows,
    budget: int,
    options: Options,
    cluster: GpuCluster,
    *,
    price_per_hour: float | None = None,
) -> RunPlan:
    """`budget`: batch.micro_batch_tokens."""
    check_layout(model, layout, cluster)
    if layout.degrees.expert * layout.degrees.tensor > 1:
        model = with_divided_experts(model)
    work = rows.work(layout, budget, 128 if options.device == "cuda" else 1)
    stages = range(layout.degrees.pipeline)
    memory = tuple(plan_memory(model, layout, work, options, stage=stage) for stage in stages)
    if rows.sampling is not None and rows.sampling.engines and options.device == "cuda":
        memory = (*memory, plan_engine(model, rows.sampling, options))
    time = plan_time(model, layout, work, options, cluster)
    errors = errors_of(model, cluster, layout, options, work.sampling)
    host = host_bytes(model, layout, work, options)
    return RunPlan(
        model, layout, work, options, cluster, budget, memory, time, errors, rows, price_per_hour, host
    )  # fmt: skip


def check_layout(model: ModelDescription, layout: RankLayout, cluster: GpuCluster) -> None:
    """A sentence for what cannot be: heads that do not divide, more stages than layers, experts."""
    degrees = layout.degrees
    if degrees.num_ranks != cluster.num_ranks:
        raise ConfigError(
            f"the layout {layout} has {degrees.num_ranks} ranks, and {cluster.name} has {cluster.num_ranks} GPUs: "
            "change parallel, launch.procs or --on"
        )
    for axis, reason in model.refuses.items():
        if getattr(degrees, axis) > 1:
            raise ConfigError(f"{reason}: set parallel.{axis} to 1")
    num_experts, parts = model.experts[0], degrees.expert * degrees.tensor
    if num_experts % parts:
        raise ConfigError(
            f"parallel.expert {degrees.expert} x parallel.tensor {degrees.tensor} does not divide the model's "
            f"{num_experts} experts"
        )
    for kind in model.kinds:
        if kind.attention is None:
            continue
        for name, heads in zip(("query", "key"), kind.attention[:2], strict=True):
            if heads % degrees.tensor:
                raise ConfigError(f"parallel.tensor {degrees.tensor} does not divide the model's {heads} {name} heads")
        if kind.attention[0] // degrees.tensor % degrees.context:
            raise ConfigError(
                f"parallel.context {degrees.context} does not divide the {kind.attention[0] // degrees.tensor} query "
                "heads of a rank"
            )
    if degrees.pipeline > len(model.layers):
        raise ConfigError(f"parallel.pipeline {degrees.pipeline} is more than the model's {len(model.layers)} layers")


def short(number: float) -> str:
    """Three digits, and all of a large number."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


# --- other ways of computing ------------------------------------------------------------------------------------------


def with_recomputation(model: ModelDescription, full: bool) -> ModelDescription:
    """The same model with every layer recomputed, or none: from what tracing found of the plain layer."""
    kinds = tuple(_recomputed(kind, model) if full else _plain(kind) for kind in model.kinds)
    return replace(model, kinds=kinds)


def with_divided_experts(model: ModelDescription) -> ModelDescription:
    """The same model computed by ranks that have a part of the experts each, all of them chosen equally often."""
    return replace(model, kinds=tuple(map(_divided, model.kinds)))


def _divided(kind: LayerKind) -> LayerKind:
    if kind.divided is None:
        return kind
    if not kind.recomputed:
        return replace(kind, costs=kind.divided, whole=kind.divided)
    added = kind.divided.minus(kind.whole)  # for a moment, while the layer is computed again
    again = kind.costs.backward.plus(added.forward).plus(added.backward)
    extra = kind.costs.backward_extra + max(added.saved_bytes() + added.backward_extra, 0.0)
    costs = replace(kind.costs, backward_extra=extra, backward=again)
    return replace(kind, costs=costs, whole=kind.divided)


def _plain(kind: LayerKind) -> LayerKind:
    return replace(kind, costs=kind.whole, recomputed=False)


def _recomputed(kind: LayerKind, model: ModelDescription) -> LayerKind:
    whole = kind.whole
    again = whole.backward.plus(whole.forward)
    saved = {"norms and residual": {"whole": float(model.hidden * model.compute_bytes)}}
    extra = whole.saved_bytes() + whole.backward_extra - model.hidden * model.compute_bytes
    scores = whole.scores + whole.scores_extra
    costs = LayerCosts(saved, whole.forward_extra, extra, whole.constant, whole.forward, again, scores_extra=scores)
    return replace(kind, costs=costs, recomputed=True)
