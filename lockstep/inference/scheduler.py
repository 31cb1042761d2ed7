"""Who is computed when: sequences wait in order, a free slot takes the next one at once.

A prompt is computed once: later samples of it copy what a slot still holds of it. Numbers only; must not know tensors,
models or text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.inference.completion import GrowingAnswer
from lockstep.inference.decoder import Decoder
from lockstep.inference.token_sampling import Truncation


@dataclass
class SlotAdmission:
    """Slots that take new sequences. In this order: copy from slots as they are, compute, copy what was computed."""

    placed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    copied: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)
    computed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence)
    shared: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


class SlotSchedule:
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

    def admit(self, may_begin: Callable[[int], bool] = lambda sequence: True) -> SlotAdmission:
        """Fill the free slots. First come, first served: while a prompt has samples waiting, some slot holds it.

        A sequence that may not begin yet keeps all behind it waiting: nobody is overtaken for ever.
        """
        admission, fresh = SlotAdmission(), dict[Hashable, int]()
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


@dataclass(frozen=True, eq=False)
class SequenceRequest:
    """`stream`: what its random numbers follow from, together with their places in the text."""

    prompt: tuple[int, ...]
    answer: GrowingAnswer
    stream: int
    truncation: Truncation

    @property
    def text(self) -> tuple[int, ...]:
        """So far, the answer included."""
        return (*self.prompt, *self.answer.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.answer.num_tokens

    @property
    def max_tokens(self) -> int:
        return self.num_tokens + self.answer.num_left


@dataclass(frozen=True)
class Limits:
    """`max_slots` sequences at once, in at most `max_bytes` of cache (None: what can be spared).

    `steps_per_read`: tokens are looked at only so often; an answer that ended in between is noticed late, and cut.
    `min_slots`: room is made for as many at once, also for fewer sequences, so that steps keep their size.
    """

    max_slots: int
    max_bytes: int | None = None
    steps_per_read: int = 1
    min_slots: int = 1


def answer_all(decoder: Decoder, requests: Sequence[SequenceRequest], limits: Limits) -> None:
    """Fill the answers. Every sequence must fit, before the first is begun."""
    with decoder.in_use():
        batch = ContinuousBatch(decoder, limits)
        batch.add(requests)
        if not batch.busy:
            decoder.prepare(1, 1)  # for the passes of other processes
        while batch.busy:
            batch.advance()
        decoder.finish()


class ContinuousBatch:
    """The sequences that a decoder has under way. It must be in use while they `advance`."""

    def __init__(self, decoder: Decoder, limits: Limits) -> None:
        self._decoder, self._limits = decoder, limits
        self._room = decoder.spare_bytes() if limits.max_bytes is None else limits.max_bytes
        self._schedule = SlotSchedule()
        self._requests: dict[int, SequenceRequest] = {}  # by their numbers in the schedule, until they have ended
        self._length = 0  # of the longest text that a slot has room for
        self._has_new = True  # those who came since slots were last made
        self._is_outdated = False

    @property
    def busy(self) -> bool:
        return self._schedule.busy

    def add(self, requests: Sequence[SequenceRequest]) -> None:
        """To be answered as soon as there is a slot, first come, first served. One that can never fit raises."""
        if requests:
            self._refuse_too_long(max(requests, key=lambda request: request.max_tokens))
        for request in requests:
            if not request.answer.finished:
                number = self._schedule.add(request.prompt, begun=request.answer.num_tokens > 0)
                self._requests[number] = request
                self._has_new = True

    def renew(self, version: int) -> None:
        """The weights have changed: tokens stay, and what follows them comes from the new weights alone."""
        self._is_outdated = True
        for request in self._requests.values():
            request.answer.version = version

    def advance(self) -> list[SequenceRequest]:
        """A few steps for everybody under way: those whose answers ended."""
        if self._is_outdated:
            self._compute_again()
        if self._has_new:
            self._make_room()
        self._admit()
        finished = self._step()
        if self._schedule.live and not self._decoder.has_fixed_rows:
            longest = max(self._requests[sequence].num_tokens for sequence in self._schedule.live.values())
            self._decoder.move(self._schedule.compact(), longest)
        return finished

    def _refuse_too_long(self, request: SequenceRequest) -> None:
        needed = self._decoder.slot_bytes(request.max_tokens)
        if needed > self._room:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.answer.num_left} new ones need "
                f"{needed / 2**20:,.3f} MiB of cache, and there is room for {self._room / 2**20:,.3f}: lower max_tokens"
            )

    def _make_room(self) -> None:
        """Slots for everybody who is here, as many and as long as there is room for."""
        length = max(request.max_tokens for request in self._requests.values())
        wanted = max(len(self._requests), self._limits.min_slots)
        if self._decoder.has_fixed_rows:
            wanted = 1 << (wanted - 1).bit_length()  # calls of about one size then share their graphs
        num_slots = min(self._limits.max_slots, wanted, self._room // self._decoder.slot_bytes(length))
        self._has_new = False
        if length <= self._length and num_slots <= self._schedule.num_slots:
            return
        if not self._schedule.live:
            self._decoder.prepare(num_slots, length)
            self._schedule.forget()
        elif num_slots >= self._schedule.num_slots:
            length = max(length, self._length)
            self._decoder.grow(num_slots, length)
        else:
            self._has_new = True  # longer slots would be too few for those under way: tried again until they fit
            return
        self._schedule.resize(num_slots)
        self._length = length

    def _compute_again(self) -> None:
        """Keys and values of every text under way; what slots still hold of others is forgotten."""
        self._is_outdated = False
        self._schedule.forget()
        self._decoder.check_model()
        live = self._schedule.live.items()
        self._decoder.prefill([(slot, self._requests[sequence].text[:-1]) for slot, sequence in live])

    def _admit(self) -> None:
        """The last token of a text is left to the first step, which gives the token after it in every slot."""
        admission = self._schedule.admit(self._may_begin)
        if not admission.placed:
            return
        requests = {slot: self._requests[sequence] for slot, sequence in admission.placed}
        longest = max(len(request.prompt) for request in requests.values()) - 1
        self._decoder.copy(admission.copied, longest)
        self._decoder.prefill([(slot, requests[slot].text[:-1]) for slot, _ in admission.computed])
        self._decoder.copy(admission.shared, longest)
        lasts = [request.text[-1] for request in requests.values()]
        places = [request.num_tokens - 1 for request in requests.values()]
        streams = torch.tensor([request.stream for request in requests.values()])
        self._decoder.place(list(requests), lasts, places, streams)

    def _may_begin(self, sequence: int) -> bool:
        """In a step all tokens are drawn in one way: a sequence that wants another waits for those under way."""
        request = self._requests[sequence]
        other = next(iter(self._schedule.live.values()), sequence)
        return request.max_tokens <= self._length and request.truncation == self._requests[other].truncation

    def _step(self) -> list[SequenceRequest]:
        live = [(slot, sequence, self._requests[sequence]) for slot, sequence in self._schedule.live.items()]
        num_rows = self._schedule.num_slots if self._decoder.has_fixed_rows else max(self._schedule.live) + 1
        num_steps = min(self._limits.steps_per_read, min(request.answer.num_left for _, _, request in live))
        reach = max(request.num_tokens for _, _, request in live) + num_steps - 1
        tokens, logprobs = self._decoder.advance(num_steps, num_rows, reach, live[0][2].truncation)
        finished = []
        for slot, sequence, request in live:
            for step in range(num_steps):
                if not math.isfinite(logprobs[step][slot]):
                    raise ValueError(
                        f"the model gives {logprobs[step][slot]} as a log-prob: its weights hold nan or inf, "
                        "or overflow"
                    )
                request.answer.push(tokens[step][slot], logprobs[step][slot])
                if request.answer.finished:
                    self._schedule.release(slot)
                    finished.append(self._requests.pop(sequence))
                    break
        return finished
