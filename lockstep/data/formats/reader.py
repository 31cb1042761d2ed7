"""Row formats: which one a row has, and the reader of a file's rows.

Recognised from the first row, after the converter and the names of columns that the configuration gives.
Must not know tokenizers, templates or where the rows are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lockstep.config.data import SourceConfig
from lockstep.data.formats.answers import (
    ANSWER_KEYS,
    Rules,
    find_answer_keys,
    find_context_key,
    find_turns_key,
    read_alpaca,
    read_conversation,
    read_exchange,
    read_prompt_completion,
    read_text,
    unread_words,
)
from lockstep.data.formats.conversation import Content, Conversation, Passage
from lockstep.data.formats.converter import ColumnText, convert, fill_templates, load_converter
from lockstep.data.formats.fields import describe_keys, parse_label
from lockstep.data.formats.messages import TURN_KEYS, TurnNames, rename_keys, turn_style
from lockstep.data.formats.preference import find_label_key, find_prompt_key, read_labelled, read_pair
from lockstep.data.sources.files import DataError, Row

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
# What a row of the format has, in words for errors.
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
_ALPACA_KEYS = ("instruction", "input", "output", "history")
_TEMPLATES = ("input_template", "output_template")
_ROW_KEYS = {
    *("messages", "conversations", "conversation", "system", "tools", "context", "text", "chosen", "rejected"),
    *("label", "kto_tag", "history", "instruction"),
    *(key for keys in ANSWER_KEYS for key in keys),
}


def recognise_format(row: Row, source: SourceConfig) -> str | None:
    """The format's name; None where the converter leaves this row out, so that another has to tell."""
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
    """Reads the rows of one file, which all have the same format. Pickles: a converter is imported where it runs."""

    def __init__(self, source: SourceConfig, format: str, *, train_on: str, has_template: bool) -> None:
        self.format = "template" if source.input_template is not None else format
        assert self.format in KINDS, self.format
        names, self._columns = _read_names(source)
        self._rules = Rules(names, train_on, has_template)
        self._converter = source.converter
        self._texts = {key: ColumnText(key, getattr(source, key)) for key in _TEMPLATES if self.format == "template"}
        self._last: tuple[Row, Row | None] | None = None
        if source.converter:
            load_converter(source.converter)

    def read(self, row: Row) -> Content | None:
        """None where the user's converter leaves the row out."""
        converted = self._convert(row)
        if converted is None:
            return None
        if self.format == "template":
            return read_exchange(fill_templates(converted, self._texts), _TEMPLATES, self._rules)
        prepared = Row(row.origin, rename_keys(converted.fields, self._columns))
        if not _fits(self.format, prepared.fields, self._rules.names):
            raise self._mismatch(prepared)
        if self.format == "preference":
            return read_pair(prepared, self._rules)
        if self.format == "unpaired":
            inner = _recognise_answers(prepared.fields, self._rules.names)
            assert inner is not None, "_fits asks for it"
            return read_labelled(prepared, self._rules, _READERS[inner])
        return _READERS[self.format](prepared, self._rules)

    def ignored_keys(self, row: Row) -> set[str]:
        """Fields that nothing reads, by the names of the file."""
        converted = self._convert(row)
        if converted is None:
            return set()
        if self.format == "template":
            return converted.fields.keys() - set().union(*(text.columns for text in self._texts.values()))
        read = _keys_read(self.format, rename_keys(converted.fields, self._columns), self._rules.names)
        renamed = {name: column for name, column in self._columns.items() if column in converted.fields}
        return converted.fields.keys() - {renamed.get(key, key) for key in read}

    def _convert(self, row: Row) -> Row | None:
        """Kept for one row: both public calls ask for it, and the user's function may be slow."""
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def _read_names(source: SourceConfig) -> tuple[TurnNames, dict[str, str]]:
    """What the source calls the keys of turns, and what it calls the keys of rows."""
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
    """Where a row fits several formats the first wins: structure says more than plain text."""
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
    """Whether the row has what the format needs. Looser than recognition: what is wrong inside has its own error."""
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
    """By our names, whether or not the row has them."""
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
        unread = describe_keys(unread_words(row.fields, keys))
        reason = f"could be {describe_keys(keys)}, but then {unread} would not be read"
    raise DataError(
        f"{row.origin}: the keys {describe_keys(row.fields)} {reason}: say what they are with data.columns, "
        "or write data.input_template and data.output_template"
    )
