"""Whatever the layers of a model keep from one token to the next, for all slots: behind transformers' cache interface.

Keys and values of attention that is the model's own, keys of indexers, windows of convolutions, recurrent states: a
layer's state is the tensors that it gives its cache, with a row for each slot. Nothing here knows a family by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from lockstep.inference.kv_cache import UnsupportedModelError


class StateName(NamedTuple):
    """Of a tensor that a layer keeps. `number`: some layers have several of a kind."""

    kind: str
    layer: int
    number: int = 0


@dataclass(frozen=True)
class StateShape:
    """Of one slot. `grows`: the last dimension but one, here 1, is that of tokens."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    grows: bool

    @property
    def num_bytes(self) -> int:
        """For each token if it grows."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class SlotTensors:
    """The tensors of `num_slots` sequences of at most `capacity` tokens; zeros are the state before the first token.

    A recurrent state is that after a sequence's last token, and cannot go back to an earlier one. So the state after a
    prompt is kept aside while samples of that prompt still wait for a slot.
    """

    def __init__(
        self, shapes: dict[StateName, StateShape], num_slots: int, capacity: int, device: torch.device
    ) -> None:
        self._device, self.tokens, self.states = device, dict[StateName, Tensor](), dict[StateName, Tensor]()
        for name, shape in shapes.items():
            sizes = (*shape.sizes[:-2], capacity, shape.sizes[-1]) if shape.grows else shape.sizes
            tensors = self.tokens if shape.grows else self.states
            tensors[name] = torch.zeros(num_slots, *sizes, dtype=shape.dtype, device=device)
        self._after_prompt: dict[int, dict[StateName, Tensor]] = {}  # by slot

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.tokens.values(), *self.states.values()))

    def copy_tokens(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """The first `length` tokens of each (from slot, to slot), as if all were copied at once."""
        if moves and length:
            sources, targets = torch.tensor(moves, device=self._device).unbind(1)
            for tensor in self.tokens.values():
                tensor[targets, ..., :length, :] = tensor[sources, ..., :length, :]

    def move_states(self, moves: Sequence[tuple[int, int]]) -> None:
        """Those of active sequences, with what they have sampled."""
        sources, targets = torch.tensor(moves, device=self._device).unbind(1)
        for tensor in self.states.values():
            tensor[targets] = tensor[sources]

    def fork_states(self, moves: Sequence[tuple[int, int]]) -> None:
        """(from slot, to slot): the second goes on after the prompt of the first, wherever that one is by now."""
        for name, tensor in self.states.items():
            found = [self._after_prompt.get(source, {}).get(name, tensor[source]).clone() for source, _ in moves]
            for (_, target), state in zip(moves, found, strict=True):
                tensor[target] = state
        for _, target in moves:
            self._after_prompt.pop(target, None)

    def begin(self, slots: Sequence[int]) -> None:
        """Before the first token of new sequences."""
        for slot in slots:
            self._after_prompt.pop(slot, None)
            for tensor in self.states.values():
                tensor[slot].zero_()

    def keep_prompts(self, slots: Sequence[int]) -> None:
        """The states after the prompts in these slots, for samples that come later; all others are dropped."""
        kept = {slot: self._after_prompt.get(slot) for slot in slots}
        self._after_prompt = {
            slot: states or {name: tensor[slot].clone() for name, tensor in self.states.items()}
            for slot, states in kept.items()
        }

    def copy_from(self, other: SlotTensors) -> None:
        """Of a cache that was smaller."""
        for name, old in other.tokens.items():
            self.tokens[name][: len(old), ..., : old.shape[-2], :] = old
        for name, old in other.states.items():
            self.states[name][: len(old)] = old
        self._after_prompt = other._after_prompt

    def clear(self) -> None:
        for tensor in (*self.tokens.values(), *self.states.values()):
            tensor.zero_()
        self._after_prompt.clear()


@dataclass(frozen=True)
class _Rows:
    """One more token for each of the first slots. `mask` [rows, length], or None: all rows see all `length` tokens.

    Rows end together, as in a batch that is padded on the left: which is how transformers' models expect them, so that
    windows and biases that count from the last token are right in every row.
    """

    positions: Tensor  # [rows] of the new tokens
    length: int
    gather: Tensor | None  # [rows, length] the tokens of each row, for rows of several lengths
    mask: Tensor | None

    @classmethod
    def of(cls, positions: Tensor, length: int) -> _Rows:
        """`length`: at least that of the longest sequence; exactly that where looking costs nothing."""
        if positions.device.type == "cpu":
            shortest, longest = (int(end) for end in positions.clamp(max=length - 1).aminmax())
            if shortest == longest:
                return cls(positions, longest + 1, None, None)
            length = longest + 1
        last = positions.clamp(max=length - 1)[:, None]  # empty slots may count on beyond the length
        index = torch.arange(length, device=positions.device) + last + 1 - length
        return cls(positions, length, index.clamp(min=0), (index >= 0).to(torch.int64))


class _Layers(list[Any]):
    """Of a SlotCache: empty, but models of older transformers read states there: `cache.layers[3].conv_states[0]`."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def __getitem__(self, layer: Any) -> Any:
        return _LayerStates(self._cache, layer)


class _LayerStates:
    record_past = False

    def __init__(self, cache: SlotCache, layer: int) -> None:
        self.conv_states = _ByNumber(cache.get_conv_state, layer)
        self.recurrent_states = _ByNumber(cache.get_recurrent_state, layer)


class _ByNumber:
    def __init__(self, read: Callable[[int, int], Tensor | None], layer: int) -> None:
        self._read, self._layer = read, layer

    def __getitem__(self, number: int) -> Tensor | None:
        return self._read(self._layer, number)


class SlotCache(Cache):
    """What a model is given as its cache: in a pass over one sequence from its beginning, or over rows.

    `keeps_keys`: False where attention of ours keeps keys and values. Outside of `prefilling` and `decoding` it only
    notes what it would keep.
    """

    def __init__(self, *, keeps_keys: bool) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.keeps_keys = keeps_keys
        self.layers = _Layers(self)
        self.shapes: dict[StateName, StateShape] = {}
        self.tensors: SlotTensors | None = None
        self._slot: int | None = None
        self._rows: _Rows | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes.values() if shape.grows)

    @property
    def bytes_per_slot(self) -> int:
        """Of what does not grow."""
        return sum(shape.num_bytes for shape in self.shapes.values() if not shape.grows)

    @property
    def has_states(self) -> bool:
        return any(not shape.grows for shape in self.shapes.values())

    def allocate(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self.tensors = SlotTensors(self.shapes, num_slots, capacity, device)

    @contextlib.contextmanager
    def prefilling(self, slot: int) -> Iterator[None]:
        self._slot = slot
        try:
            yield
        finally:
            self._slot = None

    @contextlib.contextmanager
    def decoding(self, positions: Tensor, length: int) -> Iterator[Tensor | None]:
        """Gives the mask."""
        self._rows = _Rows.of(positions, length)
        try:
            yield self._rows.mask
        finally:
            self._rows = None

    # Attention that is the model's own.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[rows, heads, tokens, dim] of all tokens so far."""
        if not self.keeps_keys:
            return key_states, value_states
        keys = self._append(StateName("key", layer_idx), key_states)
        return keys, self._append(StateName("value", layer_idx), value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._append(StateName("index", layer_idx), indexer_key_states)

    def _append(self, name: StateName, new: Tensor) -> Tensor:
        """[rows, ..., tokens, dim]."""
        if self._rows is None:
            self._note(name, new[:, ..., :1, :], grows=True)
            if self._slot is not None:
                self.stored.tokens[name][self._slot, ..., : new.shape[-2], :] = new[0]
            return new
        stored, rows = self.stored.tokens[name], self._rows
        slots = torch.arange(len(new), device=new.device)
        stored[slots, ..., rows.positions, :] = new[..., 0, :]
        seen = stored[: len(new)]
        if rows.gather is None:
            return seen[..., : rows.length, :]
        index = rows.gather.view(len(new), *[1] * (new.ndim - 3), rows.length, 1)
        return seen.gather(-2, index.expand(*seen.shape[:-2], rows.length, seen.shape[-1]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._rows is None else self._rows.length - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # Convolutions and recurrent states.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._rows is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Some layers write into it."""
        return self._state(StateName("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state(StateName("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """[rows, channels, tokens]; returns it after the tokens of before."""
        name = StateName("conv", layer_idx, state_idx)
        before = self._state(name)
        size = (conv_kernel_size or conv_states.shape[-1]) if before is None else before.shape[-1]
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        seen = F.pad(seen, (max(size - seen.shape[-1], 0), 0))
        self._store(name, seen[..., seen.shape[-1] - size :])
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        self._store(StateName("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def _state(self, name: StateName) -> Tensor | None:
        if self._rows is None or name not in self.shapes:
            return None
        return self.stored.states[name][: len(self._rows.positions)]

    def _store(self, name: StateName, state: Tensor) -> None:
        if self._rows is not None:
            self.stored.states[name][: len(self._rows.positions)].copy_(state)
            return
        self._note(name, state, grows=False)
        if self._slot is not None:
            self.stored.states[name][self._slot].copy_(state[0])

    def _note(self, name: StateName, tensor: Tensor, *, grows: bool) -> None:
        shape = StateShape(tuple(tensor.shape[1:]), tensor.dtype, grows)
        if self.shapes.setdefault(name, shape) != shape:
            raise UnsupportedModelError(f"the {name.kind} of layer {name.layer} changes its shape from pass to pass")

    @property
    def stored(self) -> SlotTensors:
        assert self.tensors is not None, "allocate comes first"
        return self.tensors
