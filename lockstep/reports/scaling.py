"""How sizes compare, for a person: the table on a terminal, the picture, one HTML page that needs nothing else.

Measures nothing itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep.cli.display import format_count
from lockstep.reports.curves import COLOURS, STYLE
from lockstep.reports.page import escape, page
from lockstep.scaling import Flow, Size

UNIT = (
    "Bytes are those that rank 0 sends in a step when the ranks of a group stand in a ring: 2 (n - 1) / n of what is "
    "summed, (n - 1) / n of what is gathered, scattered or traded. They are counted where torch hands them to the "
    "network; the least is worked out from the sizes of parameters and of the batch."
)
COLUMNS = ("procs", "layout", "tokens/s", "efficiency", "step", "waiting", "sent", "least", "memory", "balance")


def size_row(size: Size) -> list[str]:
    least = sum(flow.least_bytes or 0.0 for flow in size.flows)
    return [
        str(size.procs),
        size.layout,
        format_count(size.tokens_per_s),
        f"{size.efficiency:.0%}",
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


FLOW_COLUMNS = ("procs", "axis", "collective", "sent", "least", "above it")


def warnings_of(sizes: Sequence[Size]) -> list[str]:
    return [
        f"with {size.procs} processes, rank {size.straggler} computes clearly longer than the others in most steps: "
        "look at what else runs on its machine or device"
        for size in sizes
        if size.straggler is not None
    ]


def tables(sizes: Sequence[Size]) -> list[Table]:
    found = [_table(COLUMNS, [size_row(size) for size in sizes], {0, 1})]
    flows = [[str(size.procs), *flow_row(flow)] for size in sizes for flow in size.flows]
    return [*found, _table(FLOW_COLUMNS, flows, {0, 1, 2})] if flows else found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def format_bytes(count: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


# --- picture --------------------------------------------------------------------------------------------------------


def draw(sizes: Sequence[Size], picture: Path) -> list[str]:
    """Write all panels as one PNG; returns each as SVG, so that a page can put them where there is room."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(15, 3.4), layout="constrained")
        try:
            for panel, axis in zip(_PANELS, axes, strict=True):
                panel(axis, sizes)
            figure.savefig(picture, dpi=150)
        finally:
            pyplot.close(figure)
        return [_draw_alone(panel, sizes) for panel in _PANELS]


def _draw_alone(panel: Callable[[Any, Sequence[Size]], None], sizes: Sequence[Size]) -> str:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(4, 3.2), layout="constrained")
    svg = io.StringIO()
    try:
        panel(axis, sizes)
        figure.savefig(svg, format="svg")
    finally:
        pyplot.close(figure)
    text = svg.getvalue()
    return text[text.index("<svg") :]  # without the XML prologue


def _draw_speed(axis: Any, sizes: Sequence[Size]) -> None:
    procs, speeds = [size.procs for size in sizes], [size.tokens_per_s for size in sizes]
    axis.plot(procs, [speeds[0] * p / procs[0] for p in procs], color="#999999", linestyle="--", label="in proportion")
    axis.plot(procs, speeds, color=COLOURS[0], marker="o", label="measured")
    axis.set_title("Tokens per second")
    axis.set_xticks(procs)
    axis.set_xlabel("processes")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.legend(frameon=False)
    _rule_behind(axis)


def _draw_efficiency(axis: Any, sizes: Sequence[Size]) -> None:
    _draw_bars(axis, sizes, "Efficiency (%)", [100 * size.efficiency for size in sizes])


def _draw_memory(axis: Any, sizes: Sequence[Size]) -> None:
    _draw_bars(axis, sizes, "Peak memory of a rank (GiB)", [size.memory_gib for size in sizes])


def _draw_bars(axis: Any, sizes: Sequence[Size], title: str, heights: Sequence[float]) -> None:
    bars = axis.bar([str(size.procs) for size in sizes], heights, color=COLOURS[0], width=0.6)
    axis.bar_label(bars, fmt="%.3g", padding=2)
    axis.set_title(title)
    axis.set_xlabel("processes")
    axis.set_ylim(top=1.12 * max(heights))  # room for the numbers
    _rule_behind(axis)


def _draw_traffic(axis: Any, sizes: Sequence[Size]) -> None:
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


def _rule_behind(axis: Any) -> None:
    axis.set_axisbelow(True)
    axis.grid(visible=False, axis="x")


_PANELS = (_draw_speed, _draw_efficiency, _draw_traffic, _draw_memory)


# --- page -----------------------------------------------------------------------------------------------------------


_STYLE = """
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .8rem; margin: 0 0 1.6rem }
.panels svg { background: #fff; border-radius: 8px; padding: .5rem; width: 100% }
th, td { white-space: nowrap }
"""


def report_page(title: str, sizes: Sequence[Size], svgs: Sequence[str]) -> str:
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in warnings_of(sizes))
    flows = [[str(size.procs), *flow_row(flow)] for size in sizes for flow in size.flows]
    parts = [
        f'<ul class="warnings">{warnings}</ul>' if warnings else "",
        f'<div class="panels">{"".join(svgs)}</div>',
        _html_table(COLUMNS, [size_row(size) for size in sizes], 2),
        f"<h2>Traffic</h2>{_html_table(FLOW_COLUMNS, flows, 3)}" if flows else "",
        f'<p class="quiet">{escape(UNIT)}</p>',
    ]
    return page(title, "\n".join(parts), _STYLE)


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ("" if i < left else ' class="number"' for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}\n<tbody>{body}</tbody></table></div>'
