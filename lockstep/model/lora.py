"""LoRA through PEFT: which layers get an adapter is read from the model itself."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lockstep.config import LoraConfig
from lockstep.model.policy import CausalLM, causal_lm, decoder_layers


def add_lora(model: nn.Module, config: LoraConfig) -> CausalLM:
    """Freeze the model and put adapters on its linear layers. Adapter weights are float32 or wider."""
    import peft

    targets = _linear_names(model) if config.targets == "all-linear" else list(config.targets)
    _refuse_unmatched(model, targets)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type] # any positive number works
        lora_dropout=config.dropout,
        target_modules=targets,
        use_dora=config.dora,
    )
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=True)


@dataclass(frozen=True)
class AdapterCoverage:
    """Weights in the decoder layers with and without an adapter, counted by the end of their names."""

    adapted: Counter[str]
    others: Counter[str]

    @property
    def share(self) -> float:
        return self.adapted.total() / max(self.adapted.total() + self.others.total(), 1)

    def __str__(self) -> str:
        total = self.adapted.total() + self.others.total()
        left = [(name, count / total) for name, count in self.others.most_common() if count >= total / 100]
        names = ", ".join(f"{name} ({share:.0%})" for name, share in left[:6])
        return (
            f"LoRA adapts {self.share:.0%} of the weights in the decoder layers: {', '.join(sorted(self.adapted))}. "
            f"Without an adapter: {names}"
        )


def measure_coverage(model: nn.Module) -> AdapterCoverage | None:
    """None without adapters. Of a whole model, before it is split over ranks."""
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    coverage = AdapterCoverage(Counter(), Counter())
    for layer in decoder_layers(model):
        adapters = {name: m for name, m in layer.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, parameter in layer.named_parameters():
            holder, _, _ = name.rpartition(".")
            owner = next((a for a in adapters if holder == a or holder.startswith(f"{a}.")), None)
            if owner is None:
                coverage.others[".".join(name.split(".")[-2:])] += parameter.numel()
            elif holder == f"{owner}.base_layer":
                coverage.adapted[owner.rpartition(".")[2]] += parameter.numel()
    return coverage


def _refuse_unmatched(model: nn.Module, targets: list[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(
                f"lora.targets {target!r} matches no module of {type(causal_lm(model)).__name__}; "
                f"its linear layers are {', '.join(_linear_names(model))}"
            )


def speed_up_eager(model: nn.Module) -> None:
    """Fewer passes over memory in plain LoRA layers, with the same results. Not for compiled models."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if isinstance(layer, Linear) and type(layer.base_layer) is nn.Linear and not layer.lora_variant:
            layer.forward = functools.partial(_lean_forward, layer)  # type: ignore[method-assign]


def is_sped_up(layer: nn.Module) -> bool:
    """By `speed_up_eager`."""
    forward = layer.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _lean_forward


def _lean_forward(layer: Any, x: Tensor, *arguments: object, **options: object) -> Tensor:
    adapters = layer.active_adapters
    plain = len(adapters) == 1 and adapters[0] in layer.lora_A and not layer.disable_adapters and not layer.merged
    if arguments or options or not plain:
        return type(layer).forward(layer, x, *arguments, **options)
    (name,) = adapters
    base, down, up = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    known = not base.weight.requires_grad and layer.lora_B[name].bias is None
    if not known or not base.weight.dtype == down.dtype == x.dtype:
        return type(layer).forward(layer, x)
    tokens = x.flatten(0, -2)
    dropout = layer.lora_dropout[name]
    dropped = dropout(tokens) if layer.training and not isinstance(dropout, nn.Identity) else None
    product = _LoraProduct.apply(tokens, dropped, base.weight, base.bias, down, up, layer.scaling[name])
    return product.view(*x.shape[:-1], -1)


class _Context(FunctionCtx):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    scaling: float


class _LoraProduct(torch.autograd.Function):
    """[T, in] -> [T, out] of a frozen layer and its adapter. Sums are taken inside the products, forward and backward.

    `dropped`: the adapter's input, where it is not `x`.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        adapter_input = x if dropped is None else dropped
        narrow = (adapter_input @ down.T).mul_(scaling)
        ctx.save_for_backward(adapter_input, weight, down, up, narrow)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(narrow, up.T)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        adapter_input, weight, down, up, narrow = ctx.saved_tensors
        needs_x, needs_dropped, _, needs_bias = ctx.needs_input_grad[:4]
        d_narrow = (grad @ up).mul_(ctx.scaling)
        d_x = grad @ weight if needs_x else None
        d_dropped = None
        if needs_dropped:
            d_dropped = d_narrow @ down
        elif d_x is not None:
            d_x.addmm_(d_narrow, down)
        d_bias = grad.sum(0) if needs_bias else None  # PEFT's `bias` setting trains the frozen layer's
        return d_x, d_dropped, None, d_bias, d_narrow.T @ adapter_input, grad.T @ narrow, None


def _linear_names(model: nn.Module) -> list[str]:
    """Name endings of every linear layer inside the decoder layers."""
    names = set()
    for layer in decoder_layers(model):
        names |= {name.rsplit(".", 1)[-1] for name, module in layer.named_modules() if _is_linear(module)}
    if not names:
        raise ValueError(f"{type(causal_lm(model)).__name__} has no linear layer inside its decoder layers")
    return sorted(names)


def _is_linear(module: nn.Module) -> bool:
    """GPT-2's Conv1D is a transposed linear layer; a router may be a linear layer that returns more than a product."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in (nn.Linear.forward, Conv1D.forward)
