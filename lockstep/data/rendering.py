"""Conversations and passages as text, with the character spans to learn.

A span of a templated answer starts where generation would start and ends where the template's turn ends.
Must not know token ids: it sees only what the template writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.data.conversation import Conversation, Message, Passage
from lockstep.data.source import DataError

Span = tuple[int, int]


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that data uses."""

    chat_template: Any

    @property
    def name_or_path(self) -> str: ...
    @property
    def is_fast(self) -> bool: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def all_special_ids(self) -> Sequence[int]: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def __call__(self, text: Any, **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text with the spans to learn. `plain` text gets its BOS and EOS as token ids; a template writes its own."""

    origin: str
    text: str
    spans: tuple[Span, ...]
    plain: bool


class Template:
    """A chat template: the tokenizer's own, or one from a file."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, *, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._source = source
        self._marks_generation: bool | None = None

    def write(self, conversation: Conversation, messages: Sequence[Message], *, for_generation: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=conversation.tools,
                    chat_template=self._source,
                    add_generation_prompt=for_generation,
                    tokenize=False,
                )
            )
        except Exception as error:  # templates raise whatever they like; jinja2's own errors are not ours to import
            raise DataError(f"{conversation.origin}: {self.name} cannot render this conversation: {error}") from error

    def marks_generation(self, conversation: Conversation) -> bool:
        """Whether add_generation_prompt changes anything; asked once, of the first conversation."""
        if self._marks_generation is None:
            before = conversation.messages[: conversation.learned[0]]
            opening = self.write(conversation, before, for_generation=True)
            self._marks_generation = opening != self.write(conversation, before)
        return self._marks_generation


def load_template(tokenizer: Tokenizer, setting: str) -> Template | None:
    """`setting` is DataConfig.chat_template: auto, none, or the path of a Jinja file."""
    if setting == "none":
        return None
    if setting == "auto":
        if not tokenizer.chat_template:
            return None
        return Template(tokenizer, name=f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}")
    try:
        source = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {setting}: cannot be read: {error}: name a Jinja file") from error
    return Template(tokenizer, source, name=f"the chat template {setting}")


def render(content: Conversation | Passage, template: Template | None) -> Rendered:
    if isinstance(content, Passage):
        text = content.prompt + content.answer
        return Rendered(content.origin, text, ((len(content.prompt), len(text)),), plain=True)
    assert template is not None, "read_row makes conversations only where there is a template"
    whole = template.write(content, content.messages)
    spans = tuple(_find_turn(content, index, whole, template) for index in content.learned)
    return Rendered(content.origin, whole, spans, plain=False)


def _find_turn(conversation: Conversation, index: int, whole: str, template: Template) -> Span:
    """Where the assistant's turn lies in the whole text, from what the template writes before and up to it."""
    messages = conversation.messages
    opening = template.write(conversation, messages[:index], for_generation=True)
    closing = whole if index == len(messages) - 1 else template.write(conversation, messages[: index + 1])
    if not whole.startswith(opening):
        raise _changing(conversation, index, template, "what it writes to start that answer")
    if not whole.startswith(closing) or len(closing) <= len(opening):
        raise _changing(conversation, index, template, "what it writes up to the end of that answer")
    if not template.marks_generation(conversation):
        _check_no_header(conversation, index, closing[len(opening) :], template)
    return len(opening), len(closing)


def _changing(conversation: Conversation, index: int, template: Template, what: str) -> DataError:
    return DataError(
        f"{conversation.origin}: message {index + 1}: {template.name} does not keep {what} when the whole conversation "
        "is rendered, so the tokens to learn are not certain: set data.chat_template to a Jinja file that renders each "
        "turn alike wherever it stands, or keep one answer per row"
    )


def _check_no_header(conversation: Conversation, index: int, turn: str, template: Template) -> None:
    """Without a generation prompt the turn could start with its role header, which must not be learned."""
    content = (conversation.messages[index].get("content") or "").strip()
    if content and not turn.lstrip().startswith(content):
        raise DataError(
            f"{conversation.origin}: message {index + 1}: {template.name} ignores add_generation_prompt, so the header "
            f"before the answer ({turn[:40]!r}) cannot be told from it: add add_generation_prompt to the template"
        )
