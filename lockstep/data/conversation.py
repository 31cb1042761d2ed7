"""What a row says: a conversation for a chat template, or a passage of plain text.

Recognises the row formats and checks every field a format needs.
Must not know tokenizers, templates or where the rows are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.data.source import DataError, Row, json_type

Message = Mapping[str, Any]

# Keys a row must have. Where a row fits several formats the first wins: structure says more than plain text.
REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "prompt_completion": ("tools",),
    "alpaca": ("input",),
    "text": (),
}
# Closed on purpose: a turn with a misspelt role would otherwise silently not be learned.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template; `learned` are the indices of the assistant turns to learn, in order.

    `label`: whether people liked the answer, in unpaired preference data. `whole`: every token is learned.
    """

    origin: str
    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: list[Any] | None = None
    label: bool | None = None
    whole: bool = False


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
    """Two answers to one prompt, of which people preferred `chosen`."""

    origin: str
    chosen: Conversation | Passage
    rejected: Conversation | Passage


Content = Conversation | Passage | Pair


def recognise_format(row: Row) -> str:
    for name, keys in REQUIRED_KEYS.items():
        if all(key in row.fields for key in keys):
            return name
    known = "; ".join(f"{name} has {_quote(keys)}" for name, keys in REQUIRED_KEYS.items())
    raise DataError(
        f"{row.origin}: the keys {_quote(row.fields)} fit no row format ({known}): rename the keys of the file"
    )


def ignored_keys(row: Row, format: str) -> set[str]:
    return row.fields.keys() - {*REQUIRED_KEYS[format], *_OPTIONAL_KEYS[format]}


def read_row(row: Row, format: str, *, has_template: bool) -> Conversation | Passage:
    """A conversation where a chat template can render it, otherwise plain text."""
    missing = [key for key in REQUIRED_KEYS[format] if key not in row.fields]
    if missing:
        raise DataError(
            f"{row.origin}: not a row of format {format}: expected the keys {_quote(REQUIRED_KEYS[format])}, found "
            f"{_quote(row.fields)}: use one format in a file, or set data.format"
        )
    if format == "text":
        return Passage(row.origin, "", _read_answer(row, "text"))
    if format == "alpaca":
        return _read_alpaca(row, has_template=has_template)
    if format == "messages":
        messages = _read_messages(row, "messages", min_length=1)
        return _converse(row, messages, learned_from=0, has_template=has_template)
    return _read_prompt_completion(row, has_template=has_template)


def _read_alpaca(row: Row, *, has_template: bool) -> Conversation | Passage:
    instruction, answer = _read_prompt(row, "instruction"), _read_answer(row, "output")
    context = _read_string(row, "input") if row.fields.get("input") is not None else ""
    if has_template:
        return _exchange(row, f"{instruction}\n\n{context}" if context.strip() else instruction, answer)
    parts = ["Carry out the following instruction.", f"### Instruction:\n{instruction}"]
    if context.strip():
        parts.append(f"### Input:\n{context}")
    return Passage(row.origin, "\n\n".join([*parts, "### Response:\n"]), answer)


def _read_prompt_completion(row: Row, *, has_template: bool) -> Conversation | Passage:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _read_turns(row, "prompt", role="user")
        after = _read_turns(row, "completion", role="assistant")
        return _converse(row, before + after, learned_from=len(before), has_template=has_template)
    prompt, answer = _read_prompt(row, "prompt"), _read_answer(row, "completion")
    return _exchange(row, prompt, answer) if has_template else Passage(row.origin, prompt, answer)


def _read_turns(row: Row, key: str, *, role: str) -> tuple[Message, ...]:
    if isinstance(row.fields[key], list):
        return _read_messages(row, key, min_length=1 if key == "completion" else 0)
    return ({"role": role, "content": _read_string(row, key)},)


def _exchange(row: Row, prompt: str, answer: str) -> Conversation:
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Conversation(row.origin, messages, (1,), _read_tools(row))


def _converse(row: Row, messages: tuple[Message, ...], *, learned_from: int, has_template: bool) -> Conversation:
    if not has_template:
        raise DataError(
            f"{row.origin}: messages need a chat template and there is none: set data.chat_template to a Jinja file, "
            "use a tokenizer that has one, or write rows as prompt and completion strings"
        )
    turns = range(learned_from, len(messages))
    # "weight": 0 on an assistant message is how OpenAI's format marks a turn as context only.
    learned = tuple(i for i in turns if messages[i]["role"] == "assistant" and messages[i].get("weight", 1) != 0)
    if not learned:
        raise DataError(f"{row.origin}: nothing to learn: no assistant turn: add the answer or remove the row")
    for i in learned:
        if not _has_substance(messages[i]):
            raise DataError(
                f"{row.origin}: nothing to learn in message {i + 1}: the answer is empty: write it or remove the row"
            )
    return Conversation(row.origin, messages, learned, _read_tools(row))


def _has_substance(message: Message) -> bool:
    texts = (message.get(key) for key in ("content", "reasoning_content", "thinking"))
    return bool(message.get("tool_calls")) or any(isinstance(t, str) and t.strip() for t in texts)


def _read_messages(row: Row, key: str, *, min_length: int) -> tuple[Message, ...]:
    messages = row.fields[key]
    if not isinstance(messages, list):
        raise DataError(f"{row.origin}: {key!r} is {json_type(messages)}: it must be an array of messages")
    if len(messages) < min_length:
        raise DataError(f"{row.origin}: {key!r} is empty: add messages or remove the row")
    for number, message in enumerate(messages, start=1):
        _check_message(message, f"{row.origin}: message {number} of {key!r}")
    return tuple(messages)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f'{where} is {json_type(message)}: it must be an object with "role" and "content"')
    role, content = message.get("role"), message.get("content")
    if "role" not in message:
        raise DataError(f'{where} has no "role", only {_quote(message)}: name the keys "role" and "content"')
    if role not in _ROLES:
        raise DataError(f"{where} has the unknown role {role!r}: use one of {', '.join(_ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        found = json_type(content) if "content" in message else "missing"
        raise DataError(f"{where}: its content is {found}: it must be a string")
    if "weight" in message and message["weight"] not in (0, 1):
        raise DataError(f"{where} has weight {message['weight']!r}: it must be 0 or 1")


def _read_tools(row: Row) -> list[Any] | None:
    tools = row.fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{row.origin}: 'tools' is {json_type(tools)}: it must be an array of tool descriptions")
    return tools or None


def _read_string(row: Row, key: str) -> str:
    value = row.fields[key]
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: {key!r} is {json_type(value)}: it must be a string")
    return value


def _read_prompt(row: Row, key: str) -> str:
    value = _read_string(row, key)
    if not value.strip():
        raise DataError(f'{row.origin}: {key!r} is empty: write a prompt, or use rows with only "text"')
    return value


def _read_answer(row: Row, key: str) -> str:
    value = _read_string(row, key)
    if not value.strip():
        raise DataError(f"{row.origin}: nothing to learn: {key!r} is empty: write the answer or remove the row")
    return value


def _quote(keys: Any) -> str:
    return ", ".join(f'"{key}"' for key in keys) or "none"
