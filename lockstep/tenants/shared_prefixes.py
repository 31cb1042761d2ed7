"""Rows that begin alike, as groups of answers to one prompt do: what they share is computed once.

The numbers are those of each row by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.types import Completion, Datum

_VALUE_NAMES = {"logprobs": "behaviour_logprobs"}
# Where one of these is not zero, a target has a part in the loss; of losses that are not named, every target has one.
_COUNTS_BY: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("advantages",),
    "ppo": ("advantages",),
    "cispo": ("advantages",),
    "gspo": ("advantages", "sequence_ratio_mask"),
}


@dataclass(frozen=True)
class TrainingRow:
    """A text and what its tokens should predict: `inputs` by name, all of one shape, [tokens] or [tokens, several]."""

    tokens: Any  # [tokens], int64
    inputs: Mapping[str, Any]

    @property
    def targets(self) -> Any:
        return self.inputs["target_tokens"]

    @property
    def weights(self) -> Any:
        return self.inputs.get("weights", np.ones(self.targets.shape))

    @property
    def values(self) -> dict[str, Any]:
        """Side values, as losses name them."""
        others = [name for name in self.inputs if name not in ("target_tokens", "weights")]
        return {_VALUE_NAMES.get(name, name): self.inputs[name] for name in others}

    def counts(self, kind: str) -> np.ndarray:
        """[tokens]: whether the targets there have a part in the loss."""
        names = _COUNTS_BY.get(kind, ())
        if not names or any(name not in self.inputs for name in names):
            return np.ones(len(self.tokens), dtype=bool)
        parts = [np.reshape(self.inputs[name] != 0, (len(self.tokens), -1)).any(axis=1) for name in names]
        return np.logical_or.reduce(parts)

    def completion(self, prompt_length: int, first: int) -> Completion:
        """What follows the prompt, with its targets from `first` on.

        The last target is appended as a token that nothing sees, so that every token of the text has a next one.
        """
        following: Any = np.concatenate(
            [self.tokens[prompt_length:], self.targets.reshape(len(self.targets), -1)[-1, :1]]
        )
        values = {name: value[first:] for name, value in self.values.items()}
        return Completion(following, self.weights[first:], values, targets=self.targets[first:])


@dataclass(frozen=True)
class _Group:
    """Rows with `prompt_length` tokens in common. Of each: its number, and its first target that is computed for it;
    those before are what the group's first row has there."""

    prompt_length: int
    members: tuple[tuple[int, int], ...]


class SharedBatch:
    """Rows as data that share prompts, and log-probs of those back as the rows'."""

    def __init__(self, rows: Sequence[TrainingRow], kind: str) -> None:
        self._rows = rows
        self._groups = [_as_group(members, rows, kind) for members in _find_groups(rows)]

    @property
    def data(self) -> list[Datum]:
        return [self._datum(group) for group in self._groups]

    def rows_of(self, logprobs: Iterable[Sequence[Sequence[float]]]) -> list[np.ndarray]:
        """Of each row, of each target, flat."""
        found: dict[int, np.ndarray] = {}
        for group, parts in zip(self._groups, logprobs, strict=True):
            arrays = [np.asarray(part) for part in parts]
            for (number, first), own in zip(group.members, arrays, strict=True):
                several = self._rows[number].targets.size // len(self._rows[number].targets)
                found[number] = np.concatenate([arrays[0][: first * several], own])
        return [found[number] for number in range(len(self._rows))]

    def _datum(self, group: _Group) -> Datum:
        length, numbers = group.prompt_length, [number for number, _ in group.members]
        completions = [self._rows[number].completion(length, first) for number, first in group.members]
        origin = "datum " + ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        return Datum(self._rows[numbers[0]].tokens[:length], completions, origin=origin)


def _find_groups(rows: Sequence[TrainingRow]) -> list[tuple[int, list[int]]]:
    """(tokens in common, numbers of the rows). Sorted, rows with most in common are neighbours; a group takes its next
    neighbour where that saves as much as it costs those that are in it."""
    # Bytes in big-endian order sort as their numbers do, and much faster than tuples of them.
    order = sorted(range(len(rows)), key=lambda number: rows[number].tokens.astype(">u4").tobytes())
    groups: list[tuple[int, list[int]]] = []
    for number in order:
        if groups:
            common, members = groups[-1]
            shared = min(common, _common_prefix(rows[members[-1]].tokens, rows[number].tokens))
            alike = rows[members[0]].targets.shape[1:] == rows[number].targets.shape[1:]
            if alike and shared > 1 and len(members) * shared >= (len(members) - 1) * common:
                groups[-1] = (shared, [*members, number])
                continue
        groups.append((len(rows[number].tokens), [number]))
    # A row by itself has its first token as the prompt, and a group the order in which its rows came.
    return [(common if len(members) > 1 else 1, sorted(members)) for common, members in groups]


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _as_group(found: tuple[int, list[int]], rows: Sequence[TrainingRow], kind: str) -> _Group:
    length, members = found
    first_row = rows[members[0]]
    starts = [(members[0], 0)]
    for number in members[1:]:
        row, before = rows[number], length - 1  # the prompt's last token predicts what only this row has
        same = np.reshape(row.targets[:before] == first_row.targets[:before], (before, -1)).all(axis=1)
        own = np.flatnonzero(row.counts(kind)[:before] | ~same)
        starts.append((number, int(own[0]) if len(own) else before))
    return _Group(length, tuple(starts))
