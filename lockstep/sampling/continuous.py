"""An engine that keeps on sampling: calls come at any time and are answered together, weights change between steps.

One thread begins, advances and changes weights; another may read how far the answers are. Must not know processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.sampling.batching import ContinuousBatch, Request
from lockstep.sampling.local import LocalEngine
from lockstep.sampling.sampler import Begun, BegunAnswers, Prompt, SamplingParams, TextCompletion
from lockstep.sampling.weights import apply_weights

_PIECE_S = 0.05  # of decoding, before whoever waits is heard


class Call:
    """What was asked for at once. `news` is for another thread than the one that samples."""

    def __init__(self, name: str, groups: list[list[Request]], params: SamplingParams) -> None:
        self.name, self.groups, self.params = name, groups, params
        self.error: Exception | None = None
        self._num_told = [[request.answer.num_tokens for request in group] for group in groups]

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.groups for request in group]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(request.answer.finished for request in self.requests)

    def completions(self) -> list[list[TextCompletion]]:
        return [[request.answer.completion() for request in group] for group in self.groups]

    def news(self) -> list[tuple[int, int, Begun]]:
        """(prompt, sample, tokens since the last time), of those that have any."""
        found = []
        for place, group in enumerate(self.groups):
            for sample, request in enumerate(group):
                new = request.answer.so_far(self._num_told[place][sample])
                if new.tokens:
                    self._num_told[place][sample] += len(new.tokens)
                    found.append((place, sample, new))
        return found


class ContinuousEngine:
    """`progress` counts passes: an engine that has something to do and does not count is stuck."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._batch: ContinuousBatch | None = None
        self._whole: deque[Call] = deque()  # of a model that cannot be decoded step by step
        self._attached, self._is_attached = contextlib.ExitStack(), False  # from piece to piece
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self.progress = 0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_work(self) -> bool:
        return bool(self._whole) or (self._batch is not None and self._batch.busy)

    @property
    def under_way(self) -> list[Call]:
        """Those whose tokens can be read while they grow. From any thread."""
        with self._lock:
            return list(self._calls)

    def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        begun: BegunAnswers | None = None,
        name: str = "",
    ) -> Call:
        """To be answered by `advance`. What can never be answered raises, and nothing is begun."""
        call = Call(name, self._engine.make_requests(prompts, params, keys, begun), params)
        decoder = self._engine.find_decoder()
        if decoder is None:
            self._whole.append(call)
            return call
        if self._batch is None:
            limits = self._engine.limits
            least = limits.max_slots if decoder.has_fixed_rows else 1  # every other number would be graphs of its own
            self._batch = ContinuousBatch(decoder, replace(limits, min_slots=least))
        self._batch.add(call.requests)
        if not call.finished:  # as one is that was begun to its end
            with self._lock:
                self._calls.append(call)
        return call

    def advance(self) -> list[Call]:
        """A short piece of work: the calls that it ended, with their answers or with the reason why there are none."""
        if self._whole:
            return [self._answer_whole(self._whole.popleft())]
        try:
            self._decode()
        except ValueError as error:  # such as weights that are no good: for all that were computed with them
            for call in self.under_way:
                call.error = call.error or error
            self._batch = None
            self._detach()
        ended = [call for call in self.under_way if call.finished]
        with self._lock:
            self._calls = [call for call in self._calls if not call.finished]
        return ended

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Between two steps, for all that follows. What does not fit raises and changes nothing."""
        apply_weights(self._engine.model, weights)
        self._engine.version = version
        if self._batch is not None:
            self._batch.renew(version)
        for call in self._whole:
            for request in call.requests:
                request.answer.version = version

    def _decode(self) -> None:
        decoder = self._engine.find_decoder()
        if decoder is None or self._batch is None:
            return
        end = time.monotonic() + _PIECE_S
        if not self._is_attached:
            self._attached.enter_context(decoder.attached())
            self._is_attached = True
        with torch.inference_mode():
            while self._batch.busy:
                finished = self._batch.advance()
                self.progress += 1
                if finished or time.monotonic() >= end:
                    break
        if not self._batch.busy:
            self._detach()

    def _detach(self) -> None:
        """From now on the model is as it was made."""
        self._attached.close()
        self._is_attached = False

    def _answer_whole(self, call: Call) -> Call:
        try:
            self._engine.answer(call.requests, call.params)
        except ValueError as error:
            call.error = error
        self.progress += 1
        return call
