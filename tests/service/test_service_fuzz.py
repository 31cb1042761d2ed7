"""Configurations that nobody would write: every one is admitted or refused with a sentence, soon."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from service_process import tree

from lockstep.config import ConfigError, known_keys
from lockstep.service.admission import digest_of
from lockstep.service.errors import ServiceError
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import JobRequest

VALUES: list[Any] = [None, True, 0, -1, 10**400, -(2**63), 0.0, 1e308, float("nan"), float("inf"), "", " ", "x" * 5000]
VALUES += [
    "\0",
    "\ud800",
    "‮abc",
    "a\nb",
    "~",
    "~nobody/x",
    "/",
    "..",
    "*",
    "[",
    "${HOME}",
    "{{ 1 }}",
    "1:1:1",
    "dataset:",
]
VALUES += [
    "dataset:../x",
    "job:none",
    "root:none/x",
    "2020-01-01",
    "0x1f",
    "1e5",
    "auto",
    "none",
    "null",
    "module:name",
]
VALUES += [
    [],
    {},
    [[]],
    [{}],
    [None],
    {"": 1},
    {"path": None},
    {"path": ["a"]},
    {"kind": "dpo"},
    {"kind": []},
    ["a"] * 2000,
]
TEXTS = [
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "1:1:1:1",
    "9" * 5000,
    "0x" + "f" * 3000,
    "0b" + "1" * 3000,
    ".nan",
    "-.inf",
]
TEXTS += [
    "1_000",
    "~",
    "!!int x",
    "!!timestamp x",
    "!!binary x",
    "!!set {a}",
    "!!omap [a: 1]",
    "!x y",
    "&a [1]",
    "*a",
    "? b",
]
TEXTS += [
    "|\n  text",
    ">-\n  text",
    "'a",
    '"\\u0000"',
    '"\\ud800"',
    "%a",
    "@b",
    "`c",
    "a: b: c",
    "[1, {2: 3}]",
    "{<<: 1}",
    "\t- x",
]
KEYS = [
    *known_keys(),
    "",
    "x",
    "2020-01-01",
    "1",
    "true",
    "a.b",
    "model.path.x",
    "\ud800",
    "k" * 3000,
    "<<",
    "__class__",
]
MAX_CPU_S = 2.0


def set_key(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        if not isinstance(config.get(parent), dict):
            config[parent] = {}
        config = config[parent]
    config[leaf] = value


def as_text(draw: random.Random) -> str:
    lines = ["model: some/model", "data: {train: some/rows}"]
    for _ in range(draw.randrange(4)):
        key, value = draw.choice([*KEYS, *TEXTS]), draw.choice(TEXTS)
        *parents, leaf = key.split(".") if "\n" not in key else [key]
        line = "".join(f"{'  ' * depth}{parent}:\n" for depth, parent in enumerate(parents))
        lines.insert(draw.randrange(len(lines) + 1), f"{line}{'  ' * len(parents)}{leaf}: {value}")
    return "\n".join(lines)


def as_sections(draw: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(tree())
    if draw.random() < 0.5:
        config["algorithm"] = draw.choice(["dpo", "kto", {"kind": "grpo", "reward": "exact"}])
    for _ in range(draw.randrange(3)):
        set_key(config, draw.choice(KEYS), copy.deepcopy(draw.choice(VALUES)))
    return config


@pytest.mark.parametrize("make", [as_text, as_sections])
def test_any_configuration_is_admitted_or_refused_with_a_sentence(
    make: Callable[[random.Random], Any], make_manager: Callable[..., JobManager]
) -> None:
    manager, said = make_manager(), list[str]()
    for seed in range(400):
        config = make(random.Random(seed))
        began = time.process_time()
        try:
            digest_of(JobRequest(config=config))
            manager.admit(config, owner="ann")
        except (ServiceError, ConfigError) as error:
            said.append(str(error))
        except Exception as error:
            raise AssertionError(f"{config!r} ({seed}) ends in {type(error).__name__}: {error}") from error
        assert time.process_time() - began < MAX_CPU_S, config
    assert 100 < len(said) < 400
    assert max(map(len, said)) < 20_000
    json.dumps(said).encode()  # answers can be made of them
