"""Rows of any shape made into rows of a known one: by the user's function, or by text with {columns}.

Must not know the formats.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lockstep.data.formats.fields import describe_keys
from lockstep.data.sources.files import DataError, Row

Converter = Callable[[dict[str, Any]], dict[str, Any] | None]
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]|[^{}]+")


@cache
def load_converter(setting: str) -> Converter:
    """`setting` is module:function; the module may lie in the working directory."""
    module_name, colon, function_name = setting.partition(":")
    if not colon or not module_name or not function_name:
        raise DataError(f"data.converter {setting!r}: write module:function, for example convert:to_messages")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise DataError(f"data.converter {setting!r}: {module_name} cannot be imported: {error}") from error
        raise DataError(
            f"data.converter {setting!r}: there is no module {error.name}: put {error.name}.py into the working "
            "directory or install it"
        ) from error
    except Exception as error:  # a module of the user's runs its own code
        raise DataError(f"data.converter {setting!r}: {module_name} cannot be imported: {_describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no function" if function is None else f"{type(function).__name__}, not a function, called"
        raise DataError(f"data.converter {setting!r}: {module_name} has {found} {function_name}")
    return function


def convert(row: Row, setting: str) -> Row | None:
    """The row as the user's function returns it; None where it leaves the row out."""
    function = load_converter(setting)
    try:
        fields = function(copy.deepcopy(row.fields))
    except Exception as error:  # whatever the user's function raises belongs to this row
        raise DataError(f"{row.origin}: the converter {setting} failed: {_describe(error)}") from error
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise DataError(
            f"{row.origin}: the converter {setting} returned a {type(fields).__name__}: return a dict or None"
        )
    return Row(row.origin, fields)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class ColumnText:
    """Text with {columns}; {{ and }} are braces. `setting` is its name in the configuration."""

    def __init__(self, setting: str, text: str) -> None:
        self.setting = setting
        self._pieces: list[tuple[str, str | None]] = []
        for match in _PIECE.finditer(text):
            piece = match[0]
            if piece in ("{", "}"):
                raise DataError(
                    f"data.{setting}: a single {piece} at character {match.start() + 1}: "
                    f"write {{column}}, or {piece * 2} for the brace itself"
                )
            is_brace = piece in ("{{", "}}")
            self._pieces.append(("", match[1]) if match[1] else (piece[0] if is_brace else piece, None))
        self.columns = {column for _, column in self._pieces if column is not None}
        if not self.columns:
            raise DataError(f"data.{setting}: it names no column: write at least one as {{column}}")

    def fill(self, row: Row) -> str:
        return "".join(text if column is None else self._write(row, column) for text, column in self._pieces)

    def _write(self, row: Row, column: str) -> str:
        if column not in row.fields:
            raise DataError(
                f"{row.origin}: data.{self.setting} names {{{column}}}, the row has {describe_keys(row.fields)}"
            )
        value = row.fields[column]
        if value is None:
            raise DataError(
                f"{row.origin}: {column!r} is null and data.{self.setting} needs it: fill it or remove the row"
            )
        if isinstance(value, str):
            return value
        return _to_json(row, column, value)


def _to_json(row: Row, column: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{row.origin}: {column!r} cannot be written as JSON: {error}") from error


def fill_templates(row: Row, texts: Mapping[str, ColumnText]) -> Row:
    return Row(row.origin, {name: text.fill(row) for name, text in texts.items()})
