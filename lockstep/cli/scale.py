"""`lockstep scale`: short real runs of the same work at several sizes, and what each size made of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lockstep.cli.display import borderless_table, make_console
from lockstep.cli.options import Config, Json, Overrides, app, echo, echo_json, load_settings

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.reports.scaling import Size, TextTable


@app.command()
def scale(
    config: Config = None,
    overrides: Overrides = None,
    procs: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of processes to try.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Steps measured at each size, after one warm-up step.", min=1)] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: scaling/<name>-<date>-<time>.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the same work at several sizes: speed, traffic, memory and balance of each."""
    from lockstep.launch.start import RunFailed
    from lockstep.reports.scaling import flow_table, size_table, straggler_warnings, write_report

    sizes = parse_sizes(procs)
    settings = load_settings(config, overrides, sizes[0])
    folder = out or Path("scaling") / f"{settings.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    console = make_console(stderr=as_json)
    try:
        with make_console(stderr=True).status(f"{steps} steps on {procs} processes"):
            results = measure(settings, sizes, steps, folder)
    except RunFailed as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    for table in (size_table(results), flow_table(results)):
        if table.rows:
            console.print(_terminal_table(table))
            console.print()
    for warning in straggler_warnings(results):
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    for path in write_report(results, f"{settings.name} at several sizes", folder):
        echo(f"wrote {path}", err=True)
    if as_json:
        rows = [{**asdict(size), "sent_bytes": size.sent_bytes} for size in results]
        echo_json(json.dumps({"out": str(folder), "sizes": rows}))


def parse_sizes(text: str) -> list[int]:
    """From "1,2,4" to numbers, smallest first."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--procs {text}: give numbers with commas, such as 1,2,4") from None
    if sizes[0] < 1:
        raise ValueError(f"--procs {text}: a run has at least one process")
    return sizes


def measure(settings: RunConfig, sizes: Sequence[int], steps: int, out: Path) -> list[Size]:
    """Run all sizes, one after the other, each in a folder of its own under `out`."""
    from lockstep.config import ConfigError
    from lockstep.launch.start import train
    from lockstep.reports.scaling import read_size
    from lockstep.rundir import RunDir

    for procs in sizes:
        try:
            settings.parallel.degrees(procs)
        except ConfigError as error:
            raise ConfigError(f"--procs {procs} does not go with this configuration: {error}") from None
    results: list[Size] = []
    for procs in sizes:
        folder = out / f"procs-{procs}"
        if folder.exists():
            raise ValueError(f"{folder} already exists: name another folder with --out")
        train(_short_run(settings, procs, steps), run_dir=folder)
        run = RunDir(folder)
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # every run leaves one at its end
        settled = run.config()
        smallest = results[0] if results else None
        results.append(read_size(procs, _layout(settled, procs), run.metrics(), smallest, _planned(settled, procs)))
    return results


def _planned(config: RunConfig, procs: int) -> tuple[float, float] | None:
    """(tokens in a second by the plan of this size here, the error of its time); None for what has no plan."""
    from lockstep.cli.plan import make_task
    from lockstep.plan.from_config import layout_of, this_machine

    cluster = this_machine(config, procs)
    try:
        plan = make_task(config, cluster, None, reads_data=True).plan(layout_of(config, cluster))
    except Exception as error:  # what was measured is shown all the same
        echo(f"no plan for {procs} processes: {' '.join(str(error).split())[:200]}", err=True)
        return None
    return plan.time.tokens_per_s, plan.errors.time


def _short_run(settings: RunConfig, procs: int, steps: int) -> RunConfig:
    """The same work without what is not a step: evaluation, checkpoints, export."""
    changes: dict[str, dict[str, Any]] = {
        "launch": {"procs": procs},
        # As many epochs as steps are enough, whatever the batch.
        "optim": {"max_steps": steps + 1, "epochs": float(steps + 1)},
        "data": {"validation": (), "validation_fraction": 0.0},
        "evaluation": {"every_steps": 0, "at_start": False, "metrics": (), "patience": None},
        "checkpoint": {"every_steps": 0, "export": "none"},
        "logging": {"every_steps": 1, "tensorboard": False},
    }
    parts = {name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()}
    return settings.model_copy(update={"name": f"{settings.name}-{procs}", **parts})


def _layout(settings: RunConfig, procs: int) -> str:
    degrees = settings.parallel.degrees(procs)
    return degrees.name


def _terminal_table(cells: TextTable) -> Table:
    table = borderless_table()
    for i, column in enumerate(cells.columns):
        table.add_column(column, justify="left" if i < cells.num_left else "right", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    return table
