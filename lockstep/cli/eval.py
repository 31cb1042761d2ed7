"""`lockstep eval`: models on held-out rows, side by side. Progress, the table of scores, the warnings, the files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import LITERAL, borderless_table, make_console, quieten_libraries, track_progress
from lockstep.cli.options import Json, MaxTokens, Temperature, app, echo_json


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="RUN|MODEL", help="Run directories, model folders or Hub ids.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="The rows: a file, folder, glob or Hub id.")] = None,
    split: Annotated[str | None, typer.Option(help="Use the run's own validation or test rows instead.")] = None,
    metrics: Annotated[
        str, typer.Option(help="Comma-separated: loss, perplexity, exact_match, numeric, rouge, bertscore.")
    ] = "loss",
    base: Annotated[bool, typer.Option("--base", help="Also evaluate the model that the run started from.")] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Also evaluate an OpenAI-compatible server.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows.", min=1)] = None,
    sample: Annotated[int | None, typer.Option(help="N random rows, drawn with --seed.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="For --sample, and for a temperature above 0.")] = 0,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(help="Answers generated at a time.", min=1)] = 8,
    max_length: Annotated[int | None, typer.Option(help="Longest row for the loss, in tokens.", min=2)] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every row.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    encoder: Annotated[str | None, typer.Option(help="The encoder of bertscore: a model folder or Hub id.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write. Default: evals/<name>-<date>-<time>.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure models on held-out rows, side by side: their loss, and the scores of their answers."""
    options: dict[str, object] = {
        "data": data,
        "split": split,
        "base": base,
        "endpoint": endpoint,
        "endpoint_model": endpoint_model,
        "limit": limit,
        "sample": sample,
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "batch_size": batch,
        "max_length": max_length,
        "system": system,
        "raw": raw,
        "encoder": encoder,
    }
    models = sources or []
    folder = out or _new_folder(models)
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    _evaluate_and_show(models, names, folder, options, as_json=as_json)


def _evaluate_and_show(
    models: Sequence[str], metrics: Sequence[str], folder: Path, options: Mapping[str, Any], *, as_json: bool
) -> None:
    with make_console(stderr=True).status("loading"):
        from lockstep.evaluation import evaluate

        quieten_libraries()
    key = os.environ.get("OPENAI_API_KEY") or None
    results = evaluate(models, metrics=metrics, out=folder, api_key=key, track=track_progress, **options)
    _show(make_console(stderr=as_json), results, folder)
    if as_json:
        summary = {key: value for key, value in results.items() if key != "rows"}
        echo_json(json.dumps({**summary, "out": str(folder)}, ensure_ascii=False))


def _new_folder(models: Sequence[str]) -> Path:
    """evals/<last model>-<date>-<time>."""
    name = Path(models[-1]).expanduser().resolve().name if models else "endpoint"
    return Path("evals") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _show(console: Console, results: Mapping[str, Any], folder: Path) -> None:
    for warning in results["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), **LITERAL)
    console.print(_score_table(results))
    console.print(f"{results['num_rows']:,} rows of {results['data']}", **LITERAL)
    console.print(f"answers to read in {folder / 'report.html'}", **LITERAL)


def _score_table(results: Mapping[str, Any]) -> Table:
    from lockstep.reports.evaluation import score_rows

    table = borderless_table()
    table.add_column("metric", no_wrap=True)
    for model in results["models"]:
        table.add_column(Text(model["name"]), justify="right", overflow="fold")
    for row in score_rows(results):
        cells = [
            Text.assemble(
                (cell.text, "bold green" if cell.best else ""), (f" {cell.error}" if cell.error else "", "dim")
            )
            for cell in row.cells
        ]
        table.add_row(row.metric.replace("_", " "), *cells)
    return table
