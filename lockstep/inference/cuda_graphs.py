"""Decoding steps of fixed shape as CUDA graphs: one launch instead of hundreds.

A graph reads weights at the addresses of its capture and runs the model's code of that time. Both are checked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config

from lockstep.inference.forwards import Forward, replaced_forwards
from lockstep.inference.token_sampling import Truncation
from lockstep.model.compiled_code import keep_compiled_code
from lockstep.model.policy import every_module

Outputs = tuple[Tensor, ...]


_NUM_TRIES = 2  # of a capture


class StepGraphs:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._fingerprint: Hashable = None
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: their memory is kept by stream
        self.problem: str | None = None
        """Why steps are no longer captured, in one line."""

    @property
    def keys(self) -> set[Hashable]:
        """Of the steps that are captured."""
        return set(self._graphs)

    @property
    def is_suspended(self) -> bool:
        """A graph would read autocast's cached casts after they are freed."""
        return torch.is_autocast_enabled("cuda")

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
        if self.problem is not None or self.is_suspended:
            return step()
        if key not in self._graphs and not self._capture(key, step, state):
            return step()
        graph, outputs = self._graphs[key]
        graph.replay()
        return tuple(tensor.clone() for tensor in outputs)  # the next replay writes over them

    def _capture(self, key: Hashable, step: Callable[[], Outputs], state: Sequence[Tensor]) -> bool:
        self._warm_up(step, state)
        reason = ""
        for attempt in range(_NUM_TRIES):
            if attempt:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            try:
                with self._capturing(graph):
                    outputs = step()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) and attempt == _NUM_TRIES - 1:
                    raise
                reason = first_line(error)
                self.clear()  # what a failed capture leaves in its pool may fail the next one too
            else:
                self._graphs[key] = (graph, outputs)
                return True
        torch.cuda.synchronize()
        self.problem = reason
        return False

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As torch.cuda.graph, which frees all cached memory first: the next training step would ask for it anew, and
        a step in which a graph is captured took half as long again."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that something failed before, not what
                    graph.capture_end()
                raise
            graph.capture_end()

    def _warm_up(self, step: Callable[[], Outputs], state: Sequence[Tensor]) -> None:
        """Libraries initialise and code is compiled in the first run, which cannot be captured."""
        before = [tensor.clone() for tensor in state]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side_stream):
                step()
        finally:
            torch.cuda.current_stream().wait_stream(side_stream)
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)


def model_fingerprint(model: nn.Module) -> Hashable:
    """Addresses of all tensors, and which adapters are active. One walk: it is taken before every call."""
    tensors: list[Hashable] = []
    adapters: list[Hashable] = []
    for module in every_module(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors.append((tensor.data_ptr(), tensor.dtype, tensor.shape))
        if _has_adapters(cast("Hashable", type(module))):
            layer: Any = module
            scaling = str(getattr(layer, "scaling", None))
            adapters.append((layer.disable_adapters, layer.merged, tuple(layer.active_adapters), scaling))
    return tuple(tensors), tuple(adapters)


@functools.cache
def _has_adapters(kind: Hashable) -> bool:
    """PEFT's layers have these as properties; asking a module for an attribute that it lacks is slow."""
    return all(hasattr(kind, name) for name in ("disable_adapters", "active_adapters", "merged"))


_MAX_RECOMPILES = 64  # of the decoder layers and of sampling: for every truncation one

Draw = Callable[[Tensor, Tensor, Tensor, Truncation], Outputs]


class CompiledStep:
    """Decoder layers and sampling as compiled code, for any number of rows and any length of the cache."""

    def __init__(self, layers: Sequence[nn.Module], draw: Draw) -> None:
        keep_compiled_code()
        self._layers = list(layers)
        # By class: parameters are inputs of compiled code, so that one compilation serves all layers of a kind.
        self._compiled: dict[type, Forward] = {
            kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers}
        }
        self.draw: Draw = torch.compile(draw, dynamic=True)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Around warm-up and capture only: other shapes, such as whole prompts, would be compiled too."""
        # A layer may be compiled as a whole, for training: its own forward is put back afterwards.
        forwards: dict[nn.Module, Forward | None] = {
            layer: functools.partial(self._compiled[type(layer)], layer) for layer in self._layers
        }
        limits = torch._dynamo.config.patch(recompile_limit=_MAX_RECOMPILES, specialize_float=True)
        # Otherwise a cache that is as long as the model is wide would be compiled for that length only.
        distinct = cast("Any", shape_config).patch(use_duck_shape=False)
        with replaced_forwards(forwards), torch.compiler.set_stance("default"), limits, distinct:
            yield


class StepSpeed:
    """Seconds of a step, and what it costs when a fast way is lost: said once, when both are known."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._said = report, set[str]()
        self._fast_s: dict[int, float] = {}  # by batch size
        self.problem: str | None = None

    def note(self, seconds: float, batch_size: int, capture_problem: str | None) -> None:
        if capture_problem is not None:
            self.problem = f"decoding steps are not captured in CUDA graphs ({capture_problem})"
        if self.problem is None:
            self._fast_s[batch_size] = min(seconds, self._fast_s.get(batch_size, seconds))
        elif self.problem not in self._said:
            self._said.add(self.problem)
            before = self._fast_s.get(batch_size)
            instead = "" if before is None else f" instead of {1e3 * before:.1f}"
            self._report(f"{self.problem}: one of {batch_size} rows takes {1e3 * seconds:.1f} ms{instead}")


def first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]
