"""A rank that verifies with one thing broken: the fault that LOCKSTEP_TEST_FAULT names, then the real worker.

Every fault is a mistake somebody could make in the product, and gives numbers that look like any others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.verification import worker

LORA_RANK = 3  # no other layer of the model is so narrow


def wrong_divide_factor() -> None:
    """FSDP2 averages gradients, as it does unless told otherwise."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def missing_tensor_sum_for_lora() -> None:
    """An adapter's second half is split over ranks, and what goes back into its first half is not summed."""
    from lockstep.parallel import tensor

    honest = tensor._columns

    def columns(linear: Any, *arguments: Any) -> Any:
        if linear.in_features != LORA_RANK:
            return honest(linear, *arguments)
        return lambda x: F.linear(x, tensor.local(linear.weight))

    tensor._columns = columns


def mask_leaks_across_ranks() -> None:
    """Where tokens are split over ranks, documents see each other."""
    from transformers import AttentionInterface

    from lockstep.model import attention

    def leaky(*arguments: Any, packed_split: Any = None, packed_lengths: Any = None, **options: Any) -> Any:
        if packed_split is not None and packed_lengths is not None:
            packed_lengths = (sum(packed_lengths),)
        return honest(*arguments, packed_split=packed_split, packed_lengths=packed_lengths, **options)

    honest = attention.packed_attention
    register = attention.register
    attention.register = lambda: (register(), AttentionInterface.register(attention.PACKED, leaky))[0]  # type: ignore


def micro_batch_dropped() -> None:
    """The last micro-batch of a rank is forgotten."""
    from lockstep.backend.torch_backend import TorchBackend

    honest = TorchBackend._micro_batches
    TorchBackend._micro_batches = lambda self, *given: honest(self, *given)[:-1] or honest(self, *given)  # type: ignore


def clipped_per_rank() -> None:
    """Every rank clips by the norm of the gradients it holds itself, and reports the right one."""
    from lockstep.backend import torch_backend

    honest = torch_backend.clip

    def clip(parameters: Sequence[Any], norm: torch.Tensor, *arguments: Any, **options: Any) -> None:
        gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
        own = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
        honest(parameters, own, *arguments, **options)

    torch_backend.clip = clip


def tied_weight_not_reduced() -> None:
    """The first stage keeps the embedding's part of a tied gradient, and the last the head's."""
    from lockstep.backend.pipelined import PipelinedPasses

    PipelinedPasses._sum_tied = lambda self: None  # type: ignore[method-assign]


def cursor_off_by_one() -> None:
    """Every batch leaves a row out."""
    from lockstep.data.order import Batches

    honest = Batches.batch_at

    def batch_at(self: Batches, cursor: int) -> Any:
        batch, following = honest(self, cursor)
        return batch, following + 1

    Batches.batch_at = batch_at  # type: ignore[method-assign]


def stages_swapped() -> None:
    """Two stages in the middle have each other's layers."""
    from lockstep.parallel import pipeline

    honest = pipeline.cut

    def cut(*arguments: Any) -> list[range]:
        first, second, third, *rest = honest(*arguments)
        return [first, third, second, *rest]

    pipeline.cut = cut


def every_rank_the_same_rows() -> None:
    """All ranks take the first share of the batch."""
    from lockstep.parallel.group import Group

    Group.data_rank = property(lambda self: 0)  # type: ignore[assignment]


def gradients_not_sent() -> None:
    """DDP never hears that the last micro-batch is the last."""
    from lockstep.backend.torch_backend import TorchBackend

    honest = TorchBackend._backward
    TorchBackend._backward = lambda self, *given, last: honest(self, *given, last=False)  # type: ignore[method-assign]


def head_not_reduced() -> None:
    """Each rank's part of a split vocabulary counts as the whole of it."""
    from lockstep.parallel.tensor import SplitVocabulary

    SplitVocabulary.sum = lambda self, values: values  # type: ignore[method-assign]


def norms_decay() -> None:
    """Weight decay is applied to norms, too."""
    from lockstep.backend import torch_backend

    honest = torch_backend._build_optimizer

    def build(*arguments: Any) -> Any:
        optimizer = honest(*arguments)
        for group in optimizer.param_groups:
            group["decays"] = True
        return optimizer

    torch_backend._build_optimizer = build


def one_replica_strays() -> None:
    """One rank's weights move a little by themselves after the last step: rank 0 has none of it."""
    from lockstep.backend.torch_backend import TorchBackend

    honest, steps = TorchBackend.optim_step, []

    def optim_step(self: TorchBackend, step: Any) -> Any:
        result = honest(self, step)
        steps.append(step)
        if self.group.rank == 1 and len(steps) == 2:
            next(iter(self.parameters().values())).data.mul_(1 + 1e-9)
        return result

    TorchBackend.optim_step = optim_step  # type: ignore[method-assign]


def rank_refuses() -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("this rank will not")

    if int(os.environ["RANK"]) == 1:
        worker.make_backend = refuse  # type: ignore[assignment]


def rank_is_killed() -> None:
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        wrong_divide_factor,
        missing_tensor_sum_for_lora,
        mask_leaks_across_ranks,
        micro_batch_dropped,
        clipped_per_rank,
        tied_weight_not_reduced,
        cursor_off_by_one,
        stages_swapped,
        every_rank_the_same_rows,
        gradients_not_sent,
        head_not_reduced,
        norms_decay,
        one_replica_strays,
        rank_refuses,
        rank_is_killed,
    )
}


def main(arguments: list[str] | None = None) -> int:
    FAULTS[os.environ["LOCKSTEP_TEST_FAULT"]]()
    return worker.main(arguments)
