"""How good a model is: eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.options import Json, MaxTokens, Temperature, app


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="RUN|MODEL...", help="Run directories, model folders or Hub ids.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="The rows: a file, folder, glob or Hub id.")] = None,
    split: Annotated[str | None, typer.Option(help="Instead: the run's own validation or test rows.")] = None,
    metrics: Annotated[
        str, typer.Option(help="Of loss, perplexity, exact_match, numeric, rouge, bertscore; with commas.")
    ] = "loss",
    base: Annotated[bool, typer.Option("--base", help="Also the model that the run started from.")] = False,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Also an OpenAI-compatible server.")] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.", min=1)] = None,
    sample: Annotated[int | None, typer.Option(help="So many rows at random, by --seed.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="For --sample, and for a temperature above 0.")] = 0,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(help="Answers computed at once.", min=1)] = 8,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a row for the loss.", min=2)] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every row.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    encoder: Annotated[str | None, typer.Option(help="Of bertscore: a model folder or a Hub id.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: evals/<name>-<date>-<time>.")] = None,
    as_json: Json = False,
) -> None:
    """Measure models on held-out rows, side by side: loss, and scores of their answers."""
    from lockstep.scoreboard import evaluate_and_show

    given = {"data": data, "split": split, "base": base, "endpoint": endpoint, "endpoint_model": endpoint_model}
    options: dict[str, Any] = {}
    options |= {"limit": limit, "sample": sample, "seed": seed, "max_tokens": max_tokens, "temperature": temperature}
    options |= {"batch_size": batch, "max_length": max_length, "system": system, "raw": raw, "encoder": encoder}
    evaluate_and_show(sources or [], metrics.split(","), out, as_json=as_json, **given, **options)
