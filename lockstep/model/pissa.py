"""PiSSA: adapters that begin as the principal part of each matrix (Meng et al., 2024), which the base then lacks.

For anybody else an adapter is a change of the base as it was published: exported are twice as wide matrices, the
trained ones and, subtracted, those of the beginning.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# As many as PEFT's documents recommend: principal parts then differ from exact ones by rounding.
_ITERATIONS = 16


@torch.no_grad()
def start_from_principal_parts(model: Any, device: torch.device | None = None) -> None:
    """Of a PEFT model with new adapters and the base's weights, in place. `device`: where to compute.

    The same in every process that computes on the same kind of device.
    """
    from peft.tuners.lora import Embedding

    beginnings: dict[str, Tensor] = {}
    for name, layer in _named_layers(model):
        if isinstance(layer, Embedding):
            raise ValueError("lora.init pissa is for linear layers: take the embedding out of lora.targets")
        base = layer.get_base_layer()
        first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        weight = base.weight.T if layer.fan_in_fan_out else base.weight
        down, up = _principal_pair(weight.to(device or weight.device), first.shape[0], layer.scaling["default"])
        first.copy_(down)
        second.copy_(up)
        base.weight.sub_(layer.get_delta_weight("default").to(base.weight))
        beginnings |= {f"{name}.lora_A.default.weight": first.cpu().clone()}
        beginnings |= {f"{name}.lora_B.default.weight": second.cpu().clone()}
    model.adapter_beginnings = beginnings


def _named_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import Embedding, Linear

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (Embedding, Linear))]


def _principal_pair(weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """([rank, in], [out, rank]) whose scaled product is the best of that rank."""
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if rank > min(wide.shape):
        raise ValueError(
            f"lora.init pissa: a matrix of {list(wide.shape)} has no {rank} principal parts: lower lora.rank"
        )
    with torch.random.fork_rng(devices=[wide.device] if wide.is_cuda else []):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(wide, q=min(rank + 8, *wide.shape), niter=_ITERATIONS)
    root = (sizes[:rank] / scaling).sqrt()
    return root[:, None] * right[:, :rank].T, left[:, :rank] * root


def as_plain_adapter(model: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """(tensors, PEFT's settings) of an adapter for the published base, with the same effect."""
    beginnings: dict[str, Tensor] = model.adapter_beginnings
    settings = copy.deepcopy(model.peft_config["default"])
    widened = dict(weights)
    for name, first in beginnings.items():
        trained, first = weights[name], first.to(weights[name])
        widened[name] = torch.cat([trained, first]) if ".lora_A." in name else torch.cat([trained, -first], dim=1)
    settings.r *= 2
    settings.lora_alpha *= math.sqrt(2) if settings.use_rslora else 2
    return widened, settings


def has_beginnings(model: nn.Module) -> bool:
    return bool(getattr(model, "adapter_beginnings", None))
