"""Files of a source and their rows, raw and parsed; reading text and lines; the error of the room."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["jsonl", "json", "csv", "parquet", "arrow"]


class DataError(ValueError):
    """Data that cannot be trained on. The message says where, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows. The origin of every row starts with `name`."""

    name: str
    path: Path
    kind: Kind

    def origin(self, number: int, row: int | None = None) -> str:
        """Where a row is: its RawRow's `number`, and its `row` where a line holds several."""
        origin = f"{self.name}:row {number}" if self.kind in ("parquet", "arrow") else f"{self.name}:{number}"
        return origin if row is None else f"{origin}, row {row}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row before parsing, which is left to the processes that compile.

    `number` is the line it starts on, or its row in a file without lines. `payload` is an error where the reader
    can skip the row but not use it. `row` counts in the file, and is set only if the line holds several rows.
    """

    number: int
    payload: bytes | dict[str, object] | DataError
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One object. `origin` is "path:line", or "path:row 12" in a file without lines."""

    origin: str
    fields: dict[str, Any]


def json_type(value: object) -> str:
    """A value's JSON type, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


Stream = gzip.GzipFile | io.BufferedReader
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# A longer row is a mistake (a missing line end or quote), detected before it fills the memory.
MAX_ROW_BYTES = 256 * 2**20


@contextmanager
def open_text(file: SourceFile) -> Iterator[Stream]:
    """The file's bytes, decompressed, without byte order mark."""
    is_packed = file.path.suffix.lower() == ".gz"
    with gzip.open(file.path, "rb") if is_packed else file.path.open("rb") as stream:
        start = stream.peek(len(BYTE_ORDER_MARK))
        if start.startswith(UTF16_MARKS):
            raise DataError(f"{file.name}: UTF-16 text: convert the file to UTF-8")
        if start.startswith(BYTE_ORDER_MARK):
            stream.read(len(BYTE_ORDER_MARK))
        yield stream


def read_lines(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Every line with its number from 1 and with its line end."""
    with open_text(file) as stream:
        number = 0
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                raise DataError(too_long(file.origin(number), "line"))
            yield number, line


def too_long(origin: str, what: str) -> str:
    size = f"{MAX_ROW_BYTES // 2**20} MiB"
    return f"{origin}: this {what} is longer than {size}: look for a missing line end or quote, or split the row"


def decode_text(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(origin, error, f" at offset {error.start}")) from error


def not_utf8(origin: str, error: UnicodeDecodeError, where: str = "") -> str:
    return f"{origin}: not UTF-8 text (byte {error.object[error.start]:#04x}{where}): convert the file to UTF-8"
