"""Every configuration key is read by something: a setting that does nothing would be silently ignored.

Found by name, in the syntax trees of the package outside config/: a key counts as read where its last part is an
attribute that is read, or a string (for `getattr` over a list of names). A property, method or function of config/ that
is used outside passes on what it reads. What this cannot see: whether the attribute belongs to the configuration (a key
named like some other attribute, such as `path`, always counts), and whether what is read has an effect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from lockstep.config import RunConfig

PACKAGE = Path(__file__).resolve().parents[3] / "lockstep"


def leaf_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that holds a value, those inside the entries of lists too."""
    for name, info in section.model_fields.items():
        children = [kind for kind in nested(info.annotation) if kind is not section]
        if not children:
            yield prefix + name
        for child in children:
            yield from leaf_keys(child, f"{prefix}{name}.")


def nested(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from nested(argument)


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Attributes that are read, functions that are called or imported, and strings."""
    names: set[str] = set()
    for node in nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                names.add(child.attr)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                names.add(child.value)
            elif isinstance(child, ast.ImportFrom):
                names |= {alias.name for alias in child.names}
    return names


def is_validator(function: ast.FunctionDef) -> bool:
    return any("validator" in ast.unparse(decorator) for decorator in function.decorator_list)


def read_outside_config() -> set[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    names = names_read(tree for path, tree in trees.items() if PACKAGE / "config" not in path.parents)
    functions = [
        node
        for path, tree in trees.items()
        if PACKAGE / "config" in path.parents
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not is_validator(node)
    ]
    while reached := [function for function in functions if function.name in names]:
        functions = [function for function in functions if function not in reached]
        names |= names_read(reached)
    return names


def test_every_key_is_read_outside_config():
    read = read_outside_config()
    unread = sorted({key for key in leaf_keys(RunConfig) if key.rsplit(".", 1)[-1] not in read})
    assert not unread, f"nothing reads {', '.join(unread)}: use them, or remove them"


def test_a_key_that_nothing_reads_is_found():
    class Longer(RunConfig):
        never_read_by_anything: int = 0

    assert "never_read_by_anything" in list(leaf_keys(Longer))
    assert "never_read_by_anything" not in read_outside_config()
    keys = set(leaf_keys(RunConfig))
    assert {"data.train.path", "algorithm.reward.weight", "cluster.cpus", "algorithm.group_size"} <= keys
