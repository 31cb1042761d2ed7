"""Sampling in a plan: how many sequences are decoded at once, what their cache holds, how long it takes. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.plan.description import ModelDescription
from lockstep.plan.hardware import Rates
from lockstep.plan.work import Options, RankLayout, Sampling

GIB = 2**30
CONTEXT_GIB = 0.6
"""Of a GPU's memory, what drivers and libraries take before the first tensor."""
GRAPH_BYTES = 0.07 * GIB  # of CUDA graphs that sample
_MOST_SEQUENCES = 256  # as inference/engine.py decodes at once on a GPU
_KEPT_SHARE = 20  # a cache of at most this part of a GPU is kept between steps
_GRAPH_KERNEL_S = 3.4e-6  # of one small kernel in a CUDA graph


@dataclass(frozen=True)
class SampledCache:
    """Bytes of keys and values. `kept`: also while the model trains."""

    sequences: int
    num_bytes: float
    kept: bool


def plan_cache(
    model: ModelDescription, tensor: int, sampling: Sampling, options: Options, held_bytes: float
) -> SampledCache:
    """On a GPU that holds `held_bytes` of other things, one of `tensor` ranks: at most half of what is free is taken,
    and then fewer sequences are decoded at once."""
    one = sequence_bytes(model, tensor, sampling)
    wanted = min(sampling.sequences, _MOST_SEQUENCES)
    device = options.device_gib * GIB
    spare = max(device - CONTEXT_GIB * GIB - held_bytes, 0.0) / 2
    sequences = wanted if not one or wanted * one <= spare else max(int(spare // one), 1)
    return SampledCache(sequences, sequences * one, kept=sequences * one <= device / _KEPT_SHARE)


def sequence_bytes(model: ModelDescription, tensor: int, sampling: Sampling) -> float:
    """Keys and values of one sequence, on one of `tensor` ranks."""
    length = -(-(sampling.prompt_tokens + sampling.new_tokens) // 64) * 64
    for_token = 0.0
    for number in model.layers:
        attention = model.kinds[number].attention
        if attention is not None:
            _, key_heads, size, _ = attention
            for_token += 2 * key_heads * size * model.compute_bytes / tensor
    return length * for_token


def sampling_s(
    model: ModelDescription,
    layout: RankLayout,
    sampling: Sampling,
    rates: Rates,
    *,
    at_once: int,
    host_s: float,
    exchange_s: float,
) -> float:
    """Reading the prompts, then one pass for each new token. It takes as long as its small kernels, or as reading
    weights and cache. Ranks that hold the model together have no CUDA graph: the host starts every operation, for which
    it takes `host_s`, and they exchange parameters or sums in every pass, `exchange_s`."""
    weights = cache = operations = prompt = 0.0
    for number, count in Counter(model.layers).items():
        kind = model.kinds[number]
        values = sum(p.inner * p.columns for p in kind.products)
        weights += count * values * model.compute_bytes / layout.degrees.tensor
        operations += count * kind.whole.forward.operations
        prompt += count * sum(
            rates.product_s(sampling.prompts * sampling.prompt_tokens, p.inner, p.columns, model.compute_bytes)
            for p in kind.products
        )
        if kind.attention is not None:
            _, heads, size, _ = kind.attention
            cache += count * 2 * heads * size * model.compute_bytes / layout.degrees.tensor
    weights += model.vocabulary * model.hidden * model.compute_bytes / layout.degrees.tensor
    waves = -(-sampling.sequences // at_once)
    length = sampling.prompt_tokens + sampling.new_tokens / 2
    read = (weights + at_once * length * cache) / rates.copy_bytes_per_s
    logits = at_once * model.vocabulary * 4 * 6 / rates.copy_bytes_per_s
    started = operations * (_GRAPH_KERNEL_S if sampling.shards == 1 else host_s)
    step = max(started, read, exchange_s) + logits
    return prompt + waves * sampling.new_tokens * step
