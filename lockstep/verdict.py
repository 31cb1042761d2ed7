"""What `lockstep verify` shows: progress while it works, then the table, what was changed, and the verdict.

Compares nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lockstep.cli.display import make_console, quieten_libraries
from lockstep.config import RunConfig

if TYPE_CHECKING:
    from lockstep.verification.checking import Report, Verdict

# Errors by their column; those of preferences are shown where there are any.
_ERRORS = {
    "log-probs": "logprobs",
    "reference": "reference",
    "rewards": "metrics",
    "gradients": "gradients",
    "after a step": "weights",
}
_OF_PREFERENCES = ("reference", "rewards")


def verify_and_show(config: RunConfig, layouts: str | None, *, as_json: bool) -> int:
    """The exit code: 0 if every layout passed, otherwise 1."""
    errors = make_console(stderr=True)
    with errors.status("loading") as status:
        from lockstep.verification import verify

        quieten_libraries()

        def show(name: str, number: int, total: int) -> None:
            words = f"{number}/{total} {name}" if total else name
            status.update(words)
            if not errors.is_terminal:
                errors.print(words, highlight=False)

        report = verify(config, layouts=layouts, on_progress=show)
    _show(make_console(stderr=as_json), report)
    if as_json:
        print(json.dumps(report.as_json()))
    return 0 if report.passed else 1


def _show(console: Any, report: Report) -> None:
    words: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    for verdict in report.verdicts:
        for warning in verdict.warnings:
            console.print(Text.assemble(("warning: ", "bold yellow"), f"{verdict.layout.name}: {warning}"), **words)
    console.print(verdict_table(report))
    for verdict in report.verdicts:
        if verdict.problem:
            console.print(Text.assemble(("FAIL ", "bold red"), f"{verdict.layout.name}: {verdict.problem}"), **words)
    for note in report.notes:
        console.print(Text(f"· {note}", "dim"), **words)
    failed = sum(not verdict.passed for verdict in report.verdicts)
    if failed:
        console.print(f"{failed} of {len(report.verdicts)} layouts do not make the step of the plain loop", **words)
    else:
        console.print(f"{len(report.verdicts)} layouts, one step: all within {report.tolerance:g}", **words)


def verdict_table(report: Report) -> Table:
    """One row per layout: loss and norm of the first batch, the largest relative errors, PASS or FAIL."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(Text(report.model), no_wrap=True)
    compared = [name for name in _ERRORS if report.metrics or name not in _OF_PREFERENCES]
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
