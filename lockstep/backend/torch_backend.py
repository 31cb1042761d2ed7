"""TrainingBackend on torch: one process, DDP or FSDP2, on CPU or CUDA.

Around any transformers causal LM, also inside PEFT. The caller is rank-free: every rank makes the same
calls with the same global batch. Must not know files beyond the paths it is given, nor algorithms' loops.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.algorithms.losses import lacks_reference
from lockstep.backend import loss_step as stepping
from lockstep.backend import state
from lockstep.backend.batching import MicroBatch, MicroBatchPlan, documents_of, share_of, to_micro_batch
from lockstep.backend.build import build_policy, settle_dtypes, split_tokens
from lockstep.backend.loss_step import RankBatch, TokenLogprobs, read_later
from lockstep.backend.pipelined import PipelinedPasses
from lockstep.backend.probe import check_policy, check_stages
from lockstep.backend.reference import make_reference
from lockstep.config import ParallelConfig
from lockstep.data.packing import Cost
from lockstep.model.export import save_weights
from lockstep.model.load import DTYPES, choose_precision
from lockstep.model.policy import causal_lm, decoder_layers
from lockstep.parallel.expected_traffic import Theory
from lockstep.parallel.gradients import clip, gradient_norm
from lockstep.parallel.group import ProcessGroup, choose_device, join, peak_memory_gib
from lockstep.parallel.loss_scale import LossScale
from lockstep.parallel.replicate import NarrowCopies
from lockstep.parallel.shard import reshard, unsharded
from lockstep.parallel.traffic import Traffic
from lockstep.types import Datum, Logprobs, LossResult, LossSpec, LossValues, OptimResult, OptimStep


class TorchBackend:
    """`forward_backward` adds gradients up; `optim_step` applies and clears them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int = 4096,
        parallel: ParallelConfig | None = None,
        precision: str = "auto",
        activation_checkpointing: str = "none",
        activation_offload: bool = False,
        compile: bool | str = "auto",
        logits_gib: float = 2.5,
        reference: str = "none",
        temperature: float = 1.0,
        device: str = "auto",
        seed: int = 0,
        timeout_s: float = 600.0,
        group: ProcessGroup | None = None,
    ) -> None:
        """`reference`: none, adapter_off or copy: what `forward(reference=True)` computes with, and losses.

        `temperature`: of all log-probs and entropies, the reference's too: where answers are sampled, that of sampling.
        """
        parallel = parallel or ParallelConfig()
        self.group = group or join_group(device, parallel, timeout_s)
        self.device = self.group.device
        self.precision = agree_on_precision(precision, self.group)
        self.micro_batch_tokens = micro_batch_tokens
        self._activation_offload = activation_offload
        self._scale = LossScale() if self.precision == "fp16" else None
        compute_dtype = _narrow_dtype(self.precision)
        settle_dtypes(model, DTYPES[self.precision])
        compiles = self.device.type == "cuda" if compile == "auto" else bool(compile)
        built = build_policy(
            model,
            self.group,
            compute_dtype=compute_dtype,
            activation_checkpointing=activation_checkpointing,
            compile_layers=compiles,
            parallel=parallel,
            logits_gib=logits_gib,
        )
        self.policy, self._module = built.policy, built.module
        self._pipelined = PipelinedPasses(built, self.group, parallel.schedule) if built.stages else None
        sharded = self.group.degrees.sharded
        self._narrow: NarrowCopies | None = None
        if compute_dtype is not None and not sharded:  # FSDP2 casts by itself
            self._narrow = NarrowCopies(self.policy, decoder_layers(model), compute_dtype)
        self._skips_on_device = self.device.type == "cuda" and not sharded and self.group.degrees.pipeline == 1
        self._skips_on_device &= self._scale is None
        self._roots: list[nn.Module] = [self.policy, *built.stages.values()]
        if self._pipelined is None:
            self.warnings = check_policy(self.policy, self._evaluation(), self.device, self.precision)
        else:
            stages = built.stages.values()
            self.warnings = check_stages(self.policy, stages, self._evaluation(), self.device, self.precision)
        self.policy.use_temperature(temperature)  # the checks above are of the model as it is
        if self.group.degrees.context > 1:
            split_tokens(self.policy, self.group)
        self._cost = Cost.from_hidden_size(causal_lm(model).config.get_text_config().hidden_size)
        self._reference = make_reference(reference, model, self.parameters())
        self._reference_moved = False
        self._optimizer = stepping.build_optimizer(self.parameters(), self.device)
        self._traffic = Traffic(self.group, unseen=("tensor", "context") if compiles else ())
        compute_bytes = DTYPES[self.precision].itemsize
        self._theory = Theory(self.policy, self.group.degrees, parallel, compute_bytes, built.stages, built.num_stages)
        state.seed_rank(seed, self.group.data_rank)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names that the model itself uses."""
        return {name: p for name, p in self.policy.model.named_parameters() if p.requires_grad}

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        work = self._work(batch, LossSpec())
        with self._as_reference() if reference else contextlib.nullcontext():
            found = self._logprobs(work)
        values = stepping.gather(work, [f.logprobs for f in found], self.group)
        return stepping.spread(values.tolist(), work.documents, batch)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        names = stepping.metric_names(loss)
        work = self._work(batch, loss)
        if work.share.num_asked == 0:
            raise ValueError(f"nothing to learn in this batch of {len(batch)} rows: every weight is zero")
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        with self._traffic.counting():
            reference = self._reference_logprobs(work) if lacks_reference(loss, batch) else None
            if stepping.is_direct(loss, work, self.group.degrees.context):
                passes = self._passes(_with_references(work.micro_batches, reference), loss)
                for metrics, _ in passes:
                    sums += stepping.stack(metrics, names) * self.group.counts
            else:
                metrics, passes = self._passes_by_slopes(work, loss, reference)
                sums += stepping.stack(metrics, names) * (self.group.rank == 0)  # every rank knows them, one says them
            # What every rank has to say of itself travels with the loss: no message of its own.
            totals = self.group.sum(torch.cat([sums, self._traffic.facts()]))
        seen = [logprobs for _, logprobs in passes]
        numbers, traffic = read_later(totals), self._describe_traffic(work)

        def read() -> LossValues:
            found = numbers.result()
            values = dict(zip(names, found[: len(names)], strict=True))
            loss_sum = values.pop("loss")
            bad = () if math.isfinite(loss_sum) else self._nonfinite_origins(work, seen)
            return LossValues(loss_sum, {**values, **traffic(found[len(names) :])}, bad)

        share = work.share
        return LossResult(read, num_tokens=share.num_tokens, num_supervised=share.num_asked, deferred=numbers.deferred)

    def optim_step(self, step: OptimStep) -> OptimResult:
        parameters = list(self.parameters().values())
        counted = parameters if self._pipelined is None else self._pipelined.own_parameters(parameters)
        with self._traffic.counting():
            norm = gradient_norm(counted, self.group) / self._loss_scale
        self._traffic.end_step()
        numbers = read_later(norm.reshape(1))
        if step.max_grad_norm is not None or self._loss_scale != 1.0:
            clip(parameters, norm, step.max_grad_norm or math.inf, scale=1 / self._loss_scale)
        stepping.set_step(self._optimizer, step)
        if self._skips_on_device:
            # A gradient that is not finite is left out by the fused kernel itself: nobody has to wait for the norm.
            self._optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            self._optimizer.step()
        elif math.isfinite(numbers.result()[0]):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        memory = peak_memory_gib(self.device)
        if self._scale is None:
            return OptimResult(lambda: numbers.result()[0], peak_memory_gib=memory, deferred=numbers.deferred)
        (value,) = numbers.result()
        self._scale.note(finite=math.isfinite(value))
        return OptimResult(lambda: value, peak_memory_gib=memory, loss_scale=self._scale.value)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    def mix_reference(self, share: float) -> None:
        if self._reference is None:
            raise ValueError("this backend was built without a reference")
        self._reference.mix(share)
        self._reference_moved = True

    def save_state(self, path: Path) -> Future[None]:
        moved = self._reference_moved and self._reference is not None
        numbers = self._numbers() | (self._reference.state() if moved and self._reference else {})
        return state.save(path, self.parameters(), self._optimizer, self.group, numbers)

    def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        numbers, kept = self._numbers(), self._reference.state() if self._reference else {}
        optimizer = self._optimizer if with_optimizer else None
        found = state.load(path, self.parameters(), optimizer, self.group, {**numbers, **kept})
        self._reference_moved = bool(found & kept.keys())
        if self._scale is not None:
            self._scale.restore(numbers["loss_scale"].tolist())

    def _numbers(self) -> dict[str, Tensor]:
        """What the next steps depend on besides parameters, optimizer and reference."""
        if self._scale is None:
            return {}
        return {"loss_scale": torch.tensor(self._scale.state(), dtype=torch.float64)}

    def export_weights(self, path: Path) -> None:
        """The trained weights as Hugging Face tools read them: the adapter under LoRA, otherwise the model."""
        full = state.gather(self.policy.model, self.group)
        if self.group.rank == 0:
            save_weights(self.policy.model, full, path)
        self.group.barrier()

    def read_weights(self) -> dict[str, Tensor]:
        """The trained tensors as they are sampled with, whole, on rank 0's CPU. All ranks."""
        dtypes = dict.fromkeys(self.parameters(), DTYPES[self.precision])
        if all(p.requires_grad for p in self.policy.model.parameters()):
            found = state.gather(self.policy.model, self.group, dtypes)
        else:
            found = _gather(self.parameters(), self.group)
        kept = dict[int, str]()
        # Copies, because training goes on: what comes from another device is one already. Of tied tensors one.
        return {
            name: tensor.to(dtypes.get(name, tensor.dtype), copy=self.device.type == "cpu")
            for name, tensor in found.items()
            if kept.setdefault(id(tensor), name) == name
        }

    @contextlib.contextmanager
    def lend_model(self, *, stable: bool = False) -> Iterator[Any]:
        """The model as its owner knows it, to generate with. All ranks, and all must call it alike.

        `stable`: its weights lie where they lay last time, also those that are computed with in a narrower dtype.
        """
        causal = causal_lm(self.policy.model)
        generation, use_cache = causal.generation_config, causal.config.use_cache
        # Compiled layers are made for packed training batches: generating step by step would compile them again.
        with self._evaluation(stable=stable), self.policy.own_attention(), unsharded(self.policy), _eagerly():
            causal.config.use_cache = True
            try:
                yield self.policy.model
            finally:
                causal.generation_config, causal.config.use_cache = generation, use_cache

    def close(self) -> None:
        self.policy.stop_packing()  # the model is its owner's again, also for generating
        self.group.leave()

    def _work(self, batch: Sequence[Datum], loss: LossSpec) -> RankBatch:
        budget = self.micro_batch_tokens * self.group.degrees.context
        documents = documents_of(batch, max_shared_tokens=budget if self.policy.shares_prompts else 0)
        share = share_of(
            documents,
            rank=self.group.data_rank,
            num_ranks=self.group.degrees.data,
            budget_tokens=budget,
            max_documents=None if self.policy.packs else 1,
            cost=self._cost,
        )
        if self._pipelined is not None:
            missing = self._pipelined.num_micro_batches(len(share.micro_batches)) - len(share.micro_batches)
            share = replace(share, micro_batches=(*share.micro_batches, *([()] * missing)))
        return RankBatch(batch, documents, share, self._micro_batches(share, batch, loss))

    def _micro_batches(self, share: MicroBatchPlan, batch: Sequence[Datum], loss: LossSpec) -> list[MicroBatch]:
        dtype = torch.float64 if self.precision == "fp64" else torch.float32
        # Whole tiles for matrix kernels and fewer shapes for compiled ones; a budget between multiples is overstepped.
        multiple_of = 128 if self.device.type == "cuda" and self.policy.packs else 1
        context = (self.group.place("context"), self.group.degrees.context)
        multiple_of *= context[1]
        if self._pipelined is not None:  # what passes between stages has one size
            longest = max(sum(d.num_tokens for d in part) for part in share.micro_batches)
            multiple_of *= -(-max(longest, 2) // multiple_of)
        return [
            to_micro_batch(part, batch, loss, self.device, dtype, multiple_of, context) for part in share.micro_batches
        ]

    def _describe_traffic(self, work: RankBatch) -> Callable[[Sequence[float]], dict[str, float]]:
        """From every rank's facts to the metrics of this step's traffic: counted, and the least it could be."""
        counts, num_shares, share = self._traffic.current, self.group.degrees.data, work.share
        tokens, asked = (sum(len(getattr(m.packed, kind)) for m in work.micro_batches) for kind in ("tokens", "asked"))
        least = self._theory.metrics(tokens, asked, len(work.micro_batches)) if self.group.num_ranks > 1 else {}
        if num_shares > 1:
            least["cost_balance"] = share.cost_balance
            least["token_balance"] = share.longest_share_tokens * num_shares / share.num_tokens
        # Counts are read late: the step's end adds to them.
        return lambda facts: {**self._traffic.read_facts(facts), **counts.as_metrics(), **least}

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("this backend was built without a reference: give it reference='copy' or 'adapter_off'")
        with self._reference.in_place():
            yield

    def _reference_logprobs(self, work: RankBatch) -> list[Tensor]:
        with self._as_reference():
            return [found.logprobs for found in self._logprobs(work)]

    def _logprobs(self, work: RankBatch, *, facts: bool = False) -> list[TokenLogprobs]:
        """Of each micro-batch, without gradient; zeros on ranks that do not have the last stage."""
        with self._evaluation():
            if self._pipelined is not None:
                return self._logprobs_of_stages(work.micro_batches, facts)
            return [stepping.keep(self._module(m.packed, facts=facts)) for m in work.micro_batches]

    def _passes(self, micro_batches: list[MicroBatch], loss: LossSpec) -> list[tuple[dict[str, Tensor], Tensor]]:
        if self._pipelined is not None:
            return self._backward_stages(micro_batches, loss)
        last = len(micro_batches) - 1
        return [self._backward(m, loss, last=i == last) for i, m in enumerate(micro_batches)]

    def _passes_by_slopes(
        self, work: RankBatch, loss: LossSpec, reference: list[Tensor] | None
    ) -> tuple[dict[str, Tensor], list[tuple[dict[str, Tensor], Tensor]]]:
        """(metrics of the whole batch, passes), where a loss needs log-probs that lie in several micro-batches."""
        found = self._logprobs(work, facts=stepping.needs_facts(loss))
        grad_logprobs, metrics = stepping.find_slopes(work, loss, found, reference, self.group)
        sloped = [stepping.with_slopes(m, grad_logprobs) for m in work.micro_batches]
        return metrics, self._passes(sloped, stepping.SLOPES)

    def _backward(self, micro_batch: MicroBatch, loss: LossSpec, *, last: bool) -> tuple[dict[str, Tensor], Tensor]:
        """One pass. DDP communicates in the last of a batch, FSDP2 each time, to keep gradients sharded."""
        waits = isinstance(self._module, DistributedDataParallel) and not last
        quiet = self._module.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]
        with quiet, self._narrowed(), self._offloaded():
            call = functools.partial(self._module, micro_batch.packed)
            total, metrics, logprobs = stepping.compute_losses(micro_batch, loss, call, self._loss_scale)
            total.backward()
        return metrics, logprobs

    def _backward_stages(
        self, micro_batches: list[MicroBatch], loss: LossSpec
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """What `_backward` gives for each micro-batch, on the ranks of the last stage; nothing on the others."""
        assert self._pipelined is not None
        found: dict[int, tuple[dict[str, Tensor], Tensor]] = {}

        def finish(number: int, hidden: Tensor) -> Tensor:
            packed = micro_batches[number].packed
            apply = functools.partial(self.policy.apply_head, hidden, packed)
            total, metrics, logprobs = stepping.compute_losses(micro_batches[number], loss, apply, self._loss_scale)
            found[number] = (metrics, logprobs)
            return total

        with self._narrowed(), self._offloaded():
            self._pipelined.forward_backward(micro_batches, self._hidden_dtype, finish)
        return [found[i] for i in sorted(found)]

    def _logprobs_of_stages(self, micro_batches: list[MicroBatch], facts: bool) -> list[TokenLogprobs]:
        assert self._pipelined is not None
        nothing = [torch.zeros(len(m.places), device=self.device) for m in micro_batches]
        found = [TokenLogprobs(zeros, zeros if facts else None) for zeros in nothing]

        def finish(number: int, hidden: Tensor) -> Tensor:
            found[number] = stepping.keep(self.policy.apply_head(hidden, micro_batches[number].packed, facts=facts))
            return found[number].logprobs

        self._pipelined.forward(micro_batches, self._hidden_dtype, finish)
        return found

    @property
    def _hidden_dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def _narrowed(self, *, kept: bool = False) -> contextlib.AbstractContextManager[None]:
        return self._narrow.in_place(kept=kept) if self._narrow is not None else contextlib.nullcontext()

    def _offloaded(self) -> contextlib.AbstractContextManager[Any]:
        """Activations kept in the CPU's memory, where asked for."""
        if not self._activation_offload:
            return contextlib.nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    @contextlib.contextmanager
    def _evaluation(self, *, stable: bool = False) -> Any:
        self.policy.eval()
        try:
            with torch.no_grad(), self._narrowed(kept=stable):
                yield
        finally:
            for root in self._roots:
                reshard(root)
            self.policy.train()

    def _nonfinite_origins(self, work: RankBatch, logprobs: Sequence[Tensor]) -> tuple[str, ...]:
        """Rows whose own log-probs are not finite, over all ranks. All ranks (they all saw the same loss)."""
        flags = self.group.sum(stepping.flag_rows(work, logprobs, self.device))
        return stepping.name_rows(flags.tolist(), work.batch)


def _with_references(micro_batches: list[MicroBatch], reference: list[Tensor] | None) -> list[MicroBatch]:
    if reference is None:
        return micro_batches
    return [stepping.with_reference(m, part) for m, part in zip(micro_batches, reference, strict=True)]


def _gather(parameters: Mapping[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """Whole, on rank 0. All ranks."""
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
    return {name: p.detach().cpu() for name, p in whole.items()} if group.rank == 0 else {}


def join_group(device: str, parallel: ParallelConfig, timeout_s: float) -> ProcessGroup:
    """Meet the other processes of this run, if torchrun started any."""
    degrees = parallel.degrees(int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    return join(choose_device(device), degrees, timeout_s=timeout_s)


def agree_on_precision(wanted: str, group: ProcessGroup) -> str:
    """Rank 0 looks at its device, all follow. All ranks."""
    return group.broadcast_object(choose_precision(wanted, group.device) if group.rank == 0 else None)


def _eagerly() -> contextlib.AbstractContextManager[None]:
    return torch.compiler.set_stance("force_eager")


def _narrow_dtype(precision: str) -> torch.dtype | None:
    """The dtype to compute in when it is narrower than what the optimizer holds."""
    return DTYPES[precision] if precision in ("bf16", "fp16") else None
