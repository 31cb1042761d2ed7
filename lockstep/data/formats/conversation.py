"""What a row says: conversations, passages and pairs; and its fields and messages, read and checked one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.formats.image_parts import IMAGE, ImageSource, read_part, read_parts
from lockstep.data.sources.rows import DataError, Row, json_type

Message = Mapping[str, Any]

# A closed list: a turn with a misspelt role would otherwise silently not be learned.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template; `learned` are the indices of the assistant turns to learn, in order.

    `label`: whether the answer is a good one, in unpaired preference data. `whole`: every token is learned.
    `images`: one for each IMAGE in the messages, in order.
    """

    origin: str
    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: list[dict[str, Any]] | None = None
    label: bool | None = None
    whole: bool = False
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """Plain text: `answer` is learned, `prompt` (which may be empty) is its context."""

    origin: str
    prompt: str
    answer: str
    label: bool | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, of which `chosen` is preferred."""

    origin: str
    chosen: Conversation | Passage
    rejected: Conversation | Passage


Content = Conversation | Passage | Pair


def check_messages(origin: str, messages: Sequence[Message]) -> None:
    """Most templates refuse a second system message, or silently drop it."""
    for number, message in enumerate(messages[1:], start=2):
        if message["role"] in SYSTEM_ROLES:
            raise DataError(
                f"{origin}: message {number} is a {message['role']} message: only the first may be one: "
                "merge it into the first, or make it a user message"
            )


def find_answers(origin: str, messages: Sequence[Message], *, first: int, last_only: bool) -> tuple[int, ...]:
    """The assistant turns to learn, of those from `first` on."""
    turns = range(first, len(messages))
    # "weight": 0 on an assistant message is how OpenAI's format marks a turn as context only.
    answers = tuple(i for i in turns if messages[i]["role"] == "assistant" and messages[i].get("weight", 1) != 0)
    if not answers:
        raise DataError(f"{origin}: nothing to learn: no assistant turn: add the answer or remove the row")
    learned = answers[-1:] if last_only else answers
    for i in learned:
        check_answer(origin, messages[i], f"message {i + 1}")
    return learned


def check_answer(origin: str, message: Message, name: str) -> None:
    texts = (message.get(key) for key in ("content", "reasoning_content", "thinking"))
    if not message.get("tool_calls") and not any(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{origin}: nothing to learn in {name}: the answer is empty: write it or remove the row")


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


def parse_label(value: object) -> bool | None:
    """None where the value is neither true nor false, as a class number or a word."""
    if isinstance(value, str):
        return _LABELS.get(value.strip().lower())
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def read_tools(row: Row) -> list[dict[str, object]] | None:
    """Tool descriptions in OpenAI's form, which chat templates expect."""
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        tools = _parse_tools(row.origin, tools)
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{row.origin}: 'tools' is {json_type(tools)}: it must be an array of tool descriptions")
    return [_read_tool(row.origin, tool, number) for number, tool in enumerate(tools or [], start=1)] or None


def parse_json(text: str) -> object:
    """JSON inside a string of a row. Raises ValueError, also for half of a surrogate pair."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse_tools(origin: str, text: str) -> object:
    if not text.strip():
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{origin}: 'tools' is a string and not JSON ({error}): write an array of tools") from error


def _read_tool(origin: str, tool: object, number: int) -> dict[str, object]:
    if not isinstance(tool, dict):
        raise DataError(f"{origin}: tool {number} of 'tools' is {json_type(tool)}: it must be an object")
    if "function" not in tool and isinstance(tool.get("name"), str) and "type" not in tool:
        return {"type": "function", "function": tool}
    return tool


def describe_keys(fields: Mapping[str, object] | Iterable[str]) -> str:
    return ", ".join(f'"{key}"' for key in fields) or "none"


# The keys of a turn, which `data.columns` may rename.
TURN_KEYS = ("role", "content", "from", "value", "tool_calls", "weight")
FUNCTION_CALL = "function_call"
_TAGS: dict[str, str] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    "function_call": FUNCTION_CALL,
}
_CALL_REMEDY = 'write {"name": ..., "arguments": {...}}, or a list of these'


@dataclass(frozen=True, slots=True)
class TurnNames:
    """The names that a source uses: `roles` by the source's tag, `columns` by our key."""

    roles: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tag, role in self.roles.items():
            if role not in (*ROLES, FUNCTION_CALL):
                raise DataError(
                    f"data.roles: {tag!r} is set to {role!r}, which is no role: use one of "
                    f"{', '.join((*ROLES, FUNCTION_CALL))}"
                )


def rename_keys(fields: Mapping[str, object], columns: Mapping[str, str]) -> dict[str, Any]:
    """The fields by our names. A renamed field hides one that already has that name."""
    if not any(column in fields for column in columns.values()):
        return dict(fields)
    taken = set(columns.values())
    kept = {key: value for key, value in fields.items() if key not in taken}
    return kept | {name: fields[column] for name, column in columns.items() if column in fields}


def turn_style(turns: object, names: TurnNames) -> str | None:
    """messages or sharegpt, judged by the first turn; None where it is neither."""
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return None
    turn = rename_keys(turns[0], names.columns)
    if "role" in turn:
        return "messages"
    return "sharegpt" if "from" in turn else None


def _parse_turns(origin: str, key: str, text: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{origin}: {key!r} is a string and not JSON ({error}): write an array of messages") from error


def read_turns(
    row: Row, key: str, names: TurnNames, *, may_be_empty: bool = False, sees: bool = False
) -> tuple[Message, ...]:
    """`sees`: messages may have images, as parts of their content. A table without arrays (CSV) has JSON text."""
    turns = row.fields[key]
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _parse_turns(row.origin, key, turns)
    if not isinstance(turns, list):
        raise DataError(f"{row.origin}: {key!r} is {json_type(turns)}: it must be an array of messages")
    if not turns and not may_be_empty:
        raise DataError(f"{row.origin}: {key!r} is empty: add messages or remove the row")
    style = turn_style(turns, names) or "messages"
    return tuple(
        read_turn(turn, names, style, f"{row.origin}: message {number} of {key!r}", sees=sees)
        for number, turn in enumerate(turns, start=1)
    )


def read_turn(turn: object, names: TurnNames, style: str, where: str, *, sees: bool = False) -> Message:
    """`style` is that of turn_style; every error starts with `where`."""
    role_key, content_key = ("from", "value") if style == "sharegpt" else ("role", "content")
    expected = f'"{role_key}" and "{content_key}"'
    if not isinstance(turn, dict):
        raise DataError(f"{where} is {json_type(turn)}: it must be an object with {expected}")
    turn = rename_keys(turn, names.columns)
    if role_key not in turn:
        raise DataError(
            f'{where} has no "{role_key}", only {describe_keys(turn)}: name the keys {expected}, or set data.columns'
        )
    role = _read_role(turn[role_key], names, style, where)
    if style == "sharegpt":
        turn = {ours: turn[key] for ours, key in (("content", "value"), ("weight", "weight")) if key in turn}
    if role == FUNCTION_CALL:
        calls = _parse_function_call(turn.get("content"), where)
        return _clean_message({**turn, "role": "assistant", "content": None, "tool_calls": calls}, where, content_key)
    return _clean_message({**turn, "role": role}, where, content_key, sees=sees)


def _read_role(tag: object, names: TurnNames, style: str, where: str) -> str:
    if not isinstance(tag, str):
        raise DataError(f"{where}: its role is {json_type(tag)}: it must be a string")
    if tag in names.roles:
        return names.roles[tag]
    if style == "messages":
        if tag not in ROLES:
            raise DataError(f"{where} has the unknown role {tag!r}: use one of {', '.join(ROLES)}, or set data.roles")
        return tag
    role = _TAGS.get(tag.lower())
    if role is None:
        raise DataError(
            f"{where} has the unknown tag {tag!r}: name its role in data.roles, for example {{{tag}: assistant}}"
        )
    return role


def _clean_message(turn: dict[str, Any], where: str, content_key: str, *, sees: bool = False) -> Message:
    """Without nulls: in a table every message has every key, and templates test whether a key exists."""
    message = {key: value for key, value in turn.items() if value is not None}
    if "weight" in message:
        message["weight"] = _read_weight(message["weight"], where)
    legacy_call = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or ([legacy_call] if legacy_call else [])
    if not isinstance(calls, list):
        raise DataError(f"{where}: its tool_calls are {json_type(calls)}: they must be an array")
    if calls:
        message["tool_calls"] = [_read_call(call, f"{where}: tool call {n}") for n, call in enumerate(calls, start=1)]
    if sees and isinstance(turn.get("content"), list):
        message["content"], message[IMAGE] = read_parts(turn["content"], f"{where}: part {{}} of its {content_key}")
    else:
        message["content"] = _read_content(turn, where, content_key, may_be_null=bool(calls))
    return message


def _read_content(turn: Mapping[str, object], where: str, key: str, *, may_be_null: bool) -> str | None:
    content = turn.get("content")
    if isinstance(content, list):
        return "".join(read_part(part, f"{where}: part {n} of its {key}") for n, part in enumerate(content, start=1))
    if isinstance(content, str) or (content is None and may_be_null):
        return content
    actual = json_type(content) if "content" in turn else "missing"
    raise DataError(f"{where}: its {key} is {actual}: it must be a string")


def _read_weight(weight: object, where: str) -> int:
    if weight not in (0, 1):
        raise DataError(f"{where} has weight {weight!r}: it must be 0 or 1")
    return 0 if weight == 0 else 1


def _read_call(call: object, where: str) -> dict[str, object]:
    if not isinstance(call, dict):
        raise DataError(f"{where} is {json_type(call)}: it must be an object with a function")
    wrapped = call if call.get("function") is not None else {"function": call}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where} has no function with a "name": write {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    arguments = function.get("arguments")
    function = function | {"arguments": {} if arguments is None else _as_object(arguments)}
    kept = {key: value for key, value in wrapped.items() if value is not None}
    return {"type": "function", **kept, "function": function}


def _as_object(arguments: object) -> object:
    """OpenAI writes arguments as a string of JSON; templates that write JSON themselves would quote it twice."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = parse_json(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _parse_function_call(value: object, where: str) -> list[object]:
    """The content of a function_call turn. The calls themselves are checked by _read_call."""
    try:
        parsed = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where} is a function call and not JSON ({error}): {_CALL_REMEDY}") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise DataError(f'{where} is a function call without "name" and "arguments": {_CALL_REMEDY}')
    return calls
