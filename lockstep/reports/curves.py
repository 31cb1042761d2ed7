"""Curves of one or several runs, drawn over each other: a PNG and one self-contained HTML page without scripts."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from lockstep.rundir import MetricRecord

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lockstep.reports.page import escape, format_count, format_duration, inline_svg, page
from lockstep.rundir import RunDir

# Okabe and Ito: distinguishable with colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#444444",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
}


@dataclass(frozen=True)
class Panel:
    title: str
    split: str
    key: str
    smooth: bool = False
    best: Callable[..., int] = min


PANELS = (
    Panel("Training loss", "train", "loss", smooth=True),
    Panel("Validation loss (circle: best)", "validation", "loss"),
    Panel("Reward", "train", "reward", smooth=True),
    Panel("Held-out reward (circle: best)", "validation", "reward", best=max),
    Panel("Completion length", "train", "completion_length", smooth=True),
    Panel("Entropy", "train", "entropy", smooth=True),
    Panel("Entropy, estimated from samples", "train", "entropy_estimate", smooth=True),
    Panel("KL from the reference", "train", "kl", smooth=True),
    Panel("Log-prob difference, sampler to trainer", "train", "sampler_trainer_logprob_diff", smooth=True),
    Panel("Groups with equal rewards", "train", "zero_std_groups", smooth=True),
    Panel("Reward margin", "train", "margin", smooth=True),
    Panel("Validation reward margin", "validation", "margin", best=max),
    Panel("Accuracy: preferred answer ahead", "train", "accuracy", smooth=True),
    Panel("Validation accuracy", "validation", "accuracy", best=max),
    Panel("Reward of preferred answers", "train", "chosen_reward", smooth=True),
    Panel("Reward of rejected answers", "train", "rejected_reward", smooth=True),
    Panel("Learning rate", "train", "learning_rate"),
    Panel("Gradient norm", "train", "grad_norm", smooth=True),
    Panel("Tokens per second", "train", "tokens_per_s", smooth=True),
)


@dataclass(frozen=True)
class Curves:
    label: str
    colour: str
    status: dict[str, Any]
    metrics: Sequence[MetricRecord]

    def points(self, panel: Panel) -> tuple[list[int], list[float]]:
        rows = [m for m in self.metrics if m.get("split", "train") == panel.split and _is_number(m.get(panel.key))]
        return [int(m["step"]) for m in rows], [float(m[panel.key]) for m in rows]


def plot_runs(run_dirs: Sequence[Path], out: Path, beside_plan: Sequence[str] = ()) -> list[Path]:
    """Write the files and return their paths. A run without metrics is an error that names it. `beside_plan`: of each
    run, what was planned and measured, in words."""
    runs = read_runs(run_dirs)
    name = runs[0].label if len(runs) == 1 else "comparison"
    title = name if len(runs) == 1 else f"{len(runs)} runs"
    with matplotlib.rc_context(STYLE):
        figure = _draw(runs)
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
        picture, document = out / f"{name}.png", out / f"{name}.html"
        try:
            out.mkdir(parents=True, exist_ok=True)
            figure.savefig(picture, dpi=150)
            document.write_text(_page(title, runs, svg.getvalue(), beside_plan), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write into {out}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)
    return [picture, document]


def read_runs(run_dirs: Sequence[Path]) -> list[Curves]:
    names = [Path(d).resolve().name for d in run_dirs]
    runs = []
    for i, directory in enumerate(run_dirs):
        run = RunDir(directory)
        run.config()  # raises where this is not a run directory
        metrics = run.metrics()
        if not metrics:
            raise ValueError(f"{directory} has no metrics yet: wait for its first step")
        label = names[i] if names.count(names[i]) == 1 else str(directory)
        runs.append(Curves(label, COLOURS[i % len(COLOURS)], run.status(), metrics))
    return runs


def _draw(runs: Sequence[Curves]) -> Figure:
    panels = [p for p in PANELS if any(run.points(p)[0] for run in runs)]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(4.2 * columns, 2.9 * rows + 0.5),
        squeeze=False,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    for i, axis in enumerate(axes.flat):
        if i >= len(panels):
            axis.axis("off")
            continue
        _draw_panel(axis, panels[i], runs)
    handles = [pyplot.Line2D([], [], color=run.colour, label=_shorten(run.label)) for run in runs]
    if len(axes.flat) > len(panels):
        axes.flat[len(panels)].legend(handles=handles, loc="upper left", frameon=False)
    else:
        figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=3)
    return figure


def _draw_panel(axis: Axes, panel: Panel, runs: Sequence[Curves]) -> None:
    drawn: list[float] = []
    for run in runs:
        steps, values = run.points(panel)
        if panel.smooth and len(values) >= 20:
            axis.plot(steps, values, color=run.colour, alpha=0.25, linewidth=0.8)
            axis.plot(steps, smooth := moving_average(values), color=run.colour)
            drawn += smooth
        else:
            # A single point has no line; few points are measurements rather than a curve.
            axis.plot(steps, values, color=run.colour, marker="o" if len(values) <= 30 else None, markersize=3.5)
            drawn += values
        if panel.split == "validation" and values:
            best = panel.best(range(len(values)), key=values.__getitem__)
            axis.plot(steps[best], values[best], marker="o", markersize=9, color=run.colour, fillstyle="none")
    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.key == "tokens_per_s":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        axis.set_ylim(bottom=0)
    if panel.key == "learning_rate":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _exponent(value)))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        axis.set_ylim(bottom=0)
    if panel.key in ("loss", "grad_norm") and drawn and min(drawn) > 0 and max(drawn) > 30 * min(drawn):
        axis.set_yscale("log")


def moving_average(values: Sequence[float]) -> list[float]:
    """Centred, so that it does not lag behind."""
    reach = max(len(values) // 40, 2)
    windows = (values[max(i - reach, 0) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _exponent(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def _shorten(label: str, length: int = 40) -> str:
    return label if len(label) <= length else "…" + label[1 - length :]


# --- the page -------------------------------------------------------------------------------------------------------

_STYLE = """
svg { width: 100%; background: #fff; border-radius: 8px }
table { width: 100%; margin-top: 1.5rem }
th, td { text-align: right; white-space: nowrap }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .5rem; vertical-align: -1px }
"""
_COLUMNS = ("run", "state", "steps", "loss", "validation loss", "best validation loss", "tokens", "tokens/s", "time")


def _page(title: str, runs: Sequence[Curves], svg: str, beside_plan: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(_row(run) for run in runs)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    said = [f"{run.label}: {text}" for run, text in zip(runs, beside_plan) if text]
    plans = "".join(f'<p class="quiet">{escape(text)}</p>' for text in said)
    return page(title, f"{inline_svg(svg)}\n{table}\n{plans}", _STYLE)


def _row(run: Curves) -> str:
    status = run.status
    step, total, best = status.get("step"), status.get("total_steps"), status.get("best_validation_loss")
    started, updated = status.get("started_at"), status.get("updated_at")
    cells = [
        f'<span class="key" style="background:{run.colour}"></span>{escape(run.label)}',
        escape(str(status.get("state", "unknown"))),
        "-" if step is None else f"{step}" + (f" / {total}" if total else ""),
        _loss(status.get("loss")),
        _loss(status.get("validation_loss")),
        _loss(best)
        + (f" (step {status['best_step']})" if best is not None and status.get("best_step") is not None else ""),
        format_count(status["tokens"]) if status.get("tokens") else "-",
        format_count(status["tokens_per_s"]) if status.get("tokens_per_s") else "-",
        format_duration(updated - started) if started and updated else "-",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _loss(value: object) -> str:
    return f"{value:.4f}" if _is_number(value) else "-"
