"""What a row says as text, with the character spans to learn.

Must not know token ids: it sees only what people and templates write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.data.formats.conversation import Content, Conversation, Pair, Passage
from lockstep.data.text.template import Template, Tokenizer, load_template
from lockstep.data.text.turns import Span, find_answers

__all__ = ["Rendered", "Span", "Template", "Tokenizer", "Variant", "load_template", "render"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One text of a row with the spans to learn, in order.

    `num_unprompted` answers start after less than what the template writes to start an answer in generation.
    """

    text: str
    spans: tuple[Span, ...]
    num_unprompted: int = 0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text: one variant, or two (chosen, rejected) for a pair.

    `plain` text gets its BOS and EOS as token ids; a template writes its own. `has_prompt`: people wrote something
    before the answer. `written` are their own words, without what a template adds.
    """

    origin: str
    variants: tuple[Variant, ...]
    plain: bool
    has_prompt: bool
    written: tuple[str, ...]
    label: bool | None = None


def render(content: Content, template: Template | None) -> Rendered:
    if isinstance(content, Pair):
        chosen, rejected = render(content.chosen, template), render(content.rejected, template)
        assert chosen.plain == rejected.plain, "both answers of a pair are of one kind"
        return Rendered(
            content.origin,
            chosen.variants + rejected.variants,
            plain=chosen.plain,
            has_prompt=chosen.has_prompt,
            written=chosen.written + rejected.written,
        )
    if isinstance(content, Passage):
        return _render_passage(content)
    assert template is not None, "rows are read as conversations only where there is a template"
    return _render_conversation(content, template)


def _render_passage(passage: Passage) -> Rendered:
    text = passage.prompt + passage.answer
    variant = Variant(text, (Span(0 if passage.whole else len(passage.prompt), len(text)),))
    return Rendered(
        passage.origin,
        (variant,),
        plain=True,
        has_prompt=bool(passage.prompt) and not passage.whole,
        written=(passage.prompt, passage.answer),
        label=passage.label,
    )


def _render_conversation(conversation: Conversation, template: Template) -> Rendered:
    text = template.write(conversation, conversation.messages)
    if conversation.whole:
        variant = Variant(text, (Span(0, len(text)),))
    else:
        variant = Variant(text, *find_answers(conversation, text, template))
    before = conversation.messages[: conversation.learned[0]]
    return Rendered(
        conversation.origin,
        (variant,),
        plain=False,
        has_prompt=not conversation.whole and any(m["role"] not in ("system", "developer") for m in before),
        written=tuple(_strings(conversation.messages)),
        label=conversation.label,
    )


def _strings(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (dict, list, tuple)):
            yield from _strings(item)
