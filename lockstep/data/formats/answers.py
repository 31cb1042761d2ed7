"""Rows with one conversation or one text to learn: messages, ShareGPT, Alpaca, prompt and completion, text.

Each reader returns a conversation where there is a chat template to render it, otherwise plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.data.formats.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    Passage,
    TurnNames,
    check_messages,
    find_answers,
    read_answer,
    read_optional,
    read_prompt,
    read_string,
    read_tools,
    read_turns,
)
from lockstep.data.sources.rows import DataError, Row, json_type

TURNS_KEYS = ("messages", "conversations", "conversation")
# Names that are clear enough where a row has no other key for a question or an answer.
ANSWER_KEYS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("input", "output"),
    ("instruction", "response"),
)
CONTEXT_KEYS = ("context", "input")
_CONTENT_KEYS = {*(key for keys in ANSWER_KEYS for key in keys), *CONTEXT_KEYS}


@dataclass(frozen=True, slots=True)
class Rules:
    """How the rows of a source are read. `train_on` is that of the data section."""

    names: TurnNames
    train_on: str
    has_template: bool

    @property
    def whole(self) -> bool:
        return self.train_on == "all"


def find_turns_key(fields: Mapping[str, Any]) -> str | None:
    return next((key for key in TURNS_KEYS if key in fields), None)


def find_answer_keys(fields: Mapping[str, Any], *, strict: bool) -> tuple[str, str] | None:
    """The prompt's and the answer's key. `strict`: only where no other field looks like content."""
    if "prompt" in fields and "completion" in fields:
        return ANSWER_KEYS[0]
    matches = [keys for keys in ANSWER_KEYS if keys[0] in fields and keys[1] in fields]
    if len(matches) != 1:
        return None
    if strict and unread_keys(fields, matches[0]):
        return None
    return matches[0]


def find_context_key(fields: Mapping[str, Any], keys: tuple[str, str]) -> str | None:
    """Dolly's `context`, which Alpaca calls input, belongs to the prompt."""
    present = [key for key in CONTEXT_KEYS if fields.get(key) is not None]
    return present[0] if keys == ("instruction", "response") and len(present) == 1 else None


def unread_keys(fields: Mapping[str, Any], keys: tuple[str, str]) -> list[str]:
    """Fields that look like part of a question or an answer but would be ignored."""
    read = {*keys, find_context_key(fields, keys)}
    return [key for key, value in fields.items() if key in _CONTENT_KEYS and key not in read and value is not None]


def read_conversation(row: Row, rules: Rules) -> Conversation:
    key = find_turns_key(row.fields)
    assert key is not None, "RowReader checks the keys"
    return converse(row, (), read_turns(row, key, rules.names), rules)


def read_text(row: Row, rules: Rules) -> Passage:
    return Passage(row.origin, "", read_answer(row, "text"), whole=rules.whole)


def read_prompt_completion(row: Row, rules: Rules) -> Conversation | Passage:
    keys = find_answer_keys(row.fields, strict=False)
    assert keys is not None, "RowReader checks the keys"
    return read_exchange(row, keys, rules)


def read_exchange(row: Row, keys: tuple[str, str], rules: Rules) -> Conversation | Passage:
    """A prompt and an answer, each a string or a list of messages."""
    prompt_key, answer_key = keys
    if isinstance(row.fields[prompt_key], list) or isinstance(row.fields[answer_key], list):
        before = _read_side(row, prompt_key, "user", rules.names)
        return converse(row, before, _read_side(row, answer_key, "assistant", rules.names), rules)
    prompt, answer = read_prompt(row, prompt_key), read_answer(row, answer_key)
    context_key = find_context_key(row.fields, keys)
    prompt = join_texts(prompt, read_optional(row, context_key) if context_key else "")
    return exchange(row, prompt, answer, rules)


def read_alpaca(row: Row, rules: Rules) -> Conversation | Passage:
    prompt, answer = read_instruction(row, rules), read_answer(row, "output")
    history = _read_history(row)
    if not history:
        return exchange(row, prompt, answer, rules)
    if not rules.has_template:
        raise no_template(row.origin, "earlier turns in 'history'")
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return converse(row, (), (*history, *turns), rules)


def read_instruction(row: Row, rules: Rules) -> str:
    """Alpaca's instruction and input as one prompt; without a chat template, under headings instead."""
    instruction, context = read_string(row, "instruction"), read_optional(row, "input")
    if not context:
        read_prompt(row, "instruction")
    if rules.has_template:
        return join_texts(instruction, context)
    parts = ["Carry out the following instruction.", f"### Instruction:\n{instruction}"]
    if context:
        parts.append(f"### Input:\n{context}")
    return "\n\n".join([*parts, "### Response:\n"])


def _read_history(row: Row) -> tuple[Message, ...]:
    history = row.fields.get("history") or []
    if not isinstance(history, list):
        raise DataError(f"{row.origin}: 'history' is {json_type(history)}: it must be an array of [question, answer]")
    turns: list[Message] = []
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{row.origin}: entry {number} of 'history' must be two strings: [question, answer]")
        turns += ({"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]})
    return tuple(turns)


def _read_side(row: Row, key: str, role: str, names: TurnNames) -> tuple[Message, ...]:
    if isinstance(row.fields[key], list):
        return read_turns(row, key, names, may_be_empty=role == "user")
    return ({"role": role, "content": read_string(row, key)},)


def join_texts(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def exchange(row: Row, prompt: str, answer: str, rules: Rules) -> Conversation | Passage:
    """One question and its answer, both strings."""
    if rules.has_template:
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return converse(row, turns[:1], turns[1:], rules)
    if read_tools(row):
        raise no_template(row.origin, "tools")
    return Passage(row.origin, join_texts(read_optional(row, "system"), prompt), answer, whole=rules.whole)


def converse(row: Row, before: tuple[Message, ...], after: tuple[Message, ...], rules: Rules) -> Conversation:
    """A conversation of which only answers in `after` are learned."""
    if not rules.has_template:
        raise no_template(row.origin, "messages")
    messages = add_system(row, before + after)
    check_messages(row.origin, messages)
    first = len(messages) - len(after)
    learned = find_answers(row.origin, messages, first=first, last_only=rules.train_on == "last")
    return Conversation(row.origin, messages, learned, read_tools(row), whole=rules.whole)


def add_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The row's `system` field, where it has one, as the first message."""
    system = read_optional(row, "system")
    if not system:
        return messages
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        raise DataError(f"{row.origin}: there is a 'system' field and a system message: keep one of them")
    return ({"role": "system", "content": system}, *messages)


def no_template(origin: str, what: str) -> DataError:
    return DataError(
        f"{origin}: {what} need a chat template and there is none: set data.chat_template to a Jinja file, "
        "use a tokenizer that has one, or write rows as prompt and completion strings"
    )
