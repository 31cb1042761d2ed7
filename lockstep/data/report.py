"""What was compiled, in numbers, and what a user should know of it before the first step.

Must not know how rows are read or kept; `dataclasses.asdict` of a report is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lockstep.data.columns import Rows

_NUM_SHOWN = 5
_COUNTED = (
    "num_rows",
    "num_tokens",
    "num_supervised",
    "prompts_cut",
    "answers_cut",
    "dropped",
    "skipped",
    "left_out",
    "num_split",
    "num_unclosed",
    "num_unprompted",
    "holds_special",
)


@dataclass
class FileReport:
    """What one file gave, before splitting and mixing.

    `dropped` rows were too long, `skipped` ones could not be used, `left_out` ones a converter did not want.
    `num_split` rows had to be tokenised in pieces at an answer's start. `num_unclosed` answers end without an
    end-of-turn token; `num_unprompted` ones start after less than the template writes for generation.
    `holds_special` rows have special tokens written out in a message. `longest_row` is as found, before cutting.
    `ignored_keys` are fields nothing reads.
    """

    path: str
    split: str
    format: str
    weight: float = 1.0
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    dropped: int = 0
    skipped: int = 0
    left_out: int = 0
    num_split: int = 0
    num_unclosed: int = 0
    num_unprompted: int = 0
    holds_special: int = 0
    longest_row: int = 0
    longest_origin: str = ""
    ignored_keys: list[str] = field(default_factory=list)

    def add(self, other: FileReport) -> None:
        """Counts of later rows of the same file."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.longest_row > self.longest_row:
            self.longest_row, self.longest_origin = other.longest_row, other.longest_origin
        self.ignored_keys = sorted({*self.ignored_keys, *other.ignored_keys})

    def warnings(self) -> list[str]:
        at_length = f"data.max_length (the longest row has {self.longest_row:,} tokens)"
        sentences = {
            "answers_cut": f"answers do not fit and lose their end: raise {at_length}",
            "prompts_cut": f"prompts were cut from the left: raise {at_length}",
            "dropped": f"rows were left out because they are longer than {at_length}",
            "skipped": "rows cannot be used and were left out",
            "num_unclosed": "answers end without a special token, so the model does not learn to stop there: end "
            "assistant turns with the EOS token in the chat template",
            "num_unprompted": "answers do not start with all that the chat template writes for generation, so the "
            "model will meet an opening it has not learned from: check data.template_options",
            "holds_special": "rows have special tokens written out in their messages, which the model would read as "
            "real ones: remove them, or keep them if that is meant",
        }
        found = [
            f"{self.path}: {getattr(self, name):,} {text}" for name, text in sentences.items() if getattr(self, name)
        ]
        if self.ignored_keys:
            found.append(f"{self.path}: rows of format {self.format} do not use {', '.join(self.ignored_keys)}")
        return found


def from_manifest(values: dict[str, Any], **now: Any) -> FileReport:
    """A report as an entry keeps it, with what only this configuration knows (split, weight)."""
    known = {item.name for item in fields(FileReport)}
    return FileReport(**{name: value for name, value in {**values, **now}.items() if name in known})


@dataclass(frozen=True)
class Leak:
    """Held-out rows whose prompt is also trained on: how many, and the first of them."""

    split: str
    num_rows: int
    origins: list[str]


@dataclass(frozen=True)
class DataReport:
    """All files of a run. Numbers of tokens are as trained, after cutting.

    `duplicates` counts training rows that occurred before, without the copies that a weight makes.
    `leaked` are held-out rows whose prompt is also trained on. `notes` are sentences about the compilation itself.
    """

    files: tuple[FileReport, ...]
    num_train: int
    num_validation: int
    num_test: int
    max_length: int
    duplicates: int = 0
    leaked: tuple[Leak, ...] = ()
    skipped_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    @property
    def num_supervised(self) -> int:
        return sum(file.num_supervised for file in self.files)

    @property
    def prompts_cut(self) -> int:
        return sum(file.prompts_cut for file in self.files)

    @property
    def answers_cut(self) -> int:
        return sum(file.answers_cut for file in self.files)

    @property
    def dropped(self) -> int:
        return sum(file.dropped for file in self.files)

    @property
    def skipped(self) -> int:
        return sum(file.skipped for file in self.files)

    @property
    def leaks(self) -> int:
        return sum(leak.num_rows for leak in self.leaked)

    @property
    def longest_row(self) -> int:
        return max(file.longest_row for file in self.files)

    def warnings(self) -> list[str]:
        """A sentence for each thing that a user should know before the first step."""
        found = [sentence for file in self.files for sentence in file.warnings()]
        if self.skipped_files:
            found.append(f"the rows that cannot be used are in {', '.join(self.skipped_files)}, each with the reason")
        if self.duplicates:
            found.append(f"{self.duplicates:,} of {self.num_train:,} training rows repeat an earlier row: remove them")
        for leak in self.leaked:
            shown = ", ".join(leak.origins) + (", ..." if leak.num_rows > len(leak.origins) else "")
            found.append(
                f"{leak.num_rows:,} {leak.split} rows have a prompt that is also trained on ({shown}), so their loss "
                "says little about new prompts: remove them from one side"
            )
        return [*found, *self.notes]


def count_duplicates(train: Rows) -> int:
    keys = train.column("row_keys")
    return len(keys) - len(np.unique(keys))


def find_leak(split: str, held_out: Rows, train: Rows) -> Leak | None:
    places = np.flatnonzero(np.isin(held_out.column("prompt_keys"), train.column("prompt_keys")))
    if len(places) == 0:
        return None
    return Leak(split, len(places), [held_out.origin(int(place)) for place in places[:_NUM_SHOWN]])


def find_leaks(train: Rows, held_out: Sequence[tuple[str, Rows]]) -> tuple[Leak, ...]:
    return tuple(leak for split, rows in held_out if (leak := find_leak(split, rows, train)) is not None)
