"""Prefill and decode passes of a causal language model over the slots of its KV cache.

It is the trainer's own model object, with other attention installed meanwhile. On CUDA a step is replayed as a graph.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.inference import kv_cache
from lockstep.inference.adapter_bank import NO_ADAPTER, AdapterBank
from lockstep.inference.cuda_graphs import CompiledStep, StepGraphs, StepSpeed, first_line
from lockstep.inference.fused_linear import MIN_ROWS, FusedLinears
from lockstep.inference.joined_linear import JoinedLinears
from lockstep.inference.kv_cache import AttentionPass, DecodePass, LayerShape
from lockstep.inference.model_call import ModelCall
from lockstep.inference.prefill import PrefillPass, PrefillShapes, pack_prompts, split_prompts
from lockstep.inference.probe import find_call
from lockstep.inference.slots import DecodeSlots
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
from lockstep.model.policy import CausalLM, causal_lm, decoder_layers, logit_transform, num_logits
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
        self.slots = DecodeSlots(self.device)
        self._prefill_shapes = PrefillShapes(self.device)
        self.shapes: dict[nn.Module, LayerShape] = {}
        self.linears: FusedLinears | None = None
        self.joined: JoinedLinears | None = None
        self.compiled: CompiledStep | None = None
        self.by_kernel = False
        self._num_slots = 0  # in use, of those allocated
        self._bank_revision = -1
        self._report, self._speed, self._read_at = report, StepSpeed(report), 0.0
        self._groups = find_call(self, model, fuses=fuses and self.device.type == "cpu" and not sharded)
        if self.device.type == "cuda":
            self.choose_fast_ways(graphs=graphs, sharded=sharded, compiles=compiles)

    def choose_fast_ways(self, *, graphs: bool, sharded: bool, compiles: bool) -> None:
        """Keys are read by a kernel, steps captured and compiled; or it is said why not."""
        if self.slots.states is not None and self.graphs is not None:
            # A capture runs a step more than once, and only tokens and positions would be as before.
            self.graphs = None
            self._report(f"decoding steps are no CUDA graphs: layers of {type(self._causal).__name__} keep a state")
        elif graphs and sharded:
            self._report("decoding steps are no CUDA graphs: several processes hold the model together")
        problems = [shape.kernel_problem for shape in self.shapes.values()]
        if not self.by_kernel and any(problems):
            why = next(problem for problem in problems if problem)
            compiled = ", nor are steps compiled" if compiles and self.graphs is not None else ""
            self._report(f"the kernel for one new token is not used{compiled}: {why}")
        if compiles and self.graphs is not None and self.by_kernel:
            if self.bank is None and self.recorder is None:
                self.compile_steps()
            else:
                adapted = self.recorder is None
                why = "rows have adapters of their own" if adapted else "the choices of routers are recorded"
                self._report(f"decoding steps are not compiled: {why}")

    def use_call(self, call: ModelCall, shapes: dict[nn.Module, LayerShape], *, kernels: bool = True) -> None:
        """`shapes`: of what attention of ours keeps. `kernels`: where those of a GPU can be used, they are."""
        self._call, self.shapes, self.linears = call, shapes, None
        self.slots.use_shapes(shapes, call.cache)
        self._head = nn.Identity() if call.whole else self._causal.get_output_embeddings()
        self._transform = LogitTransform() if call.whole else logit_transform(self._causal)
        self._num_logits = None if call.whole else num_logits(self._causal)
        on_gpu = kernels and self.device.type == "cuda"
        self.by_kernel = on_gpu and bool(shapes) and all(s.kernel_problem is None for s in shapes.values())

    def compile_steps(self) -> None:
        """From the next step on; their linear layers are joined if an eighth of the memory holds the copy."""
        self.compiled = CompiledStep(decoder_layers(self._model), self._draw)
        joined = JoinedLinears(self._model, self._groups)
        if joined.num_bytes <= kv_cache.total_bytes(self.device) // 8:
            self.joined = joined
        else:
            gib = joined.num_bytes / 2**30
            self._report(f"linear layers are not joined for decoding: {gib:.1f} GiB are over an eighth of the memory")

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
    def attends(self) -> bool:
        """Whether attention is ours: every row at its own length, and prompts packed."""
        return self._call.attends

    def spare_bytes(self) -> int:
        """The default limit of the cache: half of the free memory, the same on every rank."""
        spare = torch.tensor((kv_cache.free_bytes(self.device) + self.slots.num_bytes) // 2, device=self.device)
        if self.sharded:
            dist.all_reduce(spare, dist.ReduceOp.MIN)
        return int(spare)

    @property
    def has_fixed_batch(self) -> bool:
        """Whether every step should compute the same number of slots, filled or not, to reuse its CUDA graph."""
        return self.device.type == "cuda"

    def prepare(self, num_slots: int, length: int) -> None:
        """Empty slots for sequences of at most `length` tokens. Call before any pass."""
        if self.slots.has_room(num_slots, length):
            self.slots.clear()
        else:
            self.release()
            self.slots.allocate(num_slots, length, shares_prompts=self.by_kernel)
        self._num_slots = num_slots
        self.check_model()

    def grow(self, num_slots: int, length: int) -> None:
        """More or longer slots; their contents stay."""
        self._num_slots = max(num_slots, self._num_slots)
        if not self.slots.has_room(num_slots, length):
            self._drop_graphs()
            self.slots.grow(num_slots, length, shares_prompts=self.by_kernel)
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
        self._drop_graphs()
        self.slots.release()

    def _drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

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
        self.slots.begin([slot for slot, _ in prompts])
        one_by_one = self.slots.states is not None  # a state is that of one sequence
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
            kept = contextlib.nullcontext() if self.slots.states is None else self.slots.states.prefilling(slots[0])
            with adapted, kept, self.rotary.texts([TextSpan(length, length + 1) for length in lengths]):
                hidden = self._prefill(rows[0], PrefillPass(self.slots.kv_cache, lengths, rows[1], rows[2], boundaries))
            for slot, routed in zip(slots, self._routing().split(lengths) if self.recorder else (), strict=False):
                self.prompt_routing[slot] = routed.cpu().numpy().tobytes()
            for (slot, tokens), states in zip(part, hidden.split(lengths), strict=True):
                if scored is not None and slot in scored:
                    targets = [*tokens[1:], scored[slot].last]
                    adapter = (adapters or {}).get(slot, NO_ADAPTER)
                    found[slot] = self._score(states, targets, scored[slot].num_top, adapter)
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
        if not all(shape.fuses_prefill(self.device) for shape in self.shapes.values()):
            return False
        if (chosen := self._prefill_shapes.buffers(part)) is None:
            return False
        shape, buffers, is_worth_a_graph = chosen
        buffers.fill(part, self.slots.kv_cache.capacity)
        attention = PrefillPass(
            self.slots.kv_cache, [shape.max_length], buffers.slots, buffers.positions, buffers.boundaries
        )

        def run() -> tuple[Tensor, ...]:
            self._prefill(buffers.tokens, attention)
            return ()

        if is_worth_a_graph:
            self.graphs.run(shape, run, ())
        else:
            run()
        return True

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
                why = self.graphs.problem or ("autocast is on" if self.graphs.is_suspended else None)
                self._speed.note((self._read_at - began) / num_steps, batch_size, why)
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

    def _attended_length(self, length: int) -> int:
        """Rounded up; on CUDA to powers of two, as each length is a graph of its own, unless one graph serves all."""
        if self.by_kernel:
            return self.slots.kv_cache.capacity
        if self.device.type == "cuda":
            length = 1 << max(length - 1, 127).bit_length()
        return min(self.slots.capacity_for(length), self.slots.kv_cache.capacity)

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
        state = (self.slots.tokens, self.slots.positions)
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
            stack.enter_context(self.adapted(self.slots.adapters[:batch_size]))
            if self.linears is not None:
                stack.enter_context(self.linears.installed())
            if self.joined is not None:
                stack.enter_context(self.joined.installed())
            if self.compiled is not None:
                stack.enter_context(self.slots.kv_cache.attached())
                stack.enter_context(self.compiled.installed())
            yield

    def _take_tokens(
        self, outputs: Tensor, truncation: object, num_top: int | None, draw: Callable[..., tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        positions, streams = self.slots.positions[: len(outputs)], self.slots.streams[: len(outputs)]
        tokens, logprobs = draw(outputs, streams, positions, truncation)
        scores = () if num_top is None else score_tokens(self._as_logits(outputs), tokens, num_top)
        self.slots.tokens[: len(outputs)] = tokens
        positions.add_(1).clamp_(max=self.slots.kv_cache.capacity - 1)  # empty slots count on
        return tokens, logprobs, *scores

    def _draw_rows(
        self, outputs: Tensor, streams: Tensor, positions: Tensor, truncations: RowTruncations
    ) -> tuple[Tensor, ...]:
        """Slots without a truncation are empty: they keep their token."""
        logits = self._as_logits(outputs)
        tokens, logprobs = self.slots.tokens[: len(outputs)].clone(), logits.new_zeros(len(outputs))
        for truncation, rows in truncations:
            index = torch.tensor(rows, device=self.device)
            random = uniforms(streams[index], positions[index] + 1)
            tokens[index], logprobs[index] = sample_tokens(logits[index], truncation, random)
        return tokens, logprobs

    def _score(self, hidden: Tensor, targets: Sequence[int], num_top: int, adapter: int) -> list[TokenScores]:
        """Of the tokens after each of the hidden states [T, hidden], some at a time. The head may be adapted too."""
        size = max(_SCORED_BYTES // (self._causal.config.get_text_config().vocab_size * 4), 1)
        found: list[TokenScores] = []
        for start in range(0, len(targets), size):
            part = torch.tensor(targets[start : start + size], device=self.device)
            with self.adapted(torch.full_like(part, adapter)):
                logits = self._as_logits(self._head(hidden[start : start + size]))
            found += TokenScores.read(score_tokens(logits, part, num_top))
        return found

    def adapted(self, numbers: Tensor) -> contextlib.AbstractContextManager[None]:
        """Around a pass whose tokens have these adapters."""
        return contextlib.nullcontext() if self.bank is None else self.bank.applied(numbers)

    def _draw(self, outputs: Tensor, streams: Tensor, positions: Tensor, truncation: Truncation) -> tuple[Tensor, ...]:
        is_plain = self._transform.softcap is None and self._num_logits is None
        if is_plain and suits_draw_kernel(outputs, truncation):
            return draw_by_kernel(outputs, streams, positions, self._transform.scale / truncation.temperature)
        return sample_tokens(self._as_logits(outputs), truncation, uniforms(streams, positions + 1))

    def logits(self, batch_size: int, length: int) -> Tensor:
        """[slots, V] after the current tokens."""
        return self._as_logits(self._head_outputs(batch_size, length))

    def _head_outputs(self, batch_size: int, length: int) -> Tensor:
        tokens, positions = self.slots.tokens[:batch_size], self.slots.positions[:batch_size]
        attention = DecodePass(self.slots.kv_cache, positions, length, prompts=self.slots.prompts)
        kept = contextlib.nullcontext() if self.slots.states is None else self.slots.states.decoding(positions, length)
        with self.rotary.next_tokens(), kept as mask:
            hidden = self._hidden(tokens[:, None], positions[:, None], attention, mask)
        return self._head(hidden[:, 0])

    def _as_logits(self, outputs: Tensor) -> Tensor:
        """As in the trainer's head: transformed in float32 or wider."""
        wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        return self._transform.apply(outputs[..., : self._num_logits].to(wide))

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
