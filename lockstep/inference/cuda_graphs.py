"""A step of fixed shape as a CUDA graph: launched as one thing instead of hundreds.

A graph reads weights where they were when it was captured, and does what the model did then. Both are checked.
Must not know what a step computes.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.inference.fused_linear import replaced_forwards

Outputs = tuple[Tensor, ...]


class StepGraphs:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._fingerprint: Hashable = None
        self._pool: Any = None
        self._works = True

    def clear(self) -> None:
        self._graphs.clear()

    def check(self) -> None:
        """Forget everything if the model is not where, or not what, it was."""
        fingerprint = _fingerprint(self._model)
        if fingerprint != self._fingerprint:
            self.clear()
            self._fingerprint = fingerprint

    def run(self, key: Hashable, step: Callable[[], Outputs], state: Sequence[Tensor]) -> Outputs:
        """What `step` gives. `key` names everything that its shape and its code depend on, `state` is what it changes
        in place: the trial run before a capture leaves no trace in it."""
        # Casts that autocast remembers would be read by the graph after they are gone.
        if not self._works or torch.is_autocast_enabled("cuda"):
            return step()
        if key not in self._graphs and not self._capture(key, step, state):
            return step()
        graph, outputs = self._graphs[key]
        graph.replay()
        return tuple(tensor.clone() for tensor in outputs)  # the next replay writes over them

    def _capture(self, key: Hashable, step: Callable[[], Outputs], state: Sequence[Tensor]) -> bool:
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up in the first run, which a graph cannot hold
            step()
        torch.cuda.current_stream().wait_stream(side)
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


def _fingerprint(model: Any) -> Hashable:
    """Where weights lie, and which adapters are on."""
    tensors = [*model.parameters(), *model.buffers()]
    adapters = [
        (module.disable_adapters, module.merged, tuple(module.active_adapters), str(getattr(module, "scaling", None)))
        for module in model.modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "active_adapters") and hasattr(module, "merged")
    ]
    return (tuple((t.data_ptr(), t.dtype, t.shape) for t in tensors), tuple(adapters))


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
