"""What a model's output head multiplies with, also where it has an adapter or is trained beside one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def head_problem(head: Any) -> str:
    """Why log-probs cannot be computed from this head's matrix; empty: they can."""
    if isinstance(head, nn.Linear):
        return ""
    if hasattr(head, "modules_to_save"):
        return head_problem(head.original_module)
    if not hasattr(head, "lora_A") or not isinstance(head.get_base_layer(), nn.Linear):
        return "not a plain linear layer: use a causal language model"
    if head.lora_variant:
        return "with an adapter that is no plain LoRA: take it out of lora.targets"
    if any(not isinstance(dropout, nn.Identity) for dropout in head.lora_dropout.values()):
        return "with an adapter whose inputs are dropped: set lora.dropout to 0, or take it out of lora.targets"
    return ""


def head_matrices(head: Any) -> tuple[Tensor, Tensor | None]:
    """(weight [V, H], bias) as they are now, with adapters that are switched on. Adapters of a head are added up into
    a matrix of its size, so that chunks of logits are one product."""
    if hasattr(head, "modules_to_save"):
        chosen = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
        return chosen.weight, chosen.bias
    if isinstance(head, nn.Linear):
        return head.weight, head.bias
    base = head.get_base_layer()
    weight = base.weight
    for name in () if head.disable_adapters or head.merged else head.active_adapters:
        if name in head.lora_A:
            change = head.lora_B[name].weight @ head.lora_A[name].weight
            weight = weight + (change * head.scaling[name]).to(weight.dtype)
    return weight, base.bias
