"""A chat template: the tokenizer's own or one from a file, with its options.

Writes conversations the way transformers does, always on the same date, and traces which message wrote what.
Must not know token ids or what is learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from lockstep.data.formats.conversation import Conversation, Message
from lockstep.data.sources.files import DataError
from lockstep.data.tracing import Trace, Tracer

# Templates that write today's date would give other tokens tomorrow, and a resumed run must find the same.
_DATE = datetime(2025, 1, 1)
_ASKED_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1""")
# Arguments of apply_chat_template that decide what it is asked: they are not the user's to set.
_RESERVED = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
_RESERVED |= {"tokenize", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"}


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
    def all_special_tokens(self) -> Sequence[str]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def __call__(self, text: Any, **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> str: ...


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """How the special tokens are written in text, the longest first."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added} - {""}, key=lambda text: (-len(text), text)))


class Template:
    """Picklable. `source` is the Jinja text as it is rendered; where there is one for tools and one without, both."""

    def __init__(
        self, tokenizer: Tokenizer, source: str | Mapping[str, str], options: Mapping[str, Any], *, name: str
    ) -> None:
        self.name = name
        self.options = dict(options)
        self.special_texts = special_texts(tokenizer)
        self._tokenizer = tokenizer
        self._variables = {**tokenizer.special_tokens_map, "documents": None, **options}
        self._plain, self._with_tools = (_fix_date(text) for text in _choose(source, name))
        texts = dict.fromkeys((self._plain, self._with_tools))
        self.source = self._plain if len(texts) == 1 else json.dumps(list(texts))
        self._tracers: dict[str, Tracer | None] = {}
        self._apart: dict[Any, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tracers": {}}  # compiled templates cannot be pickled

    def write(self, conversation: Conversation, messages: Sequence[Message], *, for_generation: bool = False) -> str:
        """What transformers renders."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=conversation.tools,
                    chat_template=self._text(conversation),
                    add_generation_prompt=for_generation,
                    tokenize=False,
                    **self.options,
                )
            )
        except Exception as error:  # templates raise whatever they like
            calls = any(message.get("tool_calls") for message in messages)
            hint = " (it may not know tool calls: set data.chat_template to one that does)" if calls else ""
            raise DataError(
                f"{conversation.origin}: {self.name} cannot render this conversation: {error}{hint}"
            ) from error

    def trace(
        self, conversation: Conversation, messages: Sequence[Message], *, for_generation: bool = False
    ) -> Trace | None:
        """The same text, rendered here, with who wrote what. None where this template cannot be run here."""
        tracer = self._tracer(conversation)
        if tracer is None:
            return None
        variables = {
            **self._variables,
            "tools": conversation.tools,
            "add_generation_prompt": for_generation,
        }
        try:
            return tracer.run(messages, variables)
        except Exception:  # what is wrong with it, if anything, transformers says too
            return None

    def has_tags(self, conversation: Conversation) -> bool:
        """Whether the author marked what is generated with {% generation %}."""
        tracer = self._tracer(conversation)
        return tracer is not None and tracer.has_tags

    def keeps_apart(self, conversation: Conversation) -> bool:
        """Whether no turn to learn holds the words of another message, for conversations of this shape."""
        shape = (conversation.learned, bool(conversation.tools), tuple(map(_shape, conversation.messages)))
        if shape not in self._apart:
            words = [f"zq{number}qz" for number in range(len(conversation.messages))]
            messages = [
                {**message, "content": word}
                if isinstance(message.get("content"), str) and message["content"]
                else message
                for word, message in zip(words, conversation.messages)
            ]
            trace = self.trace(conversation, messages)
            turns = [(i, trace.segment(i)) for i in conversation.learned] if trace else []
            self._apart[shape] = trace is not None and all(
                turn is not None
                and not any(w in trace.text[turn.start : turn.end] for j, w in enumerate(words) if j != index)
                for index, turn in turns
            )
        return self._apart[shape]

    def _text(self, conversation: Conversation) -> str:
        return self._with_tools if conversation.tools else self._plain

    def _tracer(self, conversation: Conversation) -> Tracer | None:
        text = self._text(conversation)
        if text not in self._tracers:
            try:
                self._tracers[text] = Tracer(text)
            except TemplateError:
                self._tracers[text] = None
        return self._tracers[text]


def load_template(tokenizer: Tokenizer, setting: str, options: Mapping[str, Any]) -> Template | None:
    """`setting` is DataConfig.chat_template: auto, none, or the path of a Jinja file."""
    if reserved := sorted(_RESERVED & options.keys()):
        raise DataError(f"data.template_options: {', '.join(reserved)} cannot be set there: remove it")
    if setting == "none":
        return None
    if setting == "auto":
        if not tokenizer.chat_template:
            return None
        name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        return Template(tokenizer, tokenizer.chat_template, options, name=name)
    try:
        source = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {setting}: cannot be read: {error}: name a Jinja file") from error
    return Template(tokenizer, source, options, name=f"the chat template {setting}")


def _shape(message: Message) -> tuple[Any, ...]:
    return message["role"], *sorted(key for key, value in message.items() if value and key != "role")


def _choose(source: str | Mapping[str, str], name: str) -> tuple[str, str]:
    """The text for conversations without tools and the one for conversations with them."""
    if isinstance(source, str):
        return source, source
    if "default" not in source:
        raise DataError(f"{name} has the parts {', '.join(sorted(source))} and no default: set data.chat_template")
    return source["default"], source.get("tool_use", source["default"])


def _fix_date(source: str) -> str:
    """The same template with strftime_now of its own, which always gives one date.

    transformers gives templates a strftime_now and lets no caller replace it: options are data, not functions.
    A macro cannot format dates, so it knows the answers for the formats that the template asks for.
    """
    if "strftime_now" not in source:
        return source
    answers = {found[2]: _DATE.strftime(found[2]) for found in _ASKED_DATE.finditer(source)}
    known = json.dumps(answers, ensure_ascii=False)
    # The line break goes with the block before it, so that the template still begins at the start of a line.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ {known}.get(format, '{_DATE:%Y-%m-%d}') }}}}{{% endmacro %}}\n{source}"
    )
