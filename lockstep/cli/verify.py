"""`lockstep verify`: does every layout make the same step? Progress, the table of layouts, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.display import LITERAL, borderless_table, make_console, quieten_libraries
from lockstep.cli.options import Config, Json, Overrides, app, echo_json, load_settings, settle_layout

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.verification.checking import Report, Verdict

Layouts = Annotated[
    str | None, typer.Option(metavar="LIST", help="Such as 'shard=2,tensor=2; pipeline=2'. Default: all that fit here.")
]
# The errors by their column heads.
_ERRORS = {
    "log-probs": "logprobs",
    "reference": "reference",
    "rewards": "metrics",
    "gradients": "gradients",
    "after a step": "weights",
}
_ONLY_WITH_REWARDS = ("reference", "rewards")


@app.command()
def verify(config: Config = None, overrides: Overrides = None, layouts: Layouts = None, as_json: Json = False) -> None:
    """Check on a small copy of the model that every parallel layout makes the same step as one rank."""
    settings = load_settings(config, overrides)
    raise typer.Exit(verify_and_show(settings, layouts, as_json=as_json))


def verify_and_show(config: RunConfig, layouts: str | None, *, as_json: bool) -> int:
    """The exit code: 0 if every layout passed, otherwise 1."""
    config = settle_layout(config, config.launch.procs)
    errors = make_console(stderr=True)
    with errors.status("loading") as status:
        from lockstep.verification import verify

        quieten_libraries()

        def show(name: str, number: int, total: int) -> None:
            text = f"{number}/{total} {name}" if total else name
            status.update(text)
            if not errors.is_terminal:
                errors.print(text, highlight=False)

        report = verify(config, layouts=layouts, on_progress=show)
    _show(make_console(stderr=as_json), report)
    if as_json:
        echo_json(json.dumps(report.as_json()))
    return 0 if report.passed else 1


def _show(console: Console, report: Report) -> None:
    said: dict[str, str] = {}  # each warning once, with the first layout that has it
    for verdict in report.verdicts:
        for warning in verdict.warnings:
            said.setdefault(warning, verdict.layout.name)
    for warning, layout in said.items():
        console.print(Text.assemble(("warning: ", "bold yellow"), f"{layout}: {warning}"), **LITERAL)
    console.print(verdict_table(report))
    for verdict in report.verdicts:
        if verdict.problem:
            console.print(Text.assemble(("FAIL ", "bold red"), f"{verdict.layout.name}: {verdict.problem}"), **LITERAL)
    for note in report.notes:
        console.print(Text(f"· {note}", "dim"), **LITERAL)
    for limit in report.not_covered:
        console.print(Text(f"· not covered: {limit}", "dim"), **LITERAL)
    failed = sum(not verdict.passed for verdict in report.verdicts)
    if failed:
        console.print(f"{failed} of {len(report.verdicts)} layouts do not make the step of the plain loop", **LITERAL)
    else:
        console.print(f"{len(report.verdicts)} layouts, one step: all within {report.tolerance:g}", **LITERAL)


def verdict_table(report: Report) -> Table:
    """One row per layout: loss and norm of the first batch, the largest relative errors, PASS or FAIL."""
    table = borderless_table()
    table.add_column(Text(report.model), no_wrap=True)
    compared = [name for name in _ERRORS if report.metrics or name not in _ONLY_WITH_REWARDS]
    for name in ("loss", "grad norm", *compared, ""):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("the plain loop", f"{report.loss:.6f}", f"{report.grad_norm:.6f}")
    for verdict in report.verdicts:
        state = ("PASS", "bold green") if verdict.passed else ("FAIL", "bold red")
        table.add_row(verdict.layout.name, *_cells(verdict, compared), Text(*state))
    return table


def _cells(verdict: Verdict, compared: Sequence[str]) -> list[str]:
    errors = verdict.errors
    if errors is None or verdict.loss is None or verdict.grad_norm is None:
        return ["-"] * (2 + len(compared))
    sizes = (getattr(errors, _ERRORS[name]) for name in compared)
    return [f"{verdict.loss:.6f}", f"{verdict.grad_norm:.6f}", *(f"{size:.1e}" for size in sizes)]
