"""Whether every layout makes the same step: verify."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.options import Config, Json, Overrides, app, load_settings

Layouts = Annotated[
    str | None, typer.Option(metavar="LIST", help="Such as 'shard=2,tensor=2; pipeline=2'. Default: all that fit here.")
]


@app.command()
def verify(config: Config = None, overrides: Overrides = None, layouts: Layouts = None, as_json: Json = False) -> None:
    """Prove on a small copy of the model that every layout makes the step of one rank: sft, dpo and kto."""
    from lockstep.verdict import verify_and_show

    settings = load_settings([a for a in (config, *(overrides or ())) if a is not None], None)
    raise typer.Exit(verify_and_show(settings, layouts, as_json=as_json))
