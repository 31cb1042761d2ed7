"""Rows rendered as text, with the spans of the answers to learn.

An answer starts where generation would start and ends where the template's turn ends. Found by tracing the template;
where the trace is not certain, by rendering the conversation again up to each answer; otherwise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from lockstep.data.chat_template import Piece, Template, Trace
from lockstep.data.formats.conversation import Content, Conversation, Message, Pair, Passage
from lockstep.data.sources.rows import DataError
from lockstep.types import ImageRef

# Replace an answer to find the header before it: they must not start with the same letter.
_PLACEHOLDERS = ("alpha", "beta")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Span(NamedTuple):
    """Characters to learn. `ends_turn` is False where more of the same answer follows."""

    start: int
    end: int
    ends_turn: bool = True


def find_answers(conversation: Conversation, text: str, template: Template) -> tuple[tuple[Span, ...], int]:
    """The spans to learn in `text`, and how many of the answers do not start with the generation prompt."""
    traced = _trace_turns(conversation, text, template)
    if traced is None:
        if template.has_tags(conversation):
            raise DataError(
                f"{conversation.origin}: {template.name} marks what is generated, but not certainly in which "
                "message: set data.chat_template to a Jinja file that loops over messages once"
            )
        return tuple(_find_by_prefix(conversation, i, text, template) for i in conversation.learned), 0
    trace, turns = traced
    if template.has_tags(conversation):
        return _find_by_tags(conversation, trace, turns, template), 0
    return _find_by_header(conversation, trace, turns, template)


# --- by tracing the template ----------------------------------------------------------------------------------------


def _trace_turns(conversation: Conversation, text: str, template: Template) -> tuple[Trace, list[Piece]] | None:
    """The turns to learn, each the one piece of text written for its message; None where that is not certain."""
    trace = template.trace(conversation, conversation.messages)
    if trace is None or trace.text != text:
        return None
    turns = [turn for index in conversation.learned if (turn := trace.segment(index)) is not None]
    if len(turns) < len(conversation.learned) or not template.keeps_turns_apart(conversation):
        return None
    return trace, turns


def _find_by_tags(conversation: Conversation, trace: Trace, turns: list[Piece], template: Template) -> tuple[Span, ...]:
    """What the template's author tagged, in the turns to learn."""
    spans: list[Span] = []
    for index, turn in zip(conversation.learned, turns):
        inside: list[tuple[int, int]] = []
        for start, end in trace.tagged:
            if not turn.start <= start < end <= turn.end:
                continue
            if inside and inside[-1][1] == start:
                inside[-1] = (inside[-1][0], end)
            else:
                inside.append((start, end))
        if not inside:
            raise DataError(
                f"{conversation.origin}: message {index + 1}: {template.name} marks nothing of it as generated: move "
                "its {% generation %} tags around the answer"
            )
        spans.extend(Span(a, b, ends_turn=number == len(inside)) for number, (a, b) in enumerate(inside, start=1))
    return tuple(spans)


def _find_by_header(
    conversation: Conversation, trace: Trace, turns: list[Piece], template: Template
) -> tuple[tuple[Span, ...], int]:
    """Each turn without the header that generation would start from."""
    prompts: dict[str, str | None] = {}  # by the role before the answer, as templates look no further back
    headers: list[str | None] | None = None
    spans, num_unprompted = [], 0
    for number, (index, turn) in enumerate(zip(conversation.learned, turns)):
        written = trace.text[turn.start : turn.end]
        role = conversation.messages[index - 1]["role"] if index else ""
        if role not in prompts:
            prompts[role] = _generation_prompt(conversation, index, written, template)
        prompt = prompts[role]
        if prompt and written.startswith(prompt):
            start = turn.start + len(prompt)
        elif not prompt and _starts_with_content(conversation.messages[index], written):
            start = turn.start
        else:
            headers = headers or _headers(conversation, template)
            header = headers[number]
            if header is not None and _is_start(header, prompt, written):
                start = turn.start + len(header) if prompt else turn.start
                num_unprompted += prompt is not None and not header.endswith(prompt)
            else:
                start = _start_by_prefix(conversation, index, trace, turn, prompt, template)
        spans.append(Span(start, _end_of_turn(conversation, index, trace, turn, template)))
    return tuple(spans), num_unprompted


def _generation_prompt(conversation: Conversation, index: int, written: str, template: Template) -> str | None:
    """What the template writes after the messages before `index` to start an answer; None if not certain.

    `written` is that answer's turn.
    """
    # A template cannot render zero messages: there the prompt is what would follow the answer itself.
    before = conversation.messages[:index] or conversation.messages[:1]
    prompted = template.trace(conversation, before, for_generation=True)
    if prompted is None:
        return None
    tail = prompted.text[_end_of_messages(prompted) :]
    if tail and tail != prompted.text and written.startswith(tail):
        return tail
    unprompted = template.trace(conversation, before)
    if unprompted is None:
        return None
    if prompted.text == unprompted.text:
        return ""
    # Some write the prompt inside the loop over messages; some write a tail such as an EOS only without the prompt.
    end = _end_of_messages(unprompted) or len(unprompted.text)
    return prompted.text[end:] if prompted.text.startswith(unprompted.text[:end]) else None


def _end_of_messages(trace: Trace) -> int:
    return max((piece.end for piece in trace.pieces if piece.owner is not None), default=0)


def _starts_with_content(message: Message, written: str) -> bool:
    content = (message.get("content") or "").strip()
    return bool(content) and written.lstrip().startswith(content)


def _headers(conversation: Conversation, template: Template) -> list[str | None]:
    """What the template writes before each answer, independent of the answer."""
    traces = []
    for placeholder in _PLACEHOLDERS:
        messages = list(conversation.messages)
        for index in conversation.learned:
            kept = {k: v for k, v in messages[index].items() if k not in (*_REASONING, "tool_calls")}
            messages[index] = {**kept, "content": placeholder}
        traces.append(template.trace(conversation, messages))
    first, second = traces
    if first is None or second is None:
        return [None] * len(conversation.learned)
    headers: list[str | None] = []
    for index in conversation.learned:
        pieces = [(trace, trace.segment(index)) for trace in (first, second)]
        written = [trace.text[piece.start : piece.end] for trace, piece in pieces if piece is not None]
        headers.append(_common_start(*written) if len(written) == 2 else None)
    return headers


def _common_start(first: str, second: str) -> str:
    return first[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))]


def _is_start(header: str, prompt: str | None, written: str) -> bool:
    """Whether an answer starts after `header`: it is part of the generation prompt, or at least starts like it.

    Templates that drop or empty the reasoning of earlier answers write less there, or something else after one line.
    """
    if not prompt:
        return prompt is not None and not header.strip()
    return (
        bool(header)
        and written.startswith(header)
        and (prompt.startswith(header) or header.endswith(prompt) or "\n" in _common_start(header, prompt))
    )


def _end_of_turn(conversation: Conversation, index: int, trace: Trace, turn: Piece, template: Template) -> int:
    """The end of the piece; for the last message, of the special token after it if the piece has none at its end."""
    if index < len(conversation.messages) - 1 or trace.text[turn.start : turn.end].rstrip().endswith(
        template.special_texts
    ):
        return turn.end
    tail = trace.text[turn.end :]
    closing = next((t for t in template.special_texts if tail.lstrip().startswith(t)), "")
    return len(trace.text) - len(tail.lstrip()) + len(closing) if closing else turn.end


def _uncertain(
    conversation: Conversation, index: int, written: str, prompt: str | None, template: Template
) -> DataError:
    where = f"{conversation.origin}: message {index + 1}: {template.name}"
    if not prompt:
        return DataError(
            f"{where} ignores add_generation_prompt, so the header before the answer ({written[:40]!r}) cannot be "
            "separated from it: add add_generation_prompt to the template"
        )
    return DataError(
        f"{where} writes {written[:40]!r} where generation would start with {prompt!r}, so the tokens to learn are not "
        "certain: set data.chat_template to a Jinja file that starts every answer with its generation prompt"
    )


# --- by rendering up to each answer -----------------------------------------------------------------------------------


def _find_by_prefix(conversation: Conversation, index: int, text: str, template: Template) -> Span:
    messages = conversation.messages
    opening = template.write(conversation, messages[:index], for_generation=True)
    closing = text if index == len(messages) - 1 else template.write(conversation, messages[: index + 1])
    if not text.startswith(opening):
        raise _changing(conversation, index, template, "what it writes to start that answer")
    if not text.startswith(closing) or len(closing) <= len(opening):
        raise _changing(conversation, index, template, "what it writes up to the end of that answer")
    turn = closing[len(opening) :]
    if opening == template.write(conversation, messages[:index]) and not _starts_with_content(messages[index], turn):
        raise _uncertain(conversation, index, turn, None, template)
    return Span(len(opening), len(closing))


def _start_by_prefix(
    conversation: Conversation, index: int, trace: Trace, turn: Piece, prompt: str | None, template: Template
) -> int:
    """Where the text continues after exactly what generation would be given; an error if it does not."""
    opening = template.trace(conversation, conversation.messages[:index], for_generation=True)
    start = len(opening.text) if opening else 0
    written = trace.text[turn.start : turn.end]
    if opening is None or not trace.text.startswith(opening.text) or not turn.start <= start < turn.end:
        raise _uncertain(conversation, index, written, prompt, template)
    if not prompt and not _starts_with_content(conversation.messages[index], trace.text[start : turn.end]):
        raise _uncertain(conversation, index, written, prompt, template)
    return start


def _changing(conversation: Conversation, index: int, template: Template, what: str) -> DataError:
    return DataError(
        f"{conversation.origin}: message {index + 1}: {template.name} does not keep {what} when the whole conversation "
        "is rendered, so the tokens to learn are not certain: set data.chat_template to a Jinja file that renders "
        "each turn independently of what follows, or keep one answer per row"
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """One text of a row with the spans to learn, in order.

    `num_unprompted` answers do not start with the whole generation prompt. `images` are the characters [start, end) of
    each image, which are never learned.
    """

    text: str
    spans: tuple[Span, ...]
    num_unprompted: int = 0
    images: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text: one variant, or two (chosen, rejected) for a pair.

    `plain` text gets its BOS and EOS as token ids; a template writes its own. `has_prompt`: the row has something
    before the answer. `written` are the strings of the row, without what a template adds. `unwritten`: it has parts
    that the template knows nothing of. `images` are in the order of their places in the text; their tokens are not
    counted yet.
    """

    origin: str
    variants: tuple[Variant, ...]
    plain: bool
    has_prompt: bool
    written: tuple[str, ...]
    label: bool | None = None
    images: tuple[ImageRef, ...] = ()
    unwritten: bool = False


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
            unwritten=chosen.unwritten or rejected.unwritten,
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
        unwritten=_has_unwritten(conversation, template),
    )


def _has_unwritten(conversation: Conversation, template: Template) -> bool:
    """Whether the row has tools, tool calls or reasoning, and the template does not even name them.

    One that writes messages whole (as JSON, or key by key) needs no names.
    """
    source = template.source
    if "tojson" in source or ".items(" in source:
        return False

    def has(*names: str) -> bool:
        return any(message.get(name) for message in conversation.messages for name in names)

    return (
        (bool(conversation.tools) and "tools" not in source)
        or (has("tool_calls") and "tool_calls" not in source)
        or (has(*_REASONING) and not any(name in source for name in _REASONING))
    )


def _strings(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (dict, list, tuple)):
            yield from _strings(item)
