"""A YAML tree on its way to a configuration: where each key was written, repeated keys, `key.path=value` overrides.

Must not know which keys there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what, where and what to do."""


def place_of(source: str, places: Mapping[str, str], dotted: str) -> str:
    parts = dotted.split(".")
    while parts:
        place = places.get(".".join(parts))
        if place is not None:
            return place
        parts.pop()
    return source


def refuse_repeated_keys(node: yaml.Node | None, source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{source}:{line}: {key.value} was already given in line {seen[key.value]}")
            seen[key.value] = line
            refuse_repeated_keys(value, source)


def lines_of_keys(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            lines[dotted] = key.start_mark.line + 1
            lines.update(lines_of_keys(value, dotted + "."))
    return lines


def apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} was already given a plain value")
    tree[leaf] = value


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value
