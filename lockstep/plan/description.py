"""A model as plain numbers: what its parameters are, and what one token costs in each kind of its layers.

`plan/trace.py` makes it from the model itself, on the meta device. No torch here: arithmetic and the service read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WIDTHS = ("whole", "split")
"""Whether ranks that split matrices each have the whole of something, or a part."""


@dataclass(frozen=True)
class ParameterShape:
    """`split_dim`: along which ranks of the tensor axis split it; None: each has all of it."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    split_dim: int | None = None
    held_bytes: int = 4
    """Of one value, as it is held."""
    stacked: bool = False
    """Has a part for each expert, along its first dimension."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, tensor: tuple[int, int] = (0, 1), shard: tuple[int, int] = (0, 1), experts: int = 1) -> int:
        """Values that one rank holds: (its place, ranks) on the tensor axis, and over those that shard. `experts`:
        ranks over which experts are divided."""
        shape = list(self.shape)
        divided = self.stacked and experts > 1
        if divided:
            shape[0] //= experts
        if self.split_dim is not None and tensor[1] > 1:
            shape[self.split_dim] = chunk(shape[self.split_dim], *tensor)
        if shard[1] > 1 and shape:
            # As parallel/shard.py does: of divided experts along another dimension, where one divides.
            even = [dim for dim in range(1, len(shape)) if shape[dim] % shard[1] == 0] if divided else []
            dim = even[0] if even else 0
            shape[dim] = chunk(shape[dim], *shard)
        return math.prod(shape)


def chunk(size: int, place: int, parts: int) -> int:
    """StepRows of one part: equal ones, of which the last may be short or empty, as torch cuts them."""
    piece = -(-size // parts)
    return max(min(piece, size - place * piece), 0)


@dataclass(frozen=True)
class Product:
    """Of one matrix for each token: [1, inner] x [inner, columns]. `trained`: its gradient is computed as well."""

    inner: int
    columns: int
    trained: bool
    split: bool = True
    share: float = 1.0
    """Of tokens that are multiplied with it: a token that chooses several experts counts for each."""
    matrices: int = 1
    """Of experts: each has its own, all of this size."""


@dataclass(frozen=True)
class PassCosts:
    """Of one token in one layer, forward or backward, apart from products and attention."""

    moved_bytes: float
    """Read and written by everything that is not a product."""
    operations: float
    """Started by the host; of the whole micro-batch, not of a token."""
    moved_scores: float = 0.0
    """As `moved_bytes`, for each token and each one of its document, where scores are in memory."""

    def plus(self, other: PassCosts, sign: int = 1) -> PassCosts:
        return PassCosts(
            self.moved_bytes + sign * other.moved_bytes,
            self.operations + sign * other.operations,
            self.moved_scores + sign * other.moved_scores,
        )


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer in one way of computing it. Bytes are of one token.

    `saved`: kept from forward to backward, by what keeps it and by width. `forward_extra` and `backward_extra`: the
    most beyond that while the layer computes; `constant`: the same of what does not depend on tokens.
    """

    saved: dict[str, dict[str, float]]
    forward_extra: float
    backward_extra: float
    constant: float
    forward: PassCosts
    backward: PassCosts
    scores: float = 0.0
    """Bytes kept for each token and each one of its document, where attention has its scores in memory."""
    scores_extra: float = 0.0
    """The same beyond that, while the layer computes."""

    def plus(self, other: LayerCosts, sign: int = 1) -> LayerCosts:
        saved = {kind: dict(widths) for kind, widths in self.saved.items()}
        for kind, widths in other.saved.items():
            mine = saved.setdefault(kind, {})
            for width, size in widths.items():
                mine[width] = mine.get(width, 0.0) + sign * size
        return LayerCosts(
            saved,
            self.forward_extra + sign * other.forward_extra,
            self.backward_extra + sign * other.backward_extra,
            self.constant + sign * other.constant,
            self.forward.plus(other.forward, sign),
            self.backward.plus(other.backward, sign),
            self.scores + sign * other.scores,
            self.scores_extra + sign * other.scores_extra,
        )

    def minus(self, other: LayerCosts) -> LayerCosts:
        return self.plus(other, -1)

    def saved_bytes(self, tensor: int = 1) -> float:
        return sum(widths.get("whole", 0.0) + widths.get("split", 0.0) / tensor for widths in self.saved.values())


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike. `attention`: (query heads, key heads, head size, window); None: no attention of ours."""

    name: str
    parameters: tuple[ParameterShape, ...]
    products: tuple[Product, ...]
    attention: tuple[int, int, int, int | None] | None
    costs: LayerCosts
    """As the run computes it: compiled or not, recomputed or not."""
    whole: LayerCosts
    """The same without recomputation: what a recomputed layer holds for a moment."""
    recomputed: bool = False
    divided: LayerCosts | None = None
    """As `whole`, where experts are divided over ranks; None: it has none."""
    plain_attention: bool = False
    """Products with scores in memory between them, for what no kernel computes: bounds and sinks."""
    sums: dict[str, int] = field(default_factory=dict)
    """What ranks of the tensor axis add up: widths for each token and parameters, as of `Sizes` in
    parallel/expected_traffic.py. Empty: it is not split."""


@dataclass(frozen=True)
class ModelDescription:
    """`layers`: the kind of each, by number."""

    name: str
    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    rest: tuple[ParameterShape, ...]
    """Embedding, final norm, head."""
    hidden: int
    vocabulary: int
    tied: bool
    compute_bytes: int
    wide_bytes: int
    """Of what is trained, its gradient and the optimizer's moments."""
    head_trained: bool
    compiled: bool
    max_positions: int | None = None
    buffers: int = 0
    """Bytes of what is held beside parameters."""
    rest_saved: float = 0.0
    """Bytes for each token that embedding, final norm and positions save, and the hidden states that the head reads."""
    rest_operations: float = 0.0
    refuses: dict[str, str] = field(default_factory=dict)
    """Axes over which this model cannot be split, and why not."""
    experts: tuple[int, int] = (0, 0)
    """How many a layer has, and how many of them a token chooses."""
    value_share: float = 1.0
    """The size of a value for each number of a key."""
    unlike: str = ""
    """What it has that no model had whose plan was compared with a GPU."""

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in self.all_parameters())

    @property
    def trained(self) -> int:
        return sum(p.numel for p in self.all_parameters() if p.trained)

    def all_parameters(self) -> Iterable[ParameterShape]:
        for number in self.layers:
            yield from self.kinds[number].parameters
        yield from self.rest

    def kind_of(self, layer: int) -> LayerKind:
        return self.kinds[self.layers[layer]]


Recomputation = Literal["none", "selective", "full"]


def read_description(tree: Mapping[str, Any]) -> ModelDescription:
    """From JSON, as `dataclasses.asdict` gives it."""
    kinds = tuple(_kind(kind) for kind in tree["kinds"])
    rest = tuple(_parameter(p) for p in tree["rest"])
    lists = {name: tuple(tree[name]) for name in ("layers", "experts")}
    return ModelDescription(**{**tree, **lists, "kinds": kinds, "rest": rest})


def _kind(tree: Mapping[str, Any]) -> LayerKind:
    return LayerKind(
        **{
            **tree,
            "parameters": tuple(_parameter(p) for p in tree["parameters"]),
            "products": tuple(Product(**p) for p in tree["products"]),
            "attention": tree["attention"] and tuple(tree["attention"]),
            "costs": _costs(tree["costs"]),
            "whole": _costs(tree["whole"]),
            "divided": tree["divided"] and _costs(tree["divided"]),
        }
    )


def _parameter(tree: Mapping[str, Any]) -> ParameterShape:
    return ParameterShape(**{**tree, "shape": tuple(tree["shape"])})


def _costs(tree: Mapping[str, Any]) -> LayerCosts:
    return LayerCosts(**{**tree, "forward": PassCosts(**tree["forward"]), "backward": PassCosts(**tree["backward"])})
