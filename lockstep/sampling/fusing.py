"""Norms and feed-forward parts as compiled kernels while a decoding step is captured on a GPU.

A captured step is as slow as its kernels are many, and most of them are the arithmetic of norms. Attention stays as it
is. Must not know slots, sampling or what a step is for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.sampling.forwards import replaced_forwards

# Every width and number of rows is a version of its own. Beyond the limit parts run uncompiled: slower, never wrong.
_MAX_VERSIONS = 64


class FusedParts:
    """`attention`: the modules that call the attention function; what lies inside them is compiled piece by piece."""

    def __init__(self, layers: Sequence[nn.Module], attention: Collection[nn.Module]) -> None:
        self._layers = list(layers)
        self._parts = [part for layer in layers for part in _find_parts(layer, attention)]
        self._compiled: dict[type, Any] = {type(part): torch.compile(type(part).forward) for part in self._parts}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Around the trial run and the capture alone: other shapes, such as whole prompts, would be versions too."""
        forwards: dict[nn.Module, Any] = dict.fromkeys(self._layers)  # a layer may be compiled as a whole, for training
        forwards |= {part: functools.partial(self._compiled[type(part)], part) for part in self._parts}
        limits = torch._dynamo.config.patch(recompile_limit=_MAX_VERSIONS, suppress_errors=True)
        with replaced_forwards(forwards), torch.compiler.set_stance("default"), limits:
            yield


def _find_parts(module: nn.Module, attention: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if any(part in attention for part in child.modules()):
            yield from _find_parts(child, attention)
        elif module not in attention or _is_norm(child):
            yield child


def _is_norm(module: nn.Module) -> bool:
    """A leaf that scales: compiling a single product brings nothing."""
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(p.dim() == 1 for p in parameters)
