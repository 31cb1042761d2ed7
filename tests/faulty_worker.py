"""A rank that verifies with one thing broken: the fault that LOCKSTEP_TEST_FAULT names, then the real worker.

Every fault is a mistake somebody could make in the product, and gives numbers that look like any others.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
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

    tensor._columns = columns  # type: ignore[assignment]


def mask_leaks_across_ranks() -> None:
    """Where tokens are split over ranks, documents see each other."""
    from transformers import AttentionInterface

    from lockstep.model import attention

    def leaky(*arguments: Any, packed_split: Any = None, packed_layout: Any = None, **options: Any) -> Any:
        if packed_split is not None and packed_layout is not None:
            packed_layout = attention.PackedLayout((sum(packed_layout.lengths),))
        return honest(*arguments, packed_split=packed_split, packed_layout=packed_layout, **options)

    honest = attention.packed_attention
    register = attention.register
    attention.register = lambda: (register(), AttentionInterface.register(attention.PACKED, leaky))[0]


def micro_batch_dropped() -> None:
    """The last micro-batch of a rank is forgotten."""
    from lockstep.backend.rank_batches import RankBatches

    honest = RankBatches._micro_batches
    RankBatches._micro_batches = lambda self, *given: honest(self, *given)[:-1] or honest(self, *given)  # type: ignore


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

    pipeline.cut = cut  # type: ignore[assignment]


def every_rank_the_same_rows() -> None:
    """All ranks take the first share of the batch."""
    from lockstep.parallel.group import ProcessGroup

    ProcessGroup.data_rank = property(lambda self: 0)  # type: ignore[assignment]


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
    from lockstep.backend import optimizers

    honest = optimizers.build_optimizer

    def build(*arguments: Any) -> Any:
        optimizer = honest(*arguments)
        for group in optimizer.param_groups:
            group["decays"] = True
        return optimizer

    optimizers.build_optimizer = build  # type: ignore[assignment]


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


def buffers_not_sent() -> None:
    """Other ranks than the first keep the buffers that they were built with."""
    from lockstep.backend import build

    build._all_tensors = lambda module: list(module.named_parameters())  # type: ignore[assignment]


def moments_lost_at_a_resume() -> None:
    from lockstep.backend.torch_backend import TorchBackend

    honest = TorchBackend.load_state

    def load_state(self: TorchBackend, *given: Any, **options: Any) -> None:
        honest(self, *given, **options)
        for moments in self._optimizer.state.values():
            moments["exp_avg"].zero_()

    TorchBackend.load_state = load_state  # type: ignore[method-assign]


def clipping_lengthens() -> None:
    from lockstep.backend import torch_backend

    def clip(parameters: Sequence[Any], norm: torch.Tensor, max_norm: float, **options: Any) -> None:
        for p in parameters:
            p.grad.mul_(max_norm / (norm + 1e-6))

    torch_backend.clip = clip  # type: ignore[assignment]


def same_dropout_everywhere() -> None:
    from lockstep.backend import state

    honest = state.seed_rank
    state.seed_rank = lambda seed, rank: honest(seed, 0)


def evaluation_with_dropout() -> None:
    from lockstep.model.policy import Policy

    Policy.eval = lambda self: self  # type: ignore[method-assign]


def rank_refuses() -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("this rank will not")

    if int(os.environ["RANK"]) == 1:
        worker.make_backend = refuse  # type: ignore[assignment]


def rank_is_killed() -> None:
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def reference_has_adapters() -> None:
    """The reference is the model with its adapters."""
    from lockstep.backend.reference import AdapterOff

    AdapterOff.in_place = contextlib.nullcontext  # type: ignore


def sides_swapped_on_one_rank() -> None:
    """One rank takes the rejected answers for the chosen ones."""
    _change_plan(lambda self, plan: _reversed(plan) if self.group.data_rank == 1 else plan)


def _reversed(plan: Any) -> Any:
    parts = [tuple(replace(d, branches=d.branches[::-1]) for d in part) for part in plan.micro_batches]
    return replace(plan, micro_batches=tuple(parts))


def _change_plan(change: Callable[[Any, Any], Any], change_loss: Callable[[Any, Any], Any] | None = None) -> None:
    from lockstep.backend.rank_batches import RankBatches

    honest = RankBatches._micro_batches

    def micro_batches(self: RankBatches, plan: Any, batch: Any, loss: Any) -> Any:
        return honest(self, change(self, plan), batch, change_loss(plan, loss) if change_loss else loss)

    RankBatches._micro_batches = micro_batches  # type: ignore[method-assign]


def pairs_counted_per_rank() -> None:
    """Every rank divides by the number of its own pairs."""

    def own_scale(plan: Any, loss: Any) -> Any:
        own = {document.datum for part in plan.micro_batches for document in part}
        return replace(loss, scale=1.0 / len(own)) if loss.kind == "preference" else loss

    _change_plan(lambda self, plan: plan, own_scale)


def statistic_per_micro_batch() -> None:
    """A loss over the whole batch is computed in each micro-batch."""
    from lockstep.algorithms.losses import LOSSES

    LOSSES["preference"] = replace(LOSSES["preference"], is_separable=lambda options: True)


def cut_pairs_taken_for_whole() -> None:
    """Answers of a pair in two micro-batches are compared with whatever is beside them."""
    from lockstep.backend import loss_step

    loss_step.is_direct = lambda *given: True


def answers_see_each_other() -> None:
    """What follows a shared prompt also sees the answer that stands before it."""
    from lockstep.backend import batching

    def segments(documents: Sequence[Any], padding: int) -> Any:
        lengths = [document.num_tokens for document in documents]
        return tuple(lengths) + ((padding,) if padding else ()), ()

    batching._segments = segments


def reference_follows_on_one_rank_only() -> None:
    from lockstep.backend.reference import ParameterCopy

    if int(os.environ["RANK"]) == 1:
        ParameterCopy.mix = lambda self, plan: None  # type: ignore[method-assign]


def every_rank_its_own_kl() -> None:
    """Ranks estimate differently how far the model is from its reference."""
    from lockstep.train import dpo

    honest = dpo.estimate_kl
    dpo.estimate_kl = lambda backend, *given: honest(backend, *given) * (1 + int(os.environ["RANK"]))


def norms_round() -> None:
    """No fault: what models do by themselves, and the reduced copy does not."""
    from lockstep.verification import reduced

    reduced.keep_float64 = lambda model: None


def answers_counted_per_rank() -> None:
    """Every rank divides the loss by another number of tokens."""
    from lockstep.train import grpo

    honest = grpo.loss_scale
    grpo.loss_scale = lambda *given: honest(*given) * (1 + int(os.environ["RANK"]))


def log_probs_of_own_rows_only() -> None:
    """What the others computed of the batch is not put together with this rank's part."""
    from lockstep.backend import loss_step

    honest = loss_step.gather_targets
    loss_step.gather_targets = lambda rank_batch, values, group: honest(rank_batch, values, replace(group, num_ranks=1))


def temperature_forgotten() -> None:
    """The model learns at temperature 1, whatever it was sampled at."""
    from lockstep.model.policy import Policy

    Policy.use_temperature = lambda self, temperature: None  # type: ignore[method-assign]


def reference_is_the_policy() -> None:
    """The copy is never put into its place."""
    from lockstep.backend.reference import ParameterCopy

    ParameterCopy._exchange = lambda self: None  # type: ignore[method-assign]


def one_length_for_all() -> None:
    """Positions that depend on length follow the longest text of a row, as transformers has it."""
    from lockstep.model.rotary import RotaryByLength

    RotaryByLength.of = classmethod(lambda cls, model: cls())  # type: ignore[method-assign,assignment]


def windows_forgotten() -> None:
    """Attention sees the whole text in layers with a sliding window."""
    from lockstep.model import attention

    honest = attention.segment_by_segment
    attention.segment_by_segment = lambda *arguments: honest(*arguments[:5], None, arguments[6])


LENGTH_FAULTS: dict[str, Callable[[], None]] = {f.__name__: f for f in (one_length_for_all, windows_forgotten)}
POLICY_FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        answers_counted_per_rank,
        log_probs_of_own_rows_only,
        temperature_forgotten,
        reference_is_the_policy,
    )
}
PREFERENCE_FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        reference_has_adapters,
        sides_swapped_on_one_rank,
        pairs_counted_per_rank,
        statistic_per_micro_batch,
        cut_pairs_taken_for_whole,
        answers_see_each_other,
        reference_follows_on_one_rank_only,
        every_rank_its_own_kl,
    )
}
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
        buffers_not_sent,
        moments_lost_at_a_resume,
        clipping_lengthens,
        same_dropout_everywhere,
        evaluation_with_dropout,
        rank_refuses,
        rank_is_killed,
    )
}


def main(arguments: list[str] | None = None) -> int:
    faults = {**FAULTS, **PREFERENCE_FAULTS, **POLICY_FAULTS, **LENGTH_FAULTS, "norms_round": norms_round}
    faults[os.environ["LOCKSTEP_TEST_FAULT"]]()
    return worker.main(arguments)
