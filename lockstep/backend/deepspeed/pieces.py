"""Whole tensors from the pieces that ZeRO keeps on each rank, and back: parameters in float32 and AdamW's moments.

All ranks call it together. Must not know batches, losses or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.group import ProcessGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroPieces:
    """`optimizer` is the AdamW that DeepSpeed steps with; it sees flat pieces, not parameters."""

    def __init__(self, deepspeed: Any, engine: Any, optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
        self._deepspeed, self._zero, self._optimizer, self._group = deepspeed, engine.optimizer, optimizer, group
        self._splits_model = engine.zero_optimization_stage() == 3
        self._lay_out_moments()

    def get(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """A trained parameter in float32, or one of its moments."""
        if key is None:
            return self._deepspeed.utils.safe_get_full_fp32_param(parameter)
        return self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """In the float32 copy that the optimizer steps: `spread` brings it into the model."""
        utils, arguments = self._deepspeed.utils, () if key is None else (key,)
        if not self._splits_model:
            write = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
            write(parameter, value, *arguments)
            return
        # By this rank's piece: DeepSpeed's own way to set a whole tensor fails where ranks do not divide its size.
        pieces: Any = parameter
        size = pieces.ds_tensor.ds_numel
        filled = torch.zeros(size * self._group.num_ranks, device=value.device)
        filled[: value.numel()] = value.flatten()
        piece = filled[size * self._group.rank : size * (self._group.rank + 1)]
        write = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        write(parameter, piece, *arguments)

    def spread(self, parameters: Iterable[nn.Parameter]) -> None:
        """What the optimizer holds becomes what the model computes with."""
        if not self._splits_model:
            self._zero.update_lp_params()
            return
        for parameter in parameters:
            value = self.get(parameter)
            with self.gathered([parameter], changed=True):
                parameter.data.copy_(value)

    @contextmanager
    def gathered(self, parameters: list[Any], *, changed: bool = False) -> Iterator[None]:
        """Whole for a while, where stage 3 holds pieces. `changed`: rank 0's content is kept."""
        pieces = [p for p in parameters if hasattr(p, "ds_id")]
        writer = 0 if changed else None
        with self._deepspeed.zero.GatheredParameters(pieces, modifier_rank=writer, enabled=bool(pieces)):
            yield

    @property
    def num_steps(self) -> float:
        return max(float(found["step"]) for found in self._optimizer.state.values())

    @num_steps.setter
    def num_steps(self, value: float) -> None:
        fused = bool(self._optimizer.defaults.get("fused"))
        for piece in self._flat_pieces():
            self._optimizer.state[piece]["step"] = torch.tensor(value, device=piece.device if fused else "cpu")

    def _flat_pieces(self) -> list[Tensor]:
        """This rank's float32 piece of each group of parameters."""
        if self._splits_model:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _lay_out_moments(self) -> None:
        """Make what AdamW makes at its first step.

        Left to that step, DeepSpeed (0.19.8) finds the moments of the first group of parameters only.
        """
        for piece in self._flat_pieces():
            self._optimizer.state[piece] = {key: torch.zeros_like(piece) for key in MOMENTS}
        self.num_steps = 0.0
        if not self._splits_model:
            self._zero._lazy_init_hp_params_optimizer_state()


def whole_shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
