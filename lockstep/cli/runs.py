"""Commands on existing runs: runs, stop, samples, plot, export."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.cli.display import make_console, print_facts, quieten_libraries, runs_table
from lockstep.cli.options import AllowPickle, Json, app, convert_checkpoints, echo, echo_json

if TYPE_CHECKING:
    from lockstep.rundir import RunDir


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from lockstep.rundir import find_runs

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    rows = [_run_row(run) for run in find_runs(folder)]
    if as_json:
        echo_json(json.dumps(rows))
    elif rows:
        console = make_console()
        console.print(runs_table(rows))
        for row in rows:
            for said in filter(None, (row["waits"], _beside_plan(row))):
                console.print(Text(f"{row['name']}: {said}", style="dim"), soft_wrap=True)
    else:
        echo(f"no runs in {folder}")


def _run_row(run: RunDir) -> dict[str, Any]:
    from lockstep.launch.local import read_handle
    from lockstep.launch.slurm import describe_queue
    from lockstep.launch.start import is_running, lacks_supervisor
    from lockstep.rundir import FINISHED_STATES

    status = run.status()
    state = str(status.get("state"))
    handle = read_handle(run.path)
    # Of those of other clusters the directory is all that is known here.
    can_tell = handle is not None and (handle.pid > 0 or handle.launcher == "slurm")
    if state not in FINISHED_STATES and can_tell and not is_running(run.path):
        state = "lost"  # its processes ended without a last status
    elif state not in FINISHED_STATES and lacks_supervisor(run):
        state = "unsupervised"  # lockstep attach takes its launcher's place
    # While a job waits nobody may write down why: its queue is asked.
    waits = describe_queue(handle) if handle is not None and handle.launcher == "slurm" and state == "created" else ""
    keys = ("step", "total_steps", "loss", "validation_loss", "tokens_per_s")
    since = status.get("started_at") or run.config_path.stat().st_mtime
    row: dict[str, object] = {
        "name": run.path.resolve().name,
        "run_dir": str(run.path),
        "state": state,
        "waits": waits or None,
    }
    row["planned"], row["measured"] = status.get("planned"), _measured(run, status) if status.get("planned") else None
    return row | {key: status.get(key) for key in keys} | {"age_s": max(time.time() - float(since), 0.0)}


def _measured(run: RunDir, status: Mapping[str, Any]) -> dict[str, float | None]:
    """What a plan says before: peak memory, and the median step without the first ones, which compile."""
    times = [r["step_time_s"] for r in run.metrics() if r.get("split") == "train" and r.get("step_time_s")][2:]
    return {"memory_gib": status.get("memory_gib"), "step_s": statistics.median(times) if times else None}


def _beside_plan(row: Mapping[str, Any]) -> str:
    from lockstep.plan.beside import beside_plan

    return beside_plan(row["planned"], row["measured"] or {})


@app.command()
def stop(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """End a run of a cluster, and wait until none of its processes is left."""
    from lockstep.launch.start import stop as stop_run

    stop_run(run)
    echo(f"stopped {run}")


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="The step. Default: the latest one kept.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The answers with the highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The answers with the lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many answers.")] = 8,
    as_json: Json = False,
) -> None:
    """Show answers that a grpo run sampled, with their rewards."""
    if best and worst:
        raise ValueError("give either --best or --worst, not both")
    rows = _read_samples(run, step)
    if best or worst:
        known = [row for row in rows if row["reward"] is not None]
        rows = sorted(known, key=lambda row: row["reward"], reverse=best)
    if as_json:
        for row in rows[:limit]:
            echo_json(json.dumps(row, ensure_ascii=False))
        return
    _print_samples(make_console(), rows[:limit], len(rows))


def _read_samples(run: Path, step: int | None) -> list[dict[str, Any]]:
    from lockstep.rundir import RunDir, read_jsonl

    RunDir(run).config()  # raises where this is not a run directory
    files = {int(path.stem.removeprefix("step-")): path for path in (run / "samples").glob("step-*.jsonl")}
    if not files:
        raise ValueError(f"{run} has no samples: only runs of kind grpo sample, and they keep algorithm.keep_samples")
    wanted = max(files) if step is None else step
    if wanted not in files:
        raise ValueError(f"{run} has no samples of step {wanted}: it has those of {min(files)} to {max(files)}")
    return list(read_jsonl(files[wanted]))


def _print_samples(console: Console, rows: list[dict[str, Any]], total: int) -> None:
    for row in rows:
        reward = "failed" if row["reward"] is None else f"{row['reward']:.3f}"
        parts = "  ".join(f"{name} {value:.3g}" for name, value in row["scores"].items())
        advantage = "" if row["advantage"] is None else f"  advantage {row['advantage']:+.2f}"
        head = f"step {row['step']}  {Path(row['origin']).name}  sample {row['sample']}  reward {reward}"
        notes = f"  ({parts}){advantage}" + ("  truncated" if row.get("truncated", row.get("cut")) else "")
        console.print(Text.assemble((head, "bold"), (notes, "dim")), soft_wrap=True)
        expected = "" if row["reference"] is None else f"   [{row['reference']}]"
        console.print(Text.assemble(("  prompt  ", "dim"), str(row["prompt"]), (expected, "dim")), soft_wrap=True)
        for turn in row["turns"]:
            console.print(Text.assemble(("  answer  ", "dim"), turn), soft_wrap=True)
        if row["problem"]:
            console.print(Text.assemble(("  problem  ", "red"), row["problem"]), soft_wrap=True)
    console.print(Text(f"{len(rows)} of {total} answers", style="dim"))


@app.command()
def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One or several run directories.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the PNG and HTML files.")] = Path("plots"),
) -> None:
    """Draw the curves of one or several runs into a PNG and a self-contained HTML page."""
    from lockstep.plan.beside import beside_plan
    from lockstep.reports.curves import plot_runs
    from lockstep.rundir import RunDir

    runs = [RunDir(path) for path in run_dirs]
    beside = [beside_plan(run.status().get("planned"), _measured(run, run.status())) for run in runs]
    for path in plot_runs(run_dirs, out, beside):
        echo(path)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    to: Annotated[
        Path | None, typer.Option("--to", "--out", help="Where to write. Default: inside the run directory.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, not merged into the model.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the latest.")] = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Write a run's model in the Hugging Face layout."""
    from lockstep.model.export import export_run

    quieten_libraries()
    if allow_pickle:
        convert_checkpoints(run)
    facts = export_run(run, to, adapter=adapter, step=step)
    if as_json:
        echo_json(json.dumps(facts, default=str))
    else:
        print_facts(make_console(), facts)
