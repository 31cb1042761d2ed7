"""Continuous batching: sequences wait in order, and a free slot of the cache takes the next one at once.

A prompt is computed once: its other samples copy what a slot still holds of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.inference.adapter_bank import NO_ADAPTER
from lockstep.inference.decoder import Decoder
from lockstep.inference.sequence import TokenSequence
from lockstep.inference.token_sampling import LaunchedSteps, RowTruncations, ScoredPrompt, Truncation


@dataclass
class SlotAdmission:
    """Slots that take new sequences. The order is: copies, then computations, then copies of what was computed."""

    placed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence id)
    copied: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)
    computed: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence id)
    shared: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


class SlotSchedule:
    """Which sequence is in which slot. `prompts`: a name for each sequence's prompt; equal names are equal prompts.

    `keeps_states`: what a slot has of its prompt is lost with its next token, unless `waited_prompts` says otherwise.
    """

    def __init__(self, prompts: Iterable[Hashable] = (), num_slots: int = 0, *, keeps_states: bool = False) -> None:
        self._keeps_states = keeps_states
        self._prompts: dict[int, Hashable] = {}  # by sequence id
        self._partial: set[int] = set()
        self._waiting: deque[int] = deque()
        self._num_added = 0
        self.active: dict[int, int] = {}  # slot -> sequence id
        self._cached: list[Hashable | None] = [None] * num_slots  # prompt in each slot, also after its sequence ended
        for prompt in prompts:
            self.add(prompt)

    @property
    def busy(self) -> bool:
        return bool(self.active or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_slots(self) -> int:
        return len(self._cached)

    def add(self, prompt: Hashable, *, partial: bool = False) -> int:
        """The id of a new sequence. A `partial` one has more tokens than its prompt, so its cache is not shared."""
        sequence_id = self._num_added
        self._num_added += 1
        self._prompts[sequence_id] = prompt
        if partial:
            self._partial.add(sequence_id)
        self._waiting.append(sequence_id)
        return sequence_id

    def holds(self, prompt: Hashable) -> bool:
        """Whether some slot has it."""
        return prompt in self._cached

    def resize(self, num_slots: int) -> None:
        """More slots, or fewer if the last ones are free."""
        assert all(slot < num_slots for slot in self.active)
        self._cached = [*self._cached[:num_slots], *[None] * (num_slots - len(self._cached))]

    def name(self, slot: int) -> Hashable:
        """Of the prompt of an active slot."""
        return self._prompts[self.active[slot]]

    def rename(self, slot: int, prompt: Hashable) -> None:
        """The cache of an active slot was computed anew, in a way that other samples of its prompt cannot share."""
        self._prompts[self.active[slot]] = prompt
        self._cached[slot] = None if self._keeps_states else prompt

    def forget_cached(self) -> None:
        """The cache is outdated. The caller recomputes the slots of active sequences."""
        active = {} if self._keeps_states else self.active
        self._cached = [self._prompts[active[slot]] if slot in active else None for slot in range(self.num_slots)]

    def admit(self, may_start: Callable[[int], bool] = lambda sequence_id: True) -> SlotAdmission:
        """Fill free slots, first come first served: while a prompt has samples waiting, some slot holds it.

        A sequence that may not start yet blocks all behind it, so that none waits forever.
        """
        admission, fresh = SlotAdmission(), dict[Hashable, int]()
        before = list(self._cached)
        free = deque(slot for slot in range(len(self._cached)) if slot not in self.active)
        while self._waiting and free and may_start(self._waiting[0]):
            sequence_id = self._waiting.popleft()
            prompt, slot = self._prompts[sequence_id], free.popleft()
            is_whole = sequence_id not in self._partial or not self._keeps_states
            if sequence_id in self._partial:
                admission.computed.append((slot, sequence_id))
                if is_whole:
                    fresh.setdefault(prompt, slot)
            elif self._cached[slot] != prompt or self._keeps_states:
                if prompt in before:
                    admission.copied.append((before.index(prompt), slot))
                elif prompt in fresh:
                    admission.shared.append((fresh[prompt], slot))
                else:
                    admission.computed.append((slot, sequence_id))
                    fresh[prompt] = slot
            self._cached[slot] = prompt if is_whole else None
            self.active[slot] = sequence_id
            admission.placed.append((slot, sequence_id))
        return admission

    def waited_prompts(self) -> list[int]:
        """After `admit`: a slot for each prompt that more samples wait for. What others have of theirs is forgotten."""
        waited = {self._prompts[sequence_id] for sequence_id in self._waiting if sequence_id not in self._partial}
        slots = {prompt: slot for slot, prompt in reversed(list(enumerate(self._cached))) if prompt in waited}
        self._cached = [prompt if slots.get(prompt) == slot else None for slot, prompt in enumerate(self._cached)]
        return sorted(slots.values())

    def release(self, slot: int) -> None:
        sequence_id = self.active.pop(slot)
        del self._prompts[sequence_id]
        self._partial.discard(sequence_id)

    def drop(self, sequence_id: int) -> None:
        """Take out a sequence, waiting or active."""
        for slot, active_id in self.active.items():
            if active_id == sequence_id:
                self.release(slot)
                return
        self._waiting.remove(sequence_id)
        del self._prompts[sequence_id]
        self._partial.discard(sequence_id)

    def compact(self) -> list[tuple[int, int]]:
        """With nothing waiting: move the last sequences into free slots before them. (from slot, to slot), at once."""
        if self._waiting:
            return []
        moves = []
        holes = [slot for slot in range(len(self.active)) if slot not in self.active]
        for target, source in zip(holes, sorted(s for s in self.active if s >= len(self.active)), strict=True):
            self.active[target] = self.active.pop(source)
            self._cached[target] = self._cached[source]
            moves.append((source, target))
        return moves


ActiveSlots = list[tuple[int, int]]  # (slot, sequence id)
_TOP_STEPS = (0, 1, 5, 20)  # so many of the likeliest tokens are found at once: steps of few shapes


@dataclass(frozen=True)
class BatchLimits:
    """`max_slots` sequences at once, in at most `max_bytes` of cache (None: what the decoder can spare).

    `steps_per_read`: tokens are fetched from the device only so often; tokens after the end of a sequence are dropped.
    `min_slots`: at least as many slots are made, also for fewer sequences, so that steps keep their shape.
    `min_length`: slots are at least so long, if all of them take no more than `min_length_bytes`.
    """

    max_slots: int
    max_bytes: int | None = None
    steps_per_read: int = 1
    min_slots: int = 1
    min_length: int = 0
    min_length_bytes: int = 0


def decode_all(decoder: Decoder, sequences: Sequence[TokenSequence], limits: BatchLimits) -> None:
    """Until all are finished. Raises before the first starts if one does not fit."""
    with decoder.in_use():
        batch = ContinuousBatch(decoder, limits)
        batch.add(sequences)
        if not batch.busy:
            decoder.prepare(1, 1)  # for the passes of other processes
        while batch.busy:
            batch.advance()
        decoder.finish()


class ContinuousBatch:
    """The sequences that a decoder works on. The decoder must be in use when they `advance`."""

    def __init__(self, decoder: Decoder, limits: BatchLimits) -> None:
        self._decoder, self._limits = decoder, limits
        self._max_bytes = decoder.spare_bytes() if limits.max_bytes is None else limits.max_bytes
        self._schedule = SlotSchedule(keeps_states=decoder.slots.keeps_states)
        self._sequences: dict[int, TokenSequence] = {}  # unfinished, by id
        self._max_length = 0  # of a sequence that fits a slot
        self._has_new = True  # sequences came since slots were last made
        self._is_outdated = False  # the cache is of older weights
        self._launched: tuple[ActiveSlots, LaunchedSteps] | None = None
        self._settled: list[TokenSequence] = []  # finished, and not yet returned by `advance`
        self._routing: dict[Hashable, bytes] = {}  # of cached prompts, where it is recorded

    @property
    def busy(self) -> bool:
        return self._schedule.busy or bool(self._settled)

    @property
    def unfinished(self) -> list[TokenSequence]:
        return list(self._sequences.values())

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """First come, first served. One that can never fit raises."""
        if sequences:
            self._refuse_too_long(max(sequences, key=lambda sequence: sequence.max_length))
        for sequence in sequences:
            if not sequence.finished:
                sequence_id = self._schedule.add(self._cache_name(sequence), partial=sequence.is_partial)
                self._sequences[sequence_id] = sequence
                self._has_new = True

    def drop_cancelled(self) -> None:
        """Free the slots of sequences that nobody wants any more."""
        cancelled = [i for i, sequence in self._sequences.items() if sequence.finished]
        if cancelled:
            self._settle()  # steps that are still being computed write into their slots
        for sequence_id in cancelled:
            if self._sequences.pop(sequence_id, None) is not None:
                self._schedule.drop(sequence_id)

    def set_version(self, version: int) -> None:
        """The weights have changed: tokens stay, the cache is recomputed before the next step."""
        self._settle()  # computed with the weights before
        self._is_outdated = True
        for sequence in self._sequences.values():
            sequence.version = version

    def advance(self) -> list[TokenSequence]:
        """A few steps of every active sequence. Returns those that finished."""
        if self._is_outdated:
            self._recompute_cache()
        if self._has_new:
            self._settle()
            self._make_slots()
        self._admit()
        self._recompute_rotated()
        finished, self._settled = self._settled, []
        if self._schedule.active:
            finished += self._step()
        if self._schedule.active and not self._decoder.has_fixed_batch:
            longest = max(self._sequences[sequence_id].length for sequence_id in self._schedule.active.values())
            self._decoder.slots.move(self._schedule.compact(), longest)
        return finished

    def _refuse_too_long(self, sequence: TokenSequence) -> None:
        longest = self._decoder.rotary.longest_decoded
        if longest is not None and sequence.max_length > longest:
            raise ValueError(
                f"a prompt of {len(sequence.prompt)} tokens and {sequence.num_left} new ones: beyond {longest} every "
                "token would change the positions of all others. Lower max_tokens"
            )
        needed = self._decoder.slots.bytes_for(sequence.max_length)
        if needed > self._max_bytes:
            raise ValueError(
                f"a prompt of {len(sequence.prompt)} tokens and {sequence.num_left} new ones need "
                f"{needed / 2**20:,.3f} MiB of cache, and there is room for {self._max_bytes / 2**20:,.3f}: "
                "lower max_tokens"
            )

    def _make_slots(self) -> None:
        """For all sequences, as many and as long as memory allows."""
        length = max(sequence.max_length for sequence in self._sequences.values())
        num_wanted = max(len(self._sequences), self._limits.min_slots)
        if self._decoder.has_fixed_batch:
            num_wanted = 1 << (num_wanted - 1).bit_length()  # calls of about one size then share their graphs
        length = self._keeping_length(length, num_wanted)
        num_slots = min(self._limits.max_slots, num_wanted, self._max_bytes // self._decoder.slots.bytes_for(length))
        self._has_new = False
        if length <= self._max_length and num_slots <= self._schedule.num_slots:
            return
        if not self._schedule.active:
            self._decoder.prepare(num_slots, length)
            self._schedule.forget_cached()
        elif num_slots >= self._schedule.num_slots:
            length = max(length, self._max_length)
            self._decoder.grow(num_slots, length)
        else:
            self._has_new = True  # longer slots would be too few for the active sequences: retried until they fit
            return
        self._schedule.resize(num_slots)
        self._max_length = length

    def _keeping_length(self, length: int, num_slots: int) -> int:
        """Long enough for later calls too, where that is cheap: what is captured for slots goes with them."""
        limits = self._limits
        longer = max(length, limits.min_length)
        num_bytes = min(num_slots, limits.max_slots) * self._decoder.slots.bytes_for(longer)
        return longer if num_bytes <= min(limits.min_length_bytes, self._max_bytes) else length

    def _recompute_cache(self) -> None:
        """Keys and values of every active sequence; cached prompts of others are forgotten."""
        self._is_outdated = False
        self._schedule.forget_cached()
        self._decoder.slots.forget_prompts()
        self._decoder.check_model()
        sequences = {slot: self._sequences[sequence_id] for slot, sequence_id in self._schedule.active.items()}
        self._prefill(sequences)
        self._place(sequences)

    def _cache_name(self, sequence: TokenSequence) -> Hashable:
        """Sequences with this in common have the same keys and values for their prompt."""
        return sequence.prompt, self._decoder.rotary.group(sequence.length), sequence.options.adapter

    def _recompute_rotated(self) -> None:
        """Of sequences that are now so long that their model rotates keys in another way, as it does in training."""
        if not self._decoder.rotary.rules:
            return
        crossed: dict[int, TokenSequence] = {}
        for slot, sequence_id in self._schedule.active.items():
            sequence = self._sequences[sequence_id]
            name = self._cache_name(sequence)
            if name != self._schedule.name(slot):
                self._schedule.rename(slot, name)
                crossed[slot] = sequence
        self._prefill(crossed)

    def _prefill(self, sequences: Mapping[int, TokenSequence]) -> None:
        """By slot. A prompt is scored when it is computed for the first time."""
        scored = {
            slot: ScoredPrompt(sequence.prompt[-1], sequence.options.num_top or 0)
            for slot, sequence in sequences.items()
            if sequence.options.prompt_scores and not sequence.prompt_scores and not sequence.sampled
        }
        prompts = [(slot, sequence.tokens[:-1]) for slot, sequence in sequences.items()]
        adapters = {slot: self._adapter(sequence) for slot, sequence in sequences.items()}
        for slot, scores in self._decoder.prefill(prompts, adapters, scored).items():
            sequences[slot].prompt_scores = scores
        for slot, rows in self._decoder.prompt_routing.items():
            sequences[slot].add_routing(0, rows)
            computed = len(sequences[slot].tokens) - 1
            in_prompt = len(rows) // computed * (len(sequences[slot].prompt) - 1)
            self._routing[self._cache_name(sequences[slot])] = rows[:in_prompt]

    def _adapter(self, sequence: TokenSequence) -> int:
        name = sequence.options.adapter
        return NO_ADAPTER if name is None or self._decoder.bank is None else self._decoder.bank.number(name)

    def _admit(self) -> None:
        """The last token is left to the first step, which gives the token after it in every slot."""
        admission = self._schedule.admit(self._may_start)
        if not admission.placed:
            return
        sequences = {slot: self._sequences[sequence_id] for slot, sequence_id in admission.placed}
        longest = max(len(sequence.prompt) for sequence in sequences.values()) - 1
        written = [slot for slot, _ in admission.computed] + [to for _, to in (*admission.copied, *admission.shared)]
        self._decoder.slots.copy_prompts(admission.copied, written, longest)
        self._prefill({slot: sequences[slot] for slot, _ in admission.computed})
        shared = [(a, b, len(sequences[b].prompt) - 1) for a, b in admission.shared]
        # Where angles depend on length, a slot may be computed anew, on its own.
        self._decoder.slots.share_prompts(shared, copies=bool(self._decoder.rotary.rules))
        if self._decoder.slots.keeps_states:
            self._decoder.slots.keep_prompts(self._schedule.waited_prompts())
        self._share_routing(sequences.values())
        self._finish_scored(admission.placed)
        self._place(sequences)

    def _share_routing(self, sequences: Collection[TokenSequence]) -> None:
        """A prompt that was not computed again was routed as when it was."""
        for sequence in sequences if self._routing else ():
            sequence.add_routing(0, self._routing.get(self._cache_name(sequence), b""))
        self._routing = {name: rows for name, rows in self._routing.items() if self._schedule.holds(name)}

    def _place(self, sequences: Mapping[int, TokenSequence]) -> None:
        if not sequences:
            return
        last_tokens = [sequence.tokens[-1] for sequence in sequences.values()]
        positions = [sequence.length - 1 for sequence in sequences.values()]
        streams = torch.tensor([sequence.random_stream for sequence in sequences.values()])
        adapters = [self._adapter(sequence) for sequence in sequences.values()]
        self._decoder.slots.place(list(sequences), last_tokens, positions, streams, adapters)

    def _finish_scored(self, placed: ActiveSlots) -> None:
        """Sequences that sample nothing leave as soon as their prompt is scored."""
        for slot, sequence_id in placed:
            sequence = self._sequences[sequence_id]
            if sequence.options.score_only:
                sequence.finish_scoring()
                self._settled.append(self._sequences.pop(sequence_id))
                self._schedule.release(slot)

    def _may_start(self, sequence_id: int) -> bool:
        return self._sequences[sequence_id].max_length <= self._max_length

    def _step(self) -> list[TokenSequence]:
        """Read what was launched last, while the device already computes the steps after it, where that is known."""
        launched = self._launched or self._launch(0)
        assert launched is not None
        # Where positions depend on the length, a sequence may have to be computed anew before its next token.
        goes_on = self._decoder.has_fixed_batch and not self._schedule.num_waiting and not self._decoder.rotary.rules
        self._launched = self._launch(launched[1].num_steps) if goes_on else None
        return self._read(*launched)

    def _launch(self, num_ahead: int) -> tuple[ActiveSlots, LaunchedSteps] | None:
        """The next steps, `num_ahead` after what sequences have; None if all will be finished by then."""
        active = [(slot, sequence_id) for slot, sequence_id in self._schedule.active.items()]
        left = {i: self._sequences[i].num_left - num_ahead for _, i in active}
        active = [(slot, i) for slot, i in active if left[i] > 0]
        if not active:
            return None
        batch_size = self._schedule.num_slots if self._decoder.has_fixed_batch else max(slot for slot, _ in active) + 1
        num_steps = min(self._limits.steps_per_read, *(left[i] for _, i in active))
        for _, i in active:
            num_steps = min(num_steps, self._decoder.rotary.steps_in_group(self._sequences[i].length) or num_steps)
        length = max(self._sequences[i].length for _, i in active) + num_ahead + num_steps - 1
        num_top = max((_top_step(self._sequences[i].options.num_top) for _, i in active), default=-1)
        truncation = self._truncations(active)
        return active, self._decoder.launch(num_steps, batch_size, length, truncation, None if num_top < 0 else num_top)

    def _truncations(self, active: ActiveSlots) -> Truncation | RowTruncations:
        slots: dict[Truncation, list[int]] = {}
        for slot, sequence_id in active:
            slots.setdefault(self._sequences[sequence_id].truncation, []).append(slot)
        if len(slots) == 1:
            return next(iter(slots))
        return tuple((truncation, tuple(rows)) for truncation, rows in slots.items())

    def _read(self, active: ActiveSlots, launched: LaunchedSteps) -> list[TokenSequence]:
        tokens, logprobs = launched.read()
        scores = None if launched.scores is None else launched.scores()
        routing = None if launched.routing is None else launched.routing()
        finished = []
        for slot, sequence_id in active:
            sequence = self._sequences.get(sequence_id)  # None: it ended in the steps before, which were read later
            for step in range(launched.num_steps if sequence is not None else 0):
                assert sequence is not None
                if not math.isfinite(logprobs[step][slot]):
                    raise ValueError(
                        f"the model gives {logprobs[step][slot]} as a log-prob: its weights hold nan or inf, "
                        "or overflow"
                    )
                wanted = sequence.options.num_top
                found = None if wanted is None or scores is None else scores[step][slot].first(wanted)
                if routing is not None:
                    sequence.add_routing(sequence.length - 1, routing[step][slot].tobytes())
                sequence.append(tokens[step][slot], logprobs[step][slot], found)
                if sequence.finished:
                    finished.append(self._sequences.pop(sequence_id))
                    self._schedule.release(slot)
                    break
        return finished

    def _settle(self) -> None:
        """Read what is still being computed: what comes next needs the sequences as they are."""
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._settled += self._read(*launched)


def _top_step(num_top: int | None) -> int:
    """-1: no scores are wanted."""
    if num_top is None:
        return -1
    return next((step for step in _TOP_STEPS if step >= num_top), num_top)
