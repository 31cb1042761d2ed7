"""Optimizers: torch's AdamW, and others that hold less than its two float32 numbers for each parameter.

All make the same step on every layout that they take. Moments are elementwise, so each rank updates its own part; eight
bits are blocks within a row, which sharding by rows does not cut; Muon and Adafactor see whole matrices, which are
gathered for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.backend.stochastic_rounding import first_place, round_into, salt_of
from lockstep.config import RunConfig
from lockstep.model.codebooks import dynamic_table
from lockstep.model.experts import expert_parameters
from lockstep.model.policy import decoder_layers
from lockstep.parallel.tensor import local as _local
from lockstep.types import OptimStep

State = dict[str, Tensor]
Group = dict[str, Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """`momentum`: Muon's. `lora_b_ratio`: the learning rate of adapters' second matrices, as a multiple.

    `stochastic_rounding`: what is trained is held in bf16.
    """

    kind: str = "adamw"
    momentum: float = 0.95
    lora_b_ratio: float = 1.0
    stochastic_rounding: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> OptimizerSettings:
        ratio = 1.0 if config.lora is None else config.lora.b_learning_rate_ratio
        return cls(config.optim.kind, config.optim.momentum, ratio, config.optim.stochastic_rounding)

    def held_dtype(self, precision: str) -> torch.dtype | None:
        """Of what is trained, where it is not float32 or wider."""
        if not self.stochastic_rounding:
            return None
        if precision != "bf16":
            raise ValueError(
                f"optim.stochastic_rounding holds weights in bf16, and this run computes in {precision}: set "
                "model.precision to bf16, or remove it"
            )
        return torch.bfloat16


ADAMW = OptimizerSettings()
_SECOND_MATRICES = (".lora_B.", ".lora_embedding_B.")


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
    settings: OptimizerSettings = ADAMW,
    model: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Norms and biases (one-dimensional parameters) do not decay. `model`: where Muon finds what it is for."""
    matrices = hidden_matrices(model) if settings.kind == "muon" and model is not None else ()
    groups: dict[tuple[object, ...], Group] = {}
    for name, p in parameters.items():
        # A fused or foreach kernel cannot take parameters of several layouts at once.
        layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        is_second = any(part in f".{name}" for part in _SECOND_MATRICES)
        about = {
            "decays": p.ndim >= 2,
            "rate": settings.lora_b_ratio if is_second else 1.0,
            "orthogonal": id(p) in matrices,
        }
        group = groups.setdefault((*about.values(), layout), {"params": [], **about})
        group["params"].append(p)
    listed = list(groups.values())
    if settings.kind == "adamw" and not settings.stochastic_rounding:
        return torch.optim.AdamW(listed, lr=0.0, fused=device.type == "cuda")
    own: OwnOptimizer = Muon(listed, settings.momentum) if settings.kind == "muon" else _OWN[settings.kind](listed)
    own.names = {p: name for name, p in parameters.items()}
    return own


def set_step(optimizer: torch.optim.Optimizer, step: OptimStep) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["eps"] = step.learning_rate * group["rate"], step.eps
        group["betas"] = (step.beta1, step.beta2)
        group["weight_decay"] = step.weight_decay if group["decays"] else 0.0


def step_on_device(optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
    """Clip and step in one pass of torch's fused kernel, which also leaves out a gradient that is not finite."""
    scale = None if max_norm is None else torch.clamp((norm + 1e-6) / max_norm, min=1.0).float()
    optimizer.grad_scale, optimizer.found_inf = scale, (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    optimizer.step()


def prepare_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> State:
    """What the first step of a parameter would create, to read a checkpoint into."""
    if isinstance(optimizer, OwnOptimizer):
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        return optimizer.first_state(parameter, group)
    fused = bool(optimizer.defaults.get("fused"))
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the weights of linear layers and experts inside the decoder layers."""
    from transformers.pytorch_utils import Conv1D

    found = set()
    for module in (module for layer in decoder_layers(model) for module in layer.modules()):
        if isinstance(module, (nn.Linear, Conv1D)):
            found.add(id(module.weight))
        found |= {id(getattr(module, name)) for name in expert_parameters(module)}
    return found


class OwnOptimizer(torch.optim.Optimizer):
    """One parameter after another. Numbers of a group are set before each step, as those of AdamW."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.names: dict[nn.Parameter, str] = {}

    def first_state(self, parameter: nn.Parameter, group: Group) -> State:
        raise NotImplementedError

    def update(self, parameter: nn.Parameter, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """`weight`: this rank's part, in place; `gradient` as it is split. Both float32 or wider. `state["step"]` is
        counted already, from 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """All ranks: matrices may be gathered."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.first_state(parameter, group)
                state = self.state[parameter]
                state["step"] += 1
                self._apply(parameter, state, group)

    def _apply(self, parameter: nn.Parameter, state: State, group: Group) -> None:
        weight, gradient = _local(parameter), parameter.grad
        assert gradient is not None
        wide = _wide(parameter)
        if wide == parameter.dtype:
            return self.update(parameter, weight, gradient, state, group)
        changed = weight.to(wide)
        self.update(parameter, changed, gradient.to(wide), state, group)
        salt = salt_of(self.names[parameter], int(state["step"]))
        round_into(weight, changed, salt, first_place(parameter))
        return None


class OwnAdamW(OwnOptimizer):
    """For weights in bf16; others take torch's, which is fused."""

    def first_state(self, parameter: nn.Parameter, group: Group) -> State:
        return {"step": _first_step(), **_zeros(parameter, "exp_avg", "exp_avg_sq")}

    def update(self, parameter: nn.Parameter, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        moments = (_local(state["exp_avg"]), _local(state["exp_avg_sq"]))
        _step_adamw(weight, _local(gradient), *moments, float(state["step"]), group)


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _zeros(parameter: Tensor, *names: str) -> State:
    return {name: torch.zeros_like(parameter, dtype=_wide(parameter)) for name in names}


def _first_step() -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def _step_adamw(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: float, group: Group) -> None:
    """In place, as torch's AdamW."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    weight.mul_(1 - rate * group["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(mean, root, value=-rate / (1 - beta1**step))


def _whole(tensor: Tensor) -> Tensor:
    """All ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of what all ranks have whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.contiguous(), like.device_mesh, like.placements, src_data_rank=None).to_local()


# --- eight bits -----------------------------------------------------------------------------------------------------

BLOCK = 256  # values of a row with one largest value
_SMALLEST = 4096  # parameters with fewer values keep float32 moments


class AdamW8bit(OwnOptimizer):
    """AdamW with moments in eight bits (Dettmers et al., 2021), in blocks within the rows of the parameter."""

    def first_state(self, parameter: nn.Parameter, group: Group) -> State:
        if parameter.ndim < 2 or parameter.numel() < _SMALLEST:
            return {"step": _first_step(), **_zeros(parameter, "exp_avg", "exp_avg_sq")}
        if isinstance(parameter, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in parameter.placements):
            raise ValueError(
                "optim.kind adamw_8bit needs whole rows on each rank: set parallel.tensor and parallel.expert to 1"
            )
        state = {"step": _first_step()}
        for name, signed in _MOMENTS.items():
            zero = int((dynamic_table(parameter.device, signed=signed) == 0).nonzero())
            state[f"{name}_codes"] = torch.full_like(parameter, zero, dtype=torch.uint8)
            state[f"{name}_largest"] = _blocks_like(parameter)
        return state

    def update(self, parameter: nn.Parameter, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        gradient, step = _local(gradient), float(state["step"])
        if "exp_avg" in state:
            return _step_adamw(weight, gradient, _local(state["exp_avg"]), _local(state["exp_avg_sq"]), step, group)
        held = {name: (_local(state[f"{name}_codes"]), _local(state[f"{name}_largest"])) for name in _MOMENTS}
        mean, square = (_read_rows(*held[name], signed).to(weight.dtype) for name, signed in _MOMENTS.items())
        _step_adamw(weight, gradient, mean, square, step, group)
        for moment, (name, signed) in zip((mean, square), _MOMENTS.items(), strict=True):
            _write_rows(moment, *held[name], signed)
        return None


_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


def _blocks_like(parameter: nn.Parameter) -> Tensor:
    """float32 [rows, blocks], split over ranks as the parameter's rows are."""
    blocks = -(-parameter[0].numel() // BLOCK)
    local = torch.zeros(_local(parameter).shape[0], blocks, device=_local(parameter).device)
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size([parameter.shape[0], blocks])
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(blocks, 1)
    )


def _in_blocks(values: Tensor) -> Tensor:
    """[rows, blocks, BLOCK], the last block of a row padded with zeros."""
    rows = values.flatten(1)
    return nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _read_rows(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """float32, in the shape of the codes."""
    values = dynamic_table(codes.device, signed=signed)[codes.int()]
    scaled = _in_blocks(values) * largest[:, :, None]
    return scaled.flatten(1)[:, : codes[0].numel() if len(codes) else 0].reshape(codes.shape)


def _write_rows(values: Tensor, codes: Tensor, largest: Tensor, signed: bool) -> None:
    if not len(codes):
        return
    blocks = _in_blocks(values.float())
    largest.copy_(blocks.abs().amax(dim=2))
    table = dynamic_table(codes.device, signed=signed)
    scaled = blocks / torch.where(largest > 0, largest, 1.0)[:, :, None]
    found = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
    if not signed:  # a mean square that is rounded to zero would be divided by
        found = torch.where(blocks > 0, found.clamp(min=1), found)
    codes.copy_(found.flatten(1)[:, : codes[0].numel()].reshape(codes.shape).to(torch.uint8))


# --- whole matrices -------------------------------------------------------------------------------------------------


class Adafactor(OwnOptimizer):
    """One number for each row and column instead of each weight (Shazeer and Stern, 2018), without momentum.

    As torch.optim.Adafactor, but for the learning rate, which is AdamW's: not scaled by the size of the weights.
    Updates with a root mean square above 1 are scaled down to it.
    """

    def first_state(self, parameter: nn.Parameter, group: Group) -> State:
        shape = tuple(parameter.shape)
        place: dict[str, Any] = {"dtype": _wide(parameter), "device": _local(parameter).device}
        if parameter.ndim < 2:
            return {"step": _first_step(), "variance": torch.zeros(shape, **place)}
        rows = torch.zeros((*shape[:-1], 1), **place)
        return {
            "step": _first_step(),
            "row_variance": rows,
            "column_variance": torch.zeros((*shape[:-2], 1, shape[-1]), **place),
        }

    def update(self, parameter: nn.Parameter, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        gradient, tiny = _whole(gradient), torch.finfo(gradient.dtype).eps
        share = float(state["step"]) ** -0.8
        if "variance" in state:
            estimate = state["variance"].lerp_(gradient.square(), share).clone()
        else:
            rows, columns = state["row_variance"], state["column_variance"]
            rows.lerp_(gradient.square().mean(dim=-1, keepdim=True), share)
            columns.lerp_(gradient.square().mean(dim=-2, keepdim=True), share)
            estimate = (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp(min=tiny))
        change = estimate.clamp_(min=tiny * tiny).rsqrt_().mul_(gradient)
        change.div_((change.norm() / math.sqrt(change.numel())).clamp(min=1.0))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(_part_like(change, parameter), alpha=-group["lr"])


class Muon(OwnOptimizer):
    """Momentum made orthogonal (Jordan et al., 2024) for the matrices of layers; AdamW for all else.

    Updates are scaled to the root mean square of AdamW's (Liu et al., 2025), so that both have one learning rate.
    """

    def __init__(self, groups: list[Group], momentum: float) -> None:
        super().__init__(groups)
        self._momentum = momentum

    def first_state(self, parameter: nn.Parameter, group: Group) -> State:
        names = ("momentum",) if group["orthogonal"] else ("exp_avg", "exp_avg_sq")
        return {"step": _first_step(), **_zeros(parameter, *names)}

    def update(self, parameter: nn.Parameter, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        gradient = _local(gradient)
        if not group["orthogonal"]:
            moments = (_local(state["exp_avg"]), _local(state["exp_avg_sq"]))
            return _step_adamw(weight, gradient, *moments, float(state["step"]), group)
        mean = _local(state["momentum"]).lerp_(gradient, 1 - self._momentum)
        ahead = gradient.lerp(mean, self._momentum)
        if isinstance(parameter, DTensor) and not _has_whole_matrices(parameter):
            everything = DTensor.from_local(
                ahead, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()  # fmt: skip
            change = _part_like(_orthogonal(everything), parameter)
        else:
            change = _orthogonal(ahead)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(change.to(weight.dtype), alpha=-0.2 * math.sqrt(max(parameter.shape[-2:])) * group["lr"])
        return None


_OWN: dict[str, type[OwnOptimizer]] = {"adamw": OwnAdamW, "adamw_8bit": AdamW8bit, "adafactor": Adafactor}


def _has_whole_matrices(parameter: DTensor) -> bool:
    """Experts that are divided by number alone."""
    return parameter.ndim > 2 and all(place.is_replicate() or place == Shard(0) for place in parameter.placements)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Near the closest orthogonal matrix: five steps of a Newton-Schulz iteration, in bf16 on GPUs."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x
