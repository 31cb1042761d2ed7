"""Parts of a model that mix tokens by themselves: state-space layers, convolutions, attention of their own.

They know no packed documents. Here they compute each document of a packed row alone, documents of similar lengths as
the rows of one batch where they take that, while everything around them computes the whole row. Which parts these are,
and which of them take batches, is measured, not known by name.
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

    @property
    def loops(self) -> bool:
        """Whether some part takes one document after another."""
        return not all(part.batches for part in self.parts.values())

    @contextlib.contextmanager
    def documents(self, layout: PackedLayout | None) -> Iterator[None]:
        """Around a pass over a row with these segments."""
        before, self._layout = self._layout, layout if self.parts else None
        try:
            yield
        finally:
            self._layout = before

    def remembering_row(self, forward: Callable[..., Any], recompute: Callable[..., Any]) -> Callable[..., object]:
        """`recompute(function, ...)` may call it again, in a backward pass: with the row of the first call."""

        def call(layout: PackedLayout | None, *args: Any, **kwargs: Any) -> Any:
            with self.documents(layout):
                return forward(*args, **kwargs)

        def remember(*args: Any, **kwargs: Any) -> object:
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
    """The forward of a part that mixes tokens. `batches`: it takes several documents as the rows of a batch."""

    def __init__(
        self,
        mixers: TokenMixers,
        module: nn.Module,
        inputs: list[Leaf | None],
        outputs: list[Leaf | None],
        arguments: Arguments = lambda layout: {},
        *,
        batches: bool = False,
    ) -> None:
        self._mixers, self._module, self._arguments = mixers, module, arguments
        self._inputs, self._outputs, self.batches = inputs, outputs, batches
        self._had_own = "forward" in module.__dict__  # such as a faster one of an adapter
        self.own = module.forward
        module.forward = self

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        texts = self._mixers.texts
        if texts is None:
            return self.own(*args, **kwargs)
        leaves, spec = _flatten_call(args, kwargs)
        if self.batches:
            return self._call_batches(leaves, spec, texts)
        results = []
        for text in texts:
            with self._mixers.documents(None):
                part_args, part_kwargs = _unflatten(_slice(leaves, self._inputs, text), spec)
                if _layout_of(kwargs):
                    part_kwargs |= self._arguments(PackedLayout((text.length,)))
                results.append(self.own(*part_args, **part_kwargs))
        return _join(results, self._outputs, functools.partial(_join_texts, texts))

    def _call_batches(self, leaves: list[Any], spec: Any, texts: list[_Text]) -> Any:
        batches, restored = _batches(tuple(texts), _device_of(leaves))
        results = []
        for batch in batches:
            with self._mixers.documents(None):
                part_args, part_kwargs = _unflatten(batch.take(leaves, self._inputs), spec)
                results.append(self.own(*part_args, **part_kwargs))
        return _join(results, self._outputs, functools.partial(_join_batches, batches, restored))

    def remove(self) -> None:
        if self._had_own:
            self._module.forward = self.own
        else:
            del self._module.forward


def _device_of(leaves: Sequence[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return torch.utils._pytree.tree_flatten(tree)


def _flatten_call(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Without what is told about the row, which differs from row to row."""
    row = _layout_of(kwargs)
    return _flatten((args, {name: value for name, value in kwargs.items() if name not in row}))


def _layout_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name.startswith("packed_")}


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


def _join(
    results: list[Any], kinds: Sequence[Leaf | None], join_tokens: Callable[[Sequence[Tensor], int], Tensor]
) -> Any:
    """One result for the row. Of tensors over pairs of tokens, such as attention weights, there is none."""
    flat = [_flatten(result) for result in results]
    joined: list[Any] = []
    for leaves, kind in zip(zip(*(leaves for leaves, _ in flat), strict=True), kinds, strict=True):
        if kind is None or not kind.token_dims:
            joined.append(leaves[0])
        elif len(kind.token_dims) > 1:
            joined.append(None)
        else:
            joined.append(join_tokens(leaves, *kind.token_dims))
    return _unflatten(joined, flat[0][1])


def _join_texts(texts: list[_Text], leaves: Sequence[Tensor], dim: int) -> Tensor:
    own = [text.own[1] - text.own[0] for text in texts]
    return torch.cat([t.narrow(dim, t.shape[dim] - n, n) for t, n in zip(leaves, own)], dim)


class _Batch(NamedTuple):
    """Texts of similar lengths as rows; the shorter ones repeat their last token, which no token before it sees."""

    rows: int
    length: int
    tokens: Tensor
    """[rows * length]: places in the packed row."""
    own: Tensor
    """Places in this batch of the tokens that the texts have for themselves, one text after another."""

    def take(self, leaves: Sequence[Any], kinds: Sequence[Leaf | None]) -> list[Any]:
        if len(leaves) != len(kinds):
            raise ValueError("a part that computes each document alone is called in more than one way")
        taken = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            for dim in () if kind is None or not kind.structural else kind.token_dims:
                leaf = leaf.narrow(dim, 0, self.length)
            if kind is not None and kind.token_dims and not kind.structural:
                (dim,) = kind.token_dims
                leaf = leaf.squeeze(0).index_select(dim - 1, self.tokens).unflatten(dim - 1, (self.rows, self.length))
                leaf = leaf.movedim(dim - 1, 0)
            taken.append(leaf)
        return taken

    def give(self, leaf: Tensor, dim: int) -> Tensor:
        """[1, ..., tokens, ...] of [rows, ..., length, ...]."""
        return leaf.movedim(0, dim - 1).flatten(dim - 1, dim).index_select(dim - 1, self.own).unsqueeze(0)


def can_batch(kinds: Sequence[Leaf | None], leaves: Sequence[Any]) -> bool:
    """Whether all that belongs to tokens has a first dimension of one row. Tensors over pairs of tokens, such as masks,
    must be the same for all texts; of results there are none."""
    of_tokens = [(kind, leaf) for kind, leaf in zip(kinds, leaves, strict=True) if kind is not None and kind.token_dims]
    return all(
        kind.structural or (len(kind.token_dims) == 1 and kind.token_dims[0] > 0 and leaf.shape[0] == 1)
        for kind, leaf in of_tokens
    )


_SHORT, _SIMILAR = 64, 1.25


def _similar_texts(texts: Sequence[_Text]) -> list[list[int]]:
    """Numbers of texts that make a batch: at most a quarter of its tokens is repeated, but for short ones, which cost
    as much as the calls that they save."""
    groups: list[list[int]] = []
    for number in sorted(range(len(texts)), key=lambda number: -texts[number].length):
        longest = texts[groups[-1][0]].length if groups else 0
        if groups and longest <= max(_SIMILAR * texts[number].length, _SHORT):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


@functools.lru_cache(maxsize=8)
def _batches(texts: tuple[_Text, ...], device: torch.device) -> tuple[list[_Batch], Tensor]:
    """And the place of each token of the row in what the batches give, one after another."""
    groups = [[texts[number] for number in group] for group in _similar_texts(texts)]
    places = torch.tensor([place for group in groups for text in group for place in range(*text.own)])
    restored = torch.empty_like(places).scatter_(0, places, torch.arange(len(places)))
    return [_batch_of(group, device) for group in groups], restored.to(device)


def _batch_of(texts: Sequence[_Text], device: torch.device) -> _Batch:
    length = max(text.length for text in texts)
    tokens: list[int] = []
    own: list[int] = []
    for row, text in enumerate(texts):
        whole = [*range(*text.prompt), *range(*text.own)]
        tokens += [*whole, *[whole[-1]] * (length - len(whole))]
        end = row * length + len(whole)
        own += range(end - (text.own[1] - text.own[0]), end)
    return _Batch(len(texts), length, torch.tensor(tokens, device=device), torch.tensor(own, device=device))


def _join_batches(batches: list[_Batch], restored: Tensor, leaves: Sequence[Tensor], dim: int) -> Tensor:
    parts = [batch.give(leaf, dim) for batch, leaf in zip(batches, leaves, strict=True)]
    return torch.cat(parts, dim).index_select(dim, restored)


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


def adapted_mixers(model: nn.Module) -> list[nn.Module]:
    """Parts with a convolution beside layers that have adapters (Mamba). While such a part trains, transformers gives
    the weights of its layers to one fused kernel, where that is installed, and adapters on them would be left out."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
        and any(hasattr(child, "lora_A") for child in module.children())
    ]


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
        self._unsafe: dict[nn.Module, bool] = {}  # whether each takes batches
        with self._hooked(list(self._kinds), self._test):
            self.run(self.lengths[0], 0)
        for part, batches in self._unsafe.items():
            self.mixers.parts[part] = EachDocument(
                self.mixers, part, *self._kinds[part], self.arguments, batches=batches
            )

    @contextlib.contextmanager
    def _hooked(self, parts: Sequence[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
        handles = [part.register_forward_hook(hook, with_kwargs=True) for part in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = _Call(_flatten_call(args, kwargs)[0], _flatten(output)[0])
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
                self._unsafe[part] = self._takes_batches(part, args, kwargs, output)
            part.forward(*args, **kwargs)  # whatever it keeps is again of the row
        finally:
            self._busy = False

    def _is_safe(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """A document gives the same alone, and beside another one."""
        inputs, outputs = self._kinds[part]
        leaves, spec = _flatten_call(args, kwargs)
        num_first, num_second = self.lengths[0]
        text = _Text((0, 0), (num_first, num_first + num_second))
        in_row = _own_tokens(_flatten(output)[0], outputs, text)
        alone_args, alone_kwargs = _unflatten(_slice(leaves, inputs, text), spec)
        if row := _layout_of(kwargs):
            alone_kwargs |= self.arguments(PackedLayout((num_second,)))
        alone = _flatten(part.forward(*alone_args, **alone_kwargs))[0]
        if not _are_close(in_row, _tokens_at(alone, outputs, num_second), self.tolerance):
            return False
        moved_args, moved_kwargs = _unflatten([_disturb(x, kind, num_first) for x, kind in zip(leaves, inputs)], spec)
        moved = _own_tokens(_flatten(part.forward(*moved_args, **moved_kwargs, **row))[0], outputs, text)
        return _are_close(in_row, moved, self.tolerance)

    def _takes_batches(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """The two documents give in a batch what they give one after the other."""
        inputs, outputs = self._kinds[part]
        leaves, spec = _flatten_call(args, kwargs)
        if not can_batch(inputs, leaves) or not can_batch(outputs, _flatten(output)[0]):
            return False
        num_first, num_second = self.lengths[0]
        texts = (_Text((0, 0), (0, num_first)), _Text((0, 0), (num_first, num_first + num_second)))

        def call(*together: _Text) -> list[Tensor]:
            """Of each output the tokens, in their first dimension."""
            batch = _batch_of(together, _device_of(leaves))
            part_args, part_kwargs = _unflatten(batch.take(leaves, inputs), spec)
            found = zip(_flatten(part.forward(*part_args, **part_kwargs))[0], outputs, strict=True)
            dims = [
                (leaf, kind.token_dims[0]) for leaf, kind in found if kind is not None and len(kind.token_dims) == 1
            ]
            return [batch.give(leaf, dim).movedim(dim, 0) for leaf, dim in dims]

        try:
            alone = [torch.cat(parts) for parts in zip(*(call(text) for text in texts), strict=True)]
            return _are_close(call(*texts), alone, self.tolerance)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the part's own code raises whatever it likes when it does not take a batch
            return False


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
