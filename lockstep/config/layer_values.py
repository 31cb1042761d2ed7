"""Settings of a model whose layers may differ in them (Gemma 4)."""

from __future__ import annotations

from typing import Any


def layer_values(text: Any, name: str) -> list[Any]:
    """What the layers of a model have under this name in its configuration, each value once; of transformers' own
    attribute there is none where they differ: reading it raises. Empty: no layer has it."""
    layers = getattr(text, "per_layer_config", None) or [text]
    found = [getattr(layer, name, None) for layer in layers]
    return list(dict.fromkeys(value for value in found if value is not None))
