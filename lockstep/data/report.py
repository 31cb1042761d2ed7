"""Counts of what was compiled, and warnings for the user before the first step. `asdict` of a report is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.data.columns import Rows

_NUM_SHOWN = 5
_COUNTS = (
    *("num_rows", "num_tokens", "num_supervised", "prompts_cut", "answers_cut", "dropped", "skipped", "left_out"),
    *("num_retokenised", "num_unclosed", "num_unprompted", "holds_special", "num_unwritten", "num_images"),
)


@dataclass
class FileReport:
    """Counts of one file, before splitting and mixing.

    `dropped` rows were too long, `skipped` ones invalid, `left_out` ones rejected by the converter.
    `num_retokenised` rows had to be tokenised in pieces, cut where an answer starts. `num_unclosed` answers end without
    an end-of-turn token; `num_unprompted` ones do not start with the whole generation prompt. `holds_special` rows have
    special tokens written out in a message, `num_unwritten` ones parts that the template does not write. `longest_row`
    counts tokens before cutting. `ignored_keys` are unused.
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
    num_retokenised: int = 0
    num_unclosed: int = 0
    num_unprompted: int = 0
    holds_special: int = 0
    num_unwritten: int = 0
    num_images: int = 0
    longest_row: int = 0
    longest_origin: str = ""
    ignored_keys: list[str] = field(default_factory=list)

    def add(self, other: FileReport) -> None:
        for name in _COUNTS:
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
            "num_unprompted": "answers do not start with the whole generation prompt of the chat template, so the "
            "model will be prompted in a way it has not learned from: check data.template_options",
            "holds_special": "rows have special tokens written out in their messages, which the model would read as "
            "real ones: remove them, or keep them if that is intended",
            "num_unwritten": "rows have tools, tool calls or reasoning that the chat template does not write, so the "
            "model never sees them: set data.chat_template to one that does",
        }
        warnings = [
            f"{self.path}: {getattr(self, name):,} {text}" for name, text in sentences.items() if getattr(self, name)
        ]
        if self.ignored_keys:
            warnings.append(f"{self.path}: rows of format {self.format} do not use {', '.join(self.ignored_keys)}")
        return warnings


def from_manifest(values: Mapping[str, Any], *, split: str, weight: float) -> FileReport:
    """The report in a cache entry, with what only this configuration knows."""
    return FileReport(**{**values, "split": split, "weight": weight})


@dataclass(frozen=True)
class Leak:
    """Held-out rows whose prompt is also trained on: how many, and the origins of the first."""

    split: str
    num_rows: int
    origins: list[str]


@dataclass(frozen=True)
class DataReport:
    """All files of a run. Tokens are counted after cutting.

    `duplicates` counts training rows that repeat an earlier row, without the copies that a source's weight makes.
    `notes` are sentences about the compilation itself.
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
    def totals(self) -> FileReport:
        """The counts of all files together."""
        totals = FileReport("all files", "", "")
        for file in self.files:
            totals.add(file)
        return totals

    @property
    def leaks(self) -> int:
        return sum(leak.num_rows for leak in self.leaked)

    def warnings(self) -> list[str]:
        """One sentence for each problem."""
        warnings = [sentence for file in self.files for sentence in file.warnings()]
        if self.skipped_files:
            warnings.append(f"the skipped rows are in {', '.join(self.skipped_files)}, each with the reason")
        if self.duplicates:
            warnings.append(
                f"{self.duplicates:,} of {self.num_train:,} training rows repeat an earlier row: remove them"
            )
        for leak in self.leaked:
            shown = ", ".join(leak.origins) + (", ..." if leak.num_rows > len(leak.origins) else "")
            warnings.append(
                f"{leak.num_rows:,} {leak.split} rows have a prompt that is also trained on ({shown}), so their loss "
                "says little about new prompts: remove them from one side"
            )
        return [*warnings, *self.notes]


def count_duplicates(train: Rows) -> int:
    keys = train.column("row_keys")
    return len(keys) - len(np.unique(keys))


def find_leaks(train: Rows, held_out: Mapping[str, Rows]) -> tuple[Leak, ...]:
    """`held_out`: the rows of each split that is not trained on."""
    leaks = []
    for split, rows in held_out.items():
        leaked = np.flatnonzero(np.isin(rows.column("prompt_keys"), train.column("prompt_keys")))
        if len(leaked):
            leaks.append(Leak(split, len(leaked), [rows.origin(int(row)) for row in leaked[:_NUM_SHOWN]]))
    return tuple(leaks)
