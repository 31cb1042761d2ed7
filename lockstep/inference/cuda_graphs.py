"""Decoding steps of fixed shape as CUDA graphs: one launch instead of hundreds.

A graph reads weights at the addresses of its capture and runs the model's code of that time. Both are checked.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.inference.fused_linear import Forward, replaced_forwards

Outputs = tuple[Tensor, ...]


class StepGraphs:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._fingerprint: Hashable = None
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._works = True

    @property
    def keys(self) -> set[Hashable]:
        """Of the steps that are captured."""
        return set(self._graphs)

    def clear(self) -> None:
        """The memory pool goes with its last graph: a capture into a pool without graphs fails in the allocator."""
        self._graphs.clear()
        self._pool = None

    def check(self) -> None:
        """Drop all graphs if the model's tensors moved or its adapters changed."""
        fingerprint = model_fingerprint(self._model)
        if fingerprint != self._fingerprint:
            self.clear()
            self._fingerprint = fingerprint

    def run(self, key: Hashable, step: Callable[[], Outputs], state: Sequence[Tensor]) -> Outputs:
        """The result of `step`. `key` covers everything that its shapes and code depend on; `state` are the tensors
        that it changes in place, which are restored after the warm-up run before a capture."""
        # A graph would read autocast's cached casts after they are freed.
        if not self._works or torch.is_autocast_enabled("cuda"):
            return step()
        if key not in self._graphs and not self._capture(key, step, state):
            return step()
        graph, outputs = self._graphs[key]
        graph.replay()
        return tuple(tensor.clone() for tensor in outputs)  # the next replay writes over them

    def _capture(self, key: Hashable, step: Callable[[], Outputs], state: Sequence[Tensor]) -> bool:
        before = [tensor.clone() for tensor in state]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):  # libraries initialise in the first run, which cannot be captured
            step()
        torch.cuda.current_stream().wait_stream(side_stream)
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._works = False
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"steps of this model are not captured in CUDA graphs, and slower: {reason}", stacklevel=2)
            return False
        self._graphs[key] = (graph, outputs)
        return True


def model_fingerprint(model: Any) -> Hashable:
    """Addresses of all tensors, and which adapters are active."""
    tensors = [*model.parameters(), *model.buffers()]
    adapters = [
        (module.disable_adapters, module.merged, tuple(module.active_adapters), str(getattr(module, "scaling", None)))
        for module in model.modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "active_adapters") and hasattr(module, "merged")
    ]
    return (tuple((t.data_ptr(), t.dtype, t.shape) for t in tensors), tuple(adapters))


# One for each width and batch size. Beyond the limit parts run uncompiled: slower, never wrong.
_MAX_RECOMPILES = 64


class CompiledParts:
    """Compiled forwards for the parts of layers. `attention`: modules that call the attention function, which are not
    compiled as a whole."""

    def __init__(self, layers: Sequence[nn.Module], attention: Collection[nn.Module]) -> None:
        self._layers = list(layers)
        self._parts = [part for layer in layers for part in _find_parts(layer, attention)]
        self._compiled: dict[type, Forward] = {type(part): torch.compile(type(part).forward) for part in self._parts}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Around warm-up and capture only: other shapes, such as whole prompts, would be compiled too."""
        # A layer may be compiled as a whole, for training.
        forwards: dict[nn.Module, Forward | None] = dict.fromkeys(self._layers)
        forwards |= {part: functools.partial(self._compiled[type(part)], part) for part in self._parts}
        limits = torch._dynamo.config.patch(recompile_limit=_MAX_RECOMPILES, suppress_errors=True)
        with replaced_forwards(forwards), torch.compiler.set_stance("default"), limits:
            yield


def _find_parts(module: nn.Module, attention: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if any(part in attention for part in child.modules()):
            yield from _find_parts(child, attention)
        elif module not in attention or _is_norm(child):
            yield child


def _is_norm(module: nn.Module) -> bool:
    """A leaf with scales only: compiling a single matrix product gains nothing."""
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(p.dim() == 1 for p in parameters)
