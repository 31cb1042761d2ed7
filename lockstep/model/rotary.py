"""Rotary positions whose frequencies depend on the length of a text: longrope, dynamic NTK.

transformers chooses them by the largest position of a whole batch, and dynamic NTK also by earlier ones. Here every
text gets those of its own length, as if it were computed alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MAX_KNOWN = 256  # sets of frequencies that are kept


class LengthRule(NamedTuple):
    """Texts of at most `limit` tokens have the original frequencies."""

    kind: str  # longrope or dynamic
    limit: int

    def group(self, length: int) -> int:
        """Equal for lengths that have the same frequencies: longrope has two sets, dynamic NTK one for each length."""
        if length <= self.limit:
            return 0
        return 1 if self.kind == "longrope" else length


class TextSpan(NamedTuple):
    """Consecutive tokens of texts with this length."""

    num_tokens: int
    length: int


class RotaryByLength:
    """Of all rotary embeddings of one model. Outside of `texts` and `next_tokens` the model is transformers' own."""

    def __init__(self) -> None:
        self.rules: tuple[LengthRule, ...] = ()
        self._spans: Sequence[TextSpan] | None = None
        self._known: dict[tuple[nn.Module, str | None, int, torch.device], Tensor] = {}
        self._is_next = False

    @classmethod
    def of(cls, model: nn.Module) -> RotaryByLength:
        """The same object for every caller; puts itself in front of the model's rotary embeddings."""
        found = {module: rules for module in model.modules() if (rules := _rules_of(module))}
        for module in found:
            if isinstance(module.forward, _ForEachText):
                return module.forward.rotary
        rotary = cls()
        rotary.rules = tuple(dict.fromkeys(rule for rules in found.values() for rule in rules.values()))
        for module in found:
            module.forward = _ForEachText(rotary, module)
        return rotary

    def group(self, length: int) -> tuple[int, ...]:
        """Equal for lengths that have the same frequencies everywhere in the model."""
        return tuple(rule.group(length) for rule in self.rules)

    def steps_in_group(self, length: int) -> int | None:
        """How many lengths from this one on have its frequencies; None: all."""
        ahead = [rule.limit - length + 1 for rule in self.rules if length <= rule.limit]
        ahead += [1 for rule in self.rules if length > rule.limit and rule.kind != "longrope"]
        return min(ahead, default=None)

    @property
    def longest_decoded(self) -> int | None:
        """Where keys that are cached would have to change with every token; None: nowhere."""
        return min((rule.limit for rule in self.rules if rule.kind != "longrope"), default=None)

    @contextlib.contextmanager
    def texts(self, spans: Sequence[TextSpan]) -> Iterator[None]:
        """Around a pass over these tokens, one after the other in a row."""
        if not self.rules:
            yield
            return
        self._spans = self._join(spans)
        try:
            yield
        finally:
            self._spans = None

    @contextlib.contextmanager
    def next_tokens(self) -> Iterator[None]:
        """Around a pass in which every token is the last of its text."""
        self._is_next = True
        try:
            yield
        finally:
            self._is_next = False

    def _join(self, spans: Sequence[TextSpan]) -> list[TextSpan]:
        joined: list[TextSpan] = []
        for span in spans:
            if joined and self.group(joined[-1].length) == self.group(span.length):
                joined[-1] = TextSpan(joined[-1].num_tokens + span.num_tokens, span.length)
            else:
                joined.append(span)
        return joined

    def compute(self, module: Any, x: Tensor, positions: Tensor, layer: str | None) -> object:
        """What `module` gives for positions [..., T]: tensors [..., T, dim]."""
        rule = _rules_of(module).get(layer)
        if rule is None or (self._spans is None and not self._is_next):
            return _own_forward(module, x, positions, layer)

        def at_length(part: Tensor, length: int) -> object:
            frequencies = self._frequencies(module, layer, rule, length, x.device)
            with _installed(module, layer, frequencies):
                return _own_forward(module, x, part, layer)

        if self._spans is not None:
            parts = positions.split([span.num_tokens for span in self._spans], dim=-1)
            outputs = [at_length(part, span.length) for part, span in zip(parts, self._spans, strict=True)]
            return outputs[0] if len(outputs) == 1 else _combine(lambda *p: torch.cat(p, dim=-2), *outputs)
        original = at_length(positions, rule.limit)
        if rule.kind != "longrope":  # texts beyond its limit are not decoded token by token
            return original
        is_long = (positions >= rule.limit)[..., None]
        extended = at_length(positions, rule.limit + 1)
        return _combine(lambda a, b: torch.where(is_long, a, b), extended, original)

    def _frequencies(
        self, module: Any, layer: str | None, rule: LengthRule, length: int, device: torch.device
    ) -> Tensor:
        """As transformers computes them for a text of this length."""
        key = (module, layer, rule.group(length), device)
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = _compute_frequencies(module, layer, rule, length).to(device)
        return self._known[key]


class _ForEachText:
    """The forward of a rotary embedding."""

    def __init__(self, rotary: RotaryByLength, module: nn.Module) -> None:
        self.rotary, self._module = rotary, module
        self.own = module.forward

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> object:
        return self.rotary.compute(self._module, x, position_ids, layer_type)


def _own_forward(module: Any, x: Tensor, positions: Tensor, layer: str | None) -> object:
    return module.forward.own(x, positions, **({} if layer is None else {"layer_type": layer}))


@contextlib.contextmanager
def _installed(module: Any, layer: str | None, frequencies: Tensor) -> Iterator[None]:
    """The module computes with these, without looking at positions to choose others."""
    name = "inv_freq" if layer is None else f"{layer}_inv_freq"
    kinds, buffer = module.rope_type, module._buffers[name]
    module.rope_type = "default" if layer is None else {**kinds, layer: "default"}
    module._buffers[name] = frequencies
    try:
        yield
    finally:
        module.rope_type, module._buffers[name] = kinds, buffer


def _compute_frequencies(module: Any, layer: str | None, rule: LengthRule, length: int) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not rule.group(length):
        original: Tensor = getattr(module, "original_inv_freq" if layer is None else f"{layer}_original_inv_freq")
        return original
    kind = module.rope_type if layer is None else module.rope_type[layer]
    # A tensor, as transformers passes it: the base is then rounded to float32.
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, seq_len=torch.tensor(length), **({} if layer is None else {"layer_type": layer})
    )
    return frequencies


def _rules_of(module: Any) -> dict[str | None, LengthRule]:
    """By type of layer; None where all have one. Read as transformers' dynamic_rope_update reads them."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or not hasattr(module, "original_max_seq_len"):
        return {}
    rules: dict[str | None, LengthRule] = {}
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            settings = parameters if layer is None else parameters[layer]
            rules[layer] = LengthRule("longrope", settings["original_max_position_embeddings"])
        elif kind and "dynamic" in kind:
            rules[layer] = LengthRule("dynamic", module.original_max_seq_len)
    return rules


def _combine(function: Any, *outputs: Any) -> object:
    """Of each tensor where an embedding returns several, such as cosines and sines."""
    if isinstance(outputs[0], Tensor):
        return function(*outputs)
    return tuple(function(*tensors) for tensors in zip(*outputs, strict=True))
