"""What models with experts need beyond others: products in float64, and routing without noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compute_experts_exactly(causal: Any, dtype: torch.dtype) -> None:
    """In float64, one expert after another: transformers' grouped products (torch 2.13) have no float64."""
    if dtype == torch.float64 and hasattr(causal, "set_experts_implementation"):
        causal.set_experts_implementation("eager")


def noisy_routers(model: nn.Module) -> list[nn.Module]:
    """Modules that add noise to their input or draw experts at random while they train.

    Transformers' models keep the size of that noise in an attribute called jitter (phimoe, mixtral, minimax, dbrx).
    """
    return [
        module
        for module in model.modules()
        if any("jitter" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
    ]
