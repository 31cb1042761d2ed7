"""Rows of JSON files, one at a time, each with the place it came from.

Reads JSONL (one object per line) and .json files that hold one array of objects.
Must not know what the fields of a row mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DataError(ValueError):
    """Data that cannot be trained on. The message says where, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object. `origin` is "path:line", or "path:row 12" in an array."""

    origin: str
    fields: dict[str, Any]


def read_rows(path: str | Path) -> Iterator[Row]:
    """Every row of the file in order; a file without rows is an error."""
    path = Path(path)
    found = False
    try:
        rows = _read_array(path) if _holds_array(path) else _read_lines(path)
        for row in rows:
            found = True
            yield row
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file: check data.train and data.validation") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a directory: name the JSONL files inside it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not found:
        raise DataError(f"{path}: no rows: remove the file from the configuration or fill it")


def _holds_array(path: Path) -> bool:
    """Many tools write JSONL under the name .json, so the first character decides."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        for line in file:
            start = line.removeprefix(_BYTE_ORDER_MARK).lstrip()
            if start:
                return start.startswith(b"[")
    return False


def _read_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.isspace() or not line:
                continue
            origin = f"{path}:{number}"
            value = _parse(_decode(line, origin), origin)
            yield Row(origin, _require_object(value, origin, "one JSON object per line"))


def _read_array(path: Path) -> Iterator[Row]:
    text = _decode(path.read_bytes().removeprefix(_BYTE_ORDER_MARK), str(path))
    for number, value in enumerate(_parse(text, str(path), whole_file=True), start=1):
        origin = f"{path}:row {number}"
        yield Row(origin, _require_object(value, origin, "an array of JSON objects"))


def _decode(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin}: not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start}): "
            "convert the file to UTF-8"
        ) from error


def _parse(text: str, origin: str, *, whole_file: bool = False) -> Any:
    remedy = "fix the file" if whole_file else "fix or remove the line"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{origin}:{error.lineno}" if whole_file else origin
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}): {remedy}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise DataError(f"{origin}: not valid JSON ({error}): {remedy}") from error
    if _SURROGATE.search(text):
        _check_characters(value, origin, remedy)
    return value


def _check_characters(value: Any, origin: str, remedy: str) -> None:
    """JSON can escape half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{origin}: holds {half}, half of a character: {remedy}") from error


def _require_object(value: Any, origin: str, expected: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        hint = "; if the file is one array, name it .json" if isinstance(value, list) else ""
        raise DataError(f"{origin}: found {json_type(value)} where an object belongs: write {expected}{hint}")
    return value


def json_type(value: Any) -> str:
    """A value's type in the words of JSON, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
