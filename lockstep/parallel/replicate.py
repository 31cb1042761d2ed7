"""Every rank holds the whole model; gradients are summed (DDP).

Must not know models, losses or data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicate(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Sums instead of DDP's average: losses are sums and their weights carry the normalisation."""
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, _sum_bucket)
    return wrapped


def _sum_bucket(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


@contextlib.contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let the module compute with copies of its trainable parameters in `dtype`.

    The parameters themselves stay wide (they are what the optimizer sees, and where gradients add up); the
    casts are part of the graph. Stays open until backward is done, because recomputation reads parameters too.
    """
    if dtype is None:
        yield
        return
    places = _places_of_parameters(module)
    copies: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for owner, name, parameter in places:
        if parameter.requires_grad and parameter.dtype != dtype:
            copy = copies.setdefault(id(parameter), parameter.to(dtype))
            originals.append((owner._parameters, name, parameter))
            owner._parameters[name] = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        for registry, name, parameter in originals:
            registry[name] = parameter


def _places_of_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every (module, name) at which a parameter hangs; a tied parameter hangs at several."""
    return [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
