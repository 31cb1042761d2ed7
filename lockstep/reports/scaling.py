"""How run sizes compare: what each size's records come to, the cells of the tables, the picture and the page."""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from lockstep.reports.curves import COLOURS, STYLE
from lockstep.reports.page import escape, format_bytes, format_count, inline_svg, page
from lockstep.rundir import MetricRecord, write_atomically

COUNTED, LEAST = "traffic/", "traffic_least/"  # how metrics name bytes: these, then axis/kind


UNIT = (
    "Bytes are those that rank 0 sends in a step, assuming ring collectives: 2 (n - 1) / n of what is all-reduced, "
    "(n - 1) / n of what is gathered, scattered or sent all-to-all. They are counted where torch hands them to the "
    "network; the least is computed from the sizes of the parameters and of the batch."
)
COLUMNS = (
    "procs",
    "layout",
    "tokens/s",
    "efficiency",
    "planned",
    "step",
    "waiting",
    "sent",
    "least",
    "memory",
    "balance",
)
FLOW_COLUMNS = ("procs", "axis", "collective", "sent", "least", "above it")


@dataclass(frozen=True)
class Flow:
    """Bytes that rank 0 sends in a step on one axis by one kind of collective; the least there could be, if known."""

    axis: str
    kind: str
    sent_bytes: float
    least_bytes: float | None


@dataclass(frozen=True)
class Size:
    """One run, per step: means over its steps without the first, which is warm-up."""

    procs: int
    layout: str
    tokens_per_s: float
    step_time_s: float
    efficiency: float
    """Speed over that of the smallest size, divided by the ratio of their process counts."""
    wait_s: float | None
    """In collectives, mean over ranks; None where it is not measured (CUDA, or one rank)."""
    memory_gib: float
    balance: float | None
    """Tokens of the fullest rank, over the mean."""
    straggler: int | None
    flows: tuple[Flow, ...]
    planned_tokens_per_s: float | None = None
    """By the plan of this size; None where there is none."""
    planned_error: float = 0.0
    """Within which share of it the step's time is expected."""
    planned_efficiency: float | None = None

    @property
    def sent_bytes(self) -> float:
        return sum(flow.sent_bytes for flow in self.flows)


def read_size(
    procs: int,
    layout: str,
    metrics: Sequence[MetricRecord],
    smallest: Size | None,
    planned: tuple[float, float] | None = None,
) -> Size:
    """Means over a run's records; the first step is left out unless it is the only one. `planned`: tokens in a second,
    and the error of that."""
    records = [record for record in metrics if record.get("split") == "train"]
    records = records[1:] or records
    if not records:
        raise ValueError(f"the run with {procs} processes has no metrics: it made no step")
    tokens_per_s = sum(r["tokens"] for r in records) / sum(r["step_time_s"] for r in records)
    base = (tokens_per_s, procs) if smallest is None else (smallest.tokens_per_s, smallest.procs)
    return Size(
        procs,
        layout,
        tokens_per_s,
        statistics.fmean(r["step_time_s"] for r in records),
        tokens_per_s / base[0] * base[1] / procs,
        _mean(records, "wait_s"),
        max(r.get("memory_gib_max", r["memory_gib"]) for r in records),
        _mean(records, "token_balance"),
        find_straggler(records),
        read_flows(records),
        *_planned(procs, planned, smallest),
    )


def _planned(
    procs: int, planned: tuple[float, float] | None, smallest: Size | None
) -> tuple[float | None, float, float | None]:
    if planned is None:
        return None, 0.0, None
    speed, error = planned
    if smallest is None:
        return speed, error, 1.0
    base = smallest.planned_tokens_per_s
    return speed, error, None if base is None else speed / base * smallest.procs / procs


def read_flows(records: Sequence[MetricRecord]) -> tuple[Flow, ...]:
    names = sorted({key.removeprefix(COUNTED) for record in records for key in record if key.startswith(COUNTED)})
    flows = []
    for name in names:
        axis, _, kind = name.partition("/")
        sent = sum(record.get(COUNTED + name, 0.0) for record in records) / len(records)
        flows.append(Flow(axis, kind, sent, _mean(records, LEAST + name)))
    return tuple(flows)


def find_straggler(records: Sequence[MetricRecord]) -> int | None:
    """The rank that was the slow one in more than half of the steps: one slow step is a hiccup."""
    named = Counter(int(record["straggler"]) for record in records if "straggler" in record)
    if not named:
        return None
    rank, times = named.most_common(1)[0]
    return rank if 2 * times > len(records) else None


def _mean(records: Sequence[MetricRecord], key: str) -> float | None:
    values = [float(record[key]) for record in records if key in record]
    return statistics.fmean(values) if values else None


# --- tables ---------------------------------------------------------------------------------------------------------


def size_row(size: Size) -> list[str]:
    least = sum(flow.least_bytes or 0.0 for flow in size.flows)
    return [
        str(size.procs),
        size.layout,
        format_count(size.tokens_per_s),
        f"{size.efficiency:.0%}",
        "-" if size.planned_efficiency is None else f"{size.planned_efficiency:.0%}",
        f"{size.step_time_s:.3g} s",
        "-" if size.wait_s is None else f"{size.wait_s / size.step_time_s:.0%}",
        format_bytes(size.sent_bytes) if size.flows else "-",
        format_bytes(least) if least else "-",
        f"{size.memory_gib:.2f} GiB",
        "-" if size.balance is None else f"{size.balance:.3f}",
    ]


def flow_row(flow: Flow) -> list[str]:
    ratio = f"{flow.sent_bytes / flow.least_bytes - 1:+.2%}" if flow.least_bytes else "-"
    least = format_bytes(flow.least_bytes) if flow.least_bytes else "-"
    return [flow.axis, flow.kind.replace("_", "-"), format_bytes(flow.sent_bytes), least, ratio]


class TextTable(NamedTuple):
    """Finished cells; the first `num_left` columns are aligned to the left, the others to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int


def size_table(sizes: Sequence[Size]) -> TextTable:
    return TextTable(COLUMNS, [size_row(size) for size in sizes], 2)


def flow_table(sizes: Sequence[Size]) -> TextTable:
    """Without rows where nothing was sent."""
    return TextTable(FLOW_COLUMNS, [[str(size.procs), *flow_row(flow)] for size in sizes for flow in size.flows], 3)


def straggler_warnings(sizes: Sequence[Size]) -> list[str]:
    return [
        f"with {size.procs} processes, rank {size.straggler} computes clearly longer than the others in most steps: "
        "look at what else runs on its machine or device"
        for size in sizes
        if size.straggler is not None
    ]


# --- picture --------------------------------------------------------------------------------------------------------


def draw(sizes: Sequence[Size], picture: Path) -> list[str]:
    """Write all panels as one PNG; returns each as SVG, so that a page can put them where there is room."""
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(15, 3.4), layout="constrained")
        try:
            for panel, axis in zip(_PANELS, axes, strict=True):
                panel(axis, sizes)
            figure.savefig(picture, dpi=150)
        finally:
            pyplot.close(figure)
        return [_draw_alone(panel, sizes) for panel in _PANELS]


def _draw_alone(panel: Callable[[Axes, Sequence[Size]], None], sizes: Sequence[Size]) -> str:
    figure, axis = pyplot.subplots(figsize=(4, 3.2), layout="constrained")
    svg = io.StringIO()
    try:
        panel(axis, sizes)
        figure.savefig(svg, format="svg")
    finally:
        pyplot.close(figure)
    return inline_svg(svg.getvalue())


def _draw_speed(axis: Axes, sizes: Sequence[Size]) -> None:
    procs, speeds = [size.procs for size in sizes], [size.tokens_per_s for size in sizes]
    axis.plot(procs, [speeds[0] * p / procs[0] for p in procs], color="#999999", linestyle="--", label="in proportion")
    axis.plot(procs, speeds, color=COLOURS[0], marker="o", label="measured")
    planned = [(size.procs, size.planned_tokens_per_s) for size in sizes if size.planned_tokens_per_s is not None]
    if planned:
        error = max(size.planned_error for size in sizes)
        label = f"planned ± {error:.0%}"
        axis.plot(
            *zip(*planned, strict=True), color="#444444", marker="s", markerfacecolor="none", linestyle=":", label=label
        )
    axis.set_title("Tokens per second")
    axis.set_xticks(procs)
    axis.set_xlabel("processes")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.legend(frameon=False)
    _rule_behind(axis)


def _draw_efficiency(axis: Axes, sizes: Sequence[Size]) -> None:
    """Measured, and in outline beside it what the plan says."""
    measured = [100 * size.efficiency for size in sizes]
    planned = [None if size.planned_efficiency is None else 100 * size.planned_efficiency for size in sizes]
    if all(height is None for height in planned):
        _draw_bars(axis, sizes, "Efficiency (%)", measured)
        return
    places = range(len(sizes))
    bars = axis.bar([i - 0.2 for i in places], measured, 0.36, color=COLOURS[0], label="measured")
    axis.bar_label(bars, fmt="%.3g", padding=2)
    known = {i + 0.2: height for i, height in enumerate(planned) if height is not None}
    outlines = axis.bar(list(known), list(known.values()), 0.36, fill=False, edgecolor="#444444", label="planned")
    axis.bar_label(outlines, fmt="%.3g", padding=2)
    axis.set_xticks(places, [str(size.procs) for size in sizes])
    axis.set_title("Efficiency (%)")
    axis.set_xlabel("processes")
    axis.set_ylim(top=1.32 * max(*measured, *known.values()))  # room for numbers and legend
    axis.legend(frameon=False, loc="upper right", ncols=2)
    _rule_behind(axis)


def _draw_memory(axis: Axes, sizes: Sequence[Size]) -> None:
    _draw_bars(axis, sizes, "Peak memory of a rank (GiB)", [size.memory_gib for size in sizes])


def _draw_bars(axis: Axes, sizes: Sequence[Size], title: str, heights: Sequence[float]) -> None:
    bars = axis.bar([str(size.procs) for size in sizes], heights, color=COLOURS[0], width=0.6)
    axis.bar_label(bars, fmt="%.3g", padding=2)
    axis.set_title(title)
    axis.set_xlabel("processes")
    axis.set_ylim(top=1.12 * max(heights))  # room for the numbers
    _rule_behind(axis)


def _draw_traffic(axis: Axes, sizes: Sequence[Size]) -> None:
    """Beside each other: what was sent, in a colour for each axis and kind, and the least, in outline."""
    names = sorted({(flow.axis, flow.kind) for size in sizes for flow in size.flows if flow.least_bytes})
    top = max(size.sent_bytes for size in sizes)
    unit, unit_bytes = next((u for u in (("GiB", 2**30), ("MiB", 2**20)) if top >= u[1]), ("KiB", 2**10))
    for i, size in enumerate(sizes):
        sent = least = 0.0
        for flow in size.flows:
            place = (flow.axis, flow.kind)
            colour = COLOURS[names.index(place) % len(COLOURS)] if place in names else "#bbbbbb"
            axis.bar(i - 0.2, flow.sent_bytes / unit_bytes, 0.36, bottom=sent / unit_bytes, color=colour)
            sent, least = sent + flow.sent_bytes, least + (flow.least_bytes or 0.0)
        axis.bar(i + 0.2, least / unit_bytes, 0.36, fill=False, edgecolor="#666666")
    for i, (name, kind) in enumerate(names):
        axis.bar(0, 0, color=COLOURS[i % len(COLOURS)], label=f"{name} {kind.replace('_', '-')}")
    axis.bar(0, 0, fill=False, edgecolor="#666666", label="least")
    axis.set_xticks(range(len(sizes)), [str(size.procs) for size in sizes])
    axis.set_title(f"Sent by rank 0 in a step ({unit})")
    axis.set_xlabel("processes")
    axis.set_ylim(0, max(top / unit_bytes, 1e-3) * (1.1 + 0.1 * (len(names) + 1)))  # the legend lies above the bars
    axis.legend(frameon=False, loc="upper left")
    _rule_behind(axis)


def _rule_behind(axis: Axes) -> None:
    axis.set_axisbelow(True)
    axis.grid(visible=False, axis="x")


_PANELS = (_draw_speed, _draw_efficiency, _draw_traffic, _draw_memory)


# --- page -----------------------------------------------------------------------------------------------------------


_STYLE = """
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .8rem; margin: 0 0 1.6rem }
.panels svg { background: #fff; border-radius: 8px; padding: .5rem; width: 100% }
th, td { white-space: nowrap }
"""


def write_report(sizes: Sequence[Size], title: str, out: Path) -> list[Path]:
    """scaling.png and scaling.html; returns their paths."""
    picture, document = out / "scaling.png", out / "scaling.html"
    try:
        svgs = draw(sizes, picture)
        write_atomically(document, report_page(title, sizes, svgs))
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror or error}") from error
    return [picture, document]


def report_page(title: str, sizes: Sequence[Size], svgs: Sequence[str]) -> str:
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in straggler_warnings(sizes))
    flows = flow_table(sizes)
    parts = [
        f'<ul class="warnings">{warnings}</ul>' if warnings else "",
        f'<div class="panels">{"".join(svgs)}</div>',
        _html_table(size_table(sizes)),
        f"<h2>Traffic</h2>{_html_table(flows)}" if flows.rows else "",
        f'<p class="quiet">{escape(UNIT)}</p>',
    ]
    return page(title, "\n".join(parts), _STYLE)


def _html_table(table: TextTable) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ("" if i < table.num_left else ' class="number"' for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    head = f"<thead><tr>{cells('th', table.columns)}</tr></thead>"
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table>{head}\n<tbody>{body}</tbody></table></div>'
