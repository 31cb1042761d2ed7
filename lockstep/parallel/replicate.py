"""Every rank holds the whole model; gradients are summed (DDP)."""

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.parallel.tensor import local


def replicate(
    module: nn.Module, device: torch.device, compression: str = "none", idle: Collection[str] = ()
) -> DistributedDataParallel:
    """Sums instead of DDP's average: losses are sums and their weights carry the normalisation.

    `compression` sends gradients in a narrower dtype or at a low rank (PowerSGD): cheaper, and not the same numbers.
    `idle`: names of parameters that may have no gradient; `finish_gradients` sums what they get.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, idle)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        init_sync=False,  # weights were distributed when the model was built
        gradient_as_bucket_view=True,
    )
    if compression == "none":
        wrapped.register_comm_hook(None, _sum_bucket)
    elif compression == "powersgd":
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, _sum_low_rank)
    else:
        wrapped.register_comm_hook(_NARROW[compression], _sum_narrow)
    return wrapped


def finish_gradients(wrapped: DistributedDataParallel) -> None:
    """After the last backward pass of a batch. All ranks.

    DDP sends gradients in buckets, and leaves out in silence those in which one is missing.
    """
    trained = {name: p for name, p in wrapped.module.named_parameters() if p.requires_grad}
    idle = [p for name, p in trained.items() if name in wrapped.parameters_to_ignore]
    if idle:
        found = torch.tensor([p.grad is not None for p in idle], dtype=torch.int32, device=idle[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        for parameter, has_gradient in zip(idle, found.tolist(), strict=True):
            if has_gradient:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
    missing = [name for name, p in trained.items() if p.grad is None and name not in wrapped.parameters_to_ignore]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters, such as {missing[0]}, took no part in computing this batch, and replicas then "
            "do not sum their gradients: set parallel.shard to the number of ranks, and parallel.replicate to 1"
        )


_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _sum_narrow(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    wide = bucket.buffer()
    narrow = wide.to(dtype)
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: wide.copy_(future.value()[0]))


def _sum_low_rank(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PowerSGD averages: times the number of ranks, that is the sum."""
    num_ranks = dist.get_world_size()
    return powerSGD_hook(state, bucket).then(lambda future: future.value().mul_(num_ranks))


def _sum_bucket(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class NarrowCopies:
    """Copies of a module's trainable parameters in a narrower dtype, for it to compute with.

    The parameters themselves stay wide: they are what the optimizer sees, and where gradients add up. The casts are
    part of the graph, one for each of `units` and one for the rest, so that a unit's gradients are wide (and can be
    sent to other ranks) as soon as its backward is done.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: list[list[Tensor]] | None = None
        self._units: list[dict[nn.Parameter, list[_Place]]] = []
        # A tied parameter hangs at several places, perhaps in several units, and is cast once.
        places: dict[nn.Parameter, list[_Place]] = {}
        for parameter, place in _places_of_parameters(module):
            if parameter.requires_grad and parameter.dtype != dtype:
                places.setdefault(parameter, []).append(place)
        for unit in (*units, module):
            mine = {parameter: places.pop(parameter) for parameter in unit.parameters() if parameter in places}
            if mine:
                self._units.append(mine)

    @contextlib.contextmanager
    def in_place(self, *, kept: bool = False) -> Iterator[None]:
        """Until backward is done, because recomputation reads parameters too.

        `kept`: at the same addresses every time, which CUDA graphs need, and without autograd.
        """
        try:
            fresh = self._keep() if kept else [_Narrowed.apply(self._dtype, *places) for places in self._units]
            for copies, places in zip(fresh, self._units, strict=True):
                for copy, homes in zip(copies, places.values(), strict=True):
                    for registry, name in homes:
                        registry[name] = copy
            yield
        finally:
            for places in self._units:
                for parameter, homes in places.items():
                    for registry, name in homes:
                        registry[name] = parameter

    @torch.no_grad()
    def _keep(self) -> list[list[Tensor]]:
        if self._kept is None:
            self._kept = [[torch.empty_like(wide, dtype=self._dtype) for wide in places] for places in self._units]
        for copies, places in zip(self._kept, self._units, strict=True):
            torch._foreach_copy_([local(copy) for copy in copies], [local(wide) for wide in places])
        return self._kept


class _Context(FunctionCtx):
    wide_dtype: torch.dtype


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, dtype: torch.dtype, *wide: Tensor) -> tuple[Tensor, ...]:
        ctx.wide_dtype = wide[0].dtype
        ctx.set_materialize_grads(False)  # a parameter that was not used has no gradient, not a gradient of zeros
        return tuple(_cast(wide, dtype))

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = iter(_cast([g for g in gradients if g is not None], ctx.wide_dtype))
        return (None, *(None if g is None else next(rest) for g in gradients))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All at once; of tensors that are split over ranks, this rank's parts."""
    cast = [
        torch.empty_like(t, dtype=dtype)
        if isinstance(t, DTensor)
        else torch.empty(t.shape, dtype=dtype, device=t.device)
        for t in tensors
    ]
    if cast:
        torch._foreach_copy_([local(t) for t in cast], [local(t) for t in tensors])
    return cast


_Place = tuple[dict[str, nn.Parameter | None], str]


def _places_of_parameters(module: nn.Module) -> list[tuple[nn.Parameter, _Place]]:
    """Every module registry and name that holds a parameter."""
    return [(p, (m._parameters, name)) for m in module.modules() for name, p in m._parameters.items() if p is not None]
