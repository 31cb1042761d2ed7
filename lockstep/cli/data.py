"""`lockstep data`: what a run would learn from, on the terminal, as JSON or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import data_progress, make_console, print_facts, quieten_libraries
from lockstep.cli.options import Config, Json, Overrides, app, echo, echo_json, load_settings
from lockstep.reports.page import format_count

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data import CompiledData, Tokenizer
    from lockstep.data.inspect import DataSheet, HistogramBar, ShownRow, ShownToken
    from lockstep.data.report import FileReport


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
    """Show what would be learned: rows, tokens, masks and lengths, with warnings about the data."""
    from lockstep.data.inspect import RowSelection, inspect_data
    from lockstep.reports.data import data_page

    settings = load_settings(config, overrides)
    if settings.algorithm.kind == "grpo":
        raise ValueError("grpo learns from what it samples, not from rows: lockstep train --dry-run counts its prompts")
    quieten_libraries()
    compiled, tokenizer = _compile(settings)
    selection = RowSelection(tuple(row or ()), longest, shortest, random, settings.seed)
    sheet = inspect_data(settings, compiled, tokenizer, selection)
    if html is not None:
        html.write_text(data_page(sheet), encoding="utf-8")
    if as_json:
        echo_json(json.dumps(sheet.as_json()))
    else:
        print_sheet(make_console(), sheet)
    if html is not None:
        echo(f"wrote {html}", err=True)
    if strict and sheet.warnings:
        echo(f"error: {len(sheet.warnings)} warnings, and --strict", err=True)
        raise typer.Exit(1)


def _compile(settings: RunConfig) -> tuple[CompiledData, Tokenizer]:
    """The data and its tokenizer, with a progress bar."""
    from lockstep.data import compile_data
    from lockstep.model.load import load_processor, load_run_tokenizer

    tokenizer = load_run_tokenizer(settings)
    images = load_processor(settings.model, tokenizer)
    with data_progress() as show:
        compiled = compile_data(
            settings.data,
            tokenizer,
            seed=settings.seed,
            timeout_s=settings.launch.timeout_s,
            on_progress=show,
            images=images,
        )
    return compiled, tokenizer


def print_sheet(console: Console, sheet: DataSheet) -> None:
    console.print("[bold]data[/]", highlight=False)
    console.print(_files_table(sheet.files))
    console.print("\n[bold]training rows[/]", highlight=False)
    print_facts(console, sheet.facts())
    console.print("\n[bold]length in tokens[/]", highlight=False)
    for bar in sheet.histogram:
        console.print(_bar(bar, max(b.rows for b in sheet.histogram)))
    for example in sheet.examples:
        _print_row(console, example)
    if sheet.warnings:
        console.print("\n[bold yellow]warnings[/]", highlight=False)
        for warning in sheet.warnings:
            console.print(Text.assemble(("  ! ", "yellow"), warning), highlight=False, soft_wrap=True)


def _files_table(files: Sequence[FileReport]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 2), pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("split")
    table.add_column("format", no_wrap=True)
    for name in ("rows", "tokens", "learned", "cut", "dropped", "skipped"):
        table.add_column(name, justify="right", no_wrap=True)
    for file in files:
        table.add_row(
            Text("  " + file.path),
            file.split,
            file.format,
            str(file.num_rows),
            format_count(file.num_tokens),
            f"{file.num_supervised / max(file.num_tokens, 1):.0%}",
            str(file.prompts_cut + file.answers_cut),
            str(file.dropped),
            str(file.skipped),
        )
    return table


def _bar(bar: HistogramBar, most: int) -> Text:
    width = round(40 * bar.rows / most) if bar.rows else 0
    return Text.assemble(
        (f"  {bar.first:>7,} - {bar.last:<7,} ", "dim"), ("█" * max(width, int(bar.rows > 0)), "cyan"), f" {bar.rows:,}"
    )


def _print_row(console: Console, row: ShownRow) -> None:
    counts = f"{row.num_tokens:,} tokens, {row.num_learned:,} learned"
    console.print(Text.assemble("\n", (row.why, "bold"), f"  {row.origin}  ", (counts, "dim")), soft_wrap=True)
    for number, image in enumerate(row.images, start=1):
        size = f"{image.width} x {image.height}, {image.num_tokens:,} tokens"
        console.print(Text.assemble((f"image {number}", "bold"), f"  {image.name}  ", (size, "dim")), soft_wrap=True)
    for name, tokens in zip(row.names, row.versions):
        if name:
            console.print(Text(f"[{name}]", style="bold"))
        console.print(_coloured(tokens) if console.is_terminal else Text(_bracketed(tokens)), soft_wrap=True)


def _coloured(tokens: Sequence[ShownToken]) -> Text:
    text = Text()
    for token in tokens:
        text.append(token.text, style=_style(token))
    return text


def _bracketed(tokens: Sequence[ShownToken]) -> str:
    """Brackets around what is learned, for outputs without colours."""
    text, learned = "", False
    for token in tokens:
        if token.learned != learned:
            text += "⟧" if learned else "⟦"
        text, learned = text + token.text, token.learned
    return text + ("⟧" if learned else "")


def _style(token: ShownToken) -> str:
    if token.learned:
        return "bold black on green" if token.special else "green"
    return "dim cyan" if token.special else "dim"
