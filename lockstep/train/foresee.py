"""What the plan says of a run on the GPUs that it has, before anything is loaded: refused, warned of, or noted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lockstep.config import ConfigError, GrpoConfig, RunConfig, parse_config
from lockstep.data.order import Batches
from lockstep.parallel.group import ProcessGroup, choose_device, meet
from lockstep.plan.choose import ChosenLayout, choose_layout
from lockstep.plan.estimate import RunPlan
from lockstep.plan.from_config import TextLengths, assumed_rows, layout_of, measured_rows, task_of, this_machine
from lockstep.plan.hardware import GpuCluster
from lockstep.plan.search import PlanTask, advise, best_budget, last_resort
from lockstep.rundir import RunDir
from lockstep.train.schedule import num_steps
from lockstep.types import Datum

_NUM_BATCHES = 8  # of the data, from which the rows of a step are known


def settle_layout(config: RunConfig, run: RunDir, rows: Sequence[object], *, has_images: bool = False) -> RunConfig:
    """`parallel: auto` in numbers, which the run directory keeps: a run that goes on with as many ranks has the same
    layout. Any other configuration is returned as it is. All ranks."""
    if not config.parallel.auto:
        return config
    group = meet(choose_device(config.launch.device), timeout_s=config.launch.timeout_s)
    # Rank 0 decides, and the others do as it says: what they read may be older, or their machine another.
    text = settle(config, run, rows, has_images).to_yaml() if run.owner else None
    return parse_config(group.broadcast_object(text), source="the layout that rank 0 chose", directory=run.path)


def settle(config: RunConfig, run: RunDir, rows: Sequence[object], has_images: bool) -> RunConfig:
    """Rank 0's part of `settle_layout`."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1 or config.parallel.chosen_for(num_ranks):  # one rank leaves nothing to choose
        return config
    run.write_status(phase="choosing a layout")
    try:
        found = choose(config, rows, _machine(config), has_images=has_images)
    except Exception as error:  # what has no plan still trains, in the layout that is usual
        usual = config.parallel.model_copy(update=config.parallel.degrees(num_ranks)._asdict())
        run.log_event("layout", message=f"parallel auto: {usual.degrees(num_ranks).name}, as there is no plan: {error}")
        settled = config.model_copy(update={"parallel": usual})
    else:
        run.log_event("layout", message=found.why)
        settled = found.config
    run.write_status(layout=settled.parallel.degrees(num_ranks).name)
    run.add_config(settled)
    return settled


def choose(
    config: RunConfig, rows: Sequence[Any] | None = None, cluster: GpuCluster | None = None, *, has_images: bool = False
) -> ChosenLayout:
    """What `parallel: auto` takes. `rows`: None where they are not known; `cluster`: None for this machine."""
    task = task_of(
        config, cluster or this_machine(config), assumed_rows(config) if rows is None else _rows(config, rows)
    )
    return choose_layout(config, task, has_images=has_images, num_rows=None if rows is None else len(rows))


def _machine(config: RunConfig) -> GpuCluster:
    """With the ranks that there are."""
    return this_machine(
        config, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
    )


def foresee(config: RunConfig, group: ProcessGroup, run: RunDir, rows: Sequence[Datum]) -> RunConfig:
    """The configuration, with the micro-batch that fits where it asks for that. On CUDA alone: of a CPU's memory too
    little is known. Raises ConfigError for what cannot fit. All ranks."""
    config = shrink_after_failure(config, group, run)
    if group.device.type != "cuda" or config.parallel.backend == "deepspeed":
        return config
    found = group.broadcast_object(_look(config, run, rows) if run.owner else None)
    if found["refused"]:
        raise ConfigError(found["refused"])
    batch = config.batch.model_copy(update={"micro_batch_tokens": found["budget"]})
    return config.model_copy(update={"batch": batch})


def shrink_after_failure(config: RunConfig, group: ProcessGroup, run: RunDir) -> RunConfig:
    """With micro-batches of half the size that was too large before this start, if there was one. All ranks."""
    if config.batch.on_out_of_memory != "shrink":
        return config
    tokens = group.broadcast_object(run.take_too_large() if run.owner else None)
    if tokens is None or tokens // 2 >= config.batch.micro_batch_tokens:
        return config
    return record_shrunk(config, run, tokens, tokens // 2, "a rank ran out of memory")


def record_shrunk(config: RunConfig, run: RunDir, before: int, after: int, reason: str) -> RunConfig:
    """The configuration with smaller micro-batches, which the run directory keeps; the longest row fits into one."""
    least = -(-config.data.max_length // config.parallel.context)
    batch = config.batch.model_copy(update={"micro_batch_tokens": max(after, least), "fit_memory": False})
    run.log_event(
        "warning",
        kind="shrunk",
        message=f"out of memory in micro-batches of {before:,} tokens: {after:,} from now on, which changes no numbers "
        f"({reason})",
    )
    run.write_status(micro_batch_tokens=after)
    shrunk = config.model_copy(update={"batch": batch})
    run.add_config(shrunk)
    return shrunk


def _look(config: RunConfig, run: RunDir, rows: Sequence[Datum]) -> dict[str, object]:
    run.write_status(phase="planning memory and time")
    try:
        return judge(config, _machine(config), run, rows)
    except Exception as error:  # a model or a layout that has no plan still trains, whatever the planner makes of it
        run.log_event("plan", message=f"no plan: {error}")
        return {"refused": None, "budget": config.batch.micro_batch_tokens}


def judge(config: RunConfig, cluster: GpuCluster, run: RunDir, rows: Sequence[Datum]) -> dict[str, Any]:
    """Writes down what is expected; {"refused": why, or None; "budget": tokens of a micro-batch}."""
    task, layout = task_of(config, cluster, _rows(config, rows)), layout_of(config, cluster)
    try:
        plan = best_budget(task, layout) if config.batch.fit_memory else task.plan(layout)
    except ConfigError as error:
        if config.batch.fit_memory and config.launch.check_memory:
            return {"refused": str(error), "budget": 0}
        raise
    if config.batch.fit_memory:
        run.log_event("plan", message=f"batch.micro_batch_tokens: {plan.budget:,} by the plan")
    planned = {
        "memory_gib": plan.worst.allocated / 2**30,
        "memory_error": plan.errors.memory,
        "step_s": plan.time.total,
        "time_error": plan.errors.time,
    }
    verdict = plan.verdict()
    run.write_status(planned={**planned, "largest_gib": plan.largest_gib()})
    run.log_event("plan", message=f"this run {verdict}", **planned)
    found = {"refused": None, "budget": plan.budget}
    if plan.fits == "yes":
        return found
    said = f"this run {verdict}{_advice(task, plan)}"
    if plan.fits == "no" and config.launch.check_memory:
        return {**found, "refused": f"{said}. launch.check_memory false starts it all the same"}
    run.log_event("warning", message=said)
    return found


def _advice(task: PlanTask, plan: RunPlan) -> str:
    last = last_resort(task, plan)
    if last:
        return f". {last}"
    found = [f"{advice.change} ({advice.effect(plan)})" for advice in advise(task, plan)]
    return f". What would help: {'; '.join(found)}" if found else ""


def _rows(config: RunConfig, rows: Sequence[Datum]) -> Any:
    if isinstance(config.algorithm, GrpoConfig):  # answers are yet to be sampled
        return assumed_rows(config)
    batches = Batches(rows, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    cursor, read = 0, []
    for _ in range(min(_NUM_BATCHES, total)):
        batch, cursor = batches.batch_at(cursor)
        read.append([lengths_of(datum) for datum in batch])
    return measured_rows(config, read, total, batches.num_steps(1.0))


def lengths_of(datum: Datum) -> TextLengths:
    return TextLengths(len(datum.prompt), tuple(len(c.tokens) for c in datum.completions), datum.num_supervised)
