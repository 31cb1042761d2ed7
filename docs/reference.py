"""Writes docs/configuration.md from the configuration classes: `make docs`. A test compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lockstep.config import RunConfig
from lockstep.config.renames import RENAMED_KEYS

TARGET = Path(__file__).with_name("configuration.md")
_OPENING = """\
# Configuration

<!-- Written by `make docs` from lockstep/config/. Change the descriptions there, not here. -->

One YAML file describes a run. What it leaves out has the default below, and `key.path=value` on the command line wins
over the file:

```sh
lockstep train lockstep.yaml optim.learning_rate=1e-4 data.train=[a.jsonl,b.jsonl] lora=null
```

- An unknown key is an error that names the nearest known one, with the file and line.
- Relative paths in the file are relative to the file; those in overrides, to the working directory.
- `model.path` is a local path if it exists, starts with `.`, `/` or `~`, or ends in `.gguf`; otherwise a Hub id.
- `model: NAME` is short for `model: {path: NAME}`, `lora: true` for `lora: {}`, `algorithm: dpo` for
  `algorithm: {kind: dpo}`. Without a `lora` section every weight is trained.
- The resolved configuration, with every default written out, is kept as `config.yaml` in the run directory.
- Former names of keys still work, and are announced once: RENAMES.
"""
_POOL_TITLE = "A pool: an entry of cluster"
_VOLUME_TITLE = "A volume: an entry of launch.volumes"
_TOLERATION_TITLE = "A toleration: an entry of launch.tolerations"
_REWARD_TITLE = "A reward: an entry of algorithm.reward"
_SOURCE_TITLE = "A source: an entry of data.train, data.validation or data.test"
_BOUNDS = (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false"}


def configuration_reference() -> str:
    """The whole page."""
    schema = RunConfig.model_json_schema()
    top = {name: field for name, field in schema["properties"].items() if _section(field, schema) is None}
    renames = ", ".join(f"`algorithm.{old}` is now `{new}`" for old, new in RENAMED_KEYS.items())
    pages = [
        _OPENING.replace("RENAMES", renames),
        _table("Top level", "", {"properties": top, "required": schema["required"]}),
    ]
    for name, field in schema["properties"].items():
        section = _section(field, schema)
        for choice in field.get("oneOf", ()):
            found = _follow(choice["$ref"], schema)
            kind = found["properties"]["kind"]["const"]
            pages.append(_table(f"{name}, kind {kind}", f"{name}.", found))
            for key, inner in found["properties"].items():
                if (nested := _section(inner, schema)) is not None:
                    title = f"{name}.{key}{_presence(key, inner, found)}"
                    pages.append(_table(title, f"{name}.{key}.", nested))
            if kind == "grpo":
                pages.append(_table(_REWARD_TITLE, "", schema["$defs"]["RewardConfig"]))
            if kind == "kubernetes":
                pages.append(_table(_VOLUME_TITLE, "", schema["$defs"]["VolumeConfig"]))
                pages.append(_table(_TOLERATION_TITLE, "", schema["$defs"]["TolerationConfig"]))
        if section is not None and "oneOf" not in field:
            pages.append(_table(f"{name}{_presence(name, field, schema)}", f"{name}.", section))
        if name == "cluster":
            pages.append(_table(_POOL_TITLE, "", schema["$defs"]["PoolConfig"]))
        if name == "data":
            pages.append(_table(_SOURCE_TITLE, "", schema["$defs"]["SourceConfig"]))
    return "\n".join(pages)


def _section(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    for candidate in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        if "$ref" in candidate:
            return _follow(candidate["$ref"], schema)
    return None


def _follow(reference: str, schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][reference.rsplit("/", 1)[-1]]
    return found


def _presence(name: str, field: dict[str, Any], schema: dict[str, Any]) -> str:
    if name in schema.get("required", ()):
        return " (required)"
    return " (off unless given)" if field.get("default", "") is None else ""


def _table(title: str, prefix: str, section: dict[str, Any]) -> str:
    lines = [f"## {title}", "", "| key | values | default | |", "|---|---|---|---|"]
    for name, field in section["properties"].items():
        required = name in section.get("required", ())
        default = "required" if required else f"`{_scalar(field['default'])}`"
        lines.append(f"| `{prefix}{name}` | {_values(field)} | {default} | {_cell(field.get('description', ''))} |")
    return "\n".join(lines) + "\n"


def _values(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return ", ".join(dict.fromkeys(_values(choice) for choice in field["anyOf"]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{_scalar(value)}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[-1].removesuffix("Config").lower()
    if field["type"] == "null":
        return "`null`"
    if field["type"] == "object":
        return "mapping"
    if field["type"] == "array":
        return f"list of {_values(field['items'])}"
    bounds = " and ".join(f"{sign} {field[key]:g}" for key, sign in _BOUNDS if key in field)
    return f"{_TYPES[field['type']]} {bounds}".strip()


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(configuration_reference(), encoding="utf-8")
    print(f"wrote {TARGET.name}")
