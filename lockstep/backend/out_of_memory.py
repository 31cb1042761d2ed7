"""After a pass that ran out of memory: the same step again, in smaller micro-batches (batch.on_out_of_memory).

Sums over micro-batches do not depend on their size, so the numbers stay. What the failed pass has left behind is thrown
away first: gradients, counts of routers, draws of dropout.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep.types import Datum

T = TypeVar("T")


@dataclass(frozen=True)
class Shrunk:
    """Tokens of the largest micro-batch that did not fit, and of those that are tried from now on."""

    before: int
    after: int
    reason: str


class MicroBatchTooLarge(torch.OutOfMemoryError):
    """On one of several ranks, which cannot go on by itself: the others wait in collectives."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.micro_batch_tokens = tokens


@dataclass(frozen=True)
class _Draws:
    """Where the generators of random numbers stand."""

    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> _Draws:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def retry_smaller(
    attempt: Callable[[], T],
    device: torch.device,
    shrink: Callable[[], tuple[int, int] | None],
    forget: Callable[[], None],
    report: Callable[[Shrunk], object],
) -> T:
    """What `attempt` returns. `shrink` makes micro-batches smaller: (tokens of the largest before, and now), or None
    where that is not possible; `forget` throws away what a failed attempt has left."""
    draws = _Draws.of(device)
    while True:
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            sizes = shrink()
            if sizes is None:
                raise
            # What the allocator has tried and who has the memory; not its advice about its own settings.
            said = str(error).partition("\n")[0].partition(" If reserved but unallocated")[0]
            shrunk = Shrunk(*sizes, reason=said.removesuffix("."))
        # Out here the frames of the failed pass are gone, and what they held is free.
        forget()
        draws.restore(device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report(shrunk)


def longest_text(batch: Sequence[Datum], *, whole: bool) -> int:
    """Tokens that must be in one micro-batch: of a prompt and one of its completions, or of all (`whole`)."""
    count = sum if whole else max
    return max(len(d.prompt) + count(len(c.tokens) for c in d.completions) for d in batch)
