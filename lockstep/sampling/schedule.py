"""Who is computed when: sequences wait in order, a free slot takes the next one at once.

A prompt is computed once: later samples of it copy what a slot still holds of it. Numbers only; must not know tensors,
models or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class Admission:
    """Slots that take new sequences. In this order: copy from slots as they are, compute, copy what was computed."""

    placed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    copied: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)
    computed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    shared: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


class Schedule:
    """`prompts`: for each sequence what names its prompt; equal names are equal prompts."""

    def __init__(self, prompts: Sequence[Hashable], num_slots: int) -> None:
        self._prompts = prompts
        self._waiting = deque(range(len(prompts)))
        self.live: dict[int, int] = {}  # slot -> sequence
        self._held: list[Hashable | None] = [None] * num_slots  # also after a sequence ended, until the next one

    @property
    def busy(self) -> bool:
        return bool(self.live or self._waiting)

    def admit(self) -> Admission:
        """Fill the free slots. First come, first served: while a prompt has samples waiting, some slot holds it."""
        admission, fresh = Admission(), dict[Hashable, int]()
        before = list(self._held)
        free = deque(slot for slot in range(len(self._held)) if slot not in self.live)
        while self._waiting and free:
            sequence = self._waiting.popleft()
            prompt, slot = self._prompts[sequence], free.popleft()
            if self._held[slot] != prompt:
                if prompt in before:
                    admission.copied.append((before.index(prompt), slot))
                elif prompt in fresh:
                    admission.shared.append((fresh[prompt], slot))
                else:
                    admission.computed.append((slot, sequence))
                    fresh[prompt] = slot
            self._held[slot] = prompt
            self.live[slot] = sequence
            admission.placed.append((slot, sequence))
        return admission

    def release(self, slot: int) -> None:
        del self.live[slot]

    def compact(self) -> list[tuple[int, int]]:
        """When nobody waits: move the last sequences into free slots before them. (from slot, to slot), all at once."""
        if self._waiting:
            return []
        moves = []
        holes = [slot for slot in range(len(self.live)) if slot not in self.live]
        for target, source in zip(holes, sorted(s for s in self.live if s >= len(self.live)), strict=True):
            self.live[target] = self.live.pop(source)
            moves.append((source, target))
        return moves
