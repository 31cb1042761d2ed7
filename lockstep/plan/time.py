"""How long a step of one rank takes, by what spends it: products, attention, head, passes over memory, the optimizer,
each axis's communication that is waited for and that is hidden, the pipeline's bubble, sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lockstep.plan.description import LayerKind, ModelDescription, ParameterShape
from lockstep.plan.hardware import LINK_SHARE, NETWORK_SHARE, GpuCluster, Rates, rates_of
from lockstep.plan.memory import sampled_at_once
from lockstep.plan.sampling import GIB, sampling_s
from lockstep.plan.stages import bubble_share, scheduled_micro_batches, stage_layers
from lockstep.plan.traffic import PlannedTraffic, count_traffic
from lockstep.plan.work import Options, RankLayout, Sampling, Workload

# The host starts an operation of a model, Python around it included, in about three times what a bare one takes.
# Fitted to steps of few tokens on an H200, eager and compiled.
_HOST_FACTOR = 3.1
_RING_S = 6e-6  # what a collective takes at least, for each rank of its group, inside a machine


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `parts` add up to `total`; `hidden` communication happens meanwhile, by axis."""

    parts: dict[str, float]
    hidden: dict[str, float]
    tokens: int
    ranks: int
    traffic: dict[str, float]
    """Bytes that one rank sends, by axis."""
    flops: float
    """Of products and attention, over all ranks, without recomputation."""
    forward_s: float = 0.0
    """One pass without gradient over the rows of a step."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total


def plan_time(
    model: ModelDescription, layout: RankLayout, work: Workload, options: Options, cluster: GpuCluster
) -> StepTime:
    """Of the slowest stage; the other ranks wait for it."""
    rates = rates_of(cluster)
    stages = range(layout.degrees.pipeline)
    passes = {stage: _Passes(model, layout, work, options, rates, stage) for stage in stages}
    slowest = max(passes.values(), key=lambda p: p.micro_batch_s)
    count = scheduled_micro_batches(layout, work.micro_batches)
    parts = {name: seconds * count for name, seconds in slowest.parts.items()}
    parts["waiting for the host"] = max(slowest.host_s - sum(slowest.parts.values()), 0.0) * count
    parts["optimizer"] = _optimizer_s(slowest, rates, layout) * work.optimizer_steps
    busy = sum(parts.values())
    parts["pipeline bubble"] = bubble_share(layout, work.micro_batches) * (busy - parts["optimizer"])
    traffic = count_traffic(model, layout, work, slowest.stage)
    waited, hidden = _communication(traffic, layout, cluster, slowest, count * work.updates)
    parts |= {f"communication: {axis}": seconds for axis, seconds in waited.items()}
    if work.sampling is not None and work.sampling.colocated:
        parts["sampling"] = sampling_s(
            model,
            layout,
            work.sampling,
            rates,
            at_once=sampled_at_once(model, layout, work, options),
            host_s=rates.launch_s * _HOST_FACTOR,
            exchange_s=_exchange_s(model, layout, work.sampling, cluster),
        )
    return StepTime(
        {name: seconds for name, seconds in parts.items() if seconds > 0},
        hidden,
        work.step_tokens or work.tokens * work.micro_batches * layout.degrees.data,
        layout.degrees.num_ranks,
        traffic.by_axis(),
        step_flops(model, work) * work.micro_batches * layout.degrees.data * work.updates,
        slowest.forward_s * count,
    )


class _Passes:
    """Forward and backward of one micro-batch on one rank: `parts` are seconds of the device."""

    def __init__(
        self, model: ModelDescription, layout: RankLayout, work: Workload, options: Options, rates: Rates, stage: int
    ) -> None:
        self._model, self._layout, self._work, self._rates = model, layout, work, rates
        self.stage = stage
        self._tokens = work.tokens / layout.degrees.context
        parts = stage_layers(model, layout)
        mine = [i for i in range(len(parts)) if i % layout.degrees.pipeline == stage]
        self.layers = [layer for i in mine for layer in parts[i]]
        self.has_last = len(parts) - 1 in mine
        self.parts: dict[str, float] = {}
        self.host_s = 0.0
        self.forward_s = self.backward_s = 0.0
        forwards = work.updates + work.reference_passes + work.extra_forwards
        for number, count in _counted(model.layers[i] for i in self.layers):
            self._add_layer(model.kinds[number], count, forwards)
        if self.has_last:
            self._add_head(forwards, options)
        self._add_copies()
        if options.activation_offload:
            saved = sum(model.kind_of(i).costs.saved_bytes(layout.degrees.tensor) for i in self.layers)
            self._add("moving activations", 2 * saved * self._tokens / 25e9)
        self.micro_batch_s = max(sum(self.parts.values()), self.host_s)
        if layout.offload and layout.degrees.sharded:
            self._add("moving parameters", 2 * self.trained_bytes / 25e9)

    @property
    def trained_bytes(self) -> float:
        layout = self._layout
        apart = layout.expert_sharding_ranks * layout.degrees.expert
        values = sum(p.numel / (apart if p.stacked else layout.sharding_ranks) for p in self._trained())
        return values * self._model.wide_bytes / layout.degrees.tensor

    @property
    def gathered_values(self) -> float:
        """Trained ones, when FSDP2 has gathered them."""
        experts = self._layout.degrees.expert
        return sum(p.numel / (experts if p.stacked else 1) for p in self._trained()) / self._layout.degrees.tensor

    def _trained(self) -> Iterator[ParameterShape]:
        for i in self.layers:
            yield from (p for p in self._model.kind_of(i).parameters if p.trained)
        if self.has_last:
            yield from (p for p in self._model.rest if p.trained)

    def _add(self, name: str, seconds: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def _add_layer(self, kind: LayerKind, count: int, forwards: int) -> None:
        size, tensor, rates = self._model.compute_bytes, self._layout.degrees.tensor, self._rates
        again, updates = 1 if kind.recomputed else 0, self._work.updates
        forward = backward = 0.0
        for p in kind.products:
            rows = self._tokens * p.share
            inner, columns = _split(p.inner, p.columns, self._model.hidden, tensor)
            here = max(p.matrices // (tensor * self._layout.degrees.expert), 1)
            once = rates.product_s(rows, inner, columns, size, here)
            forward += once
            # The gradient of each expert's matrix is a product of its own.
            backward += once + (here * rates.product_s(columns, rows / here, inner, size) if p.trained else 0.0)
        self._add("products", count * (forward * (forwards + updates * again) + updates * backward))
        attention = {"forward": 0.0, "backward": 0.0}
        if kind.attention is not None:
            attention = self._attention(kind)
            whole = attention["forward"] * (forwards + updates * again) + updates * attention["backward"]
            self._add("attention", count * whole)
        share = _share(kind, tensor)
        speed = rates.copy_bytes_per_s if self._model.compiled else rates.pointwise_bytes_per_s
        moved = {
            "forward": kind.whole.forward.moved_bytes * self._tokens * share / speed,
            "backward": kind.costs.backward.moved_bytes * self._tokens * share / speed,
        }
        self._add("passes over memory", count * (moved["forward"] * forwards + updates * moved["backward"]))
        self.forward_s += count * (forward + attention["forward"] + moved["forward"])
        self.backward_s += count * (backward + again * forward + attention["backward"] + moved["backward"])
        operations = kind.whole.forward.operations * forwards + updates * kind.costs.backward.operations
        self.host_s += count * operations * rates.launch_s * _HOST_FACTOR

    def _attention(self, kind: LayerKind) -> dict[str, float]:
        assert kind.attention is not None
        all_heads, _, size, window = kind.attention
        heads = all_heads / self._layout.degrees.tensor / self._layout.degrees.context
        pairs = self._work.pairs
        if kind.plain_attention:  # two products forward, four backward, over all pairs; and passes over the scores
            share = 2 * pairs / self._layout.degrees.tensor / self._layout.degrees.context
            product = 4 * pairs * 2 * heads * size / self._rates.product_flops * self._model.compute_bytes / 2
            speed = self._rates.pointwise_bytes_per_s
            moved = (kind.whole.forward.moved_scores * share, kind.costs.backward.moved_scores * share)
            return {"forward": product + moved[0] / speed, "backward": 2 * product + moved[1] / speed}
        if window is not None:
            pairs = min(pairs, self._work.tokens * window)
        wide = self._model.compute_bytes / 2
        return {
            name: wide * self._rates.attention_s(name, self._work.tokens * heads * size, pairs * heads * size)
            for name in ("forward", "backward")
        }

    def _add_head(self, forwards: int, options: Options) -> None:
        """Logits, the gradient of what enters, that of the matrix; and passes over the logits."""
        model, rates, tensor = self._model, self._rates, self._layout.degrees.tensor
        targets = self._work.targets / self._layout.degrees.context
        vocabulary, size = model.vocabulary / tensor, model.compute_bytes
        once = rates.product_s(targets, model.hidden, vocabulary, size)
        again = not self._work.linear and targets * vocabulary * size > options.logits_gib * GIB and model.head_trained
        updates = self._work.updates
        products = forwards + updates * (1 + model.head_trained + again)
        fused = options.device == "cuda" and tensor == 1
        passes = forwards - updates + updates * (3 if self._work.linear or not model.head_trained else 4)
        logits = targets * vocabulary * size * passes * (1 if fused else 4) / rates.copy_bytes_per_s
        self._add("head", products * once + logits)
        self.forward_s += once
        self.backward_s += ((products - 1) * once + logits) / updates
        self.host_s += model.rest_operations * 2 * updates * rates.launch_s * _HOST_FACTOR

    def _add_copies(self) -> None:
        """Narrow copies of parameters and wide ones of their gradients; FSDP2 makes them of its shards."""
        model, layout = self._model, self._layout
        values = self.trained_bytes / model.wide_bytes
        narrows = model.compute_bytes < model.wide_bytes
        moved = 0.0
        if narrows:
            moved += 2 * (model.wide_bytes + model.compute_bytes) * values
        if self._work.micro_batches > 1:
            moved += 3 * model.wide_bytes * values
        if layout.degrees.sharded:
            moved += self.gathered_values * (2 * 2 * model.compute_bytes + model.compute_bytes + 4 + 4)
        self._add("passes over memory", self._work.updates * moved / self._rates.copy_bytes_per_s)


def _counted(numbers: Iterable[int]) -> list[tuple[int, int]]:
    return list(Counter(numbers).items())


def _split(inner: int, columns: int, hidden: int, tensor: int) -> tuple[float, float]:
    """A matrix that reads hidden states is split by its columns, one that writes them by its rows."""
    if tensor == 1:
        return inner, columns
    return (inner, columns / tensor) if inner == hidden else (inner / tensor, columns)


def _share(kind: LayerKind, tensor: int) -> float:
    whole = kind.whole.saved_bytes()
    return kind.whole.saved_bytes(tensor) / whole if whole else 1.0


def _optimizer_s(passes: _Passes, rates: Rates, layout: RankLayout) -> float:
    """The norm, clipping, and AdamW: 28 bytes for each float32 value."""
    held = passes.trained_bytes
    if layout.offload and layout.degrees.sharded:
        return held * 7 / 20e9  # on the host
    return held * 3 / rates.copy_bytes_per_s + held * 7 / rates.optimizer_bytes_per_s


def step_flops(model: ModelDescription, work: Workload) -> float:
    """Of one micro-batch on the ranks that share it: 6 for each weight and token, 12 for each pair and head value."""
    total = 0.0
    for number, count in _counted(model.layers):
        kind = model.kinds[number]
        for p in kind.products:
            total += count * 2 * work.tokens * p.share * p.inner * p.columns * (3 if p.trained else 2)
        if kind.attention is not None:
            heads, _, size, _ = kind.attention
            total += count * 12 * work.pairs * heads * size
    return total + 2 * work.targets * model.hidden * model.vocabulary * (2 + model.head_trained)


# --- communication ----------------------------------------------------------------------------------------------------


def _communication(
    traffic: PlannedTraffic, layout: RankLayout, cluster: GpuCluster, passes: _Passes, count: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds that are waited for, seconds behind computation), by axis."""
    waited: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for axis, (size, calls, groups) in traffic.axes.items():
        seconds = size / _rate(axis, layout, cluster) + calls * _latency(axis, layout, cluster, groups)
        if axis in ("tensor", "context", "expert"):
            room = 0.0
        elif axis == "pipeline":
            room = 0.5 * seconds
        elif layout.degrees.sharded and not axis.endswith("replicate"):
            room = count * (passes.forward_s + passes.backward_s) * 0.9
        else:
            room = passes.backward_s * 0.9 * (count if layout.degrees.sharded else 1)
        behind = min(seconds, room)
        waited[axis] = seconds - behind
        hidden[axis] = behind
    return waited, {axis: seconds for axis, seconds in hidden.items() if seconds}


def _exchange_s(model: ModelDescription, layout: RankLayout, sampling: Sampling, cluster: GpuCluster) -> float:
    """Of one decoding pass by ranks that hold the model together: FSDP2 gathers every layer, unless they stay gathered;
    tensor ranks add up twice in each."""
    degrees, seconds = layout.degrees, 0.0
    if sampling.shards == 1:
        return 0.0
    if layout.sharding_ranks > 1 and not layout.keep_parameters:
        axis = "shard_context" if degrees.context > 1 else "shard"
        values = sum(p.numel for i in range(len(model.layers)) for p in model.kind_of(i).parameters)
        part = values * model.compute_bytes / degrees.tensor / degrees.expert
        part *= 1 - 1 / layout.sharding_ranks
        calls = len(model.layers) * _latency(axis, layout, cluster, layout.sharding_ranks)
        seconds += part / _rate(axis, layout, cluster) + calls
    if degrees.tensor > 1:
        seconds += 2 * len(model.layers) * _latency("tensor", layout, cluster, degrees.tensor)
    return seconds


def spans_machines(axis: str, layout: RankLayout, cluster: GpuCluster) -> bool:
    """Whether the ranks of an axis are on several machines: those further right in the mesh are neighbours."""
    order = ("tensor", "context", "shard", "replicate", "pipeline")
    if axis == "expert":  # neighbours of the axis that they are a part of
        reach = layout.degrees.tensor * layout.degrees.context * layout.degrees.expert
        return reach > cluster.per_node
    axis = axis.removeprefix("expert_")
    reach = 1
    for name in order:
        reach *= getattr(layout.degrees, name)
        if name == axis or (name == "shard" and axis in ("shard_context",)):
            break
    return reach > cluster.per_node


def _rate(axis: str, layout: RankLayout, cluster: GpuCluster) -> float:
    if spans_machines(axis, layout, cluster):
        return cluster.network.bytes_per_s * NETWORK_SHARE * _shared_network(axis, layout, cluster)
    return _measured_rate(axis, cluster) or cluster.device.link_bytes_per_s * LINK_SHARE


# What most of an axis's bytes are sent by.
_KINDS = {
    "replicate": ("all_reduce",),
    "tensor": ("all_reduce",),
    "context": ("all_to_all",),
    "shard": ("all_gather", "reduce_scatter"),
    "shard_context": ("all_gather", "reduce_scatter"),
}


def _measured_rate(axis: str, cluster: GpuCluster) -> float | None:
    """Inside this machine, where its collectives were timed; of several kinds the mean time of a byte."""
    measured = cluster.calibration.collectives if cluster.calibration is not None else {}
    kinds = _KINDS.get(axis.removeprefix("expert_"), ("all_to_all",))
    rates = [measured[kind] for kind in kinds if measured.get(kind)]
    return len(rates) / sum(1 / rate for rate in rates) if rates else None


def _shared_network(axis: str, layout: RankLayout, cluster: GpuCluster) -> float:
    """A ring over machines crosses each machine's border once: with all of its GPUs in one ring they share what all
    their adapters send."""
    axis = axis.removeprefix("expert_")
    if axis in ("shard", "shard_context", "replicate") and layout.degrees.num_ranks > cluster.per_node:
        inside = cluster.per_node
        size = layout.sharding_ranks if axis != "replicate" else 1
        return min(inside, max(size // max(cluster.nodes, 1), 1)) ** 0.5 if size > 1 else 1.0
    return 1.0


def _latency(axis: str, layout: RankLayout, cluster: GpuCluster, ranks: int) -> float:
    hop = cluster.network.latency_s if spans_machines(axis, layout, cluster) else _RING_S
    return hop * max(ranks - 1, 1) ** 0.5
