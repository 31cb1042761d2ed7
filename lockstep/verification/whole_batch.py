"""A whole batch as a loss reads it, put together from one answer after the other.

Must not know models or backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.algorithms.losses import LossInputs
from lockstep.types import Completion, LossSpec


def supervised(values: Tensor, completion: Completion) -> Tensor:
    """Those of the tokens that have a weight."""
    return values[column(completion.weights).nonzero()[:, 0]]


def column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def side_values(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """What rows bring with them, such as labels."""
    names = completions[0].values
    return {name: torch.cat([supervised(column(c.values[name]), c) for c in completions]) for name in names}


def whole_inputs(completions: Sequence[Completion], loss: LossSpec, values: dict[str, Tensor]) -> LossInputs:
    weights = [supervised(column(c.weights), c) for c in completions]
    return LossInputs(
        weights=torch.cat(weights),
        scale=loss.scale,
        values=values,
        options=loss.options,
        completions=torch.arange(len(weights)).repeat_interleave(torch.tensor([len(w) for w in weights])),
        num_completions=len(weights),
    )
