"""Commands on runs that are there: runs, plot, export."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import Json, app

if TYPE_CHECKING:
    from lockstep.rundir import RunDir


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[Path | None, typer.Option(help="Where to write. Default: inside the run directory.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, not merged into the model.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the latest.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run's model in the Hugging Face layout."""
    from lockstep.cli.display import make_console, print_facts, quieten_libraries
    from lockstep.model.export import export_run

    quieten_libraries()
    facts = export_run(run, to, adapter=adapter, step=step)
    if as_json:
        typer.echo(json.dumps(facts, default=str))
    else:
        print_facts(make_console(), facts)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from lockstep.cli.display import make_console, runs_table
    from lockstep.rundir import find_runs

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    rows = [_run_row(run) for run in find_runs(folder)]
    if as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        make_console().print(runs_table(rows))
    else:
        typer.echo(f"no runs in {folder}")


def _run_row(run: RunDir) -> dict[str, Any]:
    from lockstep.launch.local import is_running, read_handle
    from lockstep.rundir import FINISHED_STATES

    status = run.status()
    state = str(status.get("state"))
    if state not in FINISHED_STATES and read_handle(run.path) is not None and not is_running(run.path):
        state = "lost"  # its processes are gone and nobody was there to say so
    keys = ("step", "total_steps", "loss", "validation_loss", "tokens_per_s")
    since = status.get("started_at") or run.config_path.stat().st_mtime
    row = {"name": run.path.resolve().name, "run_dir": str(run.path), "state": state}
    return row | {key: status.get(key) for key in keys} | {"age_s": time.time() - float(since)}


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One or several run directories.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the PNG and the HTML page.")] = Path("plots"),
) -> None:
    """Draw the curves of one or several runs into a PNG and a self-contained HTML page."""
    from lockstep.reports.curves import plot_runs

    for path in plot_runs(run_dirs, out):
        typer.echo(path)
