"""Continuous batching: sequences of different lengths through the slots of a decoder until each has its answer.

A slot whose answer ended takes the next sequence at once, and a prompt is computed once for all its samples.
Must not know models, text or weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.sampling.answer import GrowingAnswer
from lockstep.sampling.choosing import Truncation
from lockstep.sampling.decoding import Decoder
from lockstep.sampling.schedule import Schedule


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    answer: GrowingAnswer

    @property
    def num_tokens(self) -> int:
        """So far, the answer included."""
        return len(self.prompt) + self.answer.num_tokens

    @property
    def max_tokens(self) -> int:
        return self.num_tokens + self.answer.num_left


@dataclass(frozen=True)
class Limits:
    """`max_slots` sequences at once, in at most `max_bytes` of cache (None: what can be spared).

    `steps_per_read`: tokens are looked at only so often; an answer that ended in between is noticed late, and cut.
    """

    max_slots: int
    max_bytes: int | None = None
    steps_per_read: int = 1


def answer_all(
    decoder: Decoder, requests: Sequence[Request], streams: Tensor, truncation: Truncation, limits: Limits
) -> None:
    """Fill the answers. `streams`: for each request what its random numbers follow from."""
    with decoder.in_use():
        num_slots = _fit(decoder, requests, limits)
        decoder.prepare(num_slots, max((r.max_tokens for r in requests), default=1))
        schedule = Schedule([r.prompt for r in requests], num_slots)
        while schedule.busy:
            _admit(decoder, schedule, requests, streams)
            num_rows = num_slots if decoder.has_fixed_rows else max(schedule.live) + 1
            _advance(decoder, schedule, requests, truncation, num_rows, limits.steps_per_read)
            if schedule.live and not decoder.has_fixed_rows:
                longest = max(requests[sequence].num_tokens for sequence in schedule.live.values())
                decoder.move(schedule.compact(), longest)
        decoder.finish()


def _fit(decoder: Decoder, requests: Sequence[Request], limits: Limits) -> int:
    """How many slots there is room for. Every sequence must fit, before the first is begun."""
    room = decoder.spare_bytes() if limits.max_bytes is None else limits.max_bytes
    if not requests:
        return 1
    longest = max(requests, key=lambda request: request.max_tokens)
    needed = decoder.slot_bytes(longest.max_tokens)
    if needed > room:
        raise ValueError(
            f"a prompt of {len(longest.prompt)} tokens and {longest.answer.num_left} new ones need "
            f"{needed / 2**20:,.3f} MiB of cache, and there is room for {room / 2**20:,.3f}: lower max_tokens"
        )
    wanted = len(requests)
    if decoder.has_fixed_rows:
        wanted = 1 << (wanted - 1).bit_length()  # calls of about one size then share their graphs
    return min(limits.max_slots, wanted, room // needed)


def _admit(decoder: Decoder, schedule: Schedule, requests: Sequence[Request], streams: Tensor) -> None:
    """The last token of a prompt is left to the first step, which gives its answer's first token in every slot."""
    admission = schedule.admit()
    if not admission.placed:
        return
    prompts = {slot: requests[sequence].prompt for slot, sequence in admission.placed}
    longest = max(len(prompt) for prompt in prompts.values()) - 1
    decoder.copy(admission.copied, longest)
    decoder.prefill([(slot, prompts[slot][:-1]) for slot, _ in admission.computed])
    decoder.copy(admission.shared, longest)
    lasts = [prompt[-1] for prompt in prompts.values()]
    places = [len(prompt) - 1 for prompt in prompts.values()]
    decoder.place(list(prompts), lasts, places, streams[[sequence for _, sequence in admission.placed]])


def _advance(
    decoder: Decoder,
    schedule: Schedule,
    requests: Sequence[Request],
    truncation: Truncation,
    num_rows: int,
    steps_per_read: int,
) -> None:
    live = [(slot, requests[sequence]) for slot, sequence in schedule.live.items()]
    num_steps = min(steps_per_read, min(request.answer.num_left for _, request in live))
    reach = max(request.num_tokens for _, request in live) + num_steps - 1
    tokens, logprobs = decoder.advance(num_steps, num_rows, reach, truncation)
    for slot, request in live:
        for step in range(num_steps):
            if not math.isfinite(logprobs[step][slot]):
                raise ValueError(
                    f"the model gives {logprobs[step][slot]} as a log-prob: its weights hold nan or inf, or overflow"
                )
            request.answer.push(tokens[step][slot], logprobs[step][slot])
            if request.answer.finished:
                schedule.release(slot)
                break
