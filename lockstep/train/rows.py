"""The rows that an algorithm learns from: whether the data has them, in which shape, and what to know before the start.

Must not know models or backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataset import Compiled
from lockstep.data.order import Batches
from lockstep.train.preferences import AsLabelled
from lockstep.train.reference import ReferenceChoice, choose_reference
from lockstep.train.steps import num_steps
from lockstep.types import Datum

_NAMES = {
    "answers": "answers",
    "pairs": "preference pairs",
    "labelled": "answers with a label (unpaired preferences)",
}
_WANTED = {"sft": ("answers",), "dpo": ("pairs",), "kto": ("labelled", "pairs")}
_REMEDIES = {
    ("sft", "pairs"): "set algorithm.kind to dpo; or, to learn only the preferred ones, set data.format to "
    "prompt_completion and data.columns to {completion: chosen}",
    ("sft", "labelled"): "set algorithm.kind to kto; or, to learn all answers whatever their label, set data.format to "
    "what the rows are without it",
    ("dpo", "answers"): "give rows with chosen and rejected, or set algorithm.kind to sft",
    ("dpo", "labelled"): "set algorithm.kind to kto, or give rows with chosen and rejected",
    ("kto", "answers"): "give rows with a label (true or false), or set algorithm.kind to sft",
}
_LEARNS = {"sft": "learns answers", "dpo": "learns from pairs", "kto": "learns from labels"}


@dataclass(frozen=True)
class RowsToLearn:
    """What the loop is given. Kto takes pairs as well: each as two labelled rows."""

    train: Any
    validation: Any


def rows_to_learn(config: RunConfig, data: Compiled) -> RowsToLearn:
    """Raises where the data holds rows of another sort than the algorithm learns from."""
    kind = config.algorithm.kind
    if kind == "grpo":
        raise ConfigError("grpo samples its answers itself: its data has no rows that could be looked at like this")
    if data.kind not in _WANTED[kind]:
        raise ConfigError(
            f"data.train holds {_NAMES[data.kind]}, and algorithm.kind {kind} {_LEARNS[kind]}: "
            f"{_REMEDIES[kind, data.kind]}"
        )
    if kind == "kto" and data.kind == "pairs":
        return RowsToLearn(AsLabelled(data.train), AsLabelled(data.validation))
    return RowsToLearn(data.train, data.validation)


def plan_reference(config: RunConfig, train: Sequence[Datum]) -> ReferenceChoice:
    batches = Batches(train, config.batch, seed=config.seed, shuffle=config.data.shuffle)
    # In whole epochs, because a batch by tokens takes now more, now fewer rows.
    num_seen = round(num_steps(config, batches) / batches.num_steps(1.0) * len(train))
    return choose_reference(config, num_rows=len(train), num_seen=num_seen)


def row_warnings(config: RunConfig, data: Compiled) -> list[str]:
    """A sentence for each thing about these rows that this algorithm makes worth knowing."""
    found = []
    budget = config.batch.micro_batch_tokens * config.parallel.context
    if data.kind == "pairs" and config.algorithm.kind == "dpo":
        totals = data.train.column("pieces").sum(axis=1, dtype=np.int64)
        if count := int((totals > budget).sum()):
            found.append(
                f"{count:,} of {len(totals):,} pairs have more than {budget:,} tokens with both answers, so a step "
                f"with one of them takes a second forward pass: raise batch.micro_batch_tokens to {totals.max():,} if "
                "there is memory"
            )
    if data.kind == "labelled" and config.algorithm.kind == "kto":
        labels = data.train.column("labels")
        good = int((labels == 1).sum())
        if good in (0, len(labels)):
            which = "good" if good else "bad"
            found.append(f"every training row has a label that says {which}: kto learns more from both sorts")
    return found


def computed_lengths(batch: Sequence[Datum], budget_tokens: int) -> list[int]:
    """Tokens of what is computed as one: a prompt with all its answers, or with each where they do not fit."""
    found = []
    for datum in batch:
        answers = [len(completion.tokens) for completion in datum.completions]
        together = len(datum.prompt) + sum(answers)
        found += [together] if together <= budget_tokens else [len(datum.prompt) + size for size in answers]
    return found
