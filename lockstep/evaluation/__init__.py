"""How well models answer held-out rows, side by side: `lockstep eval`, and `evaluate` from Python.

rows → questions → loss (likelihood) and answers → scores (metrics) → results.json, answers.jsonl, report.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.evaluation.comparison import evaluate

__all__ = ["evaluate"]


def __getattr__(name: str) -> Any:
    """`evaluate` brings models with it; metrics on texts do not need them."""
    if name != "evaluate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lockstep.evaluation import comparison

    return comparison.evaluate
