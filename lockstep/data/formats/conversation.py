"""What a row says: a conversation for a chat template, plain text, or two answers to one prompt.

The types that readers make and renderers take, and the rules that every conversation keeps.
Must not know row formats, tokenizers, templates or where the rows are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.sources.files import DataError

Message = Mapping[str, Any]

# Closed on purpose: a turn with a misspelt role would otherwise silently not be learned.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SYSTEM_ROLES = ("system", "developer")


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


def check_messages(origin: str, messages: Sequence[Message]) -> None:
    """Most templates refuse a second system message, or drop it: neither is found out in time."""
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
