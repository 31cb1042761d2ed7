"""What a source gives: files, their rows as they were read, and rows as fields with the place they came from.

Must not know how any kind of file is read, nor what the fields of a row mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["jsonl", "json", "csv", "parquet", "arrow"]


class DataError(ValueError):
    """Data that cannot be trained on. The message says where, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows. `name` is what people call it; it begins the origin of every row."""

    name: str
    path: Path
    kind: Kind

    def origin(self, number: int, row: int | None = None) -> str:
        """The place of a row: its RawRow's `number`, and its `row` where a line holds several."""
        place = f"{self.name}:row {number}" if self.kind in ("parquet", "arrow") else f"{self.name}:{number}"
        return place if row is None else f"{place}, row {row}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that is not checked yet: parsing it is left to whoever has a processor free.

    `number` is the line it starts on, or its row in a file without lines. `payload` is an error where the reader
    could step over a row but not use it. `row` counts in the file, and is there only if the line holds several rows.
    """

    number: int
    payload: bytes | dict[str, Any] | DataError
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One object. `origin` is "path:line", or "path:row 12" in a file without lines."""

    origin: str
    fields: dict[str, Any]


def json_type(value: Any) -> str:
    """A value's type in the words of JSON, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
