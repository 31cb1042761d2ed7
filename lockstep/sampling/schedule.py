"""Who is computed when: sequences wait in order, a free slot takes the next one at once.

A prompt is computed once: later samples of it copy what a slot still holds of it. Numbers only; must not know tensors,
models or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field


@dataclass
class Admission:
    """Slots that take new sequences. In this order: copy from slots as they are, compute, copy what was computed."""

    placed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    copied: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)
    computed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    shared: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


class Schedule:
    """`prompts`: for each sequence what names its prompt; equal names are equal prompts. Sequences are numbered."""

    def __init__(self, prompts: Iterable[Hashable] = (), num_slots: int = 0) -> None:
        self._prompts: dict[int, Hashable] = {}
        self._begun: set[int] = set()
        self._waiting: deque[int] = deque()
        self._num_added = 0
        self.live: dict[int, int] = {}  # slot -> sequence
        self._held: list[Hashable | None] = [None] * num_slots  # also after a sequence ended, until the next one
        for prompt in prompts:
            self.add(prompt)

    @property
    def busy(self) -> bool:
        return bool(self.live or self._waiting)

    @property
    def num_slots(self) -> int:
        return len(self._held)

    def add(self, prompt: Hashable, *, begun: bool = False) -> int:
        """The number of a new sequence. One that was `begun` elsewhere has more than its prompt, and is computed."""
        number = self._num_added
        self._num_added += 1
        self._prompts[number] = prompt
        if begun:
            self._begun.add(number)
        self._waiting.append(number)
        return number

    def resize(self, num_slots: int) -> None:
        """More slots, or fewer as long as none of those that go is in use."""
        assert all(slot < num_slots for slot in self.live)
        self._held = [*self._held[:num_slots], *[None] * (num_slots - len(self._held))]

    def forget(self) -> None:
        """What slots held is worth nothing any more; those with a sequence are filled again by whoever says so."""
        self._held = [self._prompts[self.live[slot]] if slot in self.live else None for slot in range(len(self._held))]

    def admit(self, may_begin: Callable[[int], bool] = lambda sequence: True) -> Admission:
        """Fill the free slots. First come, first served: while a prompt has samples waiting, some slot holds it.

        A sequence that may not begin yet keeps all behind it waiting: nobody is overtaken for ever.
        """
        admission, fresh = Admission(), dict[Hashable, int]()
        before = list(self._held)
        free = deque(slot for slot in range(len(self._held)) if slot not in self.live)
        while self._waiting and free and may_begin(self._waiting[0]):
            sequence = self._waiting.popleft()
            prompt, slot = self._prompts[sequence], free.popleft()
            if sequence in self._begun:
                admission.computed.append((slot, sequence))
                fresh.setdefault(prompt, slot)
            elif self._held[slot] != prompt:
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
        sequence = self.live.pop(slot)
        del self._prompts[sequence]
        self._begun.discard(sequence)

    def compact(self) -> list[tuple[int, int]]:
        """When nobody waits: move the last sequences into free slots before them. (from slot, to slot), all at once."""
        if self._waiting:
            return []
        moves = []
        holes = [slot for slot in range(len(self.live)) if slot not in self.live]
        for target, source in zip(holes, sorted(s for s in self.live if s >= len(self.live)), strict=True):
            self.live[target] = self.live.pop(source)
            self._held[target] = self._held[source]
            moves.append((source, target))
        return moves
