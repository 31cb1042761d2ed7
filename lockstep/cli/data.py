"""What a run would learn from: data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import Config, Json, Overrides, app, load_settings

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data import CompiledData


@app.command()
def data(
    config: Config = None,
    overrides: Overrides = None,
    row: Annotated[
        list[str] | None, typer.Option(metavar="FILE:LINE", help="Show this row; or its number. Can be repeated.")
    ] = None,
    longest: Annotated[int, typer.Option(help="How many of the longest rows to show.", min=0)] = 1,
    shortest: Annotated[int, typer.Option(help="How many of the shortest rows to show.", min=0)] = 1,
    random: Annotated[int, typer.Option(help="How many rows to show at random.", min=0)] = 2,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all of it as one HTML page.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there is any warning.")] = False,
    as_json: Json = False,
) -> None:
    """Show what would be learned: rows, tokens, masks, lengths, and whatever is wrong with them."""
    from lockstep.cli.display import make_console, quieten_libraries
    from lockstep.datasheet import Choice, gather, print_sheet
    from lockstep.reports.data import sheet_page

    settings = load_settings([a for a in (config, *(overrides or ())) if a is not None], None)
    if settings.algorithm.kind == "grpo":
        raise ValueError("grpo learns from what it samples, not from rows: lockstep train --dry-run counts its prompts")
    quieten_libraries()
    compiled, tokenizer = _compile(settings)
    chosen = Choice(tuple(row or ()), longest, shortest, random, settings.seed)
    sheet = gather(settings, compiled, tokenizer, chosen)
    if html is not None:
        html.write_text(sheet_page(sheet), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(sheet.as_json()))
    else:
        print_sheet(make_console(), sheet)
    if html is not None:
        typer.echo(f"wrote {html}", err=True)
    if strict and sheet.warnings:
        typer.echo(f"error: {len(sheet.warnings)} warnings, and --strict", err=True)
        raise typer.Exit(1)


def _compile(settings: RunConfig) -> tuple[CompiledData, Any]:
    """The data and its tokenizer, with a progress bar."""
    from lockstep.cli.display import data_progress
    from lockstep.data import compile_data
    from lockstep.model.load import load_run_tokenizer

    tokenizer = load_run_tokenizer(settings)
    with data_progress() as show:
        compiled = compile_data(
            settings.data, tokenizer, seed=settings.seed, timeout_s=settings.launch.timeout_s, on_progress=show
        )
    return compiled, tokenizer
