"""TrainingBackend on torch, around any transformers causal LM, also inside PEFT; on one rank or many, CPU or CUDA.

Every rank makes the same calls with the same global batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.algorithms.losses import lacks_reference
from lockstep.backend import loss_step, optimizers, state
from lockstep.backend.batching import MicroBatch, MicroBatchPlan, RankBatch
from lockstep.backend.build import Built, build_policy, expect_traffic, settle_dtypes, split_tokens
from lockstep.backend.images import BatchImages, refuse_layouts
from lockstep.backend.loss_step import TokenLogprobs, read_later
from lockstep.backend.optimizers import ADAMW, OptimizerSettings
from lockstep.backend.out_of_memory import MicroBatchTooLarge, Shrunk, longest_text, retry_smaller
from lockstep.backend.pipelined import PipelinedPasses
from lockstep.backend.probe import check_images, check_policy, check_stages
from lockstep.backend.rank_batches import RankBatches, tile_tokens
from lockstep.backend.reference import make_reference
from lockstep.backend.router_balance import NO_LOSSES, RouterBalance, RouterLosses
from lockstep.backend.staging import StagingArea
from lockstep.backend.step_clock import StepClock
from lockstep.config import ParallelConfig
from lockstep.data.packing import Cost
from lockstep.model.export import is_adapted, save_weights
from lockstep.model.load import DTYPES, choose_precision
from lockstep.model.policy import Policy, causal_lm, decoder_layers, generating
from lockstep.parallel.gradients import clip, gradient_norm
from lockstep.parallel.group import ProcessGroup, choose_device, join, peak_memory_gib
from lockstep.parallel.loss_scale import LossScale
from lockstep.parallel.replicate import NarrowCopies, finish_gradients
from lockstep.parallel.shard import has_shards, reshard, unsharded
from lockstep.parallel.traffic import Traffic
from lockstep.types import (
    Datum,
    ImageProcessor,
    Logprobs,
    LossResult,
    LossSpec,
    LossValues,
    OptimResult,
    OptimStep,
    SavedState,
)

T = TypeVar("T")


class TorchBackend:
    """`forward_backward` adds gradients up; `optim_step` applies and clears them."""

    on_shrunk: Callable[[Shrunk], object] = staticmethod(lambda shrunk: None)
    """Is told of micro-batches that were too large."""

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int = 4096,
        on_out_of_memory: str = "stop",
        parallel: ParallelConfig | None = None,
        precision: str = "auto",
        activation_checkpointing: str = "none",
        activation_offload: bool = False,
        compile: bool | str = "auto",
        logits_gib: float = 2.5,
        reference: str = "none",
        temperature: float = 1.0,
        router_losses: RouterLosses = NO_LOSSES,
        router_replay: bool = False,
        optimizer: OptimizerSettings = ADAMW,
        device: str = "auto",
        seed: int = 0,
        timeout_s: float = 600.0,
        stages_saves: bool = False,
        deterministic: bool = False,
        group: ProcessGroup | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """`reference`: none, adapter_off or copy: what `forward(reference=True)` computes with, and losses.
        `temperature`: of all log-probs and entropies, the reference's too: where answers are sampled, that of sampling.
        `stages_saves`: on a GPU, saved states are copied while training goes on (StagingArea). `deterministic`: there,
        sums are taken in a fixed order. `images`: of a vision-language model whose batches have some.
        `router_replay`: experts are those of the completions' `routing`. `on_out_of_memory`: as in BatchConfig.
        """
        parallel = parallel or ParallelConfig()
        self.group = group or join_group(device, parallel, timeout_s)
        self.device, on_gpu = self.group.device, self.group.device.type == "cuda"
        self.precision, self.micro_batch_tokens = agree_on_precision(precision, self.group), micro_batch_tokens
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Whether this rank was; results of `forward_backward` say whether any was."""
        self._activation_offload, self._shrinks = activation_offload, on_out_of_memory == "shrink"
        self._in_fixed_order = fixed_order if deterministic and on_gpu else contextlib.nullcontext
        self._scale = LossScale() if self.precision == "fp16" else None
        settle_dtypes(model, DTYPES[self.precision], optimizer.held_dtype(self.precision))
        self._compiles = compiles = on_gpu if compile == "auto" else bool(compile)
        compute_dtype = _narrow_dtype(self.precision, parallel)
        built = build_policy(
            model,
            self.group,
            compute_dtype=compute_dtype,
            activation_checkpointing=activation_checkpointing,
            compile_layers=compiles,
            parallel=parallel,
            logits_gib=logits_gib,
            router_replay=router_replay,
        )
        self.policy, self._module, self.parts = built.policy, built.module, built.parts
        self._pipelined = PipelinedPasses.of(built, self.group, parallel.schedule, DTYPES[self.precision])
        self._narrow = _narrow_copies(self.policy, None if self.group.degrees.sharded else compute_dtype)
        self._sharded_roots = [root for root in (self.policy, *built.stages.values()) if has_shards(root)]
        self.slow = self._check_passes(built)
        self._images = None if images is None else self._see(images)
        self._end_checks(built, temperature)
        self.balance = RouterBalance(self.policy, router_losses, self.group, reference, compiled=compiles)
        self.warnings = [*built.warnings, *self.balance.warnings]
        self._batches = self._split_batches(built)
        self._reference, self._reference_mixed = make_reference(reference, model, self.parameters()), False
        self._optimizer = optimizers.build_optimizer(self.parameters(), self.device, optimizer, model)
        self._staging = StagingArea(self.device) if stages_saves and on_gpu else None
        self._clock = StepClock() if on_gpu else None
        self.traffic = Traffic(self.group, unseen=("tensor", "context") if compiles else ())
        self._expected = expect_traffic(built, self.group, parallel, DTYPES[self.precision].itemsize)
        state.seed_rank(seed, self.group.dropout_rank)

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """As the optimizer has them: to look for them in thousands of modules takes longer than some steps of it."""
        return list(self.parameters().values())

    @property
    def _skips_on_device(self) -> bool:
        """Whether the optimizer's fused kernel itself skips a gradient that is not finite."""
        fused = self.device.type == "cuda" and isinstance(self._optimizer, torch.optim.AdamW)
        alone = not self.group.degrees.sharded and self.group.degrees.pipeline == 1
        return fused and alone and self._scale is None

    def _check_passes(self, built: Built) -> list[str]:
        """Ways that are slower than they might be."""
        about = (self._evaluation(), self.device, self.precision)
        if self._pipelined is None:
            return check_policy(self.policy, *about)
        return check_stages(self.policy, built.stages.values(), *about)

    def _split_batches(self, built: Built) -> RankBatches:
        return RankBatches(
            self.policy,
            self.group,
            self._tile_tokens,
            dtype=torch.float64 if self.precision == "fp64" else torch.float32,
            cost=Cost.from_hidden_size(hidden_size(causal_lm(self.policy.model))),
            pipelined=self._pipelined,
            images=self._images,
            routing=built.routing,
            takes_longer=self._shrinks,
        )

    def _see(self, processor: ImageProcessor) -> BatchImages:
        refuse_layouts(self.group.degrees)
        images = BatchImages(self.policy, processor)
        check_images(self.policy, images, self._evaluation(), self.device, self.precision)
        return images

    def _end_checks(self, built: Built, temperature: float) -> None:
        """They are of the model as it is, on whole documents."""
        built.leave_loops_uncompiled()
        self.policy.use_temperature(temperature)
        if self.group.degrees.context > 1:
            split_tokens(self.policy, self.group)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names that the model itself uses."""
        return {name: p for name, p in self.policy.model.named_parameters() if p.requires_grad}

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        return self._retried(batch, lambda: self._forward(batch, reference))

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        whole = loss_step.find_loss(loss).needs_entropy(loss.options)
        return self._retried(batch, lambda: self._forward_backward(batch, loss), whole=whole)

    def _retried(self, batch: Sequence[Datum], attempt: Callable[[], T], *, whole: bool = False) -> T:
        """`whole`: the completions of a datum must stay in one micro-batch."""
        if not self._shrinks:
            return attempt()
        if self.group.num_ranks > 1:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                raise MicroBatchTooLarge(str(error), self._largest(batch) // self.group.degrees.context) from error
        had_gradients = any(p.grad is not None for p in self.parameters().values())

        def shrink() -> tuple[int, int] | None:
            before = self._largest(batch)
            after = max(before // 2, longest_text(batch, whole=whole))
            if had_gradients or after >= before:
                return None
            self.micro_batch_tokens = after
            return before, after

        return retry_smaller(attempt, self.device, shrink, self._forget, lambda shrunk: self.on_shrunk(shrunk))

    def _largest(self, batch: Sequence[Datum]) -> int:
        """Tokens of this rank's largest micro-batch."""
        return max(sum(d.num_tokens for d in part) for part in self._plan(batch).micro_batches)

    def _forget(self) -> None:
        """What a pass that failed has left."""
        for parameter in self.parameters().values():
            parameter.grad = None
        self.balance.forget()

    def _forward(self, batch: Sequence[Datum], reference: bool) -> list[Logprobs]:
        rank_batch = self._rank_batch(batch, LossSpec())
        with self._in_fixed_order(), self._as_reference() if reference else contextlib.nullcontext():
            outputs = self._logprobs(rank_batch)
        values = loss_step.gather_targets(rank_batch, [o.logprobs for o in outputs], self.group)
        return loss_step.scatter_to_rows(values.tolist(), rank_batch.documents, batch)

    def _forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        names = loss_step.metric_names(loss)
        rank_batch = self._rank_batch(batch, loss)
        if rank_batch.plan.num_targets == 0:
            raise ValueError(f"nothing to learn in this batch of {len(batch)} rows: every weight is zero")
        if self._staging is not None:  # before the first step, which is compiled meanwhile
            self._staging.reserve(lambda: state.expect_sizes(self.parameters()))
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        with self._in_fixed_order(), self.traffic.counting():
            passes, known = self._compute_passes(rank_batch, loss)
            if known is None:
                for metrics, _ in passes:
                    sums += loss_step.stack(metrics, names) * self.group.counts
            else:
                sums += loss_step.stack(known, names) * (self.group.rank == 0)  # every rank has them: counted once
            # Each rank's own numbers travel with the loss, without a message of their own.
            asked = torch.full((1,), float(self.asked_to_stop()), dtype=torch.float64, device=self.device)
            totals = self.group.sum(torch.cat([asked, sums, self.traffic.facts()]))
        logprobs = [part for _, part in passes]
        numbers, traffic = read_later(torch.cat([totals, self.balance.take()])), self._describe_traffic(rank_batch)
        num_totals = len(totals)

        def read() -> LossValues:
            every = numbers.result()
            (asked, *summed), routed = every[:num_totals], every[num_totals:]
            values = dict(zip(names, summed[: len(names)], strict=True))
            loss_sum = values.pop("loss")
            nonfinite = () if math.isfinite(loss_sum) else self._nonfinite_origins(rank_batch, logprobs)
            others = {**traffic(summed[len(names) :]), **self.balance.metrics(routed)}
            return LossValues(loss_sum, {**values, **others}, nonfinite, asked > 0)

        def read_logprobs() -> list[Logprobs]:
            values = loss_step.gather_targets(rank_batch, logprobs, self.group)
            return loss_step.scatter_to_rows(values.tolist(), rank_batch.documents, batch)

        plan = rank_batch.plan
        return LossResult(
            read,
            num_tokens=plan.num_tokens,
            num_supervised=plan.num_targets,
            deferred=numbers.deferred,
            read_logprobs=read_logprobs,
        )

    def _compute_passes(
        self, rank_batch: RankBatch, loss: LossSpec
    ) -> tuple[list[tuple[dict[str, Tensor], Tensor]], dict[str, Tensor] | None]:
        """((metrics, log-probs) of each pass, with their gradients; metrics where the whole batch gave them)."""
        reference = self._reference_logprobs(rank_batch) if lacks_reference(loss, rank_batch.batch) else None
        num_parts = self.group.degrees.context
        counts_first = self._counts_first(rank_batch, loss, num_parts)
        with self.balance.counting_pass() if counts_first else contextlib.nullcontext():
            micro_batches, pass_loss, known = loss_step.plan_passes(
                rank_batch,
                loss,
                reference,
                lambda facts: self._logprobs(rank_batch, facts=facts),
                self.group,
                num_parts,
            )
            if counts_first and known is None:
                self._logprobs(rank_batch)
        with self.balance.training_passes(self._loss_scale):
            return self._passes(micro_batches, pass_loss), known

    def optim_step(self, step: OptimStep) -> OptimResult:
        parameters = self._trained
        counted = parameters if self._pipelined is None else self._pipelined.own_parameters(parameters)
        with self._in_fixed_order(), self.traffic.counting():
            norm = gradient_norm(counted, self.group) / self._loss_scale
        self.traffic.end_step()
        numbers = read_later(norm.reshape(1))
        if not self._skips_on_device and (step.max_grad_norm is not None or self._loss_scale != 1.0):
            clip(parameters, norm, step.max_grad_norm or math.inf, scale=1 / self._loss_scale)
        optimizers.set_step(self._optimizer, step)
        self._before_change()
        if self._skips_on_device:
            # The fused kernel itself clips, and skips a gradient that is not finite: the host waits for no norm.
            optimizers.step_on_device(self._optimizer, norm, step.max_grad_norm)
        elif math.isfinite(numbers.result()[0]):
            self._optimizer.step()
        self.balance.end_step(norm)
        self._optimizer.zero_grad(set_to_none=True)
        memory = peak_memory_gib(self.device)
        if self._scale is None:
            return OptimResult(
                lambda: numbers.result()[0],
                peak_memory_gib=memory,
                deferred=numbers.deferred,
                ended_at=time.perf_counter if self._clock is None else self._clock.mark(),
            )
        (value,) = numbers.result()
        self._scale.update(finite=math.isfinite(value))
        return OptimResult(lambda: value, peak_memory_gib=memory, loss_scale=self._scale.value)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    def mix_reference(self, share: float) -> None:
        if self._reference is None:
            raise ValueError("this backend was built without a reference")
        self._before_change()
        self._reference.mix(share)
        self._reference_mixed = True

    def save_state(self, path: Path) -> Future[SavedState]:
        kept = self._reference.state() if self._reference is not None and self._reference_mixed else {}
        numbers = self._numbers() | kept
        saved = {**self.parameters(), **self.balance.state()}
        return state.save(Path(path), saved, self._optimizer, self.group, numbers, self._staging)

    def _before_change(self) -> None:
        """Of what a checkpoint holds, which may be being copied."""
        if self._staging is not None:
            self._staging.before_change()

    def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        self._before_change()
        numbers, kept = self._numbers(), self._reference.state() if self._reference else {}
        optimizer = self._optimizer if with_optimizer else None
        held = {**self.parameters(), **self.balance.state()}
        loaded = state.load(Path(path), held, optimizer, self.group, {**numbers, **kept})
        self._reference_mixed = bool(loaded & kept.keys())
        if self._scale is not None:
            self._scale.restore(numbers["loss_scale"].tolist())

    def _numbers(self) -> dict[str, Tensor]:
        """What the next steps depend on besides parameters, optimizer and reference."""
        if self._scale is None:
            return {}
        return {"loss_scale": torch.tensor(self._scale.state(), dtype=torch.float64)}

    def export_weights(self, path: Path) -> None:
        """The trained weights as Hugging Face tools read them: the adapter under LoRA, otherwise the model."""
        # A base that many adapters share is not read for each of them.
        full = state.gather(self.policy.model, self.group, trained_only=is_adapted(self.policy.model))
        if self.group.rank == 0:
            save_weights(self.policy.model, full, path)
        self.group.barrier()

    def read_weights(self, *, on_device: bool = False) -> dict[str, Tensor]:
        """The trained tensors as they are sampled with, whole, copied for rank 0. All ranks."""
        dtypes = dict.fromkeys(self.parameters(), DTYPES[self.precision])
        copy = functools.partial(state.copy_for_rank_0, on_device=on_device)
        if all(p.requires_grad for p in self.policy.model.parameters()):
            whole = state.gather(self.policy.model, self.group, dtypes, copy)
        else:
            whole = _gather(self.parameters(), self.group, dtypes, copy)
        kept = dict[int, str]()
        return {
            name: tensor for name, tensor in whole.items() if kept.setdefault(id(tensor), name) == name
        }  # tied: once

    @contextlib.contextmanager
    def lend_model(self, *, stable: bool = False) -> Iterator[Any]:
        """The plain model, to generate with. All ranks, and all must make the same calls to it.

        `stable`: weights stay at the same addresses from call to call, also those in a narrower dtype.
        """
        # Compiled layers are made for packed training batches: generating step by step would compile them again.
        with (
            self._evaluation(stable=stable),
            self.policy.own_attention(),
            unsharded(self.policy),
            _eagerly(),
            generating(causal_lm(self.policy.model)),
        ):
            yield self.policy.model

    def image_inputs(self, datum: Datum, tokens: Sequence[int]) -> dict[str, Tensor]:
        """Of the images in the first tokens of a text: what the lent model takes beside those."""
        return self._images.inputs_of(datum, tokens, self.device) if self._images is not None else {}

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        self.policy.stop_packing()  # the caller's model is as it was, also for generating
        self.group.leave()

    def _plan(self, batch: Sequence[Datum], data_rank: int | None = None) -> MicroBatchPlan:
        return self._batches.plan(batch, self.micro_batch_tokens, data_rank)[1]

    def _rank_batch(self, batch: Sequence[Datum], loss: LossSpec) -> RankBatch:
        return self._batches.make(batch, loss, self.micro_batch_tokens)

    def _describe_traffic(self, rank_batch: RankBatch) -> Callable[[Sequence[float]], dict[str, float]]:
        """From every rank's facts to metrics of this step's traffic: as counted, and the least possible."""
        counts, num_data_ranks, plan = self.traffic.current, self.group.degrees.data, rank_batch.plan
        packs = [m.packed for m in rank_batch.micro_batches]
        num_tokens, num_targets = sum(len(p.tokens) for p in packs), sum(len(p.targets) for p in packs)
        least = {} if self._expected is None else self._expected.metrics(num_tokens, num_targets, len(packs))
        if num_data_ranks > 1:
            least["cost_balance"] = plan.cost_balance
            least["token_balance"] = plan.max_rank_tokens * num_data_ranks / plan.num_tokens
        # Counts are read late: optim_step adds to them.
        return lambda facts: {**self.traffic.read_facts(facts), **counts.as_metrics(), **least}

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("this backend was built without a reference: give it reference='copy' or 'adapter_off'")
        self._before_change()  # sharded parameters exchange their values with it
        with self._reference.in_place(), self.policy.routers.choosing_freely():
            yield

    def _reference_logprobs(self, rank_batch: RankBatch) -> list[Tensor]:
        with self._as_reference():
            return [output.logprobs for output in self._logprobs(rank_batch)]

    def _logprobs(self, rank_batch: RankBatch, *, facts: bool = False) -> list[TokenLogprobs]:
        """Of each micro-batch, without gradient; zeros on ranks that do not have the last stage."""
        with self._evaluation():
            if self._pipelined is not None:
                return self._pipelined.logprobs(rank_batch.micro_batches, facts)
            outputs = (self._module(m.packed, facts=facts) for m in rank_batch.micro_batches)
            return [loss_step.as_token_logprobs(output) for output in outputs]

    def _passes(self, micro_batches: list[MicroBatch], loss: LossSpec) -> list[tuple[dict[str, Tensor], Tensor]]:
        if self._pipelined is not None:
            with self._narrowed(), self._offloaded():
                return self._pipelined.forward_backward(micro_batches, loss, self._loss_scale)
        last = len(micro_batches) - 1
        return [self._backward(m, loss, last=i == last) for i, m in enumerate(micro_batches)]

    def _backward(self, micro_batch: MicroBatch, loss: LossSpec, *, last: bool) -> tuple[dict[str, Tensor], Tensor]:
        """One pass. DDP communicates in the last of a batch, FSDP2 each time, to keep gradients sharded."""
        replicated = self._module if isinstance(self._module, DistributedDataParallel) else None
        quiet = contextlib.nullcontext() if last or replicated is None else replicated.no_sync()
        with quiet, self._narrowed(), self._offloaded():
            call = functools.partial(self._module, micro_batch.packed)
            total, metrics, logprobs = loss_step.compute_losses(micro_batch, loss, call, self._loss_scale)
            if not total.requires_grad:
                name = type(causal_lm(self.policy.model)).__name__
                raise ValueError(f"nothing that is trained takes part in what {name} predicts: change lora.targets")
            self.balance.before_backward()
            total.backward()
        if last and replicated is not None:
            finish_gradients(replicated)
        return metrics, logprobs

    def _counts_first(self, rank_batch: RankBatch, loss: LossSpec, num_parts: int) -> bool:
        """Whether a loss of routers must be counted in a pass before: else that happens on the way to backward."""
        if not self.balance.has_loss:
            return False
        alone = len(rank_batch.micro_batches) == 1 and loss_step.is_direct(loss, rank_batch, num_parts)
        return not alone or self._pipelined is not None or self._compiles

    @property
    def _tile_tokens(self) -> int:
        return tile_tokens(self.device)

    def _narrowed(self, *, kept: bool = False) -> contextlib.AbstractContextManager[None]:
        return self._narrow.in_place(kept=kept) if self._narrow is not None else contextlib.nullcontext()

    def _offloaded(self) -> contextlib.AbstractContextManager[object]:
        """Activations kept in host memory, where configured."""
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
            for root in self._sharded_roots:
                reshard(root)
            self.policy.train()

    def _nonfinite_origins(self, rank_batch: RankBatch, logprobs: Sequence[Tensor]) -> tuple[str, ...]:
        """Rows whose own log-probs are not finite, on any rank. All ranks (they all saw the same loss)."""
        flags = self.group.sum(loss_step.flag_nonfinite(rank_batch, logprobs, self.device))
        return loss_step.origins_of(flags.tolist(), rank_batch.batch)


def _gather(
    parameters: Mapping[str, Tensor], group: ProcessGroup, dtypes: Mapping[str, torch.dtype], copy: state.Copy
) -> dict[str, Tensor]:
    """Whole, on rank 0. All ranks."""
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
    return {name: copy(p, dtypes[name]) for name, p in whole.items()} if group.rank == 0 else {}


def join_group(device: str, parallel: ParallelConfig, timeout_s: float) -> ProcessGroup:
    """Meet the other processes of this run, if torchrun started any."""
    degrees = parallel.degrees(int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    return join(choose_device(device), degrees, timeout_s=timeout_s)


def hidden_size(causal: Any) -> int:
    size = getattr(causal.config.get_text_config(), "hidden_size", None)
    return size or causal.get_output_embeddings().in_features


@contextlib.contextmanager
def fixed_order() -> Iterator[None]:
    """Kernels that add up as threads come, such as attention's backward pass, are replaced by slower ones."""
    # cuBLAS reads it when it is first used: several streams must not share what it adds up in.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def agree_on_precision(wanted: str, group: ProcessGroup) -> str:
    """Rank 0 decides by its device. All ranks."""
    return group.broadcast_object(choose_precision(wanted, group.device) if group.rank == 0 else None)


def _eagerly() -> contextlib.AbstractContextManager[None]:
    return torch.compiler.set_stance("force_eager")


def _narrow_copies(policy: Policy, dtype: torch.dtype | None) -> NarrowCopies | None:
    """None where there is no other dtype, or FSDP2 casts by itself."""
    return None if dtype is None else NarrowCopies(policy, decoder_layers(policy.model), dtype)


def _narrow_dtype(precision: str, parallel: ParallelConfig) -> torch.dtype | None:
    """The dtype to compute in when it is narrower than what the optimizer holds."""
    parallel.check_precision(precision)
    return DTYPES[precision] if precision in ("bf16", "fp16") else None
