"""Rows that people judged, on their way to a loss: which tokens count, pairs as labelled answers, mixed-up answers.

Pure functions and views of rows. Must not know backends, files or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from lockstep.types import Completion, Datum


def discount_length(pairs: Sequence[Datum], ld_alpha: float) -> list[Datum]:
    """Tokens by which one answer of a pair is longer than the other count `ld_alpha` times."""
    if ld_alpha == 1:
        return list(pairs)
    found = []
    for pair in pairs:
        weights = [np.array(completion.weights, dtype=np.float32) for completion in pair.completions]
        shared = min(int(np.count_nonzero(own)) for own in weights)
        for own in weights:
            own[np.flatnonzero(own)[shared:]] *= ld_alpha
        completions = [replace(c, weights=cast(Any, own)) for c, own in zip(pair.completions, weights, strict=True)]
        found.append(replace(pair, completions=completions))
    return found


def count_supervised(completion: Completion) -> int:
    return int(np.count_nonzero(completion.weights))


def count_chosen_tokens(pairs: Sequence[Datum]) -> int:
    """Supervised tokens of the preferred answers."""
    return sum(count_supervised(pair.completions[0]) for pair in pairs)


def count_padded_tokens(batch: Sequence[Datum]) -> int:
    """What the batch would cost with the prompt repeated for each answer, and all padded to the longest."""
    lengths = [len(datum.prompt) + len(c.tokens) for datum in batch for c in datum.completions]
    return len(lengths) * max(lengths)


def mismatch(rows: Sequence[Datum], max_length: int) -> list[Datum]:
    """Each prompt with the answer to another one of the batch, where there is another; a prompt loses its start to fit.

    What the model makes of answers that do not belong tells how far it is from its reference altogether.
    """
    prompts = [tuple(int(token) for token in row.prompt) for row in rows]
    found = []
    for i, row in enumerate(rows):
        others = (j % len(rows) for j in range(i + 1, i + len(rows)))
        partner = next((j for j in others if prompts[j] != prompts[i]), None)
        if partner is None:
            continue
        (answer,) = rows[partner].completions
        room = max(max_length - len(answer.tokens), 1)
        # Values such as a reference's log-probs belong to the answer behind its own prompt.
        found.append(Datum(row.prompt[-room:], [Completion(answer.tokens, answer.weights)], row.origin))
    return found


class AsLabelled(Sequence[Datum]):
    """Every pair as two rows: the preferred answer with label 1, the other with label 0."""

    def __init__(self, pairs: Any) -> None:
        """`pairs` are compiled rows: they also know their digest and the lengths of their pieces."""
        self._pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    @overload
    def __getitem__(self, place: int) -> Datum: ...
    @overload
    def __getitem__(self, place: slice) -> list[Datum]: ...
    def __getitem__(self, place: int | slice) -> Datum | list[Datum]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        number, side = divmod(int(place) % len(self), 2)
        pair: Datum = self._pairs[number]
        answer = pair.completions[side]
        label = np.full(len(answer.tokens), 1 - side, dtype=np.float32)
        return Datum(pair.prompt, [replace(answer, values={"label": cast(Any, label)})], pair.origin)

    def __iter__(self) -> Iterator[Datum]:
        return (self[i] for i in range(len(self)))

    @property
    def digest(self) -> str:
        return f"labelled {self._pairs.digest}"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        pieces = np.asarray(self._pairs.column("pieces"), dtype=np.int64)
        return (pieces[:, :1] + pieces[:, 1:]).reshape(-1)
