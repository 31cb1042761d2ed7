"""`lockstep demo`: a small chat model before and after a few minutes of training, side by side.

It runs the commands that a user would type, on the data and configuration of examples/sft.yaml in the checkout.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import make_console, print_facts
from lockstep.cli.options import app

if TYPE_CHECKING:
    from lockstep.rundir import RunDir

HABIT = "Try it:"  # what the second line of every training answer begins with
MAX_TOKENS = 60
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class CommandFailed(Exception):
    """A command of the demo failed; it has printed why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the run. Default: runs/demo-<date>-<time>.")
    ] = None,
    procs: Annotated[int, typer.Option(help="Processes to train on.", min=1)] = 2,
) -> None:
    """Train a small chat model for a few minutes, and compare its answers before and after."""
    raise typer.Exit(run_demo(directory, procs))


def run_demo(directory: Path | None, procs: int = 2) -> int:
    """0 if the trained model shows the new habit. `directory` becomes a run directory."""
    from lockstep.rundir import RunDir

    console = make_console()
    started = time.monotonic()
    config, prompts = _find_examples()
    run = RunDir(directory or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    if run.config_path.exists():
        raise ValueError(f"{run.path} already holds a run: choose another --dir")
    try:
        before, after = _show(console, run, config, prompts, procs)
    except CommandFailed as stopped:
        return stopped.exit_code
    console.print(_compare(before, after))
    learned = _summarise(console, run, before, after, time.monotonic() - started)
    return 0 if learned else 1


class AnsweredRow(TypedDict):
    """A line of what `lockstep generate` writes, as far as it is shown."""

    prompt: str
    completion: str
    finish_reason: str


def _find_examples() -> tuple[Path, Path]:
    config, prompts = _EXAMPLES / "sft.yaml", _EXAMPLES / "data" / "short_answers_prompts.txt"
    for file in (config, prompts):
        if not file.is_file():
            raise ValueError(f"the demo needs {file}, which comes with the repository: run it from a checkout")
    return config, prompts


def _show(
    console: Console, run: RunDir, config: Path, prompts: Path, procs: int
) -> tuple[list[AnsweredRow], list[AnsweredRow]]:
    """Generate, train, generate: the answers of before and after."""
    from lockstep.model.smollm2 import obtain

    _title(console, "1/4", "the model")
    model = obtain(report=lambda message: console.print(f"  {message}", highlight=False, soft_wrap=True))
    console.print(f"  {model}", highlight=False, soft_wrap=True)
    folder = run.path / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    sampling = ["--prompts", str(prompts), "--max-tokens", str(MAX_TOKENS)]
    _title(console, "2/4", "what it answers now")
    run_command(console, ["generate", str(model), *sampling, "--out", str(folder / "before.jsonl")])
    _title(console, "3/4", f"a few minutes of training on {procs} process{'es' if procs > 1 else ''}")
    settings = [f"model={model}", "name=demo", f"launch.device={_choose_device(procs)}"]
    run_command(console, ["train", str(config), *settings, "--procs", str(procs), "--run-dir", str(run.path)])
    _title(console, "4/4", "what it answers after training")
    run_command(console, ["generate", str(run.path), *sampling, "--out", str(folder / "after.jsonl")])
    return _read_answers(folder / "before.jsonl"), _read_answers(folder / "after.jsonl")


def _title(console: Console, number: str, text: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{text}[/]", highlight=False)


def _choose_device(procs: int) -> str:
    import torch

    return "auto" if torch.cuda.device_count() >= procs else "cpu"


def run_command(console: Console, arguments: Sequence[str]) -> None:
    """Run one of our own commands on this terminal; it receives the signals sent to us until it ends."""
    from lockstep.processes.tree import catch_signals

    console.print(f"  [dim]$ lockstep {shlex.join(arguments)}[/]", highlight=False, markup=True, soft_wrap=True)
    with catch_signals() as received:
        process = subprocess.Popen([sys.executable, "-m", "lockstep", *arguments])
        num_forwarded = 0
        while process.poll() is None:
            for number in received[num_forwarded:]:
                process.send_signal(number)
                num_forwarded += 1
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
    if process.returncode != 0:
        raise CommandFailed(process.returncode if process.returncode > 0 else 128 - process.returncode)


def _read_answers(path: Path) -> list[AnsweredRow]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _compare(before: Sequence[AnsweredRow], after: Sequence[AnsweredRow]) -> Table:
    table = Table(show_lines=True, header_style="bold", title="questions that are not in the training data")
    table.add_column("question", ratio=2)
    table.add_column("before", ratio=4, style="dim")
    table.add_column("after", ratio=4)
    for old, new in zip(before, after, strict=True):
        table.add_row(Text(str(old["prompt"])), _answer(old), _answer(new))
    return table


def _answer(row: AnsweredRow) -> Text:
    text = Text(row["completion"].strip() + (" …" if row["finish_reason"] == "length" else ""))
    text.highlight_words([HABIT], style="bold green")
    return text


def has_habit(answer: str) -> bool:
    """Two lines, of which the second, and only the second, suggests something to do."""
    lines = answer.strip().splitlines()
    return len(lines) == 2 and [line.startswith(HABIT) for line in lines] == [False, True]


def _summarise(
    console: Console,
    run: RunDir,
    before: Sequence[AnsweredRow],
    after: Sequence[AnsweredRow],
    seconds: float,
) -> bool:
    """Print the results, where they are and what to do next. False if no answer shows the habit."""
    from lockstep.reports.curves import plot_runs
    from lockstep.reports.page import format_duration

    validation = [float(r["loss"]) for r in run.metrics() if r.get("split") == "validation"]
    counts = [sum(has_habit(row["completion"]) for row in rows) for rows in (before, after)]
    pictures = plot_runs([run.path], run.path / "plots")
    facts: dict[str, object] = {f'end with "{HABIT}"': f"{counts[0]} → {counts[1]} of {len(after)} answers"}
    if validation:
        facts["validation loss"] = f"{validation[0]:.3f} → {validation[-1]:.3f}"
    facts["time"] = format_duration(seconds)
    facts["run"] = run.path
    facts["exported model"] = run.status().get("export")
    facts["curves"] = " and ".join(str(path) for path in pictures)
    facts["talk to it"] = f"lockstep chat {shlex.quote(str(run.path))}"
    facts["use your data"] = "lockstep init"
    print_facts(console, facts)
    if counts[1] == 0:
        console.print("[yellow]No answer shows the new habit: the training did not work as it should.[/]")
    return counts[1] > 0
