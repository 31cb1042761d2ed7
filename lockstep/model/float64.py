"""Float64 from end to end: parts that models compute in float32, whatever they are in, stay in float64.

There 1e-16 between two layouts can become 1e-7, where a value lies between two numbers of float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def keep_float64(model: nn.Module) -> None:
    """Norms compute in float32 whatever the model's dtype, and round gradients to it in the backward pass.

    A prompt that is computed once for two answers gets the rounded sum, two prompts get two rounded summands: the
    gradients differ by rounding unless norms stay in float64.
    """
    for module in model.modules():
        if not any(module.children()) and not isinstance(module, (nn.Linear, nn.Embedding)):
            module.forward = functools.partial(_forward_in_float64, type(module).forward, module)


def _forward_in_float64(forward: Callable[..., object], *arguments: object, **options: object) -> object:
    with _Float64Stays():
        return forward(*arguments, **options)


class _Float64Stays(TorchFunctionMode):
    """Casts from float64 to float32 do nothing."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: dict[str, Any] | None = None
    ) -> object:
        options = options or {}
        narrows = function is Tensor.float
        narrows |= function in (Tensor.to, Tensor.type) and torch.float32 in (*arguments[1:], *options.values())
        is_wide = bool(arguments) and isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.float64
        if narrows and is_wide:
            return arguments[0]
        if is_wide and options.get("dtype") is torch.float32:  # softmax, of routers
            options = {**options, "dtype": torch.float64}
        return function(*arguments, **options)
