"""Rows as Llama Stack's data sets hold them, turned into rows that Lockstep's data compiler reads.

Llama Stack writes a conversation as JSON text in a column, and a table with gaps as NaN.
Must not know jobs or where rows are stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.service.errors import ServiceError

Row = dict[str, Any]
_TURNS = ("messages", "conversations", "conversation")
_PAIR = ("chosen", "rejected")


class RequestError(ServiceError):
    """A request that cannot be done. The message begins with the field or the row."""

    status = 400  # what Llama Stack answers, where the rest of the service says 422


def is_foreign(row: Mapping[str, Any]) -> bool:
    """Whether a row has columns that only Llama Stack knows."""
    return "dialog" in row or ("expected_answer" in row and ("chat_completion_input" in row or "input_query" in row))


def convert_rows(rows: Iterable[Mapping[str, Any]], name: str) -> list[Row]:
    """All rows of the data set `name`, in Lockstep's formats where Llama Stack has its own."""
    return [_convert(row, f"row {number} of data set {name}") for number, row in enumerate(rows, start=1)]


def check_format(row: Mapping[str, Any], data_format: str, name: str) -> None:
    """Refuse `dialog` for rows that hold no conversation; `row` is the first one, converted."""
    if data_format == "dialog" and not any(key in row for key in (*_TURNS, *_PAIR)):
        found = ", ".join(sorted(row)) or "none"
        raise RequestError(
            f"training_config.data_config.data_format: dialog needs rows with messages or dialog, and row 1 of data "
            f"set {name} has the columns {found}: say instruct, or register conversations"
        )


def _convert(row: Mapping[str, Any], place: str) -> Row:
    if not isinstance(row, Mapping):
        raise RequestError(f"{place}: it is {type(row).__name__}: a row must be an object")
    known = {key: value for key, value in row.items() if not _is_gap(value)}
    if "dialog" in known:
        return {"messages": _read_turns(known, "dialog", place), **_rest(known, "dialog")}
    if "expected_answer" in known and "chat_completion_input" in known:
        turns = _read_turns(known, "chat_completion_input", place)
        answer = {"role": "assistant", "content": known["expected_answer"]}
        rest = _rest(known, "chat_completion_input", "expected_answer", "input_query")
        return {"messages": [*turns, answer], **rest}
    if "expected_answer" in known and "input_query" in known:
        named = {"prompt": known["input_query"], "completion": known["expected_answer"]}
        return {**named, **_rest(known, "input_query", "expected_answer")}
    if isinstance(known.get("messages"), str):
        known["messages"] = _read_turns(known, "messages", place)
    return known


def _is_gap(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _rest(row: Row, *used: str) -> Row:
    return {key: value for key, value in row.items() if key not in used}


def _read_turns(row: Row, column: str, place: str) -> list[Any]:
    value = row[column]
    try:
        turns = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RequestError(f"{place}: {column!r} is not JSON ({error}): write a list of messages") from error
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{place}: {column!r} must be a list of messages with role and content")
    return turns
