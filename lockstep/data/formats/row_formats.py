"""The row formats: messages, ShareGPT, Alpaca, prompt and completion, text, preference pairs and labelled answers.

Each reader returns conversations where there is a chat template to render them, otherwise plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.data.formats.conversation import (
    SYSTEM_ROLES,
    Conversation,
    Message,
    Pair,
    Passage,
    TurnNames,
    check_answer,
    check_messages,
    find_answers,
    parse_label,
    read_answer,
    read_optional,
    read_prompt,
    read_string,
    read_tools,
    read_turn,
    read_turns,
    turn_style,
)
from lockstep.data.formats.image_parts import gather_images, refuse_images
from lockstep.data.sources.rows import DataError, Row, json_type

_TURNS_KEYS = ("messages", "conversations", "conversation")
# Names that are clear enough where a row has no other key for a question or an answer.
ANSWER_KEYS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("input", "output"),
    ("instruction", "response"),
)
_CONTEXT_KEYS = ("context", "input")
_CONTENT_KEYS = {*(key for keys in ANSWER_KEYS for key in keys), *_CONTEXT_KEYS}
_LABEL_KEYS = ("kto_tag", "label")
_PROMPT_KEYS = ("prompt", "question", "instruction", *_TURNS_KEYS)
_SIDES = ("chosen", "rejected")
_DIALOGUE_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class Rules:
    """How the rows of a source are read. `train_on` is that of the data section. `sees`: rows may have images."""

    names: TurnNames
    train_on: str
    has_template: bool
    sees: bool = False

    @property
    def whole(self) -> bool:
        return self.train_on == "all"


def find_turns_key(fields: Mapping[str, object]) -> str | None:
    return next((key for key in _TURNS_KEYS if key in fields), None)


def find_answer_keys(fields: Mapping[str, object], *, strict: bool) -> tuple[str, str] | None:
    """The prompt's and the answer's key. `strict`: only where no other field looks like content."""
    if "prompt" in fields and "completion" in fields:
        return ANSWER_KEYS[0]
    matches = [keys for keys in ANSWER_KEYS if keys[0] in fields and keys[1] in fields]
    if len(matches) != 1:
        return None
    if strict and unread_keys(fields, matches[0]):
        return None
    return matches[0]


def find_context_key(fields: Mapping[str, object], keys: tuple[str, str]) -> str | None:
    """Dolly's `context`, which Alpaca calls input, belongs to the prompt."""
    present = [key for key in _CONTEXT_KEYS if fields.get(key) is not None]
    return present[0] if keys == ("instruction", "response") and len(present) == 1 else None


def unread_keys(fields: Mapping[str, object], keys: tuple[str, str]) -> list[str]:
    """Fields that look like part of a question or an answer but would be ignored."""
    read = {*keys, find_context_key(fields, keys)}
    return [key for key, value in fields.items() if key in _CONTENT_KEYS and key not in read and value is not None]


def read_conversation(row: Row, rules: Rules) -> Conversation:
    key = find_turns_key(row.fields)
    assert key is not None, "RowReader checks the keys"
    return _converse(row, (), read_turns(row, key, rules.names, sees=rules.sees), rules)


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
        before = _read_side(row, prompt_key, "user", rules)
        return _converse(row, before, _read_side(row, answer_key, "assistant", rules), rules)
    prompt, answer = read_prompt(row, prompt_key), read_answer(row, answer_key)
    context_key = find_context_key(row.fields, keys)
    prompt = _join_texts(prompt, read_optional(row, context_key) if context_key else "")
    return _exchange(row, prompt, answer, rules)


def read_alpaca(row: Row, rules: Rules) -> Conversation | Passage:
    prompt, answer = _read_instruction(row, rules), read_answer(row, "output")
    history = _read_history(row)
    if not history:
        return _exchange(row, prompt, answer, rules)
    if not rules.has_template:
        raise _no_template(row.origin, "earlier turns in 'history'")
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return _converse(row, (), (*history, *turns), rules)


def _read_instruction(row: Row, rules: Rules) -> str:
    """Alpaca's instruction and input as one prompt; without a chat template, under headings instead."""
    instruction, context = read_string(row, "instruction"), read_optional(row, "input")
    if not context:
        read_prompt(row, "instruction")
    if rules.has_template:
        return _join_texts(instruction, context)
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


def _read_side(row: Row, key: str, role: str, rules: Rules) -> tuple[Message, ...]:
    if isinstance(row.fields[key], list):
        return read_turns(row, key, rules.names, may_be_empty=role == "user", sees=rules.sees)
    return ({"role": role, "content": read_string(row, key)},)


def _join_texts(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def _exchange(row: Row, prompt: str, answer: str, rules: Rules) -> Conversation | Passage:
    """One question and its answer, both strings."""
    if rules.has_template:
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        return _converse(row, turns[:1], turns[1:], rules)
    if read_tools(row):
        raise _no_template(row.origin, "tools")
    return Passage(row.origin, _join_texts(read_optional(row, "system"), prompt), answer, whole=rules.whole)


def _converse(row: Row, before: tuple[Message, ...], after: tuple[Message, ...], rules: Rules) -> Conversation:
    """A conversation of which only answers in `after` are learned."""
    if not rules.has_template:
        raise _no_template(row.origin, "messages")
    messages = _add_system(row, before + after)
    check_messages(row.origin, messages)
    first = len(messages) - len(after)
    messages, images = gather_images(row, messages) if rules.sees else (messages, ())
    learned = find_answers(row.origin, messages, first=first, last_only=rules.train_on == "last")
    return Conversation(row.origin, messages, learned, read_tools(row), whole=rules.whole, images=images)


def _add_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The row's `system` field, where it has one, as the first message."""
    system = read_optional(row, "system")
    if not system:
        return messages
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        raise DataError(f"{row.origin}: there is a 'system' field and a system message: keep one of them")
    return ({"role": "system", "content": system}, *messages)


def _no_template(origin: str, what: str) -> DataError:
    return DataError(
        f"{origin}: {what} need a chat template and there is none: set data.chat_template to a Jinja file, "
        "use a tokenizer that has one, or write rows as prompt and completion strings"
    )


# --- preferences: only the last answer is learned ---------------------------------------------------------------------


def find_label_key(fields: Mapping[str, object]) -> str | None:
    return next((key for key in _LABEL_KEYS if key in fields), None)


def find_prompt_key(fields: Mapping[str, object]) -> str | None:
    return next((key for key in _PROMPT_KEYS if fields.get(key) is not None), None)


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
    if rules.sees:
        refuse_images(row)
    content = read(row, replace(rules, train_on="last", sees=False))
    if isinstance(content, Passage):
        return replace(content, label=label)
    last = max(i for i, message in enumerate(content.messages) if message["role"] == "assistant")
    check_answer(row.origin, content.messages[last], f"message {last + 1}")
    return replace(content, learned=(last,), label=label)


def read_pair(row: Row, rules: Rules) -> Pair:
    if row.fields["chosen"] == row.fields["rejected"]:
        raise DataError(f"{row.origin}: nothing to prefer: 'chosen' and 'rejected' are the same: remove the row")
    if rules.sees:
        refuse_images(row)
    rules = replace(rules, train_on="last", sees=False)
    prompt_key = find_prompt_key(row.fields)
    strings = all(isinstance(row.fields[side], str) for side in _SIDES)
    if strings and prompt_key and isinstance(row.fields[prompt_key], str):
        chosen, rejected = (_read_strings(row, prompt_key, side, rules) for side in _SIDES)
        return Pair(row.origin, chosen, rejected)
    if not rules.has_template:
        raise _no_template(row.origin, "messages")
    answers = {side: _read_answer_turns(row, side, rules, with_prompt=prompt_key is None) for side in _SIDES}
    if prompt_key is not None:
        prompt = _read_prompt_turns(row, prompt_key, rules)
        answers = {side: _join_prompt(row, prompt_key, prompt, side, turns) for side, turns in answers.items()}
    _check_same_prompt(row, answers["chosen"], answers["rejected"])
    chosen, rejected = (_converse_side(row, side, answers[side]) for side in _SIDES)
    return Pair(row.origin, chosen, rejected)


def _read_strings(row: Row, prompt_key: str, side: str, rules: Rules) -> Conversation | Passage:
    prompt = _read_instruction(row, rules) if prompt_key == "instruction" else read_prompt(row, prompt_key)
    return _exchange(row, prompt, read_answer(row, side), rules)


def _read_prompt_turns(row: Row, key: str, rules: Rules) -> tuple[Message, ...]:
    if isinstance(row.fields[key], list):
        turns = read_turns(row, key, rules.names)
        if turns[-1]["role"] == "assistant":
            raise DataError(f"{row.origin}: the prompt in {key!r} ends with an answer: end it before the answers")
        return turns
    text = _read_instruction(row, rules) if key == "instruction" else read_prompt(row, key)
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


def _converse_side(row: Row, side: str, turns: tuple[Message, ...]) -> Conversation:
    messages = _add_system(row, turns)
    check_messages(row.origin, messages)
    check_answer(row.origin, messages[-1], repr(side))
    return Conversation(row.origin, messages, (len(messages) - 1,), read_tools(row))
