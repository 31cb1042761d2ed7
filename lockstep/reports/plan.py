"""A plan for people: rows of a table for the terminal, and a page with a picture. It gets `Plan.as_json()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.reports.page import escape, format_bytes, format_count, format_duration, page

_COLOURS = (
    "#2a6fb0",
    "#3f9c6b",
    "#c98a1b",
    "#b5503f",
    "#7a5aa6",
    "#4b8fa8",
    "#8a8f3c",
    "#a04f7f",
    "#6c757f",
    "#b7bcc2",
)
_STYLE = """
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; background: var(--shade); max-width: 900px }
.bar span { display: block; min-width: 1px }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em }
.verdict { padding: .6rem 1rem; border-radius: 8px; margin: 0 0 1rem }
.verdict.yes { background: var(--good-shade); color: var(--good) }
.verdict.close { background: var(--warn-shade); color: var(--warn) }
.verdict.no { background: var(--bad-shade); color: var(--bad) }
"""
Row = tuple[str, str]


def facts(plan: Mapping[str, Any]) -> list[Row]:
    """What it is a plan of, and the figures that count, each with its error."""
    time = f"± {plan['time_error']:.0%}"
    rows = [
        ("model", f"{plan['model']}: {format_count(plan['parameters'])} parameters, "
                  f"{format_count(plan['trained'])} trained"),
        ("hardware", f"{plan['cluster']}, {plan['capacity_gib']:.4g} GiB usable on each"),
        ("layout", plan["layout"]),
        ("step", f"{format_count(plan['tokens_per_step'])} tokens, {_micro_batches(plan['micro_batches'])} of at most "
                 f"{plan['micro_batch_tokens']:,} on each rank"),
        ("time of a step", f"{_seconds(plan['step_s'])} {time}: {format_count(plan['tokens_per_s'])} tokens/s"),
    ]  # fmt: skip
    if plan["run_s"] is not None:
        rows.append(("time of the run", f"{format_duration(plan['run_s'])} {time}: {plan['steps']:,} steps, without "
                                        "its start, evaluations and export"))  # fmt: skip
    if plan["cost"] is not None:
        rows.append(("cost of the run", f"{plan['cost']:,.2f} {time}"))
    if plan["host_gib"]:
        parts = ", ".join(f"{name} {size:.3g}" for name, size in plan["host_gib"].items())
        total = sum(plan["host_gib"].values())
        rows.append(("host memory", f"{total:.4g} GiB of each machine ± {plan['memory_error']:.0%}: {parts}"))
    rows.append(("how sure", f"memory ± {plan['memory_error']:.0%}, time {time}: {plan['errors_from']}"))
    if plan["assumed"]:
        rows.append(("assumed", plan["assumed"]))
    return rows


def memory_rows(rank: Mapping[str, Any]) -> list[Row]:
    parts = sorted(rank["parts_gib"].items(), key=lambda part: -part[1])
    return [(name, f"{size:.3g} GiB") for name, size in parts if size >= 0.005]


def time_rows(plan: Mapping[str, Any]) -> list[Row]:
    total = plan["step_s"]
    parts = sorted(plan["step_parts_s"].items(), key=lambda part: -part[1])
    rows = [(name, f"{_seconds(seconds)} ({seconds / total:.0%})") for name, seconds in parts]
    hidden = [(f"{axis}, hidden", f"{_seconds(seconds)}") for axis, seconds in plan["hidden_s"].items()]
    return rows + hidden


def traffic_rows(plan: Mapping[str, Any]) -> list[Row]:
    return [(axis, f"{format_bytes(size)} from each rank") for axis, size in plan["traffic_bytes"].items()]


def write_page(plan: Mapping[str, Any], verdict: str, advice: Sequence[Row], title: str, path: Path) -> Path:
    body = [f'<p class="verdict {escape(plan["fits"])}">{escape(verdict)}</p>', _table(facts(plan))]
    for rank in plan["memory"]:
        body.append(f"<h2>Memory of {escape(rank['rank'])}: {rank['reserved_gib']:.4g} GiB ± "
                    f"{plan['memory_error']:.0%}, at its worst in {escape(rank['moment'])}</h2>")  # fmt: skip
        body.append(_bar(rank["parts_gib"], plan["capacity_gib"], "GiB"))
    body.append(f"<h2>Time of a step: {_seconds(plan['step_s'])} ± {plan['time_error']:.0%}</h2>")
    body.append(_bar(plan["step_parts_s"], plan["step_s"], "s"))
    if plan["traffic_bytes"]:
        body += ["<h2>Traffic of a step</h2>", _table(traffic_rows(plan))]
    if advice:
        body += ["<h2>What would change it</h2>", _table(advice)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, "\n".join(body), _STYLE), encoding="utf-8")
    return path


def _table(rows: Sequence[Row]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<div class="scroll"><table class="facts">{lines}</table></div>'


def _bar(parts: Mapping[str, float], whole: float, unit: str) -> str:
    """A stacked bar against the whole, and its key; what goes beyond the whole fills the bar."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    scale = max(whole, sum(parts.values()))
    return f'<div class="bar" role="img">{"".join(_spans(largest, scale))}</div>{_key(largest, unit)}'


def _spans(parts: Sequence[tuple[str, float]], scale: float) -> Iterator[str]:
    for number, (name, size) in enumerate(parts):
        colour = _COLOURS[number % len(_COLOURS)]
        yield f'<span style="width:{100 * size / scale:.2f}%;background:{colour}" title="{escape(name)}"></span>'


def _key(parts: Sequence[tuple[str, float]], unit: str) -> str:
    lines = [
        f'<tr><th><span class="key" style="background:{_COLOURS[number % len(_COLOURS)]}"></span>{escape(name)}</th>'
        f'<td class="number">{size:.3g} {unit}</td></tr>'
        for number, (name, size) in enumerate(parts)
    ]
    return f'<div class="scroll"><table class="facts">{"".join(lines)}</table></div>'


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else format_duration(seconds)
