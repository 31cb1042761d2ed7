"""One field of a row at a time, checked: strings, prompts, answers, tools, labels.

Every error names the row and the field. Must not know which format a row has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.data.sources.files import DataError, Row, json_type

_LABELS = {"true": True, "false": False, "1": True, "0": False}


def read_string(row: Row, key: str) -> str:
    value = row.fields[key]
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: {key!r} is {json_type(value)}: it must be a string")
    return value


def read_optional(row: Row, key: str) -> str:
    """Empty where the field is absent, null or blank."""
    if row.fields.get(key) is None:
        return ""
    value = read_string(row, key)
    return value if value.strip() else ""


def read_prompt(row: Row, key: str) -> str:
    value = read_string(row, key)
    if not value.strip():
        raise DataError(f'{row.origin}: {key!r} is empty: write a prompt, or use rows with only "text"')
    return value


def read_answer(row: Row, key: str) -> str:
    value = read_string(row, key)
    if not value.strip():
        raise DataError(f"{row.origin}: nothing to learn: {key!r} is empty: write the answer or remove the row")
    return value


def parse_label(value: Any) -> bool | None:
    """None where the value is no judgement: a class number or a word."""
    if isinstance(value, str):
        return _LABELS.get(value.strip().lower())
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def read_tools(row: Row) -> list[Any] | None:
    """Tool descriptions in OpenAI's shape, which is what chat templates are written for."""
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        tools = _parse_tools(row.origin, tools)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{row.origin}: 'tools' is {json_type(tools)}: it must be an array of tool descriptions")
    return [_read_tool(row.origin, tool, number) for number, tool in enumerate(tools or [], start=1)] or None


def parse_json(text: str) -> Any:
    """JSON inside a string of a row. Raises ValueError, also for half a character: no tokenizer takes one."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse_tools(origin: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{origin}: 'tools' is a string and not JSON ({error}): write an array of tools") from error


def _read_tool(origin: str, tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise DataError(f"{origin}: tool {number} of 'tools' is {json_type(tool)}: it must be an object")
    if "function" not in tool and isinstance(tool.get("name"), str) and "type" not in tool:
        return {"type": "function", "function": tool}
    return tool


def describe_keys(fields: Mapping[str, Any] | Iterable[str]) -> str:
    return ", ".join(f'"{key}"' for key in fields) or "none"
