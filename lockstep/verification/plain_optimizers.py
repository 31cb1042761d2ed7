"""The optimizers of the plain loop, written out on whole float64 tensors, and the biases of routers that they move.

Shares no code with the backend but the table of numbers that eight bits stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.model.codebooks import dynamic_table
from lockstep.types import OptimStep

State = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, OptimStep, int], None]
_BIAS = "e_score_correction_bias"
_EIGHT_BIT_VALUES, _EIGHT_BIT_BLOCK = 4096, 256
_ROUNDING = 1e-12  # of the largest gradient: below it a gradient is zero but for rounding


class PlainOptimizer:
    """As `config` says, AdamW without one; in place. `step` is adapted to the first gradient, see `_fit_step`.

    `unsettled`: parameters whose gradient is rounding alone, where a step does not depend on the gradient's size.
    """

    def __init__(self, model: nn.Module, step: OptimStep, *, clip_at_half: bool, config: RunConfig | None = None):
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._kind = "adamw" if config is None else config.optim.kind
        self._momentum = 0.0 if config is None else config.optim.momentum
        self._b_ratio = 1.0 if config is None or config.lora is None else config.lora.b_learning_rate_ratio
        self._matrices = _matrices_of_layers(model) if self._kind == "muon" else set()
        rate = 0.0 if config is None else config.model.router_bias_rate
        self._biases = PlainRouterBiases(model, rate) if rate else None
        self._states: dict[str, State] = {name: {} for name in self._trained}
        self.step, self._clip_at_half = step, clip_at_half
        self.unsettled: set[str] = set()
        self._count = 0

    @property
    def holds_eight_bits(self) -> bool:
        return self._kind == "adamw_8bit" and any(map(_is_held_in_eight_bits, self._trained.values()))

    def snapshot(self, kind: str) -> dict[str, Tensor]:
        """Copies of "gradients" or "weights"; with these the biases of routers, if they move."""
        if kind == "gradients":
            return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self._trained.items()}
        weights = {n: p.detach().clone() for n, p in self._trained.items() if n not in self.unsettled}
        return weights if self._biases is None else weights | self._biases.snapshot()

    def apply(self) -> float:
        """One step with the gradients in the model, which are cleared; returns their norm."""
        gradients = self.snapshot("gradients")
        norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
        self._count += 1
        if self._count == 1:
            num_weights = sum(p.numel() for p in self._trained.values())
            self.step = _fit_step(self.step, norm, num_weights, clip_at_half=self._clip_at_half)
        if self._kind == "adafactor":
            sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
            self.unsettled |= {n for n, size in sizes.items() if 0 < size < _ROUNDING * max(sizes.values())}
        step = step_number(self.step, self._count)
        for name, parameter in self._trained.items():
            rate = step.learning_rate * (self._b_ratio if "lora_B" in name or "lora_embedding_B" in name else 1.0)
            own = replace(step, learning_rate=rate, weight_decay=step.weight_decay if parameter.ndim >= 2 else 0.0)
            clipped = _clipped(gradients[name], norm, step)
            self._rule(name)(parameter.data, clipped, self._states[name], own, self._count)
            parameter.grad = None
        if self._biases is not None:
            self._biases.move()
        return norm

    def _rule(self, name: str) -> Rule:
        if self._kind == "muon":
            return self._step_muon if name in self._matrices else _step_adamw
        return {"adamw": _step_adamw, "adamw_8bit": _step_adamw_8bit, "adafactor": _step_adafactor}[self._kind]

    def _step_muon(self, weight: Tensor, gradient: Tensor, state: State, step: OptimStep, number: int) -> None:
        """Nesterov momentum, each matrix then nearly orthogonal, as long as AdamW's steps are on average."""
        mean = state.get("mean", torch.zeros_like(weight))
        state["mean"] = mean = self._momentum * mean + (1 - self._momentum) * gradient
        ahead = self._momentum * mean + (1 - self._momentum) * gradient
        matrices = [_orthogonalised(m) for m in ahead.reshape(-1, *weight.shape[-2:])]
        length = 0.2 * math.sqrt(max(weight.shape[-2:]))
        weight.mul_(1 - step.learning_rate * step.weight_decay)
        weight.sub_(step.learning_rate * length * torch.stack(matrices).view_as(weight))


class PlainRouterBiases:
    """Counts which experts tokens choose in passes with a gradient, and moves every bias against it."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate = rate
        self._held = {name: b for name, b in model.named_buffers() if name.endswith(_BIAS)}
        self._loads = {name: torch.zeros(len(bias)) for name, bias in self._held.items()}
        modules = dict(model.named_modules())
        for name in self._held:
            modules[name.removesuffix(f".{_BIAS}")].register_forward_hook(self._count(name))

    def _count(self, name: str) -> object:
        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                chosen = next(part for part in output if not part.is_floating_point())
                self._loads[name] += torch.bincount(chosen.flatten(), minlength=len(self._loads[name]))

        return hook

    def move(self) -> None:
        for name, load in self._loads.items():
            self._held[name].add_(self._rate * torch.sign(load.mean() - load))
            load.zero_()

    def snapshot(self) -> dict[str, Tensor]:
        return {name: bias.detach().clone() for name, bias in self._held.items()}


def _matrices_of_layers(model: Any) -> set[str]:
    """Names of what Muon is for: weights of linear layers and stacked experts in the decoder layers."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds, found = set(causal._no_split_modules), set()
    layers = [(name, m) for name, m in model.named_modules() if type(m).__name__ in kinds]
    for prefix, layer in layers:
        for name, module in layer.named_modules():
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            for key, parameter in module.named_parameters(recurse=False):
                is_stack = "expert" in type(module).__name__.lower() and parameter.ndim == 3
                if is_stack or (is_linear and key == "weight"):
                    found.add(".".join(filter(None, (prefix, name, key))))
    return found


def _orthogonalised(matrix: Tensor) -> Tensor:
    """Jordan et al. (2024): an odd polynomial, five times, takes singular values near 1."""
    x = matrix / max(float(torch.linalg.matrix_norm(matrix)), 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x


def _fit_step(step: OptimStep, norm: float, num_weights: int, *, clip_at_half: bool) -> OptimStep:
    """Settings under which the step depends on the gradient's values, whatever its size in the reduced model.

    With an eps far below the gradient, Adam's first step is only the gradient's signs: a wrong scale would go
    unnoticed, and rounding of entries near zero would be magnified. So eps is at least a typical entry.
    """
    max_norm = norm / 2 if clip_at_half else None
    return replace(step, max_grad_norm=max_norm, eps=max(step.eps, (max_norm or norm) / num_weights**0.5))


def step_number(step: OptimStep, number: int) -> OptimStep:
    """The step as it is the first time; later ones are clipped at four times the first gradient's norm, which has no
    effect unless clipping also makes gradients longer."""
    if number == 1 or step.max_grad_norm is None:
        return step
    return replace(step, max_grad_norm=8 * step.max_grad_norm)


def _clipped(gradient: Tensor, norm: float, step: OptimStep) -> Tensor:
    if step.max_grad_norm is None:
        return gradient
    return gradient * min(1.0, step.max_grad_norm / (norm + 1e-6))


# --- rules: `weight` is changed in place; `number` counts from 1 ----------------------------------------------------


def _step_adamw(weight: Tensor, gradient: Tensor, state: State, step: OptimStep, number: int) -> None:
    """As in Loshchilov and Hutter (2019)."""
    mean, square = (state.setdefault(name, torch.zeros_like(weight)) for name in ("mean", "square"))
    weight.mul_(1 - step.learning_rate * step.weight_decay)
    mean.mul_(step.beta1).add_(gradient, alpha=1 - step.beta1)
    square.mul_(step.beta2).add_(gradient.square(), alpha=1 - step.beta2)
    unbiased_mean = mean / (1 - step.beta1**number)
    unbiased_square = square / (1 - step.beta2**number)
    weight.sub_(step.learning_rate * unbiased_mean / (unbiased_square.sqrt() + step.eps))


def _step_adamw_8bit(weight: Tensor, gradient: Tensor, state: State, step: OptimStep, number: int) -> None:
    """Between steps both moments are what eight bits hold of them: of each block, its largest and codes beside it."""
    _step_adamw(weight, gradient, state, step, number)
    if not _is_held_in_eight_bits(weight):
        return
    for name in ("mean", "square"):
        table = dynamic_table(weight.device, signed=name == "mean")
        for row in state[name]:
            for block in row.flatten().split(_EIGHT_BIT_BLOCK):  # views of the moment
                block.copy_(_rounded(block.float(), table, never_zero=name == "square"))


def _is_held_in_eight_bits(weight: Tensor) -> bool:
    return weight.ndim >= 2 and weight.numel() >= _EIGHT_BIT_VALUES


def _rounded(block: Tensor, table: Tensor, *, never_zero: bool) -> Tensor:
    """A block of float32, each number as that of the table beside its largest which is nearest. A positive mean square
    does not become zero, by which a step would be divided."""
    largest = block.abs().max()
    if largest == 0:
        return block
    codes = torch.searchsorted((table[1:] + table[:-1]) / 2, block / largest)
    if never_zero:
        codes = torch.where(block > 0, codes.clamp(min=1), codes)
    return table[codes] * largest


def _step_adafactor(weight: Tensor, gradient: Tensor, state: State, step: OptimStep, number: int) -> None:
    """Shazeer and Stern (2018) without momentum and without steps relative to weights: the mean squares of a matrix are
    those of its rows times those of its columns; a step with a root mean square above 1 is scaled down to it."""
    keep, squares, tiny = 1 - number**-0.8, gradient.square(), torch.finfo(gradient.dtype).eps

    def average(name: str, value: Tensor) -> Tensor:
        state[name] = keep * state.get(name, torch.zeros_like(value)) + (1 - keep) * value
        return state[name]

    if weight.ndim < 2:
        variance = average("squares", squares)
    else:
        rows, columns = average("rows", squares.mean(-1)), average("columns", squares.mean(-2))
        mean = rows.mean(-1).clamp(min=tiny)[..., None, None]
        variance = rows[..., :, None] * columns[..., None, :] / mean
    change = gradient / variance.clamp(min=tiny**2).sqrt()
    change = change / max(float(change.square().mean().sqrt()), 1.0)
    weight.mul_(1 - step.learning_rate * step.weight_decay).sub_(step.learning_rate * change)
