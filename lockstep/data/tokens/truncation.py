"""Rows that are longer than data.max_length: what is kept of them.

Must not know text: it cuts token ids and their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
# Ids of an answer and the weight of each; the last weight is never zero.
Answer = tuple[Ints, Ints]
POLICIES = ("prompt_left", "right", "drop", "error")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A row that fits; `answers` is empty where nothing to learn was left."""

    prompt: Ints
    answers: tuple[Answer, ...]
    prompt_cut: bool = False
    answer_cut: bool = False


def fit(prompt: Ints, answers: Sequence[Answer], *, max_length: int, policy: str, bos: int | None) -> Fitted:
    """Cut a row whose prompt with its longest answer has more than `max_length` tokens.

    prompt_left: the start of the prompt goes, as much as the longest answer needs. At least one token of the prompt
    stays, its BOS where it has one, and an answer that does not fit beside that loses its end.
    right: what is behind `max_length` goes; a row of which no answer, or only one of two, is left is dropped.
    drop: the row goes.
    """
    if policy == "drop":
        return Fitted(prompt, ())
    room = max_length - 1 if policy == "prompt_left" else max_length - len(prompt)
    kept = tuple(_cut_right(answer, room) for answer in answers)
    answer_cut = any(len(ids) > room for ids, _ in answers)
    if any(len(ids) == 0 for ids, _ in kept):
        return Fitted(prompt, (), answer_cut=True)
    cut_prompt = _cut_left(prompt, max_length - max(len(ids) for ids, _ in kept), bos)
    return Fitted(cut_prompt, kept, prompt_cut=len(cut_prompt) < len(prompt), answer_cut=answer_cut)


def _cut_right(answer: Answer, room: int) -> Answer:
    """The first `room` tokens, without those after the last learned one: they are of no use."""
    ids, weights = answer
    if len(ids) <= room:
        return answer
    learned = np.flatnonzero(weights[: max(room, 0)])
    num_kept = int(learned[-1]) + 1 if len(learned) else 0
    return ids[:num_kept], weights[:num_kept]


def _cut_left(prompt: Ints, room: int, bos: int | None) -> Ints:
    """The last `room` tokens of the prompt (at least one), its BOS kept in front."""
    if len(prompt) <= room:
        return prompt
    if bos is None or prompt[0] != bos:
        return prompt[-room:]
    rest = prompt[len(prompt) - (room - 1) :]
    # Where messages start with the BOS too, a cut in front of one leaves it there once.
    return rest if len(rest) and rest[0] == bos else np.concatenate([prompt[:1], rest])
