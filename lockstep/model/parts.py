"""The parts of a model by what they do (attention, experts, router, ...): how much of each is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from lockstep.model.experts import nf4_sizes
from lockstep.model.policy import causal_lm, decoder_layers
from lockstep.model.quantised_layers import QuantisedLinear
from lockstep.model.vision import vision_parameters

# Of a module's own name and its class's, the first that fits decides.
_KINDS = {
    "shared experts": re.compile(r"shared_?(expert|mlp)", re.IGNORECASE),
    "router": re.compile(r"router|gating|topk|^gate$|[a-z0-9]gate$", re.IGNORECASE),
    "experts": re.compile(r"expert", re.IGNORECASE),
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "mixer": re.compile(r"mixer|mamba|ssm|deltanet|recurrent|shortconv", re.IGNORECASE),
    "mlp": re.compile(r"mlp|feed_?forward|ffn|dense|c_fc|fc\d", re.IGNORECASE),
    "norms": re.compile(r"norm|(^|_)ln", re.IGNORECASE),
}


class Part(NamedTuple):
    trained: int
    total: int
    """Parameters of the model itself, without adapters."""


def measure_parts(model: nn.Module) -> dict[str, Part]:
    """By kind, the largest first. Of a whole model, before it is split over ranks."""
    layers = decoder_layers(model)
    inside = {id(p): kind_of(layer, name) for layer in layers for name, p in layer.named_parameters()}
    embedding = {id(p) for p in causal_lm(model).get_input_embeddings().parameters()}
    head = {id(p) for p in causal_lm(model).get_output_embeddings().parameters()}
    inside |= {id(parameter): kind for _, kind, parameter in vision_parameters(causal_lm(model))}
    found: dict[str, Part] = {}
    sizes = sizes_of(model)
    for name, parameter in model.named_parameters():
        kind = inside.get(id(parameter))
        if kind is None:
            outside = "embedding" if id(parameter) in embedding else "head" if id(parameter) in head else "others"
            kind = "norms" if outside == "others" and _KINDS["norms"].search(name) else outside
        trained, total = found.get(kind, Part(0, 0))
        is_adapter = ".lora_" in name
        size = sizes[id(parameter)]
        found[kind] = Part(trained + size * parameter.requires_grad, total + size * (not is_adapter))
    return dict(sorted(found.items(), key=lambda item: -item[1].total))


def sizes_of(module: nn.Module) -> dict[int, int]:
    """By id of each parameter: how many weights it holds, quantised ones too."""
    sizes = {id(p): p.numel() for p in module.parameters()}
    for part in module.modules():
        if isinstance(part, QuantisedLinear):
            sizes |= {id(p): 0 for p in part.parameters(recurse=False) if p is not part.bias}
            sizes[id(part.codes)] = part.num_weights
        sizes |= nf4_sizes(part)
    return sizes


def kind_of(layer: nn.Module, name: str) -> str:
    """Of a parameter of a decoder layer, by the modules around it, from the innermost that says something."""
    path = [part for part in name.split(".")[:-1] if part != "base_layer" and not part.startswith("lora_")]
    if _KINDS["attention"].search(".".join(path)) and "expert" not in name:
        return "attention"  # with the norms of its queries and keys
    while path:
        words = (path[-1], type(_get(layer, path)).__name__)
        for kind, pattern in _KINDS.items():
            if any(map(pattern.search, words)):
                return kind
        path.pop()
    return "others"


def _get(layer: nn.Module, path: list[str]) -> nn.Module | None:
    """Behind PEFT's wrappers."""
    module: nn.Module | None = layer
    for part in path:
        while module is not None and hasattr(module, "base_layer") and part not in module._modules:
            module = module.base_layer  # type: ignore[assignment]
        module = None if module is None else module._modules.get(part)
    while module is not None and hasattr(module, "base_layer"):
        module = module.base_layer  # type: ignore[assignment]
    return module


def describe_parts(parts: Mapping[str, Part]) -> str:
    """ "attention 7.1 M, experts 52 M, router frozen": the trained parameters of each part, adapters or its own."""
    shown = [f"{kind} {_count(part.trained) if part.trained else 'frozen'}" for kind, part in parts.items()]
    return ", ".join(sorted(shown, key=lambda text: text.endswith("frozen")))


def _count(number: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
