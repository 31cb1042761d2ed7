"""YAML text to a tree and the line of every key, in one pass, within bounds on what the text may cost.

Plain YAML only: no tags, no dates, no numbers to base 60, and keys that are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lockstep.config.schema import ConfigError

_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge"))
_KEYS = frozenset({_TAG + "str", _TAG + "merge"})
_MAX_DIGITS = 80
# libyaml's parser where PyYAML was built with it: ten times as fast.
_SafeLoader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Bounds:
    """Of one text. `nodes` are keys and values, those that an alias repeats counted again."""

    characters: int
    nodes: int
    depth: int = 50
    aliases: bool = True


FILE_BOUNDS = Bounds(characters=4 << 20, nodes=100_000)
REQUEST_BOUNDS = Bounds(characters=1 << 17, nodes=5_000, aliases=False)


class _Loader(_SafeLoader):  # type: ignore[misc]
    pass


_Loader.yaml_implicit_resolvers = {
    sign: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TAG + "timestamp", _TAG + "int")]
    for sign, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "int", re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)\Z"), list("-+0123456789")
)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    if len(node.value) > _MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            problem=f"a number of {len(node.value):,} digits", problem_mark=node.start_mark
        )
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor(_TAG + "int", _construct_int)


def read_yaml(text: str, source: str, bounds: Bounds = FILE_BOUNDS) -> tuple[object, dict[str, int]]:
    """The tree, and the line of every dotted key. A ConfigError says the line, where there is one."""
    if len(text) > bounds.characters:
        raise ConfigError(f"{source} has {len(text):,} characters, and {bounds.characters:,} are allowed")
    try:
        _check_events(text, source, bounds)
        return _load(text, source, bounds)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {problem}") from error
    except UnicodeError:
        raise ConfigError(f"{source}: not valid YAML: it holds half of a character") from None


def load_value(text: str) -> object:
    """One value, as an override or an option has it."""
    return read_yaml(text, "the value")[0]


def check_tree(tree: object, source: str, bounds: Bounds) -> None:
    """The same bounds for a tree that came as JSON."""
    num_nodes, waiting = 0, [(tree, 1)]
    while waiting:
        value, depth = waiting.pop()
        num_nodes += 1
        _check_counts(num_nodes, depth, source, bounds)
        children: list[object] = list(value) if isinstance(value, list) else []
        if isinstance(value, dict):
            children = [*value, *value.values()]
        if num_nodes + len(waiting) + len(children) > bounds.nodes:
            num_nodes = bounds.nodes + 1
            _check_counts(num_nodes, depth, source, bounds)
        waiting += [(child, depth + 1) for child in children]


def _check_counts(num_nodes: int, depth: int, source: str, bounds: Bounds) -> None:
    if num_nodes > bounds.nodes:
        raise ConfigError(f"{source} has more than {bounds.nodes:,} keys and values: no configuration needs as many")
    if depth > bounds.depth:
        raise ConfigError(f"{source} is nested too deeply: more than {bounds.depth} levels")


def _check_events(text: str, source: str, bounds: Bounds) -> None:
    """Before anything recursive sees the text, and no further than its bounds."""
    num_nodes = depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent):
            num_nodes += 1
            _check_counts(num_nodes, depth, source, bounds)
        if isinstance(event, yaml.AliasEvent) and not bounds.aliases:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError(f"{source}:{line}: YAML aliases (*name) are not taken over HTTP: write the values out")


def _load(text: str, source: str, bounds: Bounds) -> tuple[object, dict[str, int]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[str, int] = {}
        for number, (dotted, line, depth) in enumerate(_walk(node, source), start=1):
            _check_counts(number, depth, source, bounds)
            if dotted is not None:
                lines[dotted] = line
        try:
            return loader.construct_document(node), lines
        except (ValueError, TypeError, LookupError, AttributeError):  # !!int of what is none
            raise ConfigError(f"{source}: not valid YAML: a value is not what its tag says") from None
    finally:
        loader.dispose()


def _walk(root: yaml.Node, source: str) -> Iterator[tuple[str | None, int, int]]:
    """(dotted key, its line, depth) of every node, through aliases; the entries of lists have no dotted keys."""
    waiting: list[tuple[yaml.Node, str | None, int]] = [(root, "", 1)]
    while waiting:
        node, prefix, depth = waiting.pop()
        if node.tag not in _PLAIN:
            tag = node.tag.replace(_TAG, "!!")
            raise ConfigError(f"{source}:{node.start_mark.line + 1}: the tag {tag} is not taken: write the value alone")
        yield None, 0, depth
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, None, depth + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                _check_key(key, line, seen, source)
                dotted = None if prefix is None else f"{prefix}{key.value}"
                yield dotted, line, depth + 1
                waiting.append((value, None if dotted is None else f"{dotted}.", depth + 1))


def _check_key(key: yaml.Node, line: int, seen: dict[str, int], source: str) -> None:
    if not isinstance(key, yaml.ScalarNode) or key.tag not in _KEYS:
        shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a section"
        raise ConfigError(f"{source}:{line}: {shown} is no key: keys are words; put others into quotes")
    if key.value in seen:
        raise ConfigError(f"{source}:{line}: {key.value} was already given in line {seen[key.value]}")
    seen[key.value] = line
