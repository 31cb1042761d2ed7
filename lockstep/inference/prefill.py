"""Whole prompts, packed into one row: what the attention layers do, and the pass as a CUDA graph.

A graph takes its tokens from buffers. Its sizes are rounded up, and what is left over is padding: documents of its own,
whose keys and values go to the last place of a slot, which nobody reads before it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.inference.kv_cache import KeyValueCache, Scores
from lockstep.model.attention import PackedLayout, packed_attention, variable_length_problem

Prompts = Sequence[tuple[int, Sequence[int]]]
"""(slot, tokens)."""

MAX_TOKENS = 8192  # packed into one pass, at most; a longer prompt has a pass of its own
_TILE = 128
_MIN_LONGEST = 512  # the kernel skips what a shorter prompt has not
_FEW_TOKENS = 2048  # fewer are padded more: that costs less than capturing more graphs
_MAX_GRAPHS = 24


def split_prompts(prompts: Prompts, max_prompts: int | None = None) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Parts of at most MAX_TOKENS tokens, or of one prompt; of at most `max_prompts` where that is given."""
    part: list[tuple[int, Sequence[int]]] = []
    for prompt in prompts:
        is_full = len(part) == max_prompts or sum(len(tokens) for _, tokens in [*part, prompt]) > MAX_TOKENS
        if part and is_full:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


class PrefillPass:
    """New sequences from their beginning, packed into one row, each cached in its slot."""

    def __init__(
        self, cache: KeyValueCache, lengths: Sequence[int], slots: Tensor, positions: Tensor, boundaries: Tensor
    ) -> None:
        """`slots` and `positions`: of each token. `boundaries`: between `lengths`; those of a graph change later."""
        self._cache, self._layout, self._max_length = cache, PackedLayout(tuple(lengths)), max(lengths)
        self._slots, self.positions, self._boundaries = slots, positions, boundaries

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
        keys, values = self._cache.layer(module)
        keys[self._slots, :, self.positions] = key[0].transpose(0, 1)
        values[self._slots, :, self.positions] = value[0].transpose(0, 1)
        layout: dict[str, Any] = {"packed_layout": self._layout, "softcap": scores.softcap, "s_aux": scores.sinks}
        if scores.are_plain and is_fused(query, value):
            layout = {"packed_boundaries": self._boundaries, "packed_max_length": self._max_length}
        return packed_attention(module, query, key, value, None, scaling=scaling, sliding_window=window, **layout)[0]


def is_fused(query: Tensor, value: Tensor) -> bool:
    return (
        query.shape[-1] == value.shape[-1]
        and variable_length_problem(query.device, query.dtype, query.shape[-1]) is None
    )


@dataclass(frozen=True)
class PrefillShape:
    """What a graph is captured for: rounded up, so that there are few."""

    num_tokens: int
    num_prompts: int
    max_length: int

    @classmethod
    def of(cls, prompts: Prompts) -> PrefillShape:
        lengths = [len(tokens) for _, tokens in prompts]
        longest = _power_of_two(max(lengths), _MIN_LONGEST)
        return cls(_rounded(sum(lengths)), _power_of_two(len(prompts), 64), longest)

    @property
    def num_boundaries(self) -> int:
        """Padding is at most half of all tokens, or of the smallest size all, in documents of at most `_TILE`."""
        return 1 + self.num_prompts + -(-self.num_tokens // (2 * _TILE)) + 1


class PrefillBuffers:
    """The inputs of passes of one shape, at the same addresses every time."""

    def __init__(self, shape: PrefillShape, device: torch.device) -> None:
        self._shape = shape
        self._rows = torch.zeros(3, shape.num_tokens, dtype=torch.int64, device=device)
        self.tokens, self.slots, self.positions = self._rows.unbind(0)
        self.boundaries = torch.zeros(shape.num_boundaries, dtype=torch.int32, device=device)

    def fill(self, prompts: Prompts, capacity: int) -> None:
        rows, boundaries = pad_prompts(prompts, self._shape, capacity)
        self._rows.copy_(rows)
        self.boundaries.copy_(boundaries)


def pad_prompts(prompts: Prompts, shape: PrefillShape, capacity: int) -> tuple[Tensor, Tensor]:
    """([3, tokens] tokens, slots and positions, [boundaries]), on the host."""
    lengths = [len(tokens) for _, tokens in prompts]
    rows, boundaries = pack_prompts(prompts)
    missing = shape.num_tokens - sum(lengths)
    nowhere = torch.tensor([0, prompts[0][0], capacity - 1])[:, None].expand(3, missing)
    ends = torch.full((shape.num_boundaries,), shape.num_tokens, dtype=torch.int32)
    ends[: len(boundaries)] = boundaries
    padding = torch.arange(sum(lengths), shape.num_tokens, _TILE, dtype=torch.int32)[1:]
    ends[len(boundaries) : len(boundaries) + len(padding)] = padding
    return torch.cat([rows, nowhere], dim=1), ends


def pack_prompts(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """([3, tokens] tokens, slots and positions, [prompts + 1] boundaries), on the host."""
    lengths = [len(tokens) for _, tokens in prompts]
    counts = torch.tensor(lengths)
    tokens = torch.tensor(list(itertools.chain.from_iterable(tokens for _, tokens in prompts)))
    slots = torch.repeat_interleave(torch.tensor([slot for slot, _ in prompts]), counts)
    positions = torch.cat([torch.arange(length) for length in lengths])
    boundaries = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return torch.stack([tokens, slots, positions]), boundaries


class PrefillShapes:
    """The buffers of every shape, and which are worth a graph: those that came before, as a capture costs some passes.

    A pass has the same shape with and without its graph, so that it rounds in the same way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[PrefillShape, PrefillBuffers] = {}

    def buffers(self, prompts: Prompts) -> tuple[PrefillShape, PrefillBuffers, bool] | None:
        """(shape, buffers, whether it is worth a graph), or None for a prompt that is too long."""
        if sum(len(tokens) for _, tokens in prompts) > MAX_TOKENS:
            return None
        shape = PrefillShape.of(prompts)
        came_before = shape in self._buffers
        if not came_before:
            self._buffers[shape] = PrefillBuffers(shape, self._device)
        return shape, self._buffers[shape], came_before and list(self._buffers).index(shape) < _MAX_GRAPHS


def _power_of_two(count: int, least: int) -> int:
    return max(1 << (count - 1).bit_length(), least)


def _rounded(count: int) -> int:
    """Up to one of two sizes between powers of two, or beyond `_FEW_TOKENS` of four."""
    whole = _power_of_two(count, 2 * _TILE)
    step = whole // (4 if whole <= _FEW_TOKENS else 8)
    return max(-(-count // step) * step, 2 * _TILE)
