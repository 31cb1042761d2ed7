"""Passes of a causal language model over slots: prompts into the cache, then one token after the other for all slots.

The trainer's own model object serves, with other attention for a while. On CUDA a step is replayed as a graph.
Must not know queues, text or where answers end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.inference import kv_cache as cache
from lockstep.inference.cuda_graphs import FusedParts, StepGraphs
from lockstep.inference.fused_linear import MIN_ROWS, FusedLinears, recorded_groups
from lockstep.inference.kv_cache import (
    AttentionPass,
    DecodePass,
    KeyValueCache,
    LayerShape,
    PrefillPass,
    UnsupportedModelError,
)
from lockstep.inference.token_sampling import Truncation, sample_tokens, uniforms
from lockstep.model.policy import causal_lm, decoder_layers, logit_transform

_PREFILL_TOKENS = 8192  # packed into one pass, at most; a longer prompt has a pass of its own
# Fixed frequencies are a property of a position; these also depend on the longest text in the batch.
_SHIFTING_ROPE = ("dynamic", "longrope")


class Decoder:
    """Raises UnsupportedModelError for a model that keeps more than keys and values from one token to the next.

    `sharded`: several processes hold the model together; all of them take the same number of passes. `compiles`: steps
    that are captured as graphs are also compiled, which takes a while at first, and rounds otherwise. `joins`: on a
    CPU, a copy of the weights is laid out for steps, if an eighth of the memory holds it.
    """

    def __init__(
        self, model: Any, *, sharded: bool = False, graphs: bool = True, compiles: bool = False, joins: bool = True
    ) -> None:
        self._model, self._causal = model, causal_lm(model)
        _refuse_unsuitable(self._causal)
        cache.register()
        self._head = self._causal.get_output_embeddings()
        self._transform = logit_transform(self._causal)
        self._sharded = sharded and dist.is_initialized()
        self.device: torch.device = self._causal.device
        self._graphs = StepGraphs(model) if graphs and self.device.type == "cuda" and not sharded else None
        self._cache: KeyValueCache | None = None
        self._shapes: dict[nn.Module, LayerShape] = {}
        self._joined: FusedLinears | None = None
        self._num_slots = 0  # that may be filled, of those there are
        with self.in_use():
            self._examine(joins=joins and self.device.type == "cpu" and not sharded)
        self.release()
        fuses = compiles and self._graphs is not None
        self._fused = FusedParts(decoder_layers(model), self._shapes.keys()) if fuses else None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The model with this attention, for answering; afterwards as it was, also after an exception."""
        with self.attached(), torch.inference_mode():
            yield

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """What takes longest of `in_use`, for those who compute in many short pieces, each in inference mode."""
        own, training = self._causal.config._attn_implementation, self._model.training
        self._model.eval()
        self._causal.set_attn_implementation(cache.CACHED)
        try:
            yield
        finally:
            self._causal.set_attn_implementation(own)
            if training:
                self._model.train()

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.num_bytes for shape in self._shapes.values())

    @property
    def cache_bytes(self) -> int:
        """Held now."""
        return 0 if self._cache is None else self._cache.num_bytes

    def slot_bytes(self, length: int) -> int:
        """What a sequence of at most `length` tokens needs."""
        return self.bytes_per_token * self._capacity(length)

    def spare_bytes(self) -> int:
        """What the cache may take when nobody says so: half of the memory that is free, on every rank the same."""
        if self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + unused
        else:
            pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
            free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        spare = torch.tensor((free + self.cache_bytes) // 2, device=self.device)
        if self._sharded:
            dist.all_reduce(spare, dist.ReduceOp.MIN)
        return int(spare)

    @property
    def has_fixed_rows(self) -> bool:
        """Whether a step is best taken by the same number of slots every time, filled or not: graphs want it so."""
        return self.device.type == "cuda"

    def prepare(self, num_slots: int, length: int) -> None:
        """Room for as many sequences of at most `length` tokens. Passes need this first."""
        if self._has_room(num_slots, length):
            self._kept.clear()
        else:
            self.release()
            self._allocate(num_slots, self._capacity(length))
        self._tokens.zero_()
        self._positions.zero_()
        self._num_slots = num_slots
        self.check_model()

    def grow(self, num_slots: int, length: int) -> None:
        """Room for more or for longer sequences, while those that are there stay as they are."""
        self._num_slots = max(num_slots, self._num_slots)
        if self._has_room(num_slots, length):
            self.check_model()
            return
        old, state = self._kept, (self._tokens, self._positions, self._streams)
        self.release()
        self._allocate(max(num_slots, old.num_slots), max(self._capacity(length), old.capacity))
        self._kept.take_over(old)
        for new, kept in zip((self._tokens, self._positions, self._streams), state, strict=True):
            new[: len(kept)] = kept
        self.check_model()

    def check_model(self) -> None:
        """What was made for a model that is no longer where, or what, it was is forgotten."""
        if self._graphs is not None:
            self._graphs.check()
        if self._joined is not None:
            self._joined.lay_out(self._num_slots)

    def release(self) -> None:
        """Give the cache's memory back, and what stands on it."""
        if self._graphs is not None:
            self._graphs.clear()
        self._cache = None

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """(slot, tokens): keys and values of tokens from the beginning of a text."""
        for part in _split([(slot, tokens) for slot, tokens in prompts if len(tokens)]):
            slots, lengths = [slot for slot, _ in part], [len(tokens) for _, tokens in part]
            attention = PrefillPass(self._kept, slots, lengths, self.device)
            row = torch.tensor(list(itertools.chain.from_iterable(tokens for _, tokens in part)), device=self.device)
            self._announce(working=True)
            self._hidden(row[None], attention.positions[None], attention)

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """The first `length` tokens of one slot to another, for each (from slot, to slot)."""
        self._kept.copy(moves, length)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """A sequence under way to another slot, for each (from slot, to slot)."""
        if moves:
            self.copy(moves, length)
            sources, targets = torch.tensor(moves, device=self.device).unbind(1)
            for state in (self._tokens, self._positions, self._streams):
                state[targets] = state[sources]

    def place(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int], streams: Tensor) -> None:
        """The token that each slot takes in next, where it stands, and the randomness of what follows it."""
        at = torch.tensor(slots, device=self.device)
        self._tokens[at] = torch.tensor(tokens, device=self.device)
        self._positions[at] = torch.tensor(positions, device=self.device)
        self._streams[at] = streams.to(self.device)

    def advance(
        self, num_steps: int, num_rows: int, length: int, truncation: Truncation
    ) -> tuple[list[list[int]], list[list[float]]]:
        """[step][slot] tokens and log-probs of the first slots, read from the device once.

        `length`: as far as any of them reaches in the last step.
        """
        length = self._reading_length(length)
        found = [self._step(num_rows, length, truncation) for _ in range(num_steps)]
        tokens, logprobs = (torch.stack(column) for column in zip(*found, strict=True))
        return tokens.tolist(), logprobs.tolist()

    def finish(self) -> None:
        """Take part in the passes that other processes have left: each needs every part of the model."""
        while self._announce(working=False):
            self._logits(1, 1)

    @property
    def _kept(self) -> KeyValueCache:
        assert self._cache is not None, "prepare comes first"
        return self._cache

    def _has_room(self, num_slots: int, length: int) -> bool:
        kept = self._cache
        return kept is not None and kept.num_slots >= num_slots and kept.capacity >= self._capacity(length)

    def _allocate(self, num_slots: int, capacity: int) -> None:
        self._cache = KeyValueCache(self._shapes, num_slots, capacity, self.device)
        state = torch.zeros(3, num_slots, dtype=torch.int64, device=self.device)
        self._tokens, self._positions, self._streams = state.unbind(0)

    def _capacity(self, length: int) -> int:
        step = 128 if self.device.type == "cuda" else 32
        return -(-length // step) * step

    def _reading_length(self, length: int) -> int:
        """On CUDA powers of two: each length is a graph of its own."""
        if self.device.type == "cuda":
            length = 1 << max(length - 1, 127).bit_length()
        return min(self._capacity(length), self._kept.capacity)

    def _step(self, num_rows: int, length: int, truncation: Truncation) -> tuple[Tensor, ...]:
        def step() -> tuple[Tensor, ...]:
            with self._quick_parts():
                return self._compute_step(num_rows, length, truncation)

        self._announce(working=True)
        if self._graphs is None:
            return step()
        return self._graphs.run((num_rows, length, truncation), step, (self._tokens, self._positions))

    def _quick_parts(self) -> AbstractContextManager[None]:
        parts = self._joined if self._fused is None else self._fused
        return contextlib.nullcontext() if parts is None else parts.in_place()

    def _compute_step(self, num_rows: int, length: int, truncation: Truncation) -> tuple[Tensor, ...]:
        positions = self._positions[:num_rows]
        logits = self._logits(num_rows, length)
        chosen, logprobs = sample_tokens(logits, truncation, uniforms(self._streams[:num_rows], positions + 1))
        self._tokens[:num_rows] = chosen
        positions.add_(1).clamp_(max=self._kept.capacity - 1)  # slots without a sequence count on
        return chosen, logprobs

    def _logits(self, num_rows: int, length: int) -> Tensor:
        """[rows, V] after the tokens in place, as the trainer's head has them: transformed in float32 or wider."""
        tokens, positions = self._tokens[:num_rows], self._positions[:num_rows]
        hidden = self._hidden(tokens[:, None], positions[:, None], DecodePass(self._kept, positions, length))
        logits = self._head(hidden[:, 0])
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return self._transform.apply(logits.to(wide))

    def _hidden(self, tokens: Tensor, positions: Tensor, attention: AttentionPass) -> Tensor:
        body = self._causal.base_model
        return body(input_ids=tokens, position_ids=positions, use_cache=False, cached_pass=attention).last_hidden_state

    def _announce(self, *, working: bool) -> bool:
        """Whether any process has a pass to take now. All ranks, before every pass and until nobody has."""
        if not self._sharded:
            return working
        count = torch.tensor(float(working), device=self.device)
        dist.all_reduce(count)
        return count.item() > 0

    def _examine(self, *, joins: bool) -> None:
        """Find what the layers keep; then a few tokens one by one must give what the model itself gives for all."""
        text = [number % self._causal.config.get_text_config().vocab_size for number in range(1, 7)]
        whole, prompt = cache.ShapePass(len(text)), text[:4]
        tokens, positions = torch.tensor([text], device=self.device), torch.arange(len(text), device=self.device)[None]
        try:
            self._announce(working=True)
            own = self._causal(input_ids=tokens, position_ids=positions, use_cache=False, cached_pass=whole).logits[0]
            self._shapes = whole.shapes
            self.prepare(1, len(text))
            self.prefill([(0, prompt)])
            with recorded_groups(self._model) as groups:
                self._take_in(text, len(prompt), own)
            if joins:
                self._join(groups)
            with contextlib.nullcontext() if self._joined is None else self._joined.in_place():
                for place in range(len(prompt) + 1, len(text)):
                    self._take_in(text, place, own)
        except (TypeError, AttributeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UnsupportedModelError(f"{type(self._causal).__name__} cannot be called for it: {reason}") from error

    def _take_in(self, text: Sequence[int], place: int, own: Tensor) -> None:
        self.place([0], [text[place]], [place], torch.zeros(1, dtype=torch.int64))
        self._announce(working=True)
        _compare(self._logits(1, len(text))[0], own[place])

    def _join(self, groups: list[list[nn.Module]]) -> None:
        """Not by what is free at the moment: the next start of a run would perhaps round otherwise."""
        joined = FusedLinears(groups)
        if joined.num_bytes <= _physical_bytes() // 8:
            joined.lay_out(MIN_ROWS)
            self._joined = joined


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _refuse_unsuitable(causal: Any) -> None:
    name = type(causal).__name__
    if not getattr(causal, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} does not take its attention from transformers' AttentionInterface")
    rope = str(getattr(causal.config.get_text_config(), "rope_parameters", None))
    for kind in _SHIFTING_ROPE:
        if f"'{kind}'" in rope:
            raise UnsupportedModelError(f"{name} has {kind} positions, which change with the longest text of a batch")


def _compare(found: Tensor, own: Tensor) -> None:
    exact = own.dtype in (torch.float32, torch.float64)
    if not own.isfinite().all():
        return  # whoever asks for an answer is told
    found, own = (logits.double() - logits.double().mean() for logits in (found, own))
    distance = float((found - own).norm() / own.norm().clamp(min=1e-30))
    if not distance < (1e-3 if exact else 0.3):  # nan is not below either
        raise UnsupportedModelError(
            f"its logits token by token are {distance:.1%} off its own: it keeps more than keys and values"
        )


def _split(prompts: list[tuple[int, Sequence[int]]]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Parts of at most _PREFILL_TOKENS tokens, or of one prompt."""
    part: list[tuple[int, Sequence[int]]] = []
    for prompt in prompts:
        if part and sum(len(tokens) for _, tokens in [*part, prompt]) > _PREFILL_TOKENS:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part
