"""What `lockstep eval` shows: progress while it works, then the table, the warnings and where the files are.

Measures nothing itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import make_console, quieten_libraries, track_progress


def evaluate_and_show(
    models: Sequence[str], metrics: Sequence[str], out: Path | None, *, as_json: bool, **settings: Any
) -> None:
    console = make_console(stderr=as_json)
    with make_console(stderr=True).status("loading"):
        from lockstep.evaluation import evaluate

        quieten_libraries()
    folder = out or _new_folder(models, settings.get("endpoint"))
    names = [name.strip() for name in metrics if name.strip()]
    key = os.environ.get("OPENAI_API_KEY") or None
    results = evaluate(models, metrics=names, out=folder, api_key=key, track=track_progress, **settings)
    _show(console, results, folder)
    if as_json:
        summary = {key: value for key, value in results.items() if key != "rows"}
        print(json.dumps({**summary, "out": str(folder)}, ensure_ascii=False))


def _new_folder(models: Sequence[str], endpoint: str | None) -> Path:
    """evals/<first model>-<date>-<time>."""
    name = Path(models[-1]).expanduser().resolve().name if models else "endpoint"
    return Path("evals") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _show(console: Console, results: Mapping[str, Any], folder: Path) -> None:
    for warning in results["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), highlight=False, soft_wrap=True)
    console.print(score_table(results))
    console.print(f"{results['num_rows']:,} rows of {results['data']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"answers to read in {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def score_table(results: Mapping[str, Any]) -> Table:
    from lockstep.evaluation.table import table_of

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for model in results["models"]:
        table.add_column(Text(model["name"]), justify="right", overflow="fold")
    for line in table_of(results):
        cells = [
            Text.assemble(
                (cell.text, "bold green" if cell.best else ""), (f" {cell.error}" if cell.error else "", "dim")
            )
            for cell in line.cells
        ]
        table.add_row(line.metric.replace("_", " "), *cells)
    return table
