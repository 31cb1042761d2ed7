"""A reduced copy of the user's model: the same class and settings, fewer layers, narrower, random weights in float64.

Head counts stay, so that what divides the model divides the copy. Every rank builds the same one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import ConfigError, RunConfig
from lockstep.model.experts import compute_experts_exactly, expert_parameters, split_problem
from lockstep.model.float64 import keep_float64
from lockstep.model.load import load_hf_config
from lockstep.model.lora import add_lora
from lockstep.model.policy import CausalLM, Policy, setting_by_layer, tensor_plan
from lockstep.model.quantised import dequantise_base, quantise_base
from lockstep.model.stages import check_divisible
from lockstep.parallel.tensor import plan_problem
from lockstep.verification.layouts import ModelLimits

_HEAD_DIM = 8
_MAX_PARAMETERS = 100_000_000  # float64, with gradients and moments, on every rank
_LENGTHS = ("sliding_window", "attention_chunk_size", "floor_scale")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Reduction:
    """`padding` is the new id of the padding token, where rows contain it. `limit`: beyond this many tokens a text is
    computed differently, where the model does so beyond some length."""

    num_layers: int
    num_tokens: int
    padding: int | None
    narrow: bool = True
    limit: int | None = None


def choose_reduction(config: RunConfig, tokens: list[int], num_layers: int, limit: int | None = None) -> Reduction:
    """Narrower too, unless the model's settings do not allow it."""
    text = load_hf_config(config.model).get_text_config()
    padding = getattr(text, "pad_token_id", None)
    reduction = Reduction(
        num_layers=min(num_layers, text.num_hidden_layers),
        num_tokens=_like(len(tokens), text.vocab_size, 8),
        padding=tokens.index(padding) if padding in tokens else None,
        limit=limit,
    )
    return reduction if _runs(config, reduction) else replace(reduction, narrow=False)


def _runs(config: RunConfig, reduction: Reduction) -> bool:
    """Models may tie their widths together in ways that are not known here: try a forward."""
    try:
        with torch.no_grad():
            build_plain(config, reduction)(input_ids=torch.arange(4)[None], use_cache=False)
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError):
        return False
    return True


def build_reduced(
    config: RunConfig, reduction: Reduction, *, dropout: bool = False, quantised: bool = True
) -> CausalLM:
    """With the user's adapters, if there are any. The same on every rank and in every process.

    Without dropout, unless asked for: what is dropped differs between layouts by design. `quantised`: otherwise plain
    layers with the weights that quantised ones compute with.
    """
    torch.manual_seed(config.seed)
    model = build_plain(config, reduction, dropout=dropout)
    keep_float64(model)
    if config.lora is not None:
        model = add_lora(model, config.lora if dropout else config.lora.model_copy(update={"dropout": 0.0}))
    generator = torch.Generator().manual_seed(config.seed)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.double()
        # Norms start at one, biases and lora_B at zero, which could hide a fault.
        if parameter.ndim < 2 or "lora_B" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if config.lora is not None and config.model.base_format is not None:
        quantise_base(model, config.model.base_format)
        if not quantised:
            dequantise_base(model, torch.float64)
    return model


def reference_config(config: RunConfig) -> RunConfig:
    """The configuration with its reference_model in place of the model, without adapters."""
    path = getattr(config.algorithm, "reference_model", None)
    assert path is not None
    model = config.model.model_copy(update={"path": path, "revision": None})
    return config.model_copy(update={"model": model, "lora": None})


@torch.no_grad()
def leave_reference(weights: Iterable[Tensor]) -> None:
    """Move a policy away from a reference that it equals: all margins would be zero.

    Elementwise, so that any shard of a tensor moves as it would within the whole. Most entries shrink: a less certain
    policy has a positive distance from its reference, as kto measures it.
    """
    for tensor in weights:
        tensor.mul_(0.75 + 0.5 * torch.sin(300 * tensor))


def drops_out(config: RunConfig) -> bool:
    """Whether anything is dropped in training, by adapters or by the model itself."""
    text = load_hf_config(config.model).get_text_config()
    of_model = any(getattr(text, name) > 0 for name in _dropouts(text))
    return of_model or (config.lora is not None and config.lora.dropout > 0)


def _dropouts(text: Any) -> list[str]:
    """Names of a model's settings."""
    floats = [name for name, value in text.to_dict().items() if isinstance(value, float)]
    return [name for name in floats if "dropout" in name or name.endswith("pdrop")]


@torch.no_grad()
def forget_weights(model: nn.Module) -> None:
    """Of ranks other than the first, which get theirs from it, as in a run: parameters and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.fill_(0.5)
        elif tensor.dtype == torch.uint8:  # of quantised layers
            tensor.fill_(5)


def build_plain(config: RunConfig, reduction: Reduction, *, dropout: bool = False) -> CausalLM:
    from transformers import AutoModelForCausalLM

    architecture = _reduce(load_hf_config(config.model), reduction, dropout=dropout)
    options = {"dtype": torch.float64, "trust_remote_code": config.model.trust_remote_code}
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(copy.deepcopy(architecture), **options)
    size = sum(p.numel() for p in outline.parameters())
    if size > _MAX_PARAMETERS:
        name = type(architecture).__name__
        raise ConfigError(f"{name} could not be made small: {size:,} parameters are too many to verify in float64")
    model = AutoModelForCausalLM.from_config(architecture, **options).eval()
    compute_experts_exactly(model, torch.float64)
    return model


def _reduce(architecture: Any, reduction: Reduction, *, dropout: bool = False) -> object:
    if hasattr(architecture, "quantization_config"):
        del architecture.quantization_config
    text = architecture.get_text_config()
    types = getattr(text, "layer_types", None)
    own = _take_layer_settings(text)
    text.num_hidden_layers = reduction.num_layers
    if types is not None:
        text.layer_types = choose_layer_types(list(types), reduction.num_layers)
        own = {i: own.get(types.index(kind), {}) for i, kind in enumerate(text.layer_types)}
    text.vocab_size = reduction.num_tokens
    text.pad_token_id = reduction.padding
    text.bos_token_id = text.eos_token_id = None
    for name in () if dropout else _dropouts(text):
        setattr(text, name, 0.0)
    if reduction.narrow:
        _narrow(text, own)
    if reduction.limit is not None:
        _lower_limits(text, reduction.limit)
    _fit_factors(text)
    if kept := {i: settings for i, settings in own.items() if settings and i < reduction.num_layers}:
        text.per_layer_config = kept
    if hasattr(text, "initializer_range"):
        text.initializer_range = text.hidden_size**-0.5  # logits far from uniform, so that faults show
    return architecture


def _take_layer_settings(text: Any) -> dict[int, dict[str, Any]]:
    """Those that layers have for themselves, by layer. The configuration, which answers no question about them as long
    as it has them, then has those of all layers alone."""
    if not getattr(text, "is_heterogeneous", False):
        return {}
    found = {int(i): dict(settings) for i, settings in text.to_dict()["per_layer_config"].items()}
    text.per_layer_config = None
    return found


def _narrow(text: Any, own: dict[int, dict[str, Any]]) -> None:
    """`own`: of single layers, whose heads stay as much larger as they are."""
    hidden = text.num_attention_heads * _HEAD_DIM
    if hidden >= text.hidden_size:
        return
    text.hidden_size = hidden
    size = getattr(text, "head_dim", None)
    if size is not None:
        text.head_dim = _HEAD_DIM
        for settings in own.values():
            if "head_dim" in settings:
                settings["head_dim"] = max(round(settings["head_dim"] / size), 1) * _HEAD_DIM
    for name in _WIDTHS:
        for settings in own.values():
            if name in settings:
                settings[name] = _narrower(settings[name], hidden)
        if hasattr(text, name):
            setattr(text, name, _narrower(getattr(text, name), hidden))


def _narrower(width: Any, hidden: int) -> Any:
    return _like(2 * hidden, width, 16) if isinstance(width, int) and width > 2 * hidden else width


def choose_limit(lengths: Iterable[int]) -> int:
    """Some of the texts are longer, the others not, unless all are of one length: then all are longer."""
    ordered = sorted(lengths)
    shorter = [length for length in ordered[: len(ordered) // 2 + 1] if length < ordered[-1]]
    return max(shorter[-1] if shorter else ordered[-1] - 1, 4)


def find_length_limits(architecture: Any, at_least: int) -> dict[str, int]:
    """Lengths beyond which a model computes a text differently, by the names of its settings. Windows count from
    `at_least` tokens on: smaller ones stay as they are."""
    text = architecture.get_text_config()
    values = {name: [v for v in setting_by_layer(text, name) if isinstance(v, int)] for name in _LENGTHS}
    limits = {name: max(found) for name, found in values.items() if max(found, default=0) > at_least}
    for settings in _rope_settings(text):
        if settings.get("rope_type") == "longrope":
            limits["longrope"] = settings["original_max_position_embeddings"]
        elif settings.get("rope_type") == "dynamic":
            limits["dynamic rope"] = text.max_position_embeddings
    return limits


def _lower_limits(text: Any, limit: int) -> None:
    """To where the sampled texts are: on both sides."""
    for name in _LENGTHS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > limit:
            setattr(text, name, limit)
    for settings in _rope_settings(text):
        if settings.get("rope_type") == "longrope":
            ratio = text.max_position_embeddings / settings["original_max_position_embeddings"]
            settings["original_max_position_embeddings"] = limit
            text.max_position_embeddings = round(limit * ratio)
            if hasattr(text, "original_max_position_embeddings"):
                text.original_max_position_embeddings = limit
        elif settings.get("rope_type") == "dynamic":
            text.max_position_embeddings = limit


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    """One, or one for each type of layer."""
    settings = getattr(text, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [s for s in settings.values() if isinstance(s, dict)]


def _fit_factors(text: Any) -> None:
    """longrope has a factor for each pair of a head's rotated dimensions: a narrower head has fewer, evenly chosen."""
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for settings in _rope_settings(text):
        count = int(size * settings.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            factors = settings.get(name)
            if factors is not None and len(factors) > count:
                settings[name] = [factors[i * len(factors) // count] for i in range(count)]


def _like(size: int, original: int, modulus: int) -> int:
    """At least `size`, with the remainder of the original: what does not divide evenly still does not."""
    return size + (original - size) % modulus


def choose_layer_types(types: list[str], num_layers: int) -> list[str]:
    """The first layers, the last of them replaced by kinds that would be missing."""
    chosen = types[:num_layers]
    missing = [kind for kind in dict.fromkeys(types) if kind not in chosen][: max(num_layers - 1, 0)]
    return chosen[: num_layers - len(missing)] + missing


def find_limits(config: RunConfig, reduction: Reduction) -> ModelLimits:
    """What the user's model supports, as far as it shows before it is split."""
    text = load_hf_config(config.model).get_text_config()
    queries, keys = (setting_by_layer(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    heads = math.gcd(*queries)  # what divides it divides those of every layer
    model = build_reduced(config, reduction)
    policy = Policy(model)
    experts = [module for module in model.modules() if expert_parameters(module)]
    return ModelLimits(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_key_value_heads=math.gcd(*(number or heads for number in keys)),
        not_tensor=_tensor_problem(config, model),
        not_pipeline=_pipeline_problem(policy),
        not_context=""
        if policy.attends_packed
        else "the model does not support packed attention, which parallel.context needs",
        not_expert=_expert_problem(config, experts),
        num_experts=min((len(p) for module in experts for p in expert_parameters(module).values()), default=0),
    )


def _tensor_problem(config: RunConfig, model: nn.Module) -> str:
    if config.optim.kind == "adamw_8bit":
        return "optim.kind adamw_8bit needs whole rows on each rank"
    if config.lora is not None and config.lora.dora:
        return "DoRA adapters cannot be split over ranks: set lora.dora to false"
    if config.lora is not None and config.model.base_format is not None:
        return f"matrices held in {config.model.base_format} are not split over ranks"
    try:
        return plan_problem(tensor_plan(model))
    except ValueError as error:
        return str(error)


def _expert_problem(config: RunConfig, experts: Sequence[nn.Module]) -> str:
    if experts and config.optim.kind == "adamw_8bit":
        return "optim.kind adamw_8bit needs whole rows on each rank"
    return next(filter(None, map(split_problem, experts)), "")


def _pipeline_problem(policy: Policy) -> str:
    try:
        check_divisible(policy)
    except ValueError as error:
        return str(error)
    return ""
