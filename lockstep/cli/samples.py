"""What a run sampled: samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.options import Json, app


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="Which step. Default: the latest that was kept.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The answers with the highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The answers with the lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many answers.")] = 8,
    as_json: Json = False,
) -> None:
    """Show answers that a run with rewards sampled, and what they earned."""
    from lockstep.cli.display import make_console

    if best and worst:
        raise ValueError("give either --best or --worst, not both")
    rows = _read(run, step)
    if best or worst:
        known = [row for row in rows if row["reward"] is not None]
        rows = sorted(known, key=lambda row: row["reward"], reverse=best)
    if as_json:
        for row in rows[:limit]:
            typer.echo(json.dumps(row, ensure_ascii=False))
        return
    _show(make_console(), rows[:limit], len(rows))


def _read(run: Path, step: int | None) -> list[dict[str, Any]]:
    from lockstep.rundir import RunDir, read_jsonl

    RunDir(run).config()  # says so when this is not a run directory
    files = {int(path.stem.removeprefix("step-")): path for path in (run / "samples").glob("step-*.jsonl")}
    if not files:
        raise ValueError(f"{run} has no samples: only runs of kind grpo sample, and they keep algorithm.keep_samples")
    wanted = max(files) if step is None else step
    if wanted not in files:
        raise ValueError(f"{run} has no samples of step {wanted}: it has those of {min(files)} to {max(files)}")
    return list(read_jsonl(files[wanted]))


def _show(console: Any, rows: list[dict[str, Any]], total: int) -> None:
    from rich.text import Text

    for row in rows:
        reward = "tainted" if row["reward"] is None else f"{row['reward']:.3f}"
        parts = "  ".join(f"{name} {value:.3g}" for name, value in row["scores"].items())
        advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.2f}"
        head = f"step {row['step']}  {Path(row['origin']).name}  sample {row['sample']}  reward {reward}"
        notes = f"  ({parts}){advantage}" + ("  cut" if row["cut"] else "")
        console.print(Text.assemble((head, "bold"), (notes, "dim")), soft_wrap=True)
        expected = "" if row["reference"] is None else f"   [{row['reference']}]"
        console.print(Text.assemble(("  asked  ", "dim"), str(row["prompt"]), (expected, "dim")), soft_wrap=True)
        for turn in row["turns"]:
            console.print(Text.assemble(("  said   ", "dim"), turn), soft_wrap=True)
        if row["problem"]:
            console.print(Text.assemble(("  problem  ", "red"), row["problem"]), soft_wrap=True)
    console.print(Text(f"{len(rows)} of {total} answers", style="dim"))
