"""The commented starter configuration that `lockstep init` writes.

Names, defaults, choices and explanations are read from the configuration classes, so it cannot drift from them.
"""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from lockstep.config import RunConfig, sections_of
from lockstep.config.algorithm import KINDS, SHORT_KINDS

# What a person must decide. Everything else is shown commented out, with its default.
ACTIVE: dict[str, str | float] = {
    "name": "my-run",
    "model.path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "lora.rank": 16,
    "lora.alpha": 32.0,
    "data.train": "train.jsonl",
}
_HEADER = """\
# A Lockstep run: {algorithm}. Start it with: lockstep train {file}
# Lines like "#key: value" show the defaults: remove the # to change one (and the # of its section).
# Relative paths are relative to this file. Any key can be overridden: lockstep train {file} optim.epochs=3
"""


ALGORITHMS: tuple[str, ...] = (*KINDS, *SHORT_KINDS)


def starter_yaml(algorithm: str = "sft", file: str = "lockstep.yaml") -> str:
    lines = [_HEADER.format(algorithm=algorithm, file=file)]
    values = {**ACTIVE, **_algorithm_values(algorithm)}
    for name, info in RunConfig.model_fields.items():
        section = next(iter(sections_of(info.annotation)), None)
        if section is None:
            lines += _setting(info, name, "", values.get(name))
            continue
        if name == "algorithm":
            section = KINDS[str(SHORT_KINDS.get(algorithm, {"kind": algorithm})["kind"])]
        active = any(key.startswith(name + ".") for key in values)
        lines += ["", f"{_mark(active)}{name}:"]
        for key, child in section.model_fields.items():
            lines += _setting(child, key, "  ", values.get(f"{name}.{key}"))
    return "\n".join(lines) + "\n"


def _algorithm_values(algorithm: str) -> dict[str, str | float]:
    """What to write out: the kind, and the settings that a short name stands for."""
    if algorithm == "sft":
        return {}
    settings = SHORT_KINDS.get(algorithm, {"kind": algorithm})
    if settings["kind"] == "grpo":
        settings = {**settings, "reward": "numeric"}
    return {f"algorithm.{key}": value for key, value in settings.items()}


def _setting(info: FieldInfo, key: str, indent: str, active: str | float | None) -> list[str]:
    """`active` is the value to write; without one the default is shown behind a #."""
    choices = _choices(info.annotation)
    comment = " ".join(
        filter(None, [" ".join((info.description or "").split()), f"One of: {', '.join(choices)}." if choices else ""])
    )
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    lines = [f"{indent}# {comment}"] if comment else []
    return [*lines, f"{indent}{_mark(active is not None)}{key}: {_scalar(default if active is None else active)}"]


def _mark(active: bool) -> str:
    return "" if active else "#"


def _scalar(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _choices(annotation: object) -> list[str]:
    """The values of a plain choice; unions with numbers or free text speak through their description."""
    if get_origin(annotation) is Literal and len(get_args(annotation)) > 1:
        return [str(a) for a in get_args(annotation)]
    return []
