"""What holds the memory of a rank, and how much at the worst moment of a step. No torch.

A step is followed from its first forward pass to the optimizer: at each moment the parts that are then alive add up,
and the worst moment is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.plan.description import LayerCosts, LayerKind, ModelDescription, ParameterShape
from lockstep.plan.sampling import GIB, GRAPH_BYTES, SampledCache, plan_cache
from lockstep.plan.stages import held_micro_batches, stage_layers, stage_rest
from lockstep.plan.work import Options, RankLayout, Sampling, Workload

# Of CUDA libraries: workspaces of matrix products, and small buffers. Measured: 0.06 to 0.10 GiB.
_LIBRARIES = 0.07 * GIB
_CACHE, _STAGING = "KV cache and graphs", "checkpoint staging"
_CPU_SEQUENCES = 16  # that a CPU decodes at once
_HEAD_CHUNK = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the worst moment, by what holds them."""

    rank: str
    moment: str
    parts: dict[str, float]
    slack: float
    """What the allocator holds and cannot use."""

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        return self.allocated + self.slack


def plan_memory(
    model: ModelDescription, layout: RankLayout, work: Workload, options: Options, *, stage: int = 0, place: int = 0
) -> RankMemory:
    """Of the rank at `stage` of the pipeline axis, and at `place` (0: the fullest) of those that split parameters."""
    work = work.largest
    held = _Held(model, layout, stage, place)
    moments = list(_moments(held, work, options))
    moment, parts = max(moments, key=lambda found: sum(found[1].values()))
    parts = {name: size for name, size in parts.items() if size}
    return RankMemory(_rank_name(layout, stage), moment, parts, _slack(parts, held, options))


def persistent_bytes(
    model: ModelDescription, layout: RankLayout, *, stage: int = 0, place: int = 0, tensor: int = 0
) -> dict[str, int]:
    """Of one rank, exactly, after a step: weights, gradients and the moments of the optimizer."""
    held = _Held(model, layout, stage, place, tensor)
    return {"weights": held.weights, "gradients": held.gradients, "optimizer": 2 * held.gradients}


def _rank_name(layout: RankLayout, stage: int) -> str:
    if layout.degrees.pipeline == 1:
        return "every rank" if layout.degrees.num_ranks > 1 else "the rank"
    return f"ranks of stage {stage}"


class _Held:
    """The parameters of one rank."""

    def __init__(self, model: ModelDescription, layout: RankLayout, stage: int, place: int, tensor: int = 0) -> None:
        self.model, self.layout, self.stage = model, layout, stage
        self._tensor = (tensor, layout.degrees.tensor)
        self._shard = (place, layout.sharding_ranks)
        self._expert_shard = (layout.expert_place(place), layout.expert_sharding_ranks)
        self._experts = layout.degrees.expert
        parts = stage_layers(model, layout)
        num_ranks = layout.degrees.pipeline
        mine = [i for i in range(len(parts)) if i % num_ranks == stage]
        self.layers = [layer for i in mine for layer in parts[i]]
        self.has_first, self.has_last = 0 in mine, len(parts) - 1 in mine
        self.rest = tuple(stage_rest(model, layout, has_first=self.has_first, has_last=self.has_last))
        everything = [*(p for layer in self.layers for p in self.kind(layer).parameters), *self.rest]
        self.weights = sum(self.local(p) * p.held_bytes for p in everything)
        self.gradients = sum(self.local(p) * model.wide_bytes for p in everything if p.trained)
        # What is offloaded leaves the GPU as it is reduced.
        self.offloaded = layout.offload and layout.degrees.sharded
        self.gradients_here = 0.0 if self.offloaded else float(self.gradients)
        self.whole_trained = sum(self.gathered(p) for p in everything if p.trained)

    def kind(self, layer: int) -> LayerKind:
        return self.model.kind_of(layer)

    def local(self, parameter: ParameterShape) -> int:
        divided = parameter.stacked and self._experts > 1
        return parameter.part(self._tensor, self._expert_shard if divided else self._shard, self._experts)

    def gathered(self, parameter: ParameterShape) -> int:
        """Values when FSDP2 has gathered it."""
        return parameter.part(self._tensor, experts=self._experts)

    def unit(self, parameters: tuple[ParameterShape, ...], *, trained: bool = False) -> int:
        return sum(self.gathered(p) for p in parameters if p.trained or not trained)


# --- the moments of a step --------------------------------------------------------------------------------------------


def _moments(held: _Held, work: Workload, options: Options) -> Iterator[tuple[str, dict[str, float]]]:
    always = _always(held, work, options)
    yield from _passes(held, work, options, always)
    if not held.offloaded:  # otherwise the host makes it
        yield "the optimizer's step", always | {"gradients": held.gradients}
    cache = _cache_of(held, work, options)
    if cache is not None:
        gathered = _Gathered(held)
        layer = max((held.unit(held.kind(i).parameters) for i in held.layers), default=0)
        around = 0.0 if not held.layout.degrees.sharded else 3.0 * layer * held.model.compute_bytes
        copies = {"computing copies": gathered.root_and_copies} if held.layout.degrees.sharded else {}
        yield "sampling", always | copies | {"communication": around} | _cache_parts(cache, work)


def _state_bytes(held: _Held, optimizer: str) -> float:
    """Of the optimizer. Muon has AdamW's two moments for what is outside of the layers, and one for their matrices."""
    if optimizer == "muon":
        outside = sum(held.local(p) * held.model.wide_bytes for p in held.rest if p.trained)
        return float(held.gradients + outside)
    return _MOMENTS[optimizer] * held.gradients


# For each byte of a gradient in float32: eight bits twice, with a scale for up to 256 values; rows and columns.
_MOMENTS = {"adamw": 2.0, "adamw_8bit": 0.52, "adafactor": 0.02}


def _always(held: _Held, work: Workload, options: Options) -> dict[str, float]:
    """What is there in every moment after the first step."""
    model = held.model
    offloaded = held.offloaded
    parts: dict[str, float] = {
        "weights": 0.0 if offloaded else held.weights,
        "optimizer": 0.0 if offloaded else _state_bytes(held, options.optimizer),
        "other buffers": model.buffers + (_LIBRARIES if options.device == "cuda" else 0.0),
    }
    if options.device != "cuda" and options.checkpoint_in_background:
        parts[_STAGING] = _staged_bytes(held, options)
    if work.reference == "copy":
        parts["frozen copies"] = held.gradients * (1.0 if not offloaded else 0.0)
    if work.sampling is None or not work.sampling.colocated or options.device != "cuda":
        return parts
    if not held.layout.degrees.sharded and model.compute_bytes < model.wide_bytes:
        parts["frozen copies"] = parts.get("frozen copies", 0.0) + held.whole_trained * model.compute_bytes
    cache = plan_cache(model, held.layout.degrees.tensor, work.sampling, options, sum(parts.values()))
    return parts | (_cache_parts(cache, work) if cache.kept else {})


def _staged_bytes(held: _Held, options: Options) -> float:
    """What a checkpoint copies before it is written: trained parameters and the optimizer's state."""
    return held.gradients + _state_bytes(held, options.optimizer)


def host_bytes(model: ModelDescription, layout: RankLayout, work: Workload, options: Options) -> dict[str, float]:
    """Of a machine's own memory, what its ranks take beside their GPUs, by what it is for."""
    if options.device != "cuda":
        return {}
    held = [_Held(model, layout, stage, 0) for stage in range(layout.degrees.pipeline)]
    ranks = min(layout.ranks_per_node, layout.degrees.num_ranks)
    found: dict[str, float] = {}
    if options.checkpoint_in_background:
        found[_STAGING] = max(_staged_bytes(h, options) for h in held)
    if layout.offload and layout.degrees.sharded:
        copy = work.reference == "copy"
        found["parameters, gradients and optimizer"] = max(
            h.weights + h.gradients * (1 + copy) + _state_bytes(h, options.optimizer) for h in held
        )
    if options.activation_offload:
        largest = work.largest
        tokens = largest.tokens / layout.degrees.context
        saved = [_saved(held[0].kind(i), model, largest, layout, tokens, False) for i in held[0].layers]
        found["activations"] = sum(sum(sizes.values()) for sizes in saved)
    return {name: size * ranks for name, size in found.items()}


def _cache_of(held: _Held, work: Workload, options: Options) -> SampledCache | None:
    """Where this rank samples on a GPU."""
    if work.sampling is None or not work.sampling.colocated or options.device != "cuda":
        return None
    others = {name: size for name, size in _always(held, work, options).items() if name != _CACHE}
    return plan_cache(held.model, held.layout.degrees.tensor, work.sampling, options, sum(others.values()))


def _cache_parts(cache: SampledCache, work: Workload) -> dict[str, float]:
    graphs = GRAPH_BYTES if work.sampling is not None and work.sampling.shards == 1 else 0.0
    return {_CACHE: cache.num_bytes + graphs}


def sampled_at_once(model: ModelDescription, layout: RankLayout, work: Workload, options: Options) -> int:
    """Sequences that a rank decodes together."""
    cache = _cache_of(_Held(model, layout, 0, 0), work, options)
    if cache is not None:
        return cache.sequences
    return min(work.sampling.sequences, _CPU_SEQUENCES) if work.sampling is not None else 0


def plan_engine(model: ModelDescription, sampling: Sampling, options: Options) -> RankMemory:
    """Of a GPU that samples alone: all weights as they are computed with, and the cache of its share of sequences."""
    weights = sum(p.numel * min(p.held_bytes, model.compute_bytes) for p in model.all_parameters())
    mine = replace(sampling, sequences=-(-sampling.sequences // max(sampling.engines, 1)))
    parts = {"weights": float(weights), "other buffers": model.buffers + _LIBRARIES}
    parts[_CACHE] = plan_cache(model, 1, mine, options, sum(parts.values())).num_bytes + GRAPH_BYTES
    return RankMemory("a GPU of an engine", "sampling", parts, 0.015 * sum(parts.values()))


def _passes(
    held: _Held, work: Workload, options: Options, always: dict[str, float]
) -> Iterator[tuple[str, dict[str, float]]]:
    """From the head back to the first layer, in the last micro-batch: gradients of those before are there."""
    model, layout = held.model, held.layout
    tokens = work.tokens / layout.degrees.context
    in_flight = held_micro_batches(layout, work.micro_batches, held.stage)
    gathered = _Gathered(held)
    offload = options.activation_offload
    saved = {i: _saved(held.kind(i), model, work, layout, tokens, offload) for i in held.layers}
    rest_saved = 0.0 if offload else model.rest_saved * tokens * held.has_last
    head = _head(held, work, options)
    several = work.micro_batches > 1
    before = held.gradients_here if several else 0.0
    common = always | {"computing copies": gathered.root_and_copies}
    others = in_flight - 1.0  # of the other micro-batches in flight, all that they saved

    def activations(alive: list[int]) -> dict[str, float]:
        found: dict[str, float] = {"activations: others": rest_saved * (1.0 + others)}
        for i in held.layers:
            share = others + (i in alive)
            for kind, size in saved[i].items():
                found[f"activations: {kind}"] = found.get(f"activations: {kind}", 0.0) + size * share
        return found

    everything = activations(held.layers)
    if held.has_last:
        yield (
            "the head, forward",
            common | everything | {"logits": head.forward, "gradients": before, "communication": gathered.root_buffers},
        )
        yield (
            "the head, backward",
            common
            | everything
            | {"logits": head.backward, "gradients": before, "communication": gathered.root_buffers},
        )
    done = 0.0
    for place in range(len(held.layers) - 1, -1, -1):
        i = held.layers[place]
        kind = held.kind(i)
        after = held.model.layers[held.layers[place - 1]] if place else None
        if after == held.model.layers[i] and place < len(held.layers) - 1:
            # Between alike layers memory falls or grows evenly: the worst is at an end of their row.
            done += gathered.kept_gradients(kind)
            continue
        extra = kind.costs.backward_extra * _scale_extra(kind.costs, layout) * tokens
        extra += kind.costs.scores_extra * _pairs_in_memory(work, layout)
        narrow, wide = gathered.gradient_buffers(kind)
        yield (
            f"layer {i}, backward",
            common
            | activations(held.layers[: place + 1])
            | {
                "activations: in work": extra,
                "logits": head.held,
                "gradients": before + (0.0 if several else done) + narrow,
                "communication": gathered.buffers(kind) + (wide if several else 0.0),
            },
        )
        done += gathered.kept_gradients(kind)
    unit = held.unit(held.rest, trained=True)
    sharded = layout.degrees.sharded
    last = unit * model.compute_bytes + (unit * 4 if sharded else 0.0)
    if several and not sharded:
        last += unit * model.wide_bytes
    yield (
        "the end of backward",
        common | {"gradients": held.gradients_here, "communication": last + gathered.root_buffers},
    )


def _saved(
    kind: LayerKind, model: ModelDescription, work: Workload, layout: RankLayout, tokens: float, offload: bool
) -> dict[str, float]:
    """Bytes of one layer and micro-batch, by kind."""
    if offload:
        return {}
    tensor = layout.degrees.tensor
    found = {
        name: (widths.get("whole", 0.0) + widths.get("split", 0.0) / tensor) * tokens
        for name, widths in kind.costs.saved.items()
    }
    if kind.costs.scores:
        found["scores"] = kind.costs.scores * _pairs_in_memory(work, layout)
    if kind.attention is not None and not kind.recomputed and work.keys > work.tokens:
        # Keys and values of a shared prompt are repeated for each answer.
        _, heads, size, _ = kind.attention
        repeated = (work.keys - work.tokens) / layout.degrees.context * 2 * heads * size * model.compute_bytes
        found["attention"] = found.get("attention", 0.0) + repeated / tensor
    return found


def _pairs_in_memory(work: Workload, layout: RankLayout) -> float:
    """Of a token and each other one of its document, before or after it, in the heads of this rank."""
    return 2 * work.pairs / layout.degrees.context / layout.degrees.tensor


def _scale_extra(costs: LayerCosts, layout: RankLayout) -> float:
    """What a layer has in work is split over the tensor axis as what it saves is."""
    whole = costs.saved_bytes()
    return costs.saved_bytes(layout.degrees.tensor) / whole if whole else 1.0


class _Gathered:
    """Copies of parameters that are made for computing, and buffers of collectives."""

    def __init__(self, held: _Held) -> None:
        self._held = held
        model, layout = held.model, held.layout
        self._sharded = layout.degrees.sharded
        size = model.compute_bytes
        if not self._sharded:
            narrows = model.compute_bytes < model.wide_bytes
            self.root_and_copies = held.whole_trained * size if narrows else 0.0
            self.root_buffers = 0.0
            return
        # FSDP2: the root unit stays gathered through forward and backward; with keep_parameters, and in a pipeline's
        # schedule, the layers do too.
        keeps = layout.keep_parameters or layout.degrees.pipeline > 1
        units = sum(held.unit(held.kind(i).parameters) for i in held.layers) if keeps else 0
        self.root_and_copies = float((held.unit(held.rest) + units) * size)
        self.root_buffers = 0.0

    def buffers(self, kind: LayerKind) -> float:
        """Around one layer in backward: gathered parameters of it and of those ahead, and gradients on their way."""
        if not self._sharded:
            return 0.0
        model, layout = self._held.model, self._held.layout
        unit, trained = self._held.unit(kind.parameters), self._held.unit(kind.parameters, trained=True)
        keeps = layout.keep_parameters or layout.degrees.pipeline > 1
        ahead = 0 if keeps else 1 + max(layout.prefetch, 1)
        # The buffer that was gathered into and the parameters copied out of it exist together for one unit.
        gathered = (ahead + (0 if keeps else 1)) * unit * model.compute_bytes
        reduced = 2 * trained * 4  # the input of one reduction in float32, and that of the one before
        return float(gathered + reduced)

    def gradient_buffers(self, kind: LayerKind) -> tuple[float, float]:
        """(gradients of one layer in the dtype of the computation, and wide before they are added to those before)."""
        model = self._held.model
        trained = self._held.unit(kind.parameters, trained=True)
        narrows = model.compute_bytes < model.wide_bytes
        narrow = trained * model.compute_bytes if narrows or self._sharded else 0.0
        return narrow, 0.0 if self._sharded else trained * model.wide_bytes

    def kept_gradients(self, kind: LayerKind) -> float:
        if self._held.offloaded:
            return 0.0
        return float(sum(self._held.local(p) for p in kind.parameters if p.trained) * self._held.model.wide_bytes)


# --- the head ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeadMemory:
    """Bytes in its forward pass, held until backward, and in its backward pass."""

    forward: float
    held: float
    backward: float


def _head(held: _Held, work: Workload, options: Options) -> _HeadMemory:
    """As model/head.py computes it: in chunks, with the gradient on the way where it can be."""
    if not held.has_last:
        return _HeadMemory(0.0, 0.0, 0.0)
    model = held.model
    vocabulary = -(-model.vocabulary // held.layout.degrees.tensor)
    granted = options.logits_gib * GIB
    fits = int(granted) // (model.vocabulary * model.compute_bytes)
    limit = min(_HEAD_CHUNK["cuda" if options.device == "cuda" else "cpu"], max(fits, 128))
    targets = -(-work.targets // held.layout.degrees.context)
    num_chunks = max(1, -(-targets // limit))
    rows = -(-targets // num_chunks)
    # A kernel writes gradients over the logits; composed operations, also those of a split vocabulary, need three more
    # copies in float32.
    wide = max(4, model.compute_bytes)
    fused = options.device == "cuda" and held.layout.degrees.tensor == 1
    chunk = rows * vocabulary * (model.compute_bytes + (0 if fused else 3 * wide))
    chunks = chunk + (rows * vocabulary * model.compute_bytes if num_chunks > 1 else 0)
    states = targets * model.hidden * model.compute_bytes
    weight = vocabulary * model.hidden * model.compute_bytes if model.head_trained else 0
    if work.linear:
        kept = states + weight
        return _HeadMemory(states + kept + chunks, kept, kept)
    if not model.head_trained:
        return _HeadMemory(2 * states + chunks, states, 2 * states)
    logits = targets * vocabulary * model.compute_bytes
    if logits <= granted:
        last = rows * vocabulary * (0 if fused else 3 * wide)
        return _HeadMemory(states + logits + last, states + logits, 2 * states + logits + weight + last)
    return _HeadMemory(states + chunks, states, 2 * states + weight + chunks)


# --- the allocator ----------------------------------------------------------------------------------------------------


def _slack(parts: dict[str, float], held: _Held, options: Options) -> float:
    """Blocks that fit nothing: a little of everything, more where the optimizer's state took blocks of activations.

    Fitted to 28 configurations on an H200: see docs/plan.md.
    """
    if options.device != "cuda":
        return 0.0
    return 0.015 * sum(parts.values()) + 0.1 * held.weights
