"""The table of an evaluation: one row per metric, one column per model, the best of each row marked.

Plain texts, for terminals and pages alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.evaluation.metrics import LOWER_IS_BETTER

_SHARES = frozenset(
    {"exact_match", "numeric", "pair_accuracy", "reward_accuracy"}
)  # shares of rows, which people read in per cent


@dataclass(frozen=True, slots=True)
class Cell:
    """`error` is the standard error of the mean, empty where none is known."""

    text: str
    error: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    metric: str
    cells: tuple[Cell, ...]


def table_of(results: Mapping[str, Any]) -> list[Line]:
    """Metrics in the order in which they were asked for; a model without one has a dash."""
    models = results["models"]
    names = dict.fromkeys(name for model in models for name in model["metrics"])
    lines = []
    for name in names:
        values = [model["metrics"].get(name) for model in models]
        shown = [format_score(name, value) for value in values]
        known = [value for value in values if value is not None]
        best = (min if name in LOWER_IS_BETTER else max)(known)
        # Of one model nothing is best, nor where all are the same as far as is shown.
        marks = len(known) > 1 and len(set(shown)) > 1
        cells = [
            Cell(text, _error(name, model), marks and value is not None and text == format_score(name, best))
            for text, value, model in zip(shown, values, models, strict=True)
        ]
        lines.append(Line(name, tuple(cells)))
    return lines


def format_score(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _SHARES:
        return f"{100 * value:.1f} %"
    if name == "perplexity":
        return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"
    return f"{value:.4f}" if name == "loss" else f"{value:.3f}"


def _error(name: str, model: Mapping[str, Any]) -> str:
    error = model["standard_errors"].get(name)
    return "" if not error else "± " + format_score(name, error)
