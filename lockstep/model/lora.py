"""LoRA through PEFT: which layers get an adapter is read from the model itself.

Must not know ranks or files.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from lockstep.config import LoraConfig
from lockstep.model.policy import causal_lm, decoder_layers


def add_lora(model: nn.Module, config: LoraConfig) -> Any:
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


def _refuse_unmatched(model: nn.Module, targets: list[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(
                f"lora.targets {target!r} matches no module of {type(causal_lm(model)).__name__}; "
                f"its linear layers are {', '.join(_linear_names(model))}"
            )


def speed_up_eager(model: nn.Module) -> None:
    """Fewer passes over memory in plain LoRA layers when nothing is compiled: same numbers, about a tenth less time.

    The scaling is applied at the width of the rank, and the product is added in place. A compiler does better alone.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if isinstance(layer, Linear) and type(layer.base_layer) is nn.Linear and not layer.lora_variant:
            layer.forward = functools.partial(_lean_forward, layer)  # type: ignore[method-assign]


def _lean_forward(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    adapters = layer.active_adapters
    plain = len(adapters) == 1 and adapters[0] in layer.lora_A and not layer.disable_adapters and not layer.merged
    if arguments or options or not plain or layer.lora_A[adapters[0]].weight.dtype != x.dtype:
        return type(layer).forward(layer, x, *arguments, **options)
    (name,) = adapters
    narrow = layer.lora_A[name](layer.lora_dropout[name](x)) * layer.scaling[name]
    wide = layer.base_layer(x)
    wide.flatten(0, -2).addmm_(narrow.flatten(0, -2), layer.lora_B[name].weight.T)
    return wide


def _linear_names(model: nn.Module) -> list[str]:
    """Name endings of every linear layer inside the decoder layers. GPT-2's Conv1D is a transposed linear."""
    from transformers.pytorch_utils import Conv1D

    names = set()
    for layer in decoder_layers(model):
        names |= {name.rsplit(".", 1)[-1] for name, m in layer.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    if not names:
        raise ValueError(f"{type(causal_lm(model)).__name__} has no linear layer inside its decoder layers")
    return sorted(names)
