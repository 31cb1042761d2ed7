"""The norm of the whole gradient and clipping by it, wherever its pieces lie.

Must not know models, losses or data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm over all gradients, the same on every rank. All ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
