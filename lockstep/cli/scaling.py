"""What more processes bring: scale."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Config, Json, Overrides, app, load_settings


@app.command()
def scale(
    config: Config = None,
    overrides: Overrides = None,
    procs: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of processes to try.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Steps measured at each size, after one that warms up.", min=1)] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: scaling/<name>-<date>-<time>.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the same work at several sizes: speed, traffic, memory and balance of each."""
    from lockstep.scaling import as_json as sizes_as_json
    from lockstep.scaling import parse_sizes

    sizes = parse_sizes(procs)
    settings = load_settings([a for a in (config, *(overrides or ())) if a is not None], sizes[0])
    folder = out or Path("scaling") / f"{settings.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    from lockstep.cli.display import make_console
    from lockstep.launch.start import RunFailed
    from lockstep.reports.scaling import tables, warnings_of
    from lockstep.scaling import measure, write_report

    console = make_console(stderr=as_json)
    try:
        with make_console(stderr=True).status(f"{steps} steps on {procs} processes"):
            found = measure(settings, sizes, steps, folder)
    except RunFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    for table in tables(found):
        console.print(table)
        console.print()
    for warning in warnings_of(found):
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    for path in write_report(found, f"{settings.name} at several sizes", folder):
        typer.echo(f"wrote {path}", err=True)
    if as_json:
        typer.echo(json.dumps({"out": str(folder), "sizes": sizes_as_json(found)}))
