"""`lockstep plan`: what a run would do before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.options import Config, Json, Overrides, app, load_settings


@app.command()
def plan(
    config: Config = None,
    overrides: Overrides = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="One step of the real code on ranks that do not exist.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --simulate: how many. Default: launch.procs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What every rank of a run would send and hold, and whether all of them agree, before any of them is started."""
    from lockstep.cli.simulation import simulate_and_show

    if not simulate:
        raise ValueError("say what to plan: --simulate, with --ranks N")
    settings = load_settings(config, overrides)
    num_ranks = ranks or getattr(settings.launch, "procs", None) or 1
    raise typer.Exit(simulate_and_show(settings, num_ranks, as_json=as_json))
