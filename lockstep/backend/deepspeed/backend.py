"""TrainingBackend on DeepSpeed: parameters, gradients and optimizer state split by ZeRO 1, 2 or 3, on CPU or CUDA.

Batches, losses and checkpoints are the same as TorchBackend's: a run can move between the two.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.algorithms.losses import lacks_reference
from lockstep.backend import loss_step, optimizers, state
from lockstep.backend.batching import MicroBatch, RankBatch
from lockstep.backend.build import build_policy, settle_dtypes
from lockstep.backend.deepspeed.config import resolve_ds_config, wanted_precision
from lockstep.backend.loss_step import TokenLogprobs
from lockstep.backend.probe import check_policy
from lockstep.backend.rank_batches import RankBatches, tile_tokens
from lockstep.backend.reference import AdapterOff
from lockstep.backend.torch_backend import agree_on_precision, join_group
from lockstep.config import ParallelConfig
from lockstep.config.parallel import ONE_RANK
from lockstep.model.checkpoint_storage import read_index
from lockstep.model.export import PARAMETER_PREFIX, save_weights
from lockstep.model.load import DTYPES
from lockstep.model.policy import causal_lm
from lockstep.parallel.group import ProcessGroup, peak_memory_gib
from lockstep.types import Datum, Logprobs, LossResult, LossSpec, LossValues, OptimResult, OptimStep, SavedState

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedBackend:
    """`forward_backward` accumulates gradients; `optim_step` applies and clears them.

    `zero_stage` and `offload` are the keys of the parallel section, `ds_config` is the content of a ds_config.json, and
    `max_grad_norm` what a gradient_clipping in it must agree with.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        zero_stage: int | None = None,
        offload: bool = False,
        ds_config: Mapping[str, object] | None = None,
        max_grad_norm: float | None = None,
        micro_batch_tokens: int = 4096,
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
        self.group = group or join_group(device, ParallelConfig(), timeout_s)
        self.device = self.group.device
        self.micro_batch_tokens, self._offloads = micro_batch_tokens, activation_offload
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """As of TorchBackend."""
        _refuse_other_axes(self.group)
        if reference not in ("none", "adapter_off"):
            raise ValueError(f"the reference {reference!r} needs parallel.backend torch: use precomputed, or LoRA")
        self.precision = agree_on_precision(wanted_precision(ds_config or {}, precision), self.group)
        settings = resolve_ds_config(
            ds_config or {}, stage=zero_stage, offload=offload, precision=self.precision, max_grad_norm=max_grad_norm
        )
        self.zero_stage: int = settings["zero_optimization"]["stage"]
        compiled = _may_compile(compile, self.device, self.zero_stage)
        if self._splits_model and activation_checkpointing == "selective":
            raise ValueError(
                "ZeRO stage 3 gathers inside what selective recomputes: set activation_checkpointing to full"
            )
        before = _process_groups()
        self._deepspeed = _import_deepspeed(self.device)
        settle_dtypes(model, DTYPES[self.precision])
        # Every rank starts with the whole model; for stage 3 in host memory, from where it is split piece by piece.
        whole = replace(self.group, degrees=ONE_RANK, device=torch.device("cpu") if self._splits_model else self.device)
        narrow = None if self.precision == "fp32" else DTYPES[self.precision]
        built = build_policy(
            model,
            whole,
            compute_dtype=narrow,
            activation_checkpointing=activation_checkpointing,
            compile_layers=compiled,
            parallel=ParallelConfig(),
            logits_gib=logits_gib,
        )
        self.policy, self.parts = built.policy, built.parts
        self._batches = RankBatches(self.policy, self.group, tile_tokens(self.device))
        exact = self._cast(narrow)
        self._reference = AdapterOff(model) if reference == "adapter_off" else None
        self._optimizer = optimizers.build_optimizer(self.parameters(), self.device)
        self.engine = self._start_engine(settings)
        _set_deadlines(_process_groups() - before, timeout_s)
        self.pieces = ZeroPieces(self._deepspeed, self.engine, self._optimizer, self.group)
        self._restore(exact)
        self.slow = check_policy(self.policy, self._evaluation(), self.device, self.precision)
        built.leave_loops_uncompiled()
        self.warnings = list(built.warnings)
        self.policy.use_temperature(temperature)  # the check above compares at temperature 1
        self._has_gradients = False
        state.seed_rank(seed, self.group.data_rank)

    def _restore(self, exact: dict[str, Tensor]) -> None:
        """Into the optimizer's pieces, what a narrower model has lost. One by one, to hold little at a time."""
        for name, parameter in self.parameters().items():
            if name in exact:
                self.pieces.set(parameter, exact.pop(name).to(self.device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names that the model itself uses; with stage 3 without their content."""
        return {name: p for name, p in self.policy.model.named_parameters() if p.requires_grad}

    def forward(self, batch: Sequence[Datum], *, reference: bool = False) -> list[Logprobs]:
        rank_batch = self._rank_batch(batch, LossSpec())
        with self._as_reference() if reference else nullcontext():
            outputs = self._logprobs(rank_batch)
        values = loss_step.gather_targets(rank_batch, [o.logprobs for o in outputs], self.group)
        return loss_step.scatter_to_rows(values.tolist(), rank_batch.documents, batch)

    def forward_backward(self, batch: Sequence[Datum], loss: LossSpec) -> LossResult:
        names = loss_step.metric_names(loss)
        rank_batch = self._rank_batch(batch, loss)
        if rank_batch.plan.num_targets == 0:
            raise ValueError(f"nothing to learn in this batch of {len(batch)} rows: every weight is zero")
        reference = self._reference_logprobs(rank_batch) if lacks_reference(loss, batch) else None
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        micro_batches, pass_loss, known = loss_step.plan_passes(
            rank_batch, loss, reference, lambda facts: self._logprobs(rank_batch, facts=facts), self.group
        )
        passes = [self._backward(micro_batch, pass_loss) for micro_batch in micro_batches]
        if known is None:
            sums += sum(loss_step.stack(metrics, names) for metrics, _ in passes)
        else:
            sums += loss_step.stack(known, names) * (self.group.rank == 0)
        self._has_gradients = True
        flags = loss_step.flag_nonfinite(rank_batch, [logprobs for _, logprobs in passes], self.device)
        asked = torch.full((1,), float(self.asked_to_stop()), dtype=torch.float64, device=self.device)
        any_asked, *totals = self.group.sum(torch.cat([asked, sums, flags])).tolist()
        values = dict(zip(names, totals))
        loss_sum = values.pop("loss")
        nonfinite = loss_step.origins_of(totals[len(names) :], batch)
        result = LossValues(loss_sum, values, () if math.isfinite(loss_sum) else nonfinite, any_asked > 0)
        return LossResult(
            lambda: result, num_tokens=rank_batch.plan.num_tokens, num_supervised=rank_batch.plan.num_targets
        )

    def mix_reference(self, share: float) -> None:
        raise ValueError("a reference that follows the policy needs parallel.backend torch")

    def optim_step(self, step: OptimStep) -> OptimResult:
        norm = 0.0
        if self._has_gradients:
            optimizers.set_step(self._optimizer, step)
            self.engine.optimizer.clip_grad = step.max_grad_norm or 0.0
            self.engine.step()  # leaves a step out whose norm is not finite
            norm = float(self.engine.get_global_grad_norm())
            self._has_gradients = False
        scale = self._loss_scale if self.precision == "fp16" else None
        return OptimResult(lambda: norm, peak_memory_gib=peak_memory_gib(self.device), loss_scale=scale)

    @property
    def _loss_scale(self) -> float:
        return float(self.engine.optimizer.loss_scale) if self.precision == "fp16" else 1.0

    def save_state(self, path: Path) -> Future[SavedState]:
        """Each rank writes whole tensors of its share of the parameters."""
        num_steps = self.pieces.num_steps
        keys = (None, *MOMENTS) if num_steps else (None,)
        mine: dict[str, nn.Parameter] = {}
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for number, (name, parameter) in enumerate(self.parameters().items()):
            whole = [self.pieces.get(parameter, key) for key in keys]
            if self._owner(number) != self.group.rank:
                continue
            value, *averages = (tensor.detach().cpu() for tensor in whole)
            mine[name] = nn.Parameter(value, requires_grad=False)
            if num_steps:
                moments[mine[name]] = {"step": torch.tensor(num_steps), **dict(zip(MOMENTS, averages))}
        return state.save(path, mine, _stand_in(mine, moments), self.group)

    def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        """Each rank reads its share of the parameters whole, and gives the others their pieces."""
        parameters = self.parameters()
        _refuse_incomplete(path, list(parameters), with_optimizer)
        mine = {
            name: nn.Parameter(torch.empty(whole_shape(p), dtype=torch.float32), requires_grad=False)
            for number, (name, p) in enumerate(parameters.items())
            if self._owner(number) == self.group.rank
        }
        optimizer = _stand_in(mine, {})
        state.load(path, mine, optimizer if with_optimizer else None, self.group)
        if with_optimizer:
            steps = [float(moments["step"]) for moments in optimizer.state.values()]
            self.pieces.num_steps = max(max(part, default=0.0) for part in self.group.gather_objects(steps))
        for number, (name, parameter) in enumerate(parameters.items()):
            for key in (None, *MOMENTS) if with_optimizer else (None,):
                value = torch.zeros(whole_shape(parameter), device=self.device)
                if name in mine:
                    loaded = mine[name] if key is None else optimizer.state.get(mine[name], {}).get(key, value)
                    value.copy_(loaded.detach())
                if self.group.num_ranks > 1:
                    dist.broadcast(value, src=self._owner(number))
                self.pieces.set(parameter, value, key)
        self.pieces.spread(parameters.values())

    def read_weights(self, *, on_device: bool = False) -> dict[str, Tensor]:
        """The trained tensors as they are sampled with, whole, copied for rank 0. All ranks."""
        whole: dict[str, Tensor] = {}
        is_whole = all(p.requires_grad for p in self.policy.model.parameters())
        held = self.policy.model.state_dict(keep_vars=True) if is_whole else self.parameters()
        seen: set[int] = set()
        for name, value in held.items():
            if id(value) in seen:  # of tied tensors one is enough
                continue
            seen.add(id(value))
            with self.pieces.gathered([value]):
                full = self.pieces.get(value) if value.requires_grad else value
                if self.group.rank == 0:
                    dtype = DTYPES[self.precision] if value.requires_grad else value.dtype
                    whole[name] = state.copy_for_rank_0(full, dtype, on_device=on_device)
        return whole

    def export_weights(self, path: Path) -> None:
        """The trained weights as Hugging Face tools read them: the adapter under LoRA, otherwise the model."""
        whole: dict[str, Tensor] = {}
        copies: dict[int, Tensor] = {}
        for name, value in self.policy.model.state_dict(keep_vars=True).items():
            if id(value) not in copies:  # tied parameters stay one tensor: that is how the writer recognises them
                with self.pieces.gathered([value]):
                    full = self.pieces.get(value) if value.requires_grad else value
                    copies[id(value)] = full.detach().to("cpu", copy=True) if self.group.rank == 0 else torch.empty(0)
            whole[name] = copies[id(value)]
        if self.group.rank == 0:
            save_weights(self.policy.model, whole, path)
        self.group.barrier()

    @contextmanager
    def lend_model(self, *, stable: bool = False) -> Iterator[Any]:
        """The plain model, to generate with. All ranks, and all must make the same calls to it.

        `stable` changes nothing: DeepSpeed's weights keep their addresses.
        """
        causal = causal_lm(self.policy.model)
        generation, use_cache = causal.generation_config, causal.config.use_cache
        with self._evaluation(), self.policy.own_attention(), torch.compiler.set_stance("force_eager"):
            causal.config.use_cache = True
            try:
                yield self.policy.model
            finally:
                causal.generation_config, causal.config.use_cache = generation, use_cache

    def close(self) -> None:
        self.policy.stop_packing()
        self.engine.destroy()
        self.group.leave()

    @property
    def _splits_model(self) -> bool:
        return self.zero_stage == 3

    def _owner(self, number: int) -> int:
        """The rank that reads and writes a parameter."""
        return number % self.group.num_ranks

    def _start_engine(self, settings: dict[str, Any]) -> Any:
        if self._splits_model:
            dtype = DTYPES[self.precision]
            self._deepspeed.zero.Init(module=self.policy, config_dict_or_path=settings, dtype=dtype)
            self.policy.use_variable_length(self.device, dtype)
            for buffer in self.policy.buffers():
                buffer.data = buffer.data.to(self.device)
        engine, *_ = self._deepspeed.initialize(model=self.policy, optimizer=self._optimizer, config=settings)
        if engine.dp_world_size != self.group.num_ranks:
            raise ValueError(
                f"DeepSpeed shares rows over {engine.dp_world_size} of {self.group.num_ranks} ranks: remove "
                "what splits the model in other ways from parallel.deepspeed_config"
            )
        return engine

    def _cast(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Trained parameters in the dtype of the computation; returns the originals of those that were rounded.

        DeepSpeed makes its float32 copies from these, and training must start from the model's own values.
        """
        exact: dict[str, Tensor] = {}
        for name, parameter in self.parameters().items():
            if dtype is not None:
                before = parameter.data
                parameter.data = before.to(dtype)
                if not torch.equal(parameter.data.to(before.dtype), before):
                    exact[name] = before.cpu()
        return exact

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        self.policy.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.policy.train()

    def _rank_batch(self, batch: Sequence[Datum], loss: LossSpec) -> RankBatch:
        return self._batches.make(batch, loss, self.micro_batch_tokens)

    def _logprobs(self, rank_batch: RankBatch, *, facts: bool = False) -> list[TokenLogprobs]:
        """Of each micro-batch, without gradient."""
        with self._evaluation():
            outputs = (self.engine(m.packed, facts=facts) for m in rank_batch.micro_batches)
            return [loss_step.as_token_logprobs(output) for output in outputs]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("this backend was built without a reference: give it reference='adapter_off'")
        with self._reference.in_place():
            yield

    def _reference_logprobs(self, rank_batch: RankBatch) -> list[Tensor]:
        with self._as_reference():
            return [output.logprobs for output in self._logprobs(rank_batch)]

    def _backward(self, micro_batch: MicroBatch, loss: LossSpec) -> tuple[dict[str, Tensor], Tensor]:
        call, scale = functools.partial(self.engine, micro_batch.packed), self._loss_scale
        with torch.autograd.graph.save_on_cpu(self.device.type == "cuda") if self._offloads else nullcontext():
            # DeepSpeed divides by the number of ranks when it adds up their gradients, and losses are sums.
            total, metrics, logprobs = loss_step.compute_losses(micro_batch, loss, call, self.group.num_ranks * scale)
        self.engine.backward(total / scale)  # which multiplies by the scale again
        return metrics, logprobs


class ZeroPieces:
    """Whole tensors from the pieces that ZeRO keeps on each rank, and back: parameters in float32 and AdamW's moments.

    `optimizer` is the AdamW that DeepSpeed steps; it sees flat pieces, not parameters. All ranks call every method.
    """

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
        return max(float(moments["step"]) for moments in self._optimizer.state.values())

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


def _refuse_other_axes(group: ProcessGroup) -> None:
    for axis in ("tensor", "pipeline", "context"):
        if getattr(group.degrees, axis) > 1:
            raise ValueError(f"parallel.{axis} needs parallel.backend torch: DeepSpeed shares rows only here")


def _may_compile(wanted: bool | str, device: torch.device, stage: int) -> bool:
    if wanted is True and stage == 3:
        raise ValueError("model.compile does not go with ZeRO stage 3, which gathers inside layers: set it to false")
    return device.type == "cuda" and stage < 3 if wanted == "auto" else bool(wanted)


def _import_deepspeed(device: torch.device) -> Any:
    """The package, on this device, with the process group that exists already."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed: Any = importlib.import_module("deepspeed")  # an extra, and without types
    except ImportError as error:
        raise ValueError("parallel.backend deepspeed needs DeepSpeed: pip install 'lockstep[deepspeed]'") from error
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if accelerator != device.type:
        raise ValueError(
            f"DeepSpeed runs on {accelerator} in this process, but launch.device is {device.type}: choose one"
        )
    # Its own collectives on CPU are compiled at first use and wait without a deadline; gloo's do neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():  # one rank: DeepSpeed needs a process group even so
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def _process_groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _set_deadlines(groups: set[dist.ProcessGroup], timeout_s: float) -> None:
    """DeepSpeed's groups get torch's default deadline; there is no public way to pass ours (torch 2.13)."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _stand_in(parameters: Mapping[str, nn.Parameter], moments: Mapping[Tensor, dict[str, Tensor]]) -> torch.optim.AdamW:
    """Whole parameters and moments in the form that checkpoints are written from and read into."""
    optimizer = torch.optim.AdamW([*parameters.values(), nn.Parameter(torch.empty(0))])
    optimizer.state.update(moments)
    return optimizer


def _refuse_incomplete(path: Path, names: list[str], with_optimizer: bool) -> None:
    """Every rank checks all names, so that none waits for a rank whose part is incomplete."""
    stored = read_index(path)
    missing = [name for name in names if PARAMETER_PREFIX + name not in stored]
    if missing:
        raise ValueError(f"the checkpoint {path} lacks {len(missing)} tensors this model has, first {missing[0]!r}")
    if with_optimizer and not any(name.startswith("optimizer.") for name in stored):
        raise ValueError(f"the checkpoint {path} has no optimizer state: it was written before the first step")
