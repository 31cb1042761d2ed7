"""Runs a chat template and tells which message each piece of its text comes from.

The template's own loops are marked as they run: markers in the output are taken out again and become spans.
Must not know tokenizers or what is learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Private-use characters. Where people write them too, the traced text is not the text that transformers renders.
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
    """What a template wrote. `tagged` is what stands inside its generation tags, in order."""

    text: str
    pieces: tuple[Piece, ...]
    tagged: tuple[tuple[int, int], ...]

    def segment(self, owner: int) -> Piece | None:
        """The one piece of a message that is not blank; None where there is none or more than one."""
        found = [p for p in self.pieces if p.owner == owner and self.text[p.start : p.end].strip()]
        return found[0] if len(found) == 1 else None


class Tracer:
    """A compiled chat template whose loops over messages leave marks."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        calls = (block.call for block in tree.find_all(nodes.CallBlock))
        self.has_tags = any(isinstance(call.node, nodes.ExtensionAttribute) for call in calls)
        self._template = environment.from_string(_mark_loops(tree, environment))

    def run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Trace:
        """Whatever a template raises goes through."""
        given = [_Owned(_with_reasoning_names(message), owner) for owner, message in enumerate(messages)]
        return _read_markers(self._template.render({**variables, "messages": given}))


# --- the template language ----------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: how an author marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as transformers has it: what is set inside stays inside.
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{_TAG_BEGINS}{_CLOSE}{caller()}{_OPEN}{_TAG_ENDS}{_CLOSE}"


def _environment() -> Environment:
    """What transformers gives to a chat template. Every row is compared with what transformers renders."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_mark.__name__] = _mark
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that is this message's alone, with its reasoning under each name that transformers gives it."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


# --- marks --------------------------------------------------------------------------------------------------------


class _Owned(dict[str, Any]):
    """A message that knows its number, wherever a template's loops meet it."""

    __slots__ = ("_owner",)

    def __init__(self, message: Mapping[str, Any], owner: int) -> None:
        super().__init__(message)
        self._owner = owner


def _mark(loop: int, *variables: Any) -> str:
    """Written at the start of each turn of a loop, with the loop's variables, and after the loop, with none."""
    for variable in variables:
        if type(variable) is _Owned:
            return f"{_OPEN}{loop}:{variable._owner}{_CLOSE}"
    return f"{_OPEN}{loop}:{_CLOSE}"


def _mark_loops(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Every loop of the tree, with a mark at the start of its body and one behind it."""
    for number, loop in enumerate(list(tree.find_all(nodes.For))):
        names = [loop.target, *loop.target.find_all(nodes.Name)]
        variables: list[nodes.Expr] = [nodes.Name(n.name, "load") for n in names if isinstance(n, nodes.Name)]
        loop.body.insert(0, _mark_node(number, variables))
        _insert_after(tree, loop, _mark_node(number, []))
    tree.set_lineno(1)
    tree.set_environment(environment)
    return tree


def _mark_node(loop: int, variables: list[nodes.Expr]) -> nodes.Output:
    # A filter, because the sandbox makes calls slow.
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
    """Take the markers out. Loops can be inside loops: text belongs to the innermost that goes over messages."""
    parts = _MARKER.split(marked)
    pieces: list[Piece] = []
    tagged: list[tuple[int, int]] = []
    turns: list[_LoopTurn] = []
    position, tag_start, writer = 0, 0, None
    for number, part in enumerate(parts):
        if number % 2 == 0:
            if part:
                turn = turns[-1] if turns else None
                # A turn goes on after a loop inside it that wrote nothing.
                start = pieces.pop().start if pieces and turn is writer else position
                position += len(part)
                pieces.append(Piece(turn.owner if turn else None, start, position))
                writer = turn
        elif part == _TAG_BEGINS:
            tag_start = position
        elif part == _TAG_ENDS:
            tagged.append((tag_start, position))
        else:
            loop, _, owner = part.partition(":")
            _leave(turns, loop)
            if owner:
                turns.append(_LoopTurn(loop, int(owner)))
    return Trace("".join(parts[::2]), tuple(pieces), tuple(tagged))


@dataclass(frozen=True, slots=True, eq=False)
class _LoopTurn:
    """One turn of a loop, told from others of the same message by being another object."""

    loop: str
    owner: int


def _leave(turns: list[_LoopTurn], loop: str) -> None:
    for depth, turn in enumerate(turns):
        if turn.loop == loop:
            del turns[depth:]
            return
