"""Calls that join and leave while others are decoded: one engine for everybody who asks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.inference.engine import LocalEngine
from lockstep.inference.scheduler import ContinuousBatch
from lockstep.inference.sequence import NOTHING_ELSE, SequenceOptions, TokenSequence
from lockstep.model.load import apply_weights
from lockstep.types import PartialCompletion, PartialCompletions, Prompt, SamplingParams, TextCompletion

_MIN_GPU_ROWS = 64  # decoded at once, at least: calls come and go, and each number of rows is a graph of its own


class SampleCall:
    """The sequences of one `submit`. `take_progress` is for another thread than the one that samples."""

    def __init__(
        self,
        name: str,
        groups: list[list[TokenSequence]],
        params: SamplingParams,
        options: SequenceOptions = NOTHING_ELSE,
    ) -> None:
        self.name, self.groups, self.params, self.options = name, groups, params, options
        self.error: Exception | None = None
        self._num_taken = [[sequence.num_sampled for sequence in group] for group in groups]

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for group in self.groups for sequence in group]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(sequence.finished for sequence in self.sequences)

    def completions(self) -> list[list[TextCompletion]]:
        return [[sequence.completion() for sequence in group] for group in self.groups]

    def take_progress(self) -> list[tuple[int, int, PartialCompletion]]:
        """(prompt, sample, tokens since the last time), where there are any."""
        progress = []
        for prompt, group in enumerate(self.groups):
            for sample, sequence in enumerate(group):
                new = sequence.partial(self._num_taken[prompt][sample])
                if new.tokens:
                    self._num_taken[prompt][sample] += len(new.tokens)
                    progress.append((prompt, sample, new))
        return progress


class ContinuousEngine:
    """Calls join while others are decoded. `progress` counts passes: with work to do and no progress it is stuck."""

    slice_s = 0.05  # of decoding in one `advance`, before new calls and weights are looked at

    def __init__(self, engine: LocalEngine, min_slots: int = 1) -> None:
        """`min_slots`: as many are made at once, on a CPU too, so that steps do not depend on how many ask."""
        self._engine, self._min_slots = engine, min_slots
        self._batch: ContinuousBatch | None = None
        self._undecodable: deque[SampleCall] = deque()  # of a model that only transformers' generate can serve
        # The decoder's attention stays installed from slice to slice.
        self._attention, self._has_attention = contextlib.ExitStack(), False
        self._lock = threading.Lock()
        self._calls: list[SampleCall] = []
        self.progress = 0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_work(self) -> bool:
        return bool(self._undecodable) or (self._batch is not None and self._batch.busy)

    @property
    def active_calls(self) -> list[SampleCall]:
        """Those whose tokens can be read while they grow. From any thread."""
        with self._lock:
            return list(self._calls)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        keys: Sequence[int] | None = None,
        partial: PartialCompletions | None = None,
        name: str = "",
        options: SequenceOptions = NOTHING_ELSE,
    ) -> SampleCall:
        """A call for `advance` to work on. Raises, and changes nothing, if it can never be answered."""
        decoder = self._engine.find_decoder()
        if decoder is None and options.num_top is not None:
            raise ValueError("transformers' generate serves this model, and its tokens are not scored")
        groups = self._engine.make_sequences(prompts, params, keys, partial, options)
        call = SampleCall(name, groups, params, options)
        if decoder is None:
            self._undecodable.append(call)
            return call
        if self._batch is None:
            limits = self._engine.limits
            min_slots = min(limits.max_slots, _MIN_GPU_ROWS) if decoder.has_fixed_batch else self._min_slots
            self._batch = ContinuousBatch(decoder, replace(limits, min_slots=min_slots))
        self._batch.add(call.sequences)
        if not call.finished:  # a partial call may have been complete
            with self._lock:
                self._calls.append(call)
        return call

    def advance(self) -> list[SampleCall]:
        """At least one pass, for about `slice_s`. Returns the calls that ended, with completions or with an error."""
        if self._undecodable:
            return [self._generate(self._undecodable.popleft())]
        try:
            self._decode()
        except ValueError as error:  # such as weights with nan: for every call that was computed with them
            for call in self.active_calls:
                call.error = call.error or error
            self._batch = None
            self._restore_attention()
        ended = [call for call in self.active_calls if call.finished]
        with self._lock:
            self._calls = [call for call in self._calls if not call.finished]
        return ended

    def cancel(self, call: SampleCall) -> None:
        """Nobody wants the rest: its slots are free from the next `advance` on. The call counts as ended."""
        for sequence in call.sequences:
            sequence.cancel()
        with self._lock:
            self._calls = [other for other in self._calls if other is not call]
        if call in self._undecodable:
            self._undecodable.remove(call)
        if self._batch is not None:
            self._batch.drop_cancelled()

    def reset(self, error: Exception) -> list[SampleCall]:
        """After a failure that left the batch in an unknown state: all calls end with it, later ones start afresh."""
        ended = [*self.active_calls, *self._undecodable]
        for call in ended:
            call.error = call.error or error
        with self._lock:
            self._calls = []
        self._undecodable.clear()
        self._batch = None
        self._restore_attention()
        self._engine.release_cache()
        return ended

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Between two steps, for all later tokens. Weights that do not fit raise, and nothing changes."""
        apply_weights(self._engine.model, weights)
        self._engine.version = version
        if self._batch is not None:
            self._batch.set_version(version)
        for call in self._undecodable:
            for sequence in call.sequences:
                sequence.version = version

    def check_adapters(self) -> None:
        """Call after a change of the engine's bank, between two `advance`: what was laid out for the old one is not
        used again."""
        decoder = self._engine.find_decoder()
        if decoder is not None and self._batch is not None:
            decoder.check_model()

    def _decode(self) -> None:
        decoder = self._engine.find_decoder()
        if decoder is None or self._batch is None:
            return
        end = time.monotonic() + self.slice_s
        if not self._has_attention:
            self._attention.enter_context(decoder.installed_attention())
            self._has_attention = True
        with torch.inference_mode():
            while self._batch.busy:
                finished = self._batch.advance()
                self.progress += 1
                if finished or time.monotonic() >= end:
                    break
        if not self._batch.busy:
            self._restore_attention()

    def _restore_attention(self) -> None:
        self._attention.close()
        self._has_attention = False

    def _generate(self, call: SampleCall) -> SampleCall:
        try:
            self._engine.decode(call.sequences, call.params)
        except ValueError as error:
            call.error = error
        self.progress += 1
        return call
