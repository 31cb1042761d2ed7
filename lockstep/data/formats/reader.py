"""From a row of any format to its content: recognises formats, applies converters and templates, calls the readers."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from lockstep.config.data import SourceConfig
from lockstep.data.formats.conversation import (
    TURN_KEYS,
    Content,
    Conversation,
    Passage,
    TurnNames,
    describe_keys,
    parse_label,
    rename_keys,
    turn_style,
)
from lockstep.data.formats.image_parts import COLUMNS as IMAGE_COLUMNS
from lockstep.data.formats.row_formats import (
    ANSWER_KEYS,
    Rules,
    find_answer_keys,
    find_context_key,
    find_label_key,
    find_prompt_key,
    find_turns_key,
    read_alpaca,
    read_conversation,
    read_exchange,
    read_labelled,
    read_pair,
    read_prompt_completion,
    read_text,
    unread_keys,
)
from lockstep.data.sources.rows import DataError, Row

Converter = Callable[[dict[str, Any]], dict[str, Any] | None]
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]|[^{}]+")


@cache
def load_converter(setting: str) -> Converter:
    """`setting` is module:function; the module may be in the working directory."""
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
    except Exception as error:  # importing runs the user's code
        raise DataError(f"data.converter {setting!r}: {module_name} cannot be imported: {_describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        actual = "no function" if function is None else f"{type(function).__name__}, not a function, called"
        raise DataError(f"data.converter {setting!r}: {module_name} has {actual} {function_name}")
    return function


def convert(row: Row, setting: str) -> Row | None:
    """The row as the user's function returns it; None where it drops the row."""
    function = load_converter(setting)
    try:
        fields = function(copy.deepcopy(row.fields))
    except Exception as error:  # anything the user's function raises concerns this row
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
        try:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{row.origin}: {column!r} cannot be written as JSON: {error}") from error


Kind = Literal["answers", "pairs", "labelled"]
Fields = Mapping[str, Any]

KINDS: dict[str, Kind] = {
    "messages": "answers",
    "sharegpt": "answers",
    "alpaca": "answers",
    "prompt_completion": "answers",
    "text": "answers",
    "template": "answers",
    "preference": "pairs",
    "unpaired": "labelled",
}
# The keys of a row, for error messages.
_EXPECTED = {
    "preference": '"chosen", "rejected"',
    "unpaired": '"label" beside those of another format',
    "messages": '"messages" (with "role" and "content")',
    "sharegpt": '"conversations" (with "from" and "value")',
    "prompt_completion": '"prompt", "completion"',
    "alpaca": '"instruction", "output"',
    "text": '"text"',
}
_READERS: dict[str, Callable[[Row, Rules], Conversation | Passage]] = {
    "messages": read_conversation,
    "sharegpt": read_conversation,
    "prompt_completion": read_prompt_completion,
    "alpaca": read_alpaca,
    "text": read_text,
}
_BLIND = ("text", "template", "preference", "unpaired")  # formats whose rows have no images
_ALPACA_KEYS = ("instruction", "input", "output", "history")
_TEMPLATES = ("input_template", "output_template")
_ROW_KEYS = {
    *("messages", "conversations", "conversation", "system", "tools", "context", "text", "chosen", "rejected"),
    *("label", "kto_tag", "history", "instruction", "images"),
    *(key for keys in ANSWER_KEYS for key in keys),
}


def recognise_format(row: Row, source: SourceConfig) -> str | None:
    """The format's name; None where the converter drops this row."""
    if source.input_template is not None:
        return "template"
    if source.format not in (None, "auto"):
        return source.format
    names, columns = _read_names(source)
    converted = convert(row, source.converter) if source.converter else row
    if converted is None:
        return None
    fields = rename_keys(converted.fields, columns)
    return _recognise(fields, names) or _fail_to_recognise(Row(row.origin, fields))


class RowReader:
    """Reads the rows of one file, which all have the same format. Picklable: a converter is imported where it runs."""

    def __init__(
        self, source: SourceConfig, format: str, *, train_on: str, has_template: bool, sees: bool = False
    ) -> None:
        """`sees`: rows may have images."""
        self.format = "template" if source.input_template is not None else format
        assert self.format in KINDS, self.format
        names, self._columns = _read_names(source)
        self._rules = Rules(names, train_on, has_template, sees and has_template)
        self._converter = source.converter
        self._texts = {key: ColumnText(key, getattr(source, key)) for key in _TEMPLATES if self.format == "template"}
        self._last: tuple[Row, Row | None] | None = None
        if source.converter:
            load_converter(source.converter)

    def read(self, row: Row) -> Content | None:
        """None where the user's converter drops the row."""
        converted = self._convert(row)
        if converted is None:
            return None
        if self.format == "template":
            texts = {name: text.fill(converted) for name, text in self._texts.items()}
            return read_exchange(Row(row.origin, texts), _TEMPLATES, self._rules)
        prepared = Row(row.origin, rename_keys(converted.fields, self._columns))
        if not _fits(self.format, prepared.fields, self._rules.names):
            raise self._mismatch(prepared)
        if self.format == "preference":
            return read_pair(prepared, self._rules)
        if self.format == "unpaired":
            inner = _recognise_answers(prepared.fields, self._rules.names)
            assert inner is not None, "checked by _fits"
            return read_labelled(prepared, self._rules, _READERS[inner])
        return _READERS[self.format](prepared, self._rules)

    def ignored_keys(self, row: Row) -> set[str]:
        """Fields that are not used, by their names in the file."""
        converted = self._convert(row)
        if converted is None:
            return set()
        if self.format == "template":
            return converted.fields.keys() - set().union(*(text.columns for text in self._texts.values()))
        read = _keys_read(self.format, rename_keys(converted.fields, self._columns), self._rules.names)
        read |= set(IMAGE_COLUMNS if self._rules.sees and self.format not in _BLIND else ())
        renamed = {name: column for name, column in self._columns.items() if column in converted.fields}
        return converted.fields.keys() - {renamed.get(key, key) for key in read}

    def _convert(self, row: Row) -> Row | None:
        """Kept for one row: both public methods need it, and the user's function may be slow."""
        if self._converter is None:
            return row
        if self._last is None or self._last[0] is not row:
            self._last = (row, convert(row, self._converter))
        return self._last[1]

    def _mismatch(self, row: Row) -> DataError:
        looks_like = _recognise(row.fields, self._rules.names)
        own = f" (which looks like {looks_like})" if looks_like else ""
        return DataError(
            f"{row.origin}: not a row of format {self.format}: expected the keys {_EXPECTED[self.format]}, found "
            f"{describe_keys(row.fields)}{own}: use one format in a file, or set data.format or data.columns"
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_last": None}


def _read_names(source: SourceConfig) -> tuple[TurnNames, dict[str, str]]:
    """The source's names for the keys of turns, and for the keys of rows."""
    columns = source.columns or {}
    unknown = columns.keys() - _ROW_KEYS - set(TURN_KEYS)
    if unknown:
        raise DataError(
            f"data.columns: no format has {describe_keys(sorted(unknown))}: write the format's name first, then the "
            f"file's: {{prompt: question}}. Names are {', '.join(sorted(_ROW_KEYS | set(TURN_KEYS)))}"
        )
    in_turns = {name: column for name, column in columns.items() if name in TURN_KEYS}
    in_rows = {name: column for name, column in columns.items() if name not in TURN_KEYS}
    return TurnNames(source.roles or {}, in_turns), in_rows


def _recognise(fields: Fields, names: TurnNames) -> str | None:
    """Where a row fits several formats the first wins: structured ones before plain text."""
    if "chosen" in fields and "rejected" in fields:
        return "preference"
    answers = _recognise_answers(fields, names)
    label_key = find_label_key(fields)
    if answers and label_key and parse_label(fields[label_key]) is not None:
        return "unpaired"
    return answers or ("text" if "text" in fields else None)


def _recognise_answers(fields: Fields, names: TurnNames) -> str | None:
    turns_key = find_turns_key(fields)
    if turns_key:
        return turn_style(fields[turns_key], names) or ("messages" if turns_key == "messages" else "sharegpt")
    if "prompt" in fields and "completion" in fields:
        return "prompt_completion"
    if "instruction" in fields and "output" in fields:
        return "alpaca"
    return "prompt_completion" if find_answer_keys(fields, strict=True) else None


def _fits(format: str, fields: Fields, names: TurnNames) -> bool:
    """Whether the row has the keys of the format. Looser than recognition: wrong values have their own errors."""
    if format == "preference":
        return "chosen" in fields and "rejected" in fields
    if format == "unpaired":
        return find_label_key(fields) is not None and _recognise_answers(fields, names) is not None
    if format in ("messages", "sharegpt"):
        key = find_turns_key(fields)
        return key is not None and turn_style(fields[key], names) in (format, None)
    if format == "prompt_completion":
        return find_answer_keys(fields, strict=False) is not None
    if format == "alpaca":
        return "instruction" in fields and "output" in fields
    return "text" in fields


def _keys_read(format: str, fields: Fields, names: TurnNames) -> set[str]:
    """By our names, whether the row has them or not."""
    if format == "text":
        return {"text"}
    read: list[str | None] = ["system", "tools"]
    if format == "preference":
        prompt_key = find_prompt_key(fields)
        read += ["chosen", "rejected", prompt_key, "input" if prompt_key == "instruction" else None]
    elif format == "unpaired":
        inner = _recognise_answers(fields, names)
        read += [find_label_key(fields), *(_keys_read(inner, fields, names) if inner else ())]
    elif format in ("messages", "sharegpt"):
        read += [find_turns_key(fields)]
    elif format == "alpaca":
        read += _ALPACA_KEYS
    elif keys := find_answer_keys(fields, strict=False):
        read += [*keys, find_context_key(fields, keys)]
    return {key for key in read if key is not None}


def _fail_to_recognise(row: Row) -> str:
    keys = find_answer_keys(row.fields, strict=False)
    known = "; ".join(f"{name} has {expected}" for name, expected in _EXPECTED.items())
    reason = f"fit no row format ({known})"
    if keys:
        unread = describe_keys(unread_keys(row.fields, keys))
        reason = f"could be {describe_keys(keys)}, but then {unread} would be ignored"
    raise DataError(
        f"{row.origin}: the keys {describe_keys(row.fields)} {reason}: map them with data.columns, "
        "or write data.input_template and data.output_template"
    )
