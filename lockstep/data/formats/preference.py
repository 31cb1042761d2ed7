"""Preference rows: two answers to one prompt, or one answer with a label. Only the last answer is learned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lockstep.data.formats.answers import (
    TURNS_KEYS,
    Rules,
    add_system,
    exchange,
    no_template,
    read_instruction,
)
from lockstep.data.formats.conversation import (
    Conversation,
    Message,
    Pair,
    Passage,
    check_answer,
    check_messages,
    parse_label,
    read_answer,
    read_prompt,
    read_tools,
    read_turn,
    read_turns,
    turn_style,
)
from lockstep.data.sources.rows import DataError, Row, json_type

LABEL_KEYS = ("kto_tag", "label")
PROMPT_KEYS = ("prompt", "question", "instruction", *TURNS_KEYS)
_SIDES = ("chosen", "rejected")
_DIALOGUE_TURN = re.compile(r"\n\n(Human|Assistant):")


def find_label_key(fields: Mapping[str, Any]) -> str | None:
    return next((key for key in LABEL_KEYS if key in fields), None)


def find_prompt_key(fields: Mapping[str, Any]) -> str | None:
    return next((key for key in PROMPT_KEYS if fields.get(key) is not None), None)


def read_labelled(
    row: Row, rules: Rules, read: Callable[[Row, Rules], Conversation | Passage]
) -> Conversation | Passage:
    """`read` reads the row without its label."""
    key = find_label_key(row.fields)
    assert key is not None, "RowReader checks the keys"
    label = parse_label(row.fields[key])
    if label is None:
        raise DataError(
            f"{row.origin}: {key!r} is {row.fields[key]!r}: it must be true or false; "
            "if it does not rate the answer, set data.format to the format of the row without it"
        )
    content = read(row, replace(rules, train_on="last"))
    if isinstance(content, Passage):
        return replace(content, label=label)
    last = max(i for i, message in enumerate(content.messages) if message["role"] == "assistant")
    check_answer(row.origin, content.messages[last], f"message {last + 1}")
    return replace(content, learned=(last,), label=label)


def read_pair(row: Row, rules: Rules) -> Pair:
    if row.fields["chosen"] == row.fields["rejected"]:
        raise DataError(f"{row.origin}: nothing to prefer: 'chosen' and 'rejected' are the same: remove the row")
    rules = replace(rules, train_on="last")
    prompt_key = find_prompt_key(row.fields)
    strings = all(isinstance(row.fields[side], str) for side in _SIDES)
    if strings and prompt_key and isinstance(row.fields[prompt_key], str):
        chosen, rejected = (_read_strings(row, prompt_key, side, rules) for side in _SIDES)
        return Pair(row.origin, chosen, rejected)
    if not rules.has_template:
        raise no_template(row.origin, "messages")
    answers = {side: _read_answer_turns(row, side, rules, with_prompt=prompt_key is None) for side in _SIDES}
    if prompt_key is not None:
        prompt = _read_prompt_turns(row, prompt_key, rules)
        answers = {side: _join_prompt(row, prompt_key, prompt, side, turns) for side, turns in answers.items()}
    _check_same_prompt(row, answers["chosen"], answers["rejected"])
    chosen, rejected = (_converse(row, side, answers[side]) for side in _SIDES)
    return Pair(row.origin, chosen, rejected)


def _read_strings(row: Row, prompt_key: str, side: str, rules: Rules) -> Conversation | Passage:
    prompt = read_instruction(row, rules) if prompt_key == "instruction" else read_prompt(row, prompt_key)
    return exchange(row, prompt, read_answer(row, side), rules)


def _read_prompt_turns(row: Row, key: str, rules: Rules) -> tuple[Message, ...]:
    if isinstance(row.fields[key], list):
        turns = read_turns(row, key, rules.names)
        if turns[-1]["role"] == "assistant":
            raise DataError(f"{row.origin}: the prompt in {key!r} ends with an answer: end it before the answers")
        return turns
    text = read_instruction(row, rules) if key == "instruction" else read_prompt(row, key)
    return ({"role": "user", "content": text},)


def _read_answer_turns(row: Row, side: str, rules: Rules, *, with_prompt: bool) -> tuple[Message, ...]:
    value = row.fields[side]
    if isinstance(value, list):
        return read_turns(row, side, rules.names)
    if isinstance(value, dict):
        style = turn_style([value], rules.names) or "messages"
        return (read_turn(value, rules.names, style, f"{row.origin}: {side!r}"),)
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: {side!r} is {json_type(value)}: it must be a string, a message or an array")
    return _read_dialogue(row, side, value) if with_prompt else ({"role": "assistant", "content": value},)


def _read_dialogue(row: Row, side: str, text: str) -> tuple[Message, ...]:
    """A conversation in one string, as in Anthropic's helpful and harmless data."""
    before, *parts = _DIALOGUE_TURN.split(text)
    if not parts or before.strip():
        raise DataError(f'{row.origin}: {side!r} is a string and there is no prompt: add the field "prompt"')
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple({"role": roles[parts[i]], "content": parts[i + 1].strip()} for i in range(0, len(parts), 2))


def _join_prompt(
    row: Row, prompt_key: str, prompt: tuple[Message, ...], side: str, turns: tuple[Message, ...]
) -> tuple[Message, ...]:
    """Answers of several messages repeat the prompt, perhaps after a system message of their own."""
    if len(turns) == 1:
        return prompt + turns
    if isinstance(row.fields[prompt_key], str):
        repeats = any(turn["role"] == "user" and turn["content"] == prompt[0]["content"] for turn in turns)
    else:
        repeats = prompt in (turns[: len(prompt)], turns[1 : len(prompt) + 1])
    if not repeats:
        raise DataError(
            f"{row.origin}: {side!r} has {len(turns)} messages that do not begin with those of {prompt_key!r}: "
            "write only the answer there, or remove the prompt field"
        )
    return turns


def _check_same_prompt(row: Row, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> None:
    for side, turns in zip(_SIDES, (chosen, rejected)):
        if turns[-1]["role"] != "assistant":
            raise DataError(
                f"{row.origin}: {side!r} ends with a {turns[-1]['role']} message: it must end with the answer"
            )
        if len(turns) < 2:
            raise DataError(f'{row.origin}: {side!r} is an answer without a prompt: add the field "prompt"')
    if chosen == rejected:
        raise DataError(f"{row.origin}: nothing to prefer: 'chosen' and 'rejected' are the same: remove the row")
    if chosen[:-1] != rejected[:-1]:
        differs = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        raise DataError(
            f"{row.origin}: 'chosen' and 'rejected' differ from message {differs + 1} on: only their last message, the "
            "answer, may differ"
        )


def _converse(row: Row, side: str, turns: tuple[Message, ...]) -> Conversation:
    messages = add_system(row, turns)
    check_messages(row.origin, messages)
    check_answer(row.origin, messages[-1], repr(side))
    return Conversation(row.origin, messages, (len(messages) - 1,), read_tools(row))
