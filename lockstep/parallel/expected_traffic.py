"""The least that a rank of a layout must send in one step, by mesh axis and kind of collective.

In the unit of parallel/traffic.py, which counts: bytes that a rank of a ring sends. Arithmetic on sizes; only
`sizes_of` looks at a model. Must not know process groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.parallel import Degrees, ParallelConfig

Bytes = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: how many there are and how many are trained, of this rank's matrices."""

    parameters: int
    trained: int


@dataclass(frozen=True)
class Sizes:
    """A model as one rank has it: its stage and its part of each matrix. Widths are of one token, in numbers."""

    layers: tuple[Unit, ...]
    rest: Unit
    hidden: int
    split_queries: int = 0
    """Heads x dim of the queries that one rank computes."""
    split_keys: int = 0
    """The same of keys, repeated where ranks outnumber them."""
    forward_sums: int = 0
    """Widths summed over the tensor axis in forward, per token."""
    backward_sums: int = 0
    """The same in backward."""
    head_sums: int = 0
    """The same per asked token, in both directions together."""
    gathers: int = 0
    """Widths gathered over the tensor axis per token, in both directions together."""
    summed_parameters: int = 0
    """Trained parameters that every rank of the tensor axis has, each with a part of the gradient."""
    compute_bytes: int = 4
    gradient_bytes: int = 4


@dataclass(frozen=True)
class RankWork:
    """One rank's share of a step: tokens as computed, filling included, of its own part of them."""

    tokens: int
    asked: int
    micro_batches: int
    stage_sends: int = 0
    """Hidden states and gradients that leave this rank's stages, per micro-batch."""


def least_traffic(sizes: Sizes, degrees: Degrees, work: RankWork, *, keep_parameters: bool = False) -> Bytes:
    """Axes of one rank are left out."""
    found: Bytes = {}
    if degrees.sharded:
        found |= _sharded(sizes, degrees, work, keep_parameters)
    elif degrees.replicate > 1:
        found["replicate", "all_reduce"] = _twice(degrees.replicate) * _trained(sizes) * sizes.gradient_bytes
    if degrees.tensor > 1:
        numbers = work.tokens * (sizes.forward_sums + sizes.backward_sums) + work.asked * sizes.head_sums
        numbers += work.micro_batches * sizes.summed_parameters
        found["tensor", "all_reduce"] = _twice(degrees.tensor) * numbers * sizes.compute_bytes
        if sizes.gathers:
            gathered = work.tokens * sizes.gathers * sizes.compute_bytes
            found["tensor", "all_gather"] = _once(degrees.tensor) * gathered
    if degrees.context > 1:
        # Queries, keys and values go out and what was attended comes back; the gradients the other way.
        widths = 2 * 2 * (sizes.split_queries + sizes.split_keys) * len(sizes.layers)
        found["context", "all_to_all"] = _once(degrees.context) * work.tokens * widths * sizes.compute_bytes
    if degrees.pipeline > 1:
        found["pipeline", "send"] = float(work.tokens * work.stage_sends * sizes.hidden * sizes.compute_bytes)
    return found


class Theory:
    """`least_traffic` of a policy that is built, step by step."""

    def __init__(
        self,
        policy: Any,
        degrees: Degrees,
        parallel: ParallelConfig,
        compute_bytes: int,
        stages: Collection[int] = (),
        num_stages: int = 0,
    ) -> None:
        """`stages` are this rank's, by number."""
        narrow = {"bf16": 2, "fp16": 2}.get(parallel.compression)
        gradient_bytes = narrow or max(compute_bytes, 4)
        self._degrees, self._keep_parameters = degrees, parallel.keep_parameters
        self._knows = degrees.num_ranks > 1 and parallel.compression != "powersgd"
        self._stage_sends = sum((i > 0) + (i < num_stages - 1) for i in stages)
        if self._knows:
            sizes = sizes_of(policy, degrees, compute_bytes=compute_bytes, gradient_bytes=gradient_bytes)
            self._sizes = sizes

    def metrics(self, tokens: int, asked: int, micro_batches: int) -> dict[str, float]:
        """`tokens` as this rank computes them; empty where theory does not say."""
        if not self._knows:
            return {}
        work = RankWork(tokens, asked, micro_batches, self._stage_sends)
        least = least_traffic(self._sizes, self._degrees, work, keep_parameters=self._keep_parameters)
        return {f"traffic_least/{axis}/{kind}": count for (axis, kind), count in sorted(least.items())}


def _sharded(sizes: Sizes, degrees: Degrees, work: RankWork, keep_parameters: bool) -> Bytes:
    ranks = degrees.shard * degrees.context
    axis = "_".join(axis for axis in ("shard", "context") if getattr(degrees, axis) > 1)
    passes = 1 if degrees.pipeline > 1 else work.micro_batches  # a schedule holds what it gathered
    in_layers = sum(unit.parameters for unit in sizes.layers)
    gathered = sizes.rest.parameters + in_layers * (1 if keep_parameters or degrees.pipeline > 1 else 2)
    found: Bytes = {}
    if ranks > 1:
        found[axis, "all_gather"] = _once(ranks) * passes * gathered * sizes.compute_bytes
        found[axis, "reduce_scatter"] = _once(ranks) * passes * _trained(sizes) * sizes.gradient_bytes
    if degrees.replicate > 1:
        shards = _trained(sizes) / ranks
        found["replicate", "all_reduce"] = _twice(degrees.replicate) * passes * shards * sizes.gradient_bytes
    return found


def _trained(sizes: Sizes) -> int:
    return sizes.rest.trained + sum(unit.trained for unit in sizes.layers)


def _once(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice(num_ranks: int) -> float:
    return 2 * _once(num_ranks)


# --- from a model ---------------------------------------------------------------------------------------------------


def sizes_of(policy: Any, degrees: Degrees, *, compute_bytes: int, gradient_bytes: int) -> Sizes:
    """Of a policy that is built: what this rank has of it."""
    from lockstep.model.policy import causal_lm, head_dim

    causal = causal_lm(policy.model)
    config = causal.config.get_text_config()
    layers = [list(layer.parameters()) for layer in _layers(causal)]
    in_layers = {p for parameters in layers for p in parameters}
    rest = [p for p in policy.parameters() if p not in in_layers]
    heads, keys = _heads(config, degrees)
    sums = _sums(policy, causal, config.hidden_size) if degrees.tensor > 1 else {}
    return Sizes(
        tuple(_unit(parameters) for parameters in layers if parameters),
        _unit(rest),
        config.hidden_size,
        heads * head_dim(causal),
        keys * head_dim(causal),
        **sums,
        compute_bytes=compute_bytes,
        gradient_bytes=gradient_bytes,
    )


def _heads(config: Any, degrees: Degrees) -> tuple[int, int]:
    """(query heads, key heads) that a rank of the tensor axis has; keys are repeated where ranks outnumber them."""
    queries = config.num_attention_heads // degrees.tensor
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // degrees.tensor
    return queries, queries if keys % degrees.context else keys


def _layers(causal: Any) -> list[Any]:
    """Also where FSDP2 has made a class of its own from the layer's."""
    names = set(causal._no_split_modules or ())
    return [m for m in causal.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def _unit(parameters: Sequence[Any]) -> Unit:
    return Unit(sum(_size(p) for p in parameters), sum(_size(p) for p in parameters if p.requires_grad))


def _size(parameter: Any) -> int:
    """Of a split matrix the part that one rank of the tensor axis has, whatever FSDP2 made of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return int(parameter.numel())
    axis = mesh.mesh_dim_names.index("tensor")
    return int(parameter.numel()) // (mesh.size(axis) if parameter.placements[axis].is_shard() else 1)


def _sums(policy: Any, causal: Any, hidden: int) -> dict[str, int]:
    """Where the model's own plan makes ranks meet. Matrices that read the same input need one sum between them."""
    from lockstep.model.policy import tensor_plan

    plan = tensor_plan(policy.model)
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    readers, forward, backward, gathers, parameters = set(), 0, 0, 0, 0
    frozen = getattr(embedding, "weight", None) is not None and not embedding.weight.requires_grad
    for name, (module, style) in plan.items():
        if style == "embedding_rowwise":
            forward += hidden
        elif style == "rowwise":
            forward += hidden + _adapter_ranks(module, "lora_A")
        elif style == "colwise" and module is not head:
            readers.add(name.rpartition(".")[0])
            backward += _adapter_ranks(module, "lora_B")
        elif style in ("replicated_with_grad_allreduce", "sequence_parallel"):
            parameters += sum(p.numel() for p in module.parameters() if p.requires_grad)
        if style == "sequence_parallel":
            # What came out; backward, the gradient of what went in, if anybody asks for it.
            gathers += hidden * (1 if frozen and not gathers else 2)
    backward += hidden * len(readers)
    if frozen and readers:
        backward -= hidden  # nobody asks for the gradient of the first layer's input
    return {
        "forward_sums": forward,
        "backward_sums": backward,
        "head_sums": hidden + 3,  # hidden's gradient; the largest logit, the sum of all, the target's
        "gathers": gathers,
        "summed_parameters": parameters,
    }


def _adapter_ranks(module: Any, half: str) -> int:
    """Of LoRA's matrices on the split side, together."""
    adapters = getattr(module, half, {}).values()
    return sum(min(linear.in_features, linear.out_features) for linear in adapters)
