"""Parts of a model that mix tokens by themselves: state-space layers, convolutions, attention of their own.

They know no packed documents. Here they compute each document of a packed row alone, while everything around them
computes the whole row. Which parts these are is measured, not known by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.model.attention import PackedLayout


class Leaf(NamedTuple):
    """How the size of a tensor in a call depends on the number of tokens.

    `structural`: it depends on the places in a row and on nothing else, as a causal mask does.
    """

    token_dims: tuple[int, ...]
    structural: bool


class _Text(NamedTuple):
    """A segment of a row and the prompt before it: [start, stop) of each."""

    prompt: tuple[int, int]
    own: tuple[int, int]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self if stop > start]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


Arguments = Callable[[PackedLayout], dict[str, Any]]
"""What attention is told about a row with this layout."""


class TokenMixers:
    """Of one model. Outside of `documents` all parts are the model's own."""

    def __init__(self) -> None:
        self.parts: dict[nn.Module, EachDocument] = {}
        self._layout: PackedLayout | None = None

    @property
    def names(self) -> list[str]:
        return sorted({type(part).__name__ for part in self.parts})

    @contextlib.contextmanager
    def documents(self, layout: PackedLayout | None) -> Iterator[None]:
        """Around a pass over a row with these segments."""
        before, self._layout = self._layout, layout if self.parts else None
        try:
            yield
        finally:
            self._layout = before

    def remembering_row(self, forward: Callable[..., Any], recompute: Callable[..., Any]) -> Callable[..., Any]:
        """`recompute(function, ...)` may call it again, in a backward pass: with the row of the first call."""

        def call(layout: PackedLayout | None, *args: Any, **kwargs: Any) -> Any:
            with self.documents(layout):
                return forward(*args, **kwargs)

        def remember(*args: Any, **kwargs: Any) -> Any:
            if not self.parts:  # nothing asks for the row: the compiler takes a plain call, and leaves the other out
                return recompute(forward, *args, **kwargs)
            return recompute(call, self._layout, *args, **kwargs)

        return remember

    @property
    def texts(self) -> list[_Text] | None:
        """None: the row is one document."""
        layout = self._layout
        return None if layout is None or len(layout.lengths) == 1 else _texts(layout)

    def clear(self) -> None:
        for part in self.parts.values():
            part.remove()
        self.parts.clear()


@functools.lru_cache(maxsize=8)
def _texts(layout: PackedLayout) -> list[_Text]:
    starts = itertools.accumulate(layout.lengths, initial=0)
    shared = layout.shared or ((0, 0),) * len(layout.lengths)
    return [
        _Text((prompt, prompt + num_prompt), (start, start + length))
        for start, length, (prompt, num_prompt) in zip(starts, layout.lengths, shared, strict=False)
    ]


class EachDocument:
    """The forward of a part that mixes tokens."""

    def __init__(self, mixers: TokenMixers, module: nn.Module, inputs: list[Leaf | None], outputs: list[Leaf | None]):
        self._mixers, self._module = mixers, module
        self._inputs, self._outputs = inputs, outputs
        self._had_own = "forward" in module.__dict__  # such as a faster one of an adapter
        self.own = module.forward
        module.forward = self

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        texts = self._mixers.texts
        if texts is None:
            return self.own(*args, **kwargs)
        leaves, spec = _flatten((args, kwargs))
        results = []
        for text in texts:
            with self._mixers.documents(None):
                part_args, part_kwargs = _unflatten(_slice(leaves, self._inputs, text), spec)
                results.append(self.own(*part_args, **part_kwargs))
        return _join(results, self._outputs, texts)

    def remove(self) -> None:
        if self._had_own:
            self._module.forward = self.own
        else:
            del self._module.forward


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return torch.utils._pytree.tree_flatten(tree)


def _unflatten(leaves: list[Any], spec: Any) -> Any:
    return torch.utils._pytree.tree_unflatten(leaves, spec)


def _slice(leaves: Sequence[Any], kinds: Sequence[Leaf | None], text: _Text) -> list[Any]:
    """Of one text, from those of the row."""
    if len(leaves) != len(kinds):
        raise ValueError("a part that computes each document alone is called in more than one way")
    sliced = []
    for leaf, kind in zip(leaves, kinds, strict=True):
        for dim in () if kind is None else kind.token_dims:
            is_structural = kind is not None and kind.structural
            leaf = leaf.narrow(dim, 0, text.length) if is_structural else text.take(leaf, dim)
        sliced.append(leaf)
    return sliced


def _join(results: list[Any], kinds: Sequence[Leaf | None], texts: list[_Text]) -> Any:
    """One result for the row. Of tensors over pairs of tokens, such as attention weights, there is none."""
    flat = [_flatten(result) for result in results]
    joined: list[Any] = []
    for leaves, kind in zip(zip(*(leaves for leaves, _ in flat), strict=True), kinds, strict=True):
        if kind is None or not kind.token_dims:
            joined.append(leaves[0])
        elif len(kind.token_dims) > 1:
            joined.append(None)
        else:
            (dim,) = kind.token_dims
            own = [text.own[1] - text.own[0] for text in texts]
            joined.append(torch.cat([t.narrow(dim, t.shape[dim] - n, n) for t, n in zip(leaves, own)], dim))
    return _unflatten(joined, flat[0][1])


def candidates(causal: nn.Module, layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The parts that could mix tokens: the children of layers, and what is beside the layers."""
    known = {id(layer) for layer in layers}

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in known:
            yield from _children(module)
        elif any(id(inner) in known for inner in module.modules()):
            for child in module.children():
                yield from walk(child)
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(module)
        else:
            yield module

    return walk(causal)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child)
        else:
            yield child


class _Call(NamedTuple):
    inputs: list[Any]
    outputs: list[Any]


class _Kinds(NamedTuple):
    inputs: list[Leaf | None]
    outputs: list[Leaf | None]


@dataclass
class Search:
    """Passes over rows of two documents find the parts whose results for a document depend on the rest of the row.

    `run` makes such a pass. `tolerance`: relative, of what rounding explains.
    """

    mixers: TokenMixers
    run: Callable[[tuple[int, int], int], None]
    arguments: Arguments
    tolerance: float
    lengths: tuple[tuple[int, int], tuple[int, int]] = ((10, 9), (7, 16))
    _calls: list[dict[nn.Module, list[_Call]]] = field(default_factory=list)
    _busy: bool = False

    def find(self, parts: Sequence[nn.Module]) -> None:
        """Installs an EachDocument for every part that needs it."""
        for number, lengths in enumerate(self.lengths):
            self._calls.append({})
            with self._hooked(parts, self._record):
                self.run(lengths, number)
        self._kinds = {part: kinds for part in self._calls[0] if (kinds := self._kinds_of(part)) is not None}
        self._unsafe: list[nn.Module] = []
        with self._hooked(list(self._kinds), self._test):
            self.run(self.lengths[0], 0)
        for part in dict.fromkeys(self._unsafe):
            self.mixers.parts[part] = EachDocument(self.mixers, part, *self._kinds[part])

    @contextlib.contextmanager
    def _hooked(self, parts: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
        handles = [part.register_forward_hook(hook, with_kwargs=True) for part in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = _Call(_flatten((args, kwargs))[0], _flatten(output)[0])
        self._calls[-1].setdefault(part, []).append(call)

    def _kinds_of(self, part: nn.Module) -> _Kinds | None:
        """None: its calls are not alike, or it gives nothing for each token."""
        first, second = (calls.get(part, []) for calls in self._calls)
        if len(first) != len(second):
            return None
        found = [self._compare(a, b) for a, b in zip(first, second, strict=True)]
        if any(kinds is None or kinds != found[0] for kinds in found):
            return None
        kinds = found[0]
        has_tokens = kinds is not None and any(kind is not None and kind.token_dims for kind in kinds.outputs)
        return kinds if has_tokens else None

    def _compare(self, first: _Call, second: _Call) -> _Kinds | None:
        sizes = (sum(self.lengths[0]), sum(self.lengths[1]))
        if (len(first.inputs), len(first.outputs)) != (len(second.inputs), len(second.outputs)):
            return None
        return _Kinds(
            [_kind(a, b, sizes) for a, b in zip(first.inputs, second.inputs, strict=True)],
            [_kind(a, b, sizes) for a, b in zip(first.outputs, second.outputs, strict=True)],
        )

    def _test(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._busy or part in self._unsafe:
            return
        self._busy = True
        try:
            if not self._is_safe(part, args, kwargs, output):
                self._unsafe.append(part)
            part.forward(*args, **kwargs)  # whatever it keeps is again of the row
        finally:
            self._busy = False

    def _is_safe(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """A document gives the same alone, and beside another one."""
        inputs, outputs = self._kinds[part]
        leaves, spec = _flatten((args, kwargs))
        num_first, num_second = self.lengths[0]
        text = _Text((0, 0), (num_first, num_first + num_second))
        in_row = _own_tokens(_flatten(output)[0], outputs, text)
        alone_args, alone_kwargs = _unflatten(_slice(leaves, inputs, text), spec)
        if any(name.startswith("packed_") for name in alone_kwargs):
            alone_kwargs = {k: v for k, v in alone_kwargs.items() if not k.startswith("packed_")}
            alone_kwargs |= self.arguments(PackedLayout((num_second,)))
        alone = _flatten(part.forward(*alone_args, **alone_kwargs))[0]
        if not _are_close(in_row, _tokens_at(alone, outputs, num_second), self.tolerance):
            return False
        moved_args, moved_kwargs = _unflatten([_disturb(x, kind, num_first) for x, kind in zip(leaves, inputs)], spec)
        moved = _own_tokens(_flatten(part.forward(*moved_args, **moved_kwargs))[0], outputs, text)
        return _are_close(in_row, moved, self.tolerance)


def _kind(first: Any, second: Any, sizes: tuple[int, int]) -> Leaf | None:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or first.ndim != second.ndim:
        return None
    pairs = list(zip(first.shape, second.shape, strict=True))
    dims = tuple(dim for dim, pair in enumerate(pairs) if pair == sizes)
    corner = second
    for dim in dims:
        corner = corner.narrow(dim, 0, sizes[0])
    return Leaf(dims, corner.shape == first.shape and bool(torch.equal(first, corner)))


def _own_tokens(leaves: list[Any], kinds: Sequence[Leaf | None], text: _Text) -> list[Tensor]:
    return [
        text.take(leaf, kind.token_dims[0])
        for leaf, kind in zip(leaves, kinds, strict=True)
        if kind is not None and len(kind.token_dims) == 1
    ]


def _tokens_at(leaves: list[Any], kinds: Sequence[Leaf | None], length: int) -> list[Tensor]:
    return _own_tokens(leaves, kinds, _Text((0, 0), (0, length)))


def _disturb(leaf: Any, kind: Leaf | None, num_tokens: int) -> Any:
    """With other values for the first tokens."""
    if kind is None or len(kind.token_dims) != 1 or kind.structural or not leaf.is_floating_point():
        return leaf
    changed = leaf.clone()
    (dim,) = kind.token_dims
    part = changed.narrow(dim, 0, num_tokens)
    part.copy_(part.flip(dim) * 0.7 + 0.3)
    return changed


def _are_close(first: list[Tensor], second: list[Tensor], tolerance: float) -> bool:
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            return False
        if a.is_floating_point():
            a, b = a.double(), b.double()
            if not bool((a - b).abs().max() <= tolerance * (1e-6 + float(b.abs().max()))):
                return False
        elif not torch.equal(a, b):
            return False
    return True
