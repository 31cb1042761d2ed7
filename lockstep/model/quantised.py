"""Which layers of a model are held quantised, for LoRA on top of them; and sources that are quantised already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.model.codebooks import NF4_BLOCK, SCALE_BLOCK, quantise_nf4
from lockstep.model.experts import (
    expert_parameters,
    follows_transformers,
    held_in_nf4,
    hold_in_nf4,
    nf4_sizes,
    restore_plain,
)
from lockstep.model.grouped_product import Nf4Stack
from lockstep.model.parts import kind_of
from lockstep.model.policy import causal_lm, decoder_layers
from lockstep.model.quantised_layers import QUANTISED, Format, QuantisedLinear


def quantise_base(
    model: nn.Module, wanted: Format, device: torch.device | None = None, *, with_weights: bool = True
) -> None:
    """Frozen linear layers and, in NF4, experts inside the decoder layers, in place, one after another: not embedding,
    head and routers.

    `device`: where to compute, if not where the weights are. Call after adapters are added, before layers are split.
    """
    num_found = 0
    for layer in decoder_layers(model):
        for name, linear in list(_frozen_linears(layer)):
            weight = linear.weight.detach()
            if _is_turned(linear):
                weight = weight.T.contiguous()
            weight = weight.to("meta" if not with_weights else device or weight.device)
            parent, _, key = name.rpartition(".")
            setattr(layer.get_submodule(parent), key, QUANTISED[wanted](linear, weight).train(linear.training))
            num_found += 1
        for experts, names in _frozen_experts(layer) if wanted == "nf4" else ():
            places = "meta" if not with_weights else device
            hold_in_nf4(experts, {name: quantise_stack(getattr(experts, name).detach(), places) for name in names})
            num_found += len(names)
    if not num_found:
        raise ConfigError(f"{type(causal_lm(model)).__name__} has no linear layer that could be held in {wanted}")


def _frozen_linears(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in layer.named_modules():
        if type(module) is not nn.Linear and not _is_turned(module):
            continue
        is_own = any(part in name for part in (".lora_", ".original_module", ".modules_to_save"))
        if is_own or module.weight.requires_grad or kind_of(layer, f"{name}.weight") == "router":
            continue
        yield name, module


def _frozen_experts(layer: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Those that `compute_experts` computes, and the names of their stacked matrices. A byte holds two neighbours."""
    for module in layer.modules():
        if follows_transformers(module):
            stacked = expert_parameters(module).items()
            if names := [name for name, p in stacked if not p.requires_grad and p.shape[-1] % 2 == 0]:
                yield module, names


def quantise_stack(matrices: Tensor, device: torch.device | str | None = None) -> Nf4Stack:
    """On `device`, if not where the matrices [experts, rows, columns] are; the result is where they are. Nothing is
    computed on the meta device, and memory is not initialised."""
    num_experts, rows, columns = matrices.shape
    blocks = -(-rows * columns // NF4_BLOCK)
    sizes = ((rows, columns // 2), (blocks,), (4 * (-(-blocks // SCALE_BLOCK) + 1),))
    stack = Nf4Stack(*(torch.empty(num_experts, *size, dtype=torch.uint8, device=matrices.device) for size in sizes))
    if matrices.is_meta or str(device) == "meta":
        return stack
    for number, matrix in enumerate(matrices):
        stored = quantise_nf4(matrix.to(device or matrix.device))
        scales = torch.cat([stored.block_scales, stored.block_mean]).view(torch.uint8)
        for part, found in zip(stack, (stored.codes.view(rows, -1), stored.block_codes, scales), strict=True):
            part[number].copy_(found)
    return stack


def _is_turned(module: nn.Module) -> bool:
    """GPT-2's Conv1D has its weight as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def dequantise_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Back to plain layers, with the weights that the quantised ones compute with. In place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantisedLinear):
                with torch.device("meta"):
                    plain = nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = nn.Parameter(child.weight.to(dtype), requires_grad=False)
                plain.bias = child.bias
                setattr(module, name, plain.train(child.training))
        if held_in_nf4(module):
            restore_plain(module, dtype)


# --- sources that are quantised already -----------------------------------------------------------------------------

# Of transformers: their weights become plain ones when they are loaded.
_DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def stored_format(architecture: object) -> str | None:
    """How the weights of a source are quantised, by transformers' name, from its configuration."""
    found = getattr(architecture, "quantization_config", None)
    if found is None:
        return None
    settings = found if isinstance(found, dict) else found.to_dict()
    method = settings.get("quant_method")
    if method is None:
        return "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else "an unknown method"
    return str(getattr(method, "value", method))


def dequantising_options(architecture: object) -> dict[str, object]:
    """For transformers' `from_pretrained`."""
    import transformers

    method = stored_format(architecture)
    return (
        {"quantization_config": getattr(transformers, _DEQUANTISED[method])(dequantize=True)}
        if method in _DEQUANTISED
        else {}
    )


def refuse_untrainable(path: str, architecture: object) -> None:
    """Weights that would stay packed: adapters on them compute with kernels that may give no gradient."""
    method = stored_format(architecture)
    if method is not None and method not in _DEQUANTISED and not path.endswith(".gguf"):
        raise ConfigError(
            f"model.path {path} holds weights that are quantised already ({method}), and only those in "
            f"{' and '.join(_DEQUANTISED)} can be trained on: name the model that they were made from; with lora, "
            "model.quantization nf4 holds it in as little memory"
        )


def describe_rest(model: nn.Module) -> str:
    """What of a quantised model's layers is not, if that is more than a tenth of its weights; of a whole model."""
    quantised, others = 0, Counter[str]()
    for layer in decoder_layers(model):
        held = {id(p) for m in layer.modules() if isinstance(m, QuantisedLinear) for p in m.parameters(recurse=False)}
        quantised += sum(m.num_weights for m in layer.modules() if isinstance(m, QuantisedLinear))
        for experts in layer.modules():
            sizes = nf4_sizes(experts)
            quantised, held = quantised + sum(sizes.values()), held | sizes.keys()
        for name, parameter in layer.named_parameters():
            if id(parameter) not in held and not parameter.requires_grad:
                others[".".join(name.replace(".base_layer", "").split(".")[-2:])] += parameter.numel()
    total = quantised + others.total()
    if not quantised or others.total() < total / 10:
        return ""
    names = ", ".join(f"{name} ({count / total:.0%})" for name, count in others.most_common(4))
    return f"{quantised / total:.0%} of the weights in the decoder layers are quantised. As they were loaded: {names}"
