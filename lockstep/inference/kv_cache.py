"""Keys and values of all active sequences, in slots of fixed length, and the attention that writes and reads them.

Registered with transformers under its own name; a model's `cached_pass` argument says what an attention call does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.model.attention import variable_length_problem

CACHED = "lockstep_cached"
_ATTACHED = "_lockstep_kv_cache"  # attribute of an attention module, see KeyValueCache.attached
TILE_ROWS = 8  # that read a prompt together: with two query heads for each of keys, all rows of a matrix unit's product


class UnsupportedModelError(Exception):
    """Why a model cannot be decoded with this cache."""


class Scores(NamedTuple):
    """What becomes of scores before they are weights: bounded by `softcap`, beside sinks [heads] that take a part."""

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def are_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class AttentionPass(Protocol):
    """What the attention layers do in one pass; gives [batch, tokens, heads, head_dim]."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        scores: Scores,
    ) -> Tensor: ...


def register() -> None:
    """Idempotent. There is no mask function: no mask is ever built."""
    AttentionInterface.register(CACHED, cached_attention)


def cached_attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, tokens, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cached_pass: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature."""
    name = type(module).__name__
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(f"{name} adds a bias to its scores")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} builds an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} is not causal")
    if cached_pass is None:
        raise UnsupportedModelError(f"{name} does not get the arguments that its model was called with")
    scores = Scores(softcap, s_aux)
    return cached_pass.attend(module, query, key, value, scaling, sliding_window, scores), None


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one token in one attention layer. `plain`: its scores are weights as they are.

    `sinks`: some scores are of no token. The kernel computes them, but no whole model with them was tried on a GPU.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    plain: bool = True
    sinks: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def kernel_problem(self) -> str | None:
        """Why the kernel for one new token does not take it, on a GPU."""
        if find_spec("triton") is None:
            return "Triton is not installed"
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"it does not compute in {self.dtype}"
        if self.key_dim != self.value_dim:
            return f"keys of {self.key_dim} and values of {self.value_dim} in one head"
        if self.key_dim > 256:
            return f"heads of {self.key_dim} are larger than 256"
        return "scores have sinks" if self.sinks else None

    def fuses_prefill(self, device: torch.device) -> bool:
        """Whether one kernel attends within all prompts of a pass."""
        fused = variable_length_problem(device, self.dtype, self.key_dim) is None
        return self.plain and fused and self.key_dim == self.value_dim


class KeyValueCache:
    """`num_slots` sequences of at most `capacity` tokens. Zeros at first: masked values are still multiplied by 0."""

    def __init__(
        self, shapes: Mapping[nn.Module, LayerShape], num_slots: int, capacity: int, device: torch.device
    ) -> None:
        self.num_slots, self.capacity, self._device = num_slots, capacity, device
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module, shape in shapes.items():
            keys, values = (
                torch.zeros(num_slots, shape.num_heads, capacity, dim, dtype=shape.dtype, device=device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self._layers[module] = (keys, values)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def layer(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Keys and values, each [slots, heads, capacity, dim]."""
        return self._layers[module]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """The tensors as attributes of their layers: compiled code of one layer then serves all."""
        try:
            for module, pair in self._layers.items():
                module.__dict__[_ATTACHED] = pair
            yield
        finally:
            for module in self._layers:
                module.__dict__.pop(_ATTACHED, None)

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """The first `length` tokens of each (from slot, to slot), as if all were copied at once."""
        if not moves or not length:
            return
        sources, targets = torch.tensor(moves, device=self._device).unbind(1)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def copy_from(self, other: KeyValueCache) -> None:
        """As much as fits."""
        for module, pair in self._layers.items():
            for new, old in zip(pair, other.layer(module), strict=True):
                num_slots, length = min(new.shape[0], old.shape[0]), min(new.shape[2], old.shape[2])
                new[:num_slots, :, :length] = old[:num_slots, :, :length]

    def clear(self) -> None:
        """Values that are not finite, left by bad weights, must not reach later sequences."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor.zero_()


class SharedPrompts:
    """Slots whose first tokens are read in another slot, so that a prompt is stored once for all of its samples."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._rows = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        # At least two: compiled code is made anew for a size of one.
        self._tiles = torch.zeros(max(num_slots // 2, 2), 2 + TILE_ROWS, dtype=torch.int64, device=device)
        self._source_of: dict[int, tuple[int, int]] = {}  # slot -> (slot that holds its first tokens, how many)

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the kernel, at the same addresses every time: of the first slots, where their first tokens are, how many,
        and how many of them are read by tiles; and the tiles, each of some rows that have the same first tokens."""
        sources, lengths, covered = self._rows[:, :count].unbind(0)
        return sources, lengths, covered, self._tiles

    def share(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(from slot, to slot, tokens): the first holds them itself."""
        assert not any(source in self._source_of for source, _, _ in moves)
        self._source_of |= {slot: (source, length) for source, slot, length in moves}
        self._tell()

    def before_write(self, slots: Iterable[int]) -> list[tuple[int, int, int]]:
        """These slots will hold something else. Returns the (from slot, to slot, tokens) to be copied before."""
        written = set(slots)
        lost = [
            (source, slot, length)
            for slot, (source, length) in self._source_of.items()
            if source in written and slot not in written
        ]
        freed = [slot for slot in self._source_of if slot in written or self._source_of[slot][0] in written]
        for slot in freed:
            del self._source_of[slot]
        if freed:
            self._tell()
        return lost

    def holder(self, slot: int) -> int:
        """The slot in which the first tokens of this one are."""
        return self._source_of.get(slot, (slot, 0))[0]

    def copy_from(self, other: SharedPrompts) -> None:
        """Of a smaller cache, whose slots have the same numbers here."""
        self.share([(source, slot, length) for slot, (source, length) in other._source_of.items()])

    def clear(self) -> None:
        self._source_of.clear()
        self._rows.zero_()
        self._tiles.zero_()

    def _tell(self) -> None:
        rows, tiles = prompt_tiles(self._source_of, self._rows.shape[1], len(self._tiles))
        self._rows.copy_(rows)
        self._tiles.copy_(tiles)


def prompt_tiles(source_of: Mapping[int, tuple[int, int]], num_slots: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """([3, slots] source, length and covered tokens of each, [tiles, 2 + TILE_ROWS] source, length and rows of each).

    The slot that holds a prompt reads it in a tile, too.
    """
    sources, lengths, covered = ([0] * num_slots for _ in range(3))
    members: dict[tuple[int, int], list[int]] = {}
    for slot, (source, length) in source_of.items():
        sources[slot], lengths[slot] = source, length
        members.setdefault((source, length), [source]).append(slot)
    tiles: list[list[int]] = []
    for (source, length), slots in members.items():
        free = [slot for slot in slots if not covered[slot]]
        if len(free) < 2 or not length:  # one alone reads its tokens without a tile
            continue
        for slot in free:
            covered[slot] = length
        for start in range(0, len(free), TILE_ROWS):
            part = free[start : start + TILE_ROWS]
            tiles.append([source, length, *part, *[-1] * (TILE_ROWS - len(part))])
    tiles += [[0] * (2 + TILE_ROWS)] * (num_tiles - len(tiles))
    return torch.tensor([sources, lengths, covered]), torch.tensor(tiles)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.library.custom_op("lockstep::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sources: Tensor,
    shared: Tensor,
    covered: Tensor,
    tiles: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """[rows, heads, dim]; see decode_kernel.attend. One operation for the compiler, which does not look inside."""
    from lockstep.inference import decode_kernel

    places = (positions, sources, shared, covered, tiles)
    return decode_kernel.attend(query, key, value, keys, values, *places, scale, window, softcap, sinks)


@decode_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


class DecodePass:
    """One more token for each of the first slots. `length`: of the longest sequence, this token included.

    `prompts`: on a GPU a kernel reads each row's own keys, whatever `length` is, and its prompt's where they say.
    """

    def __init__(
        self, cache: KeyValueCache, positions: Tensor, length: int, *, prompts: SharedPrompts | None = None
    ) -> None:
        self._cache, self._positions, self._length, self._prompts = cache, positions, length, prompts
        self._slots = torch.arange(len(positions), device=positions.device)
        self._masks: dict[int | None, Tensor] = {}  # by window; one serves all layers

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        attached = getattr(module, _ATTACHED, None)
        keys, values = self._cache.layer(module) if attached is None else attached
        if self._prompts is not None:
            query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, 0]
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            where = (self._positions, *self._prompts.rows(len(query)))
            how = (scale, window or 0, scores.softcap or 0.0, scores.sinks)
            return decode_attention(query, key, value, keys, values, *where, *how)[:, None]
        keys[self._slots, :, self._positions] = key[:, :, 0]
        values[self._slots, :, self._positions] = value[:, :, 0]
        num_slots, num_heads = query.shape[:2]
        # Query heads that share keys take the dimension of tokens: keys are not copied for each of them.
        grouped, mask = query[:, :, 0].unflatten(1, (keys.shape[1], -1)), self._mask(window, query.dtype)
        keys, values = keys[:num_slots, :, : self._length], values[:num_slots, :, : self._length]
        if scores.are_plain:
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        else:
            attended = _attend_with(scores, grouped, keys, values, mask, scaling)
        return attended.reshape(num_slots, 1, num_heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[slots, 1, 1, length] to be added to the scores: causal, within the window."""
        if window not in self._masks:
            # Empty slots may count on beyond the length; with everything masked they would give nan.
            last = self._positions.clamp(max=self._length - 1)[:, None]
            distance = last - torch.arange(self._length, device=last.device)
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            mask = torch.zeros_like(distance, dtype=dtype).masked_fill_(~seen, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _attend_with(
    scores: Scores,
    query: Tensor,  # [rows, key heads, query heads of each, dim]
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
) -> Tensor:
    """As SDPA, with the scores in memory."""
    found = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    found = found + mask
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype).view(1, *query.shape[1:3], 1).expand(len(query), -1, -1, 1)
        found = torch.cat([found, sinks], dim=-1)
    weights = torch.softmax(found, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return weights[..., : keys.shape[2]] @ values
