"""`lockstep plan`: memory, time and traffic of a configuration before it starts, here or on other hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lockstep.cli.display import LITERAL, borderless_table, make_console, quieten_libraries
from lockstep.cli.options import Config, Json, Overrides, app, echo, echo_json, load_settings

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.config import RunConfig
    from lockstep.plan.estimate import RunPlan
    from lockstep.plan.hardware import GpuCluster
    from lockstep.plan.search import Advice, PlanTask
    from lockstep.plan.work import StepRows

_NUM_BATCHES = 16  # of the data, from which the rows of a step are known


@app.command()
def plan(
    config: Config = None,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="GPU:NxM", help="Hardware: N GPUs in each of M machines, such as h200:8x4. Default: here."
        ),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own devices and networks, in YAML.")
    ] = None,
    search: Annotated[
        int, typer.Option(metavar="N", help="Try every layout of the hardware, and show the N fastest.", min=0)
    ] = 0,
    price: Annotated[
        float | None, typer.Option(help="Of one GPU for an hour: the run's cost is shown.", min=0.0, max=1e6)
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Time this machine first, in under a minute, and keep the result.")
    ] = False,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="Do not read rows: take all to be as long as data.max_length.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Instead: one step of the real code on ranks that do not exist.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --simulate: how many. Default: launch.procs.")
    ] = None,
    simulate_ranks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="With --simulate: these and their partners, such as 0,17,300-310, or all of them."
        ),
    ] = None,
    expert_imbalance: Annotated[
        float,
        typer.Option(min=1.0, help="With --simulate: how many times its share of tokens the busiest expert gets."),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """What a run will cost before it starts: memory, time and traffic of each rank, and how sure that is."""
    if simulate:
        raise typer.Exit(_simulate(config, overrides, (ranks, simulate_ranks), expert_imbalance, as_json=as_json))
    if calibrate:
        _calibrate()
        if config is None and not Path("lockstep.yaml").is_file():
            return
    named = _named_cluster(on, hardware)
    changes = [] if named is None else ["launch.kind=local", f"launch.procs={named.num_ranks}"]
    settings = load_settings(config, [*(overrides or ()), *changes], starts=False)
    with make_console(stderr=True).status("describing the model"):
        quieten_libraries()
        cluster = named or _here(settings)
        task = make_task(settings, cluster, price, reads_data=not no_data)
    if search:
        found = _search(task, search)
        chosen: RunPlan = found[0]
    else:
        found, chosen = [], _plan_of(settings, task)
    _show(make_console(stderr=as_json), task, chosen, found, page, settings.name, as_json=as_json)
    raise typer.Exit(0 if chosen.fits != "no" else 1)


def _simulate(
    config: str | None,
    overrides: list[str] | None,
    ranks: tuple[int | None, str | None],
    expert_imbalance: float,
    *,
    as_json: bool,
) -> int:
    """`ranks`: how many, and which."""
    from lockstep.cli.simulation import simulate_and_show

    settings = load_settings(config, overrides, starts=False)
    count, only = ranks[0] or settings.launch.procs, ranks[1]
    return simulate_and_show(settings, count, only=only, expert_imbalance=expert_imbalance, as_json=as_json)


def _calibrate() -> None:
    import torch

    from lockstep.plan.calibrate import calibrate, keep
    from lockstep.plan.hardware import Calibrations

    Calibrations().prepare()  # that it cannot be kept shows now
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with make_console(stderr=True).status(f"timing {device}"):
        path = keep(calibrate(device))
    echo(f"wrote {path}", err=True)


def _named_cluster(on: str | None, hardware: Path | None) -> GpuCluster | None:
    from lockstep.config import ConfigError
    from lockstep.plan.hardware import parse_cluster, read_hardware

    if on is None and hardware is not None:
        raise ConfigError("--hardware describes machines: say which one with --on")
    return None if on is None else parse_cluster(on, read_hardware(hardware) if hardware else None)


def _here(config: RunConfig) -> GpuCluster:
    from lockstep.plan.from_config import this_machine

    return this_machine(config)


def make_task(config: RunConfig, cluster: GpuCluster, price: float | None, *, reads_data: bool) -> PlanTask:
    from lockstep.plan.from_config import assumed_rows, task_of

    rows = _read_rows(config) if reads_data and config.algorithm.kind != "grpo" else None
    return task_of(config, cluster, rows or assumed_rows(config), price_per_hour=price)


def _read_rows(config: RunConfig) -> StepRows | None:
    """From the data, as a run would compile it; None where there is no tokenizer, or the rows are not here."""
    from lockstep.data.dataset import compile_data
    from lockstep.data.order import Batches
    from lockstep.model.load import load_run_tokenizer
    from lockstep.plan.from_config import measured_rows
    from lockstep.train.foresee import lengths_of
    from lockstep.train.preference_data import rows_to_learn
    from lockstep.train.schedule import num_steps

    try:
        tokenizer = load_run_tokenizer(config)
        data = compile_data(config.data, tokenizer, seed=config.seed, timeout_s=config.launch.timeout_s)
    except (ValueError, OSError) as error:  # a folder without a tokenizer raises a plain ValueError
        echo(f"rows are assumed, not read: {' '.join(str(error).split())[:160]}", err=True)
        return None
    batches = Batches(rows_to_learn(config, data).train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    total = num_steps(config, batches)
    cursor, read = 0, []
    for _ in range(min(_NUM_BATCHES, total)):
        batch, cursor = batches.batch_at(cursor)
        read.append([lengths_of(datum) for datum in batch])
    return measured_rows(config, read, total, batches.num_steps(1.0))


def _plan_of(config: RunConfig, task: PlanTask) -> RunPlan:
    """In the configuration's own layout, or in that which `parallel: auto` would take; the same of the micro-batch."""
    from lockstep.plan.choose import choose_layout, plan_layout
    from lockstep.plan.from_config import layout_of

    if config.parallel.auto and not config.parallel.chosen_for(task.cluster.num_ranks):
        chosen = choose_layout(config, task)
        echo(chosen.why, err=True)
        return chosen.plan
    found = plan_layout(config, task, layout_of(config, task.cluster))
    if config.batch.fit_memory and task.options.device == "cuda":
        echo(f"batch.micro_batch_tokens: {found.budget:,} by the plan", err=True)
    return found


def _search(task: PlanTask, count: int) -> list[RunPlan]:
    from lockstep.plan.search import best_layout, search

    with make_console(stderr=True).status("trying layouts"):
        return search(task)[:count] or [best_layout(task)]  # which says why there is none


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(
    console: Console,
    task: PlanTask,
    plan: RunPlan,
    found: list[RunPlan],
    page: Path | None,
    name: str,
    *,
    as_json: bool,
) -> None:
    from lockstep.plan.search import advise, last_resort
    from lockstep.reports.plan import facts, memory_rows, time_rows, traffic_rows, write_page

    advice = [] if found else advise(task, plan)  # a search has tried all of it
    tree = plan.as_json()
    console.print(_rows_table(facts(tree)))
    if found:
        console.print(_layouts(found))
    for rank in tree["memory"]:
        error = f"± {tree['memory_error']:.0%}"
        console.print(f"\nmemory of {rank['rank']}: {rank['reserved_gib']:.4g} GiB {error}, worst in {rank['moment']}")
        console.print(_rows_table(memory_rows(rank)))
    console.print(f"\ntime of a step ± {tree['time_error']:.0%}")
    console.print(_rows_table(time_rows(tree)))
    if tree["traffic_bytes"]:
        console.print("\ntraffic of a step")
        console.print(_rows_table(traffic_rows(tree)))
    console.print(f"\n{plan.verdict()}", highlight=False, soft_wrap=True)
    changes = [(a.change, _effect(a, plan)) for a in advice]
    if changes:
        console.print("what would change it:", highlight=False)
        console.print(_rows_table(changes))
    if last := last_resort(task, plan):
        console.print(last, **LITERAL)
    if found:
        console.print(f"to take the first layout: {plan.as_overrides()}", **LITERAL)
    if page is not None:
        echo(f"wrote {write_page(tree, plan.verdict(), changes, f'Plan of {name}', page)}", err=True)
    if as_json:
        rows = [{"change": a.change, **a.plan.as_json()} for a in advice]
        others = [{**p.as_json(), "overrides": p.as_overrides()} for p in found]
        echo_json(json.dumps({**tree, "verdict": plan.verdict(), "advice": rows, "search": others}))


def _effect(advice: Advice, before: RunPlan) -> str:
    words = {"yes": "fits", "close": "close to the limit", "no": "still does not fit"}[advice.plan.fits]
    return f"{words}: {advice.effect(before)}"


def _rows_table(rows: list[tuple[str, str]]) -> Table:
    table = borderless_table()
    table.show_header = False
    table.add_column()
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _layouts(found: list[RunPlan]) -> Table:
    from lockstep.plan.estimate import short

    table = borderless_table()
    for heading in ("layout", "micro-batch", "recomputes", "step", "memory"):
        table.add_column(heading)
    for plan in found:
        table.add_row(
            str(plan.layout),
            f"{plan.budget:,}",
            "yes" if plan.model.kinds[0].recomputed else "no",
            f"{plan.time.total:.3g} s ± {plan.errors.time:.0%}",
            f"{short(plan.worst.reserved / 2**30)} GiB ± {plan.errors.memory:.0%}",
        )
    return table
