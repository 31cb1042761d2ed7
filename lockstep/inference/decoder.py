"""Prefill and decode passes of a causal language model over the slots of its KV cache.

It is the trainer's own model object, with other attention installed meanwhile. On CUDA a step is replayed as a graph.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.inference import kv_cache
from lockstep.inference.adapter_bank import NO_ADAPTER, AdapterBank
from lockstep.inference.cuda_graphs import CompiledStep, StepGraphs, StepSpeed, first_line
from lockstep.inference.fused_linear import MIN_ROWS, FusedLinears
from lockstep.inference.joined_linear import JoinedLinears
from lockstep.inference.kv_cache import (
    AttentionPass,
    DecodePass,
    KeyValueCache,
    LayerShape,
    SharedPrompts,
)
from lockstep.inference.model_call import ModelCall
from lockstep.inference.prefill import PrefillPass, PrefillShapes, pack_prompts, split_prompts
from lockstep.inference.probe import find_call
from lockstep.inference.slot_cache import SlotCache
from lockstep.inference.token_sampling import (
    LaunchedSteps,
    RowTruncations,
    ScoredPrompt,
    TokenScores,
    Truncation,
    copy_to_host,
    draw_by_kernel,
    sample_tokens,
    score_tokens,
    suits_draw_kernel,
    uniforms,
)
from lockstep.model.head import LogitTransform
from lockstep.model.policy import CausalLM, causal_lm, decoder_layers, logit_transform
from lockstep.model.replay import RoutingRecorder
from lockstep.model.rotary import RotaryByLength, TextSpan

_SCORED_BYTES = 1 << 26  # of logits at a time, where those of a whole prompt are wanted


class Decoder:
    """Raises UnsupportedModelError for a model whose layers keep something that no cache of ours holds.

    `sharded`: several processes hold the model together; all make the same number of passes. `compiles`: steps that are
    captured as graphs are also compiled, which takes a while at first and rounds differently. `fuses`: on a CPU, and
    where steps are compiled, a copy of the weights is laid out for them if an eighth of the memory holds it. `bank`:
    adapters, one of which each slot may have for itself. `recorder`: of the choices of routers, for each token that is
    computed. `report` is told where a fast way cannot be taken, and what that costs.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        sharded: bool = False,
        graphs: bool = True,
        compiles: bool = False,
        fuses: bool = True,
        bank: AdapterBank | None = None,
        recorder: RoutingRecorder | None = None,
        report: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._model, self._causal, self.bank, self.recorder = model, causal_lm(model), bank, recorder
        self.prompt_routing: dict[int, bytes] = {}  # by slot, of the last `prefill`
        kv_cache.register()
        self.rotary = RotaryByLength.of(self._causal)
        self.sharded = sharded and dist.is_initialized()
        self.device: torch.device = self._causal.device
        self.graphs = StepGraphs(model) if graphs and self.device.type == "cuda" and not sharded else None
        self._cache: KeyValueCache | None = None
        self._prompts: SharedPrompts | None = None
        self._prefill_shapes = PrefillShapes(self.device)
        self._shapes: dict[nn.Module, LayerShape] = {}
        self.linears: FusedLinears | None = None
        self.joined: JoinedLinears | None = None
        self.compiled: CompiledStep | None = None
        self.by_kernel = False
        self._num_slots = 0  # in use, of those allocated
        self._bank_revision = -1
        self._speed, self._read_at = StepSpeed(report), 0.0
        self._groups = find_call(self, model, fuses=fuses and self.device.type == "cpu" and not sharded)
        if self._states is not None and self.graphs is not None:
            # A capture runs a step more than once, and only tokens and positions would be as before.
            self.graphs = None
            report(f"decoding steps are no CUDA graphs: layers of {type(self._causal).__name__} keep a state")
        if compiles and self.graphs is not None and self.by_kernel:
            if bank is None and recorder is None:
                self.compile_steps()
            else:
                why = "rows have adapters of their own" if recorder is None else "the choices of routers are recorded"
                report(f"decoding steps are not compiled: {why}")

    def use_call(self, call: ModelCall, shapes: dict[nn.Module, LayerShape], *, kernels: bool = True) -> None:
        """`shapes`: of what attention of ours keeps. `kernels`: where those of a GPU can be used, they are."""
        self._call, self._shapes, self.linears = call, shapes, None
        self._head = nn.Identity() if call.whole else self._causal.get_output_embeddings()
        self._transform = LogitTransform() if call.whole else logit_transform(self._causal)
        on_gpu = kernels and self.device.type == "cuda"
        self.by_kernel = on_gpu and bool(shapes) and all(shape.suits_kernel for shape in shapes.values())

    def compile_steps(self) -> None:
        """From the next step on; their linear layers are joined if an eighth of the memory holds the copy."""
        self.compiled = CompiledStep(decoder_layers(self._model), self._draw)
        joined = JoinedLinears(self._model, self._groups)
        if joined.num_bytes <= kv_cache.total_bytes(self.device) // 8:
            self.joined = joined

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Around all passes: cached attention and inference mode; afterwards the model is as it was."""
        with self.installed_attention(), torch.inference_mode():
            yield

    @contextlib.contextmanager
    def installed_attention(self) -> Iterator[None]:
        """The slow part of `in_use`, for callers that decode in many short slices, each in inference mode."""
        with self._call.installed():
            yield

    @property
    def bytes_per_token(self) -> int:
        kept = 0 if self._states is None else self._states.bytes_per_token
        return kept + sum(shape.num_bytes for shape in self._shapes.values())

    @property
    def cache_bytes(self) -> int:
        tensors = None if self._states is None else self._states.tensors
        return sum(cache.num_bytes for cache in (self._cache, tensors) if cache is not None)

    def slot_bytes(self, length: int) -> int:
        """Cache for a sequence of at most `length` tokens."""
        fixed = 0 if self._states is None else self._states.bytes_per_slot
        return max(self.bytes_per_token * self._capacity(length) + fixed, 1)

    @property
    def attends(self) -> bool:
        """Whether attention is ours: every row at its own length, and prompts packed."""
        return self._call.attends

    @property
    def keeps_states(self) -> bool:
        """Whether layers have a state that cannot go back to an earlier token."""
        return self._states is not None and self._states.has_states

    @property
    def _states(self) -> SlotCache | None:
        return self._call.cache

    def spare_bytes(self) -> int:
        """The default limit of the cache: half of the free memory, the same on every rank."""
        spare = torch.tensor((kv_cache.free_bytes(self.device) + self.cache_bytes) // 2, device=self.device)
        if self.sharded:
            dist.all_reduce(spare, dist.ReduceOp.MIN)
        return int(spare)

    @property
    def has_fixed_batch(self) -> bool:
        """Whether every step should compute the same number of slots, filled or not, to reuse its CUDA graph."""
        return self.device.type == "cuda"

    def prepare(self, num_slots: int, length: int) -> None:
        """Empty slots for sequences of at most `length` tokens. Call before any pass."""
        if self._has_room(num_slots, length):
            self._kv_cache.clear()
            if self._states is not None:
                self._states.stored.clear()
            self.forget_prompts()
        else:
            self.release()
            self._allocate(num_slots, self._capacity(length))
        self._tokens.zero_()
        self._positions.zero_()
        self._adapters.zero_()
        self._num_slots = num_slots
        self.check_model()

    def grow(self, num_slots: int, length: int) -> None:
        """More or longer slots; their contents stay."""
        self._num_slots = max(num_slots, self._num_slots)
        if self._has_room(num_slots, length):
            self.check_model()
            return
        old, old_state, old_prompts = self._kv_cache, self._slot_state, self._prompts
        kept = None if self._states is None else self._states.stored
        self.release()
        self._allocate(max(num_slots, old.num_slots), max(self._capacity(length), old.capacity))
        self._kv_cache.copy_from(old)
        if self._states is not None and kept is not None:
            self._states.stored.copy_from(kept)
        if self._prompts is not None and old_prompts is not None:
            self._prompts.copy_from(old_prompts)
        for state, old_values in zip(self._slot_state, old_state, strict=True):
            state[: len(old_values)] = old_values
        self.check_model()

    def check_model(self) -> None:
        """Call when weights may have changed: graphs and fused weights of an older model are dropped."""
        if self.graphs is not None:
            self.graphs.check()
            if self.bank is not None and self.bank.revision != self._bank_revision:
                self.graphs.clear()  # they read the adapters at the addresses of their capture
                self._bank_revision = self.bank.revision
        if self.linears is not None:
            self.linears.lay_out(self._num_slots)
        if self.joined is not None:
            self.joined.lay_out()

    def release(self) -> None:
        """Free the cache, and the graphs that use it."""
        if self.graphs is not None:
            self.graphs.clear()
        self._cache = self._prompts = None
        if self._states is not None:
            self._states.tensors = None

    def prefill(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        adapters: Mapping[int, int] | None = None,
        scored: Mapping[int, ScoredPrompt] | None = None,
    ) -> dict[int, list[TokenScores]]:
        """(slot, tokens): keys and values of all tokens of a sequence but its last one.

        `adapters`: by slot, see AdapterBank.number. `scored`: the slots whose scores are returned.
        """
        found: dict[int, list[TokenScores]] = {}
        self.prompt_routing = {}
        if self._states is not None:
            self._states.stored.begin([slot for slot, _ in prompts])
        one_by_one = self._states is not None  # a state is that of one sequence
        for part in split_prompts(
            [(slot, tokens) for slot, tokens in prompts if len(tokens)], 1 if one_by_one else None
        ):
            if not scored and self._prefill_padded(part):
                continue
            slots, lengths = [slot for slot, _ in part], [len(tokens) for _, tokens in part]
            rows, boundaries = (packed.to(self.device) for packed in pack_prompts(part))
            self.announce(working=True)
            numbers = torch.tensor([(adapters or {}).get(slot, NO_ADAPTER) for slot in slots])
            adapted = self.adapted(numbers.repeat_interleave(torch.tensor(lengths)).to(self.device))
            # The next token belongs to the text as well: its length decides.
            kept = contextlib.nullcontext() if self._states is None else self._states.prefilling(slots[0])
            with adapted, kept, self.rotary.texts([TextSpan(length, length + 1) for length in lengths]):
                hidden = self._prefill(rows[0], PrefillPass(self._kv_cache, lengths, rows[1], rows[2], boundaries))
            for slot, routed in zip(slots, self._routing().split(lengths) if self.recorder else (), strict=False):
                self.prompt_routing[slot] = routed.cpu().numpy().tobytes()
            for (slot, tokens), states in zip(part, hidden.split(lengths), strict=True):
                if scored is not None and slot in scored:
                    found[slot] = self._score(states, [*tokens[1:], scored[slot].last], scored[slot].num_top)
        return found

    def _prefill(self, tokens: Tensor, attention: PrefillPass) -> Tensor:
        """[tokens, hidden]."""
        with contextlib.nullcontext() if self.joined is None else self.joined.installed():
            return self._hidden(tokens[None], attention.positions[None], attention)[0]

    def _prefill_padded(self, part: Sequence[tuple[int, Sequence[int]]]) -> bool:
        """Where steps are graphs: in one of few shapes, which is a graph from its second time on. False: not done."""
        if self.graphs is None or not self.by_kernel or self.rotary.rules:
            return False
        if self.bank is not None or self.recorder is not None:
            return False
        if not all(shape.fuses_prefill(self.device) for shape in self._shapes.values()):
            return False
        if (chosen := self._prefill_shapes.buffers(part)) is None:
            return False
        shape, buffers, is_worth_a_graph = chosen
        buffers.fill(part, self._kv_cache.capacity)
        attention = PrefillPass(
            self._kv_cache, [shape.max_length], buffers.slots, buffers.positions, buffers.boundaries
        )

        def run() -> tuple[Tensor, ...]:
            self._prefill(buffers.tokens, attention)
            return ()

        if is_worth_a_graph:
            self.graphs.run(shape, run, ())
        else:
            run()
        return True

    def forget_prompts(self) -> None:
        """Every slot holds its own tokens from here on."""
        if self._prompts is not None:
            self._prompts.clear()

    def copy_prompts(self, moves: Sequence[tuple[int, int]], written: Sequence[int], length: int) -> None:
        """As `copy`, before the slots in `written` get prompts that they have not: others may read there."""
        self._fork(moves)
        if self._prompts is None:
            self.copy(moves, length)
            return
        moves = [(self._prompts.holder(source), slot) for source, slot in moves]
        for source, slot, num_tokens in self._prompts.before_write(written):
            self.copy([(source, slot)], num_tokens)  # no more: what follows are the slot's own
        self.copy(moves, length)

    def share_prompts(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(from slot, to slot, tokens): the second has the tokens of the first, by a copy or by reading there."""
        self._fork([(source, slot) for source, slot, _ in moves])
        if self._prompts is None or self.rotary.rules:  # those may compute a slot anew, on its own
            self.copy([(source, slot) for source, slot, _ in moves], max((n for *_, n in moves), default=0))
        else:
            self._prompts.share(moves)

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """The first `length` tokens of one slot to another, for each (from slot, to slot)."""
        self._kv_cache.copy(moves, length)
        if self._states is not None:
            self._states.stored.copy_tokens(moves, length)

    def keep_prompts(self, slots: Sequence[int]) -> None:
        """The states after the prompts in these slots, for samples that come later; all others are dropped."""
        if self._states is not None:
            self._states.stored.keep_prompts(slots)

    def _fork(self, moves: Sequence[tuple[int, int]]) -> None:
        if self._states is not None:
            self._states.stored.fork_states(moves)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """An active sequence to another slot, for each (from slot, to slot)."""
        assert not moves or self._prompts is None, "others may read there"
        if moves:
            self.copy(moves, length)
            if self._states is not None:
                self._states.stored.move_states(moves)
            sources, targets = torch.tensor(moves, device=self.device).unbind(1)
            for state in self._slot_state:
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
        self._tokens[index] = torch.tensor(tokens, device=self.device)
        self._positions[index] = torch.tensor(positions, device=self.device)
        self._streams[index] = streams.to(self.device)
        self._adapters[index] = torch.tensor(adapters or [NO_ADAPTER] * len(slots), device=self.device)

    def launch(
        self,
        num_steps: int,
        batch_size: int,
        length: int,
        truncation: Truncation | RowTruncations,
        num_top: int | None = None,
    ) -> LaunchedSteps:
        """Steps of the first `batch_size` slots. On a GPU they are still running when this returns.

        `length`: of the longest sequence in the last step. `num_top`: tokens are scored too, with as many of the
        likeliest.
        """
        length = self._attended_length(length)
        started, captured = time.perf_counter(), self._captured
        steps = [self._step(batch_size, length, truncation, num_top) for _ in range(num_steps)]
        sampled = copy_to_host([torch.stack([step[place] for step in steps]) for place in (0, 1)])

        def read() -> tuple[list[list[int]], list[list[float]]]:
            tokens, logprobs = sampled()
            found = tokens.tolist(), logprobs.tolist()
            began, self._read_at = max(started, self._read_at), time.perf_counter()  # steps before may have run on
            if self.graphs is not None and captured == self._captured:
                self._speed.note((self._read_at - began) / num_steps, batch_size, self.graphs.problem)
            return found

        scored = None if num_top is None else [copy_to_host(step[2:5]) for step in steps]
        routed = None if self.recorder is None else [copy_to_host(step[-1:]) for step in steps]
        scores = None if scored is None else lambda: [TokenScores.read(each()) for each in scored]
        routing = None if routed is None else lambda: [each()[0].numpy() for each in routed]
        return LaunchedSteps(num_steps, read, scores, routing)

    def finish(self) -> None:
        """Join the passes that other processes still have to make: each needs every part of the model."""
        while self.announce(working=False):
            self.logits(1, 1)

    @property
    def _captured(self) -> int:
        return 0 if self.graphs is None else len(self.graphs.keys)

    @property
    def _kv_cache(self) -> KeyValueCache:
        assert self._cache is not None, "prepare comes first"
        return self._cache

    def _has_room(self, num_slots: int, length: int) -> bool:
        cache = self._cache
        return cache is not None and cache.num_slots >= num_slots and cache.capacity >= self._capacity(length)

    def _allocate(self, num_slots: int, capacity: int) -> None:
        self._cache = KeyValueCache(self._shapes, num_slots, capacity, self.device)
        if self._states is not None:
            self._states.allocate(num_slots, capacity, self.device)
        self._prompts = SharedPrompts(num_slots, self.device) if self.by_kernel else None
        state = torch.zeros(4, num_slots, dtype=torch.int64, device=self.device)
        self._tokens, self._positions, self._streams, self._adapters = state.unbind(0)

    @property
    def _slot_state(self) -> tuple[Tensor, ...]:
        return self._tokens, self._positions, self._streams, self._adapters

    def _capacity(self, length: int) -> int:
        step = 128 if self.device.type == "cuda" else 32
        return -(-length // step) * step

    def _attended_length(self, length: int) -> int:
        """Rounded up; on CUDA to powers of two, as each length is a graph of its own, unless one graph serves all."""
        if self.by_kernel:
            return self._kv_cache.capacity
        if self.device.type == "cuda":
            length = 1 << max(length - 1, 127).bit_length()
        return min(self._capacity(length), self._kv_cache.capacity)

    def _step(
        self, batch_size: int, length: int, truncation: Truncation | RowTruncations, num_top: int | None
    ) -> tuple[Tensor, ...]:
        """(tokens, log-probs), and what `score_tokens` returns if `num_top` says so."""
        self.announce(working=True)
        if isinstance(truncation, Truncation):

            def step() -> tuple[Tensor, ...]:
                draw = self._draw if self.compiled is None else self.compiled.draw
                return self._take_tokens(self._head_outputs(batch_size, length), truncation, num_top, draw)

            return self._run((batch_size, length, truncation, num_top), batch_size, step)
        # Which rows draw in which way changes from step to step: that is no part of a graph.
        outputs, *routing = self._run(
            (batch_size, length), batch_size, lambda: (self._head_outputs(batch_size, length),)
        )
        return (*self._take_tokens(outputs, truncation, num_top, self._draw_rows), *routing)

    def _run(self, key: Hashable, batch_size: int, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """With fast modules, as a graph where that is possible. Where routing is recorded, it is the last result."""

        def step() -> tuple[Tensor, ...]:
            with self._fast_modules(batch_size):
                found = compute()
            return found if self.recorder is None else (*found, self._routing())

        if self.graphs is None:
            return step()
        state = (self._tokens, self._positions)
        try:
            return self.graphs.run(key, step, state)
        except (torch.OutOfMemoryError, ValueError):
            raise
        except Exception as error:  # compilers raise whatever they like
            if self.compiled is None:
                raise
            self.compiled = self.joined = None
            self._speed.problem = f"decoding steps could not be compiled ({first_line(error)})"
            return self.graphs.run(key, step, state)

    @contextlib.contextmanager
    def _fast_modules(self, batch_size: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.adapted(self._adapters[:batch_size]))
            if self.linears is not None:
                stack.enter_context(self.linears.installed())
            if self.joined is not None:
                stack.enter_context(self.joined.installed())
            if self.compiled is not None:
                stack.enter_context(self._kv_cache.attached())
                stack.enter_context(self.compiled.installed())
            yield

    def _take_tokens(
        self, outputs: Tensor, truncation: Any, num_top: int | None, draw: Callable[..., tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        positions, streams = self._positions[: len(outputs)], self._streams[: len(outputs)]
        tokens, logprobs = draw(outputs, streams, positions, truncation)
        scores = () if num_top is None else score_tokens(self._as_logits(outputs), tokens, num_top)
        self._tokens[: len(outputs)] = tokens
        positions.add_(1).clamp_(max=self._kv_cache.capacity - 1)  # empty slots count on
        return tokens, logprobs, *scores

    def _draw_rows(
        self, outputs: Tensor, streams: Tensor, positions: Tensor, truncations: RowTruncations
    ) -> tuple[Tensor, ...]:
        """Slots without a truncation are empty: they keep their token."""
        logits = self._as_logits(outputs)
        tokens, logprobs = self._tokens[: len(outputs)].clone(), logits.new_zeros(len(outputs))
        for truncation, rows in truncations:
            index = torch.tensor(rows, device=self.device)
            random = uniforms(streams[index], positions[index] + 1)
            tokens[index], logprobs[index] = sample_tokens(logits[index], truncation, random)
        return tokens, logprobs

    def _score(self, hidden: Tensor, targets: Sequence[int], num_top: int) -> list[TokenScores]:
        """Of the tokens after each of the hidden states [T, hidden], some at a time."""
        size = max(_SCORED_BYTES // (self._causal.config.get_text_config().vocab_size * 4), 1)
        found: list[TokenScores] = []
        for start in range(0, len(targets), size):
            part = torch.tensor(targets[start : start + size], device=self.device)
            logits = self._as_logits(self._head(hidden[start : start + size]))
            found += TokenScores.read(score_tokens(logits, part, num_top))
        return found

    def adapted(self, numbers: Tensor) -> contextlib.AbstractContextManager[None]:
        """Around a pass whose tokens have these adapters."""
        return contextlib.nullcontext() if self.bank is None else self.bank.applied(numbers)

    def _draw(self, outputs: Tensor, streams: Tensor, positions: Tensor, truncation: Truncation) -> tuple[Tensor, ...]:
        if self._transform.softcap is None and suits_draw_kernel(outputs, truncation):
            return draw_by_kernel(outputs, streams, positions, self._transform.scale / truncation.temperature)
        return sample_tokens(self._as_logits(outputs), truncation, uniforms(streams, positions + 1))

    def logits(self, batch_size: int, length: int) -> Tensor:
        """[slots, V] after the current tokens."""
        return self._as_logits(self._head_outputs(batch_size, length))

    def _head_outputs(self, batch_size: int, length: int) -> Tensor:
        tokens, positions = self._tokens[:batch_size], self._positions[:batch_size]
        attention = DecodePass(self._kv_cache, positions, length, prompts=self._prompts)
        kept = contextlib.nullcontext() if self._states is None else self._states.decoding(positions, length)
        with self.rotary.next_tokens(), kept as mask:
            hidden = self._hidden(tokens[:, None], positions[:, None], attention, mask)
        return self._head(hidden[:, 0])

    def _as_logits(self, outputs: Tensor) -> Tensor:
        """As in the trainer's head: transformed in float32 or wider."""
        wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        return self._transform.apply(outputs.to(wide))

    def _hidden(
        self, tokens: Tensor, positions: Tensor, attention: AttentionPass, mask: Tensor | None = None
    ) -> Tensor:
        with contextlib.nullcontext() if self.recorder is None else self.recorder.recording():
            return self._call.hidden(tokens, positions, attention, mask)

    def _routing(self) -> Tensor:
        """[tokens, bytes] of the last pass."""
        assert self.recorder is not None
        return self.recorder.take()

    def announce(self, *, working: bool) -> bool:
        """Whether any process has a pass to make now. All ranks call it, before every pass and until none has."""
        if not self.sharded:
            return working
        count = torch.tensor(float(working), device=self.device)
        dist.all_reduce(count)
        return count.item() > 0

    def fuse(self, groups: list[list[nn.Module]]) -> None:
        """Decided by all memory, not by what is free now: a restarted run could otherwise round differently."""
        linears = FusedLinears(groups, self.bank)
        if linears.num_bytes <= kv_cache.total_bytes(self.device) // 8:
            linears.lay_out(MIN_ROWS)
            self.linears = linears
