"""A process group for several processes on one GPU: every tensor goes through host memory, over gloo.

NCCL refuses two ranks on one GPU, and gloo knows only some collectives for CUDA tensors. For tests: it is slow, and
each call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

NAME = "staged"


def register() -> None:
    """Idempotent. `dist.init_process_group(NAME)` then makes such groups, and so do meshes."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make_group, devices=["cpu", "cuda"])


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class StagedGroup(dist.ProcessGroup):
    """Torch 2.13 has other names for some methods than those before it; these have both."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo, self._rank, self._size = gloo, rank, size

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        options = _options(opts, dist.AllreduceOptions)
        for tensor in tensors:
            tensor.copy_(self._sum(tensor, options.reduceOp))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def _sum(self, tensor: Tensor, operation: Any) -> Tensor:
        """On the host. The average, which gloo has not, is computed from the sum."""
        averages = operation == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if averages else operation
        host = _on_host(tensor)
        self._gloo.allreduce([host], options).wait()
        return host / self._size if averages else host

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        options = _options(opts, dist.BroadcastOptions)
        for tensor in tensors:
            host, each = _on_host(tensor), dist.BroadcastOptions()
            each.rootRank = options.rootRank
            self._gloo.broadcast([host], each).wait()
            tensor.copy_(host)
        return _done(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            parts = self._gather(tensor)
            for place, part in zip(output, parts, strict=True):
                place.copy_(part)
        return _done(list(inputs))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        host = _on_host(tensor)
        parts = [torch.empty_like(host) for _ in range(self._size)]
        self._gloo.allgather([parts], [host]).wait()
        return parts

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(torch.stack(self._gather(tensor)).view(output.shape))
        return _done([output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        options = _options(opts, dist.ReduceScatterOptions)
        whole = self._sum(tensor, options.reduceOp)
        output.copy_(whole.reshape(self._size, -1)[self._rank].view(output.shape))
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.stack(list(parts)), opts)
        return _done(list(outputs))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        arrived = torch.empty(output.shape, dtype=output.dtype)
        send = getattr(self._gloo, "alltoall_base", None) or self._gloo.all_to_all_single
        send(arrived, _on_host(tensor), list(output_sizes), list(input_sizes)).wait()
        output.copy_(arrived)
        return _done([output])

    all_to_all_single = alltoall_base

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        host = _on_host(tensor)
        return _Transfer(self._gloo.send([host], to, tag), lambda: None, host)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Transfer(self._gloo.recv([host], source, tag), lambda: tensor.detach().copy_(host), host)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return _done([])


class _Transfer(dist.Work):
    """Between two processes: what was received is copied to the device by whoever waits."""

    def __init__(self, work: Any, finish: Callable[[], object], host: Tensor) -> None:
        super().__init__()
        self._work, self._finish, self._host = work, finish, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        self._finish()
        return True


def _on_host(tensor: Tensor) -> Tensor:
    """A copy of its own, contiguous."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _options(given: Any, kind: type) -> Any:
    return kind() if given is None else given


def _done(tensors: Sequence[Tensor]) -> dist.Work:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()  # other streams may read the result at once
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)
