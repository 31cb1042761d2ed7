"""All that the sequences of a batch keep on the device, a slot each, made, grown, moved and freed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.inference.adapter_bank import NO_ADAPTER
from lockstep.inference.kv_cache import KeyValueCache, LayerShape, SharedPrompts
from lockstep.inference.slot_cache import SlotCache


class DecodeSlots:
    """Keys and values of attention that is ours, whatever else layers keep, and the token that each slot computes next.

    `states`: what the model gets as its cache, where layers keep something else. `prompts`: where a kernel can read the
    first tokens of a slot in another one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: SlotCache | None = None
        self.prompts: SharedPrompts | None = None
        self._shapes: Mapping[nn.Module, LayerShape] = {}
        self._cache: KeyValueCache | None = None

    def use_shapes(self, shapes: Mapping[nn.Module, LayerShape], states: SlotCache | None) -> None:
        self._shapes, self.states = shapes, states

    @property
    def bytes_per_token(self) -> int:
        kept = 0 if self.states is None else self.states.bytes_per_token
        return kept + sum(shape.num_bytes for shape in self._shapes.values())

    @property
    def num_bytes(self) -> int:
        """Allocated now."""
        tensors = None if self.states is None else self.states.tensors
        return sum(cache.num_bytes for cache in (self._cache, tensors) if cache is not None)

    def bytes_for(self, length: int) -> int:
        """For a sequence of at most `length` tokens."""
        fixed = 0 if self.states is None else self.states.bytes_per_slot
        return max(self.bytes_per_token * self.capacity_for(length) + fixed, 1)

    @property
    def keeps_states(self) -> bool:
        """Whether layers have a state that cannot go back to an earlier token."""
        return self.states is not None and self.states.has_states

    @property
    def kv_cache(self) -> KeyValueCache:
        assert self._cache is not None, "prepare comes first"
        return self._cache

    def capacity_for(self, length: int) -> int:
        step = 128 if self.device.type == "cuda" else 32
        return -(-length // step) * step

    def has_room(self, num_slots: int, length: int) -> bool:
        cache = self._cache
        return cache is not None and cache.num_slots >= num_slots and cache.capacity >= self.capacity_for(length)

    def allocate(self, num_slots: int, length: int, *, shares_prompts: bool) -> None:
        """Empty slots for sequences of at most `length` tokens."""
        capacity = self.capacity_for(length)
        self._cache = KeyValueCache(self._shapes, num_slots, capacity, self.device)
        if self.states is not None:
            self.states.allocate(num_slots, capacity, self.device)
        self.prompts = SharedPrompts(num_slots, self.device) if shares_prompts else None
        state = torch.zeros(4, num_slots, dtype=torch.int64, device=self.device)
        self.tokens, self.positions, self.streams, self.adapters = state.unbind(0)

    def grow(self, num_slots: int, length: int, *, shares_prompts: bool) -> None:
        """More or longer slots; their contents stay."""
        old, old_state, old_prompts = self.kv_cache, self._next_state, self.prompts
        kept = None if self.states is None else self.states.stored
        self.release()
        self.allocate(max(num_slots, old.num_slots), max(length, old.capacity), shares_prompts=shares_prompts)
        self.kv_cache.copy_from(old)
        if self.states is not None and kept is not None:
            self.states.stored.copy_from(kept)
        if self.prompts is not None and old_prompts is not None:
            self.prompts.copy_from(old_prompts)
        for state, old_values in zip(self._next_state, old_state, strict=True):
            state[: len(old_values)] = old_values

    def clear(self) -> None:
        """All slots are empty, and stay where they are."""
        self.kv_cache.clear()
        if self.states is not None:
            self.states.stored.clear()
        self.forget_prompts()
        for state in (self.tokens, self.positions, self.adapters):
            state.zero_()

    def release(self) -> None:
        self._cache = self.prompts = None
        if self.states is not None:
            self.states.tensors = None

    def begin(self, slots: Sequence[int]) -> None:
        """Before the first tokens of new sequences."""
        if self.states is not None:
            self.states.stored.begin(slots)

    def forget_prompts(self) -> None:
        """Every slot holds its own tokens from here on."""
        if self.prompts is not None:
            self.prompts.clear()

    def copy_prompts(self, moves: Sequence[tuple[int, int]], written: Sequence[int], length: int) -> None:
        """As `copy`, before the slots in `written` get prompts that they have not: others may read there."""
        self._fork(moves)
        if self.prompts is None:
            self.copy(moves, length)
            return
        moves = [(self.prompts.holder(source), slot) for source, slot in moves]
        for source, slot, num_tokens in self.prompts.before_write(written):
            self.copy([(source, slot)], num_tokens)  # no more: what follows are the slot's own
        self.copy(moves, length)

    def share_prompts(self, moves: Sequence[tuple[int, int, int]], *, copies: bool) -> None:
        """(from slot, to slot, tokens): the second has the tokens of the first, by a copy or by reading there."""
        self._fork([(source, slot) for source, slot, _ in moves])
        if self.prompts is None or copies:
            self.copy([(source, slot) for source, slot, _ in moves], max((n for *_, n in moves), default=0))
        else:
            self.prompts.share(moves)

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """The first `length` tokens of one slot to another, for each (from slot, to slot)."""
        self.kv_cache.copy(moves, length)
        if self.states is not None:
            self.states.stored.copy_tokens(moves, length)

    def keep_prompts(self, slots: Sequence[int]) -> None:
        """The states after the prompts in these slots, for samples that come later; all others are dropped."""
        if self.states is not None:
            self.states.stored.keep_prompts(slots)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """An active sequence to another slot, for each (from slot, to slot)."""
        assert not moves or self.prompts is None, "others may read there"
        if moves:
            self.copy(moves, length)
            if self.states is not None:
                self.states.stored.move_states(moves)
            sources, targets = torch.tensor(moves, device=self.device).unbind(1)
            for state in self._next_state:
                state[targets] = state[sources]

    def place(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        streams: Tensor,
        adapters: Sequence[int] | None = None,
    ) -> None:
        """The token that each slot computes next, its position, and the sequence's random stream and adapter."""
        index = torch.tensor(slots, device=self.device)
        self.tokens[index] = torch.tensor(tokens, device=self.device)
        self.positions[index] = torch.tensor(positions, device=self.device)
        self.streams[index] = streams.to(self.device)
        self.adapters[index] = torch.tensor(adapters or [NO_ADAPTER] * len(slots), device=self.device)

    @property
    def _next_state(self) -> tuple[Tensor, ...]:
        return self.tokens, self.positions, self.streams, self.adapters

    def _fork(self, moves: Sequence[tuple[int, int]]) -> None:
        if self.states is not None:
            self.states.stored.fork_states(moves)
