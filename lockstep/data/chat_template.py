"""A chat template: rendered as transformers does, and traced to know which message wrote what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.data.formats.conversation import Conversation, Message
from lockstep.data.formats.image_parts import IMAGE
from lockstep.data.sources.rows import DataError
from lockstep.types import Tokenizer

# Templates that write today's date would give other tokens tomorrow, but a resumed run needs the same tokens.
_DATE = datetime(2025, 1, 1)
_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1""")
# Arguments of apply_chat_template that are set here and not by the user.
_RESERVED = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
_RESERVED |= {"tokenize", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"}


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """How the special tokens are written in text, the longest first."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added} - {""}, key=lambda text: (-len(text), text)))


class Template:
    """Picklable. `source` is the Jinja text as rendered: both texts where there is another one for tools."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | Mapping[str, str],
        options: Mapping[str, object],
        *,
        name: str,
        sees: bool = False,
    ) -> None:
        """`sees`: it is of a vision-language model."""
        self.name = name
        self.options = dict(options)
        self.special_texts = special_texts(tokenizer)
        self._tokenizer = tokenizer
        self._variables = {**tokenizer.special_tokens_map, "documents": None, **options}
        self._plain, self._with_tools = (_fix_date(text) for text in _choose(source, name))
        texts = dict.fromkeys((self._plain, self._with_tools))
        self.source = self._plain if len(texts) == 1 else json.dumps(list(texts))
        self._tracers: dict[str, Tracer | None] = {}
        self._apart: dict[Hashable, bool] = {}
        self._only_parts = sees and not self._writes("zq0qz")

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tracers": {}}  # compiled templates cannot be pickled

    def write(self, conversation: Conversation, messages: Sequence[Message], *, for_generation: bool = False) -> str:
        """What transformers renders."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    self._as_taken(messages),
                    tools=conversation.tools,
                    chat_template=self._text(conversation),
                    add_generation_prompt=for_generation,
                    tokenize=False,
                    **self.options,
                )
            )
        except Exception as error:  # templates raise anything
            calls = any(message.get("tool_calls") for message in messages)
            hint = " (it may not know tool calls: set data.chat_template to one that does)" if calls else ""
            raise DataError(
                f"{conversation.origin}: {self.name} cannot render this conversation: {error}{hint}"
            ) from error

    def trace(
        self, conversation: Conversation, messages: Sequence[Message], *, for_generation: bool = False
    ) -> Trace | None:
        """The same text, rendered here, with the message of each piece. None where this template cannot be traced."""
        tracer = self._tracer(conversation)
        if tracer is None:
            return None
        variables = {
            **self._variables,
            "tools": conversation.tools,
            "add_generation_prompt": for_generation,
        }
        try:
            return tracer.run(self._as_taken(messages), variables)
        except Exception:  # `write` raises a real error of the template
            return None

    def has_tags(self, conversation: Conversation) -> bool:
        """Whether the template marks what is generated with {% generation %}."""
        tracer = self._tracer(conversation)
        return tracer is not None and tracer.has_tags

    def keeps_turns_apart(self, conversation: Conversation) -> bool:
        """Whether no turn to learn contains text of another message, for conversations of this shape."""
        shape = (conversation.learned, bool(conversation.tools), tuple(map(_shape, conversation.messages)))
        if shape not in self._apart:
            markers = [f"zq{number}qz" for number in range(len(conversation.messages))]
            messages = [
                {**message, "content": IMAGE * message["content"].count(IMAGE) + marker}
                if isinstance(message.get("content"), str) and message["content"]
                else message
                for marker, message in zip(markers, conversation.messages)
            ]
            trace = self.trace(conversation, messages)
            turns = [(i, trace.segment(i)) for i in conversation.learned] if trace else []
            self._apart[shape] = trace is not None and all(
                turn is not None
                and not any(m in trace.text[turn.start : turn.end] for j, m in enumerate(markers) if j != index)
                for index, turn in turns
            )
        return self._apart[shape]

    def _as_taken(self, messages: Sequence[Message]) -> list[Message]:
        """With contents as lists of parts where there are images, and for templates that read nothing else."""
        if not self._only_parts and not any(IMAGE in (message.get("content") or "") for message in messages):
            return list(messages)
        return [
            {**message, "content": list(_parts_of(message["content"]))}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def _writes(self, text: str) -> bool:
        """Whether it writes a content that is plain text: some of vision-language models silently leave it out."""
        try:
            written = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], chat_template=self._plain, tokenize=False, **self.options
            )
        except Exception:  # templates raise anything
            return False
        return text in str(written)

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


def _parts_of(content: str) -> Iterator[dict[str, str]]:
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def load_template(
    tokenizer: Tokenizer, setting: str, options: Mapping[str, object], *, sees: bool = False
) -> Template | None:
    """`setting` is DataConfig.chat_template: auto, none, or the path of a Jinja file. `sees`: see Template."""
    if reserved := sorted(_RESERVED & options.keys()):
        raise DataError(f"data.template_options: {', '.join(reserved)} cannot be set there: remove it")
    if setting == "none":
        return None
    if setting == "auto":
        if not tokenizer.chat_template:
            return None
        name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        return Template(tokenizer, tokenizer.chat_template, options, name=name, sees=sees)
    try:
        source = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template {setting}: cannot be read: {error}: name a Jinja file") from error
    return Template(tokenizer, source, options, name=f"the chat template {setting}", sees=sees)


def _shape(message: Message) -> Hashable:
    has_image = IMAGE in (message.get("content") or "")
    return message["role"], has_image, *sorted(key for key, value in message.items() if value and key != "role")


def _choose(source: str | Mapping[str, str], name: str) -> tuple[str, str]:
    """The text for conversations without tools and the one for conversations with them."""
    if isinstance(source, str):
        return source, source
    if "default" not in source:
        raise DataError(f"{name} has the parts {', '.join(sorted(source))} and no default: set data.chat_template")
    return source["default"], source.get("tool_use", source["default"])


def _fix_date(source: str) -> str:
    """The same template with its own strftime_now, which always gives one date.

    The strftime_now of transformers cannot be replaced by a caller: options are data, not functions. A macro cannot
    format dates, so it looks up the formats that the template uses.
    """
    if "strftime_now" not in source:
        return source
    dates = {call[2]: _DATE.strftime(call[2]) for call in _DATE_CALL.finditer(source)}
    known = json.dumps(dates, ensure_ascii=False)
    # The line break belongs to the block before it, so the template still begins at the start of a line.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ {known}.get(format, '{_DATE:%Y-%m-%d}') }}}}{{% endmacro %}}\n{source}"
    )


# --- tracing: which message wrote what -----------------------------------------------------------------------------

# Private-use characters. If a row contains them, the traced text differs from what transformers renders.
_OPEN, _CLOSE = "\uf8d0", "\uf8d1"
_MARKER = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_TAG_BEGINS, _TAG_ENDS = "tag", "/tag"


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters [start, end) that the template wrote for message `owner`; None is the template's own text."""

    owner: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a template wrote. `tagged` are the spans inside its generation tags, in order."""

    text: str
    pieces: tuple[Piece, ...]
    tagged: tuple[tuple[int, int], ...]

    def segment(self, owner: int) -> Piece | None:
        """The one piece of a message that is not blank; None where there is none or more than one."""
        pieces = [p for p in self.pieces if p.owner == owner and self.text[p.start : p.end].strip()]
        return pieces[0] if len(pieces) == 1 else None


class Tracer:
    """A compiled chat template whose loops over messages write markers, which are taken out again and become spans."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        calls = (block.call for block in tree.find_all(nodes.CallBlock))
        self.has_tags = any(isinstance(call.node, nodes.ExtensionAttribute) for call in calls)
        self._template = environment.from_string(_mark_loops(tree, environment))

    def run(self, messages: Sequence[Message], variables: Mapping[str, object]) -> Trace:
        """Errors of the template are raised as they are."""
        owned = [_Owned(_with_reasoning_names(message), owner) for owner, message in enumerate(messages)]
        return _read_markers(self._template.render({**variables, "messages": owned}))


# --- the template language ----------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: variables set inside are not visible outside.
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{_TAG_BEGINS}{_CLOSE}{caller()}{_OPEN}{_TAG_ENDS}{_CLOSE}"


def _environment() -> Environment:
    """As transformers sets it up. Every traced text is compared with what transformers renders."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_mark.__name__] = _mark
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning_names(message: Message) -> dict[str, object]:
    """A copy of the message, with its reasoning under each name that transformers gives it."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


# --- markers ------------------------------------------------------------------------------------------------------


class _Owned(dict[str, Any]):
    """A message with its number, which any loop of the template can read."""

    __slots__ = ("owner",)

    def __init__(self, message: Message, owner: int) -> None:
        super().__init__(message)
        self.owner = owner


def _mark(loop: int, *variables: object) -> str:
    """The marker at the start of each iteration of a loop, with the loop's variables, and after the loop, with none."""
    for variable in variables:
        if isinstance(variable, _Owned):
            return f"{_OPEN}{loop}:{variable.owner}{_CLOSE}"
    return f"{_OPEN}{loop}:{_CLOSE}"


def _mark_loops(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Adds a marker to the start of each loop's body, and one after the loop."""
    for number, loop in enumerate(list(tree.find_all(nodes.For))):
        names = [loop.target, *loop.target.find_all(nodes.Name)]
        variables: list[nodes.Expr] = [nodes.Name(n.name, "load") for n in names if isinstance(n, nodes.Name)]
        loop.body.insert(0, _mark_node(number, variables))
        _insert_after(tree, loop, _mark_node(number, []))
    tree.set_lineno(1)
    tree.set_environment(environment)
    return tree


def _mark_node(loop: int, variables: list[nodes.Expr]) -> nodes.Output:
    # A filter, because calls are slow in the sandbox.
    return nodes.Output([nodes.Filter(nodes.Const(loop), _mark.__name__, variables, [], None, None)])


def _insert_after(tree: nodes.Node, statement: nodes.Node, new: nodes.Node) -> None:
    for parent in _walk(tree):
        for _, value in parent.iter_fields():
            if isinstance(value, list) and any(item is statement for item in value):
                value.insert(next(i for i, item in enumerate(value) if item is statement) + 1, new)
                return
    raise AssertionError("a loop is in the body of something")


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _read_markers(marked: str) -> Trace:
    """Takes the markers out. In nested loops, text belongs to the innermost one over messages."""
    parts = _MARKER.split(marked)
    pieces: list[Piece] = []
    tagged: list[tuple[int, int]] = []
    iterations: list[_Iteration] = []
    position, tag_start, writer = 0, 0, None
    for number, part in enumerate(parts):
        if number % 2 == 0:
            if part:
                iteration = iterations[-1] if iterations else None
                # An iteration continues after a loop inside it that wrote nothing.
                start = pieces.pop().start if pieces and iteration is writer else position
                position += len(part)
                pieces.append(Piece(iteration.owner if iteration else None, start, position))
                writer = iteration
        elif part == _TAG_BEGINS:
            tag_start = position
        elif part == _TAG_ENDS:
            tagged.append((tag_start, position))
        else:
            loop, _, owner = part.partition(":")
            _leave(iterations, loop)
            if owner:
                iterations.append(_Iteration(loop, int(owner)))
    return Trace("".join(parts[::2]), tuple(pieces), tuple(tagged))


@dataclass(frozen=True, slots=True, eq=False)
class _Iteration:
    """One iteration of a loop; compared by identity, as several may be over the same message."""

    loop: str
    owner: int


def _leave(iterations: list[_Iteration], loop: str) -> None:
    for depth, iteration in enumerate(iterations):
        if iteration.loop == loop:
            del iterations[depth:]
            return
