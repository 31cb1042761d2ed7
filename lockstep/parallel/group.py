"""The processes of a run: rank, device and mesh of this one, and how all of them join, agree and leave.

With one process no torch process group is needed.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.config.parallel import AXES, ONE_RANK, Degrees

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """One rank's view of the processes of a run. `mesh` is None when there is one process."""

    rank: int
    num_ranks: int
    device: torch.device
    degrees: Degrees = ONE_RANK
    mesh: DeviceMesh | None = None
    background: dist.ProcessGroup | None = None
    """A separate gloo group for checkpoint writers, which run beside the training thread."""
    remote_ranks: tuple[int, ...] = ()
    """Those that do not see rank 0's files, as `host_files` found out. The same on every rank."""
    remote_leaders: tuple[int, ...] = ()
    """The first of them on each host."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks as in `mesh`, where experts are divided: with the axis `expert`."""

    def place(self, axis: str) -> int:
        """This rank's index along a mesh axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank computes; ranks of the other axes compute the same part."""
        return self.place("replicate") * self.degrees.shard + self.place("shard")

    @property
    def dropout_rank(self) -> int:
        """Its stream of dropout: another for ranks with other tokens or layers, the same for tensor ranks."""
        others = self.place("context") + self.degrees.context * self.place("pipeline")
        return self.data_rank + self.degrees.data * others

    @property
    def counts(self) -> bool:
        """Whether its results enter sums: tensor ranks have the same ones, and only the last stage has any."""
        return self.place("tensor") == 0 and self.place("pipeline") == self.degrees.pipeline - 1

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place. All ranks."""
        if self.num_ranks > 1:
            dist.all_reduce(values)
        return values

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's value, on every rank; what the others pass is not read. All ranks."""
        box: list[Any] = [value]
        if self.num_ranks > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks. All ranks."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def choose_device(wanted: str = "auto") -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("launch.device is cuda, but torch sees no CUDA device: use device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: there are {torch.cuda.device_count()}, so lower --procs"
        )
    return torch.device("cuda", local_rank)


def meet(device: torch.device, *, timeout_s: float = 600.0) -> ProcessGroup:
    """Meet the other processes (torchrun's environment), with a deadline on every later collective. They have no layout
    yet, and can agree on one: see `join`. All ranks."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if num_ranks == 1:
        return ProcessGroup(rank, 1, device)
    if not dist.is_initialized():
        started = time.monotonic()
        try:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            waited = time.monotonic() - started
            raise TimeoutError(
                f"rank {rank} waited {waited:.0f} s at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
                f"for all {num_ranks} ranks to join, and they did not: is every process started?"
            ) from error
    return ProcessGroup(rank, num_ranks, device)


def join(device: torch.device, degrees: Degrees, *, timeout_s: float = 600.0) -> ProcessGroup:
    """Meet the other processes, and take this one's place in the layout. All ranks."""
    group = meet(device, timeout_s=timeout_s)
    if group.num_ranks == 1:
        return group
    timeout = timedelta(seconds=timeout_s)
    mesh, expert_mesh = make_meshes(device, degrees)
    for part in (mesh, expert_mesh):
        for process_group in part.get_all_groups() if part is not None else ():
            # A mesh gives its groups torch's default deadline; there is no public way to pass ours (torch 2.13).
            dist.distributed_c10d._set_pg_timeout(timeout, process_group)
    background = dist.new_group(backend="gloo", timeout=timeout)
    return replace(group, degrees=degrees, mesh=mesh, background=background, expert_mesh=expert_mesh)


def make_meshes(device: torch.device, degrees: Degrees) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Of all axes, and of experts, where they are divided: the axis that they are divided along as two, `expert`, of
    neighbours that have all of them together, and `expert_shard` (or `expert_replicate`), of ranks with the same."""
    mesh = init_device_mesh(device.type, tuple(getattr(degrees, axis) for axis in AXES), mesh_dim_names=AXES)
    if degrees.expert == 1:
        return mesh, None
    axis = degrees.expert_axis
    sizes = (getattr(degrees, axis) // degrees.expert, degrees.expert)
    return mesh, mesh._unflatten(axis, sizes, (f"expert_{axis}", "expert"))


@dataclass(frozen=True)
class NcclSetup:
    """What NCCL finds on this host. `peers` are pairs of GPUs, and whether one reaches the other's memory."""

    version: tuple[int, ...]
    interfaces: tuple[str, ...]
    infiniband: tuple[str, ...]
    variables: Mapping[str, str]
    peers: Mapping[tuple[int, int], bool]

    def describe(self) -> str:
        """One line for people."""
        chosen = self.variables.get("NCCL_SOCKET_IFNAME")
        network = f"interface {chosen}" if chosen else f"interfaces {', '.join(self.interfaces) or 'none but loopback'}"
        network += f", InfiniBand {', '.join(self.infiniband)}" if self.infiniband else ", no InfiniBand"
        apart = [f"{a}-{b}" for (a, b), reached in self.peers.items() if not reached]
        memory = "" if not self.peers else ", GPUs reach each other's memory"
        if apart:
            memory = f", no peer access between GPUs {', '.join(apart)}"
        shown = " ".join(f"{name}={value}" for name, value in sorted(self.variables.items())) or "no NCCL_* variable"
        return f"NCCL {'.'.join(map(str, self.version))}: {network}{memory}; {shown}"


def find_nccl() -> NcclSetup:
    """On a host with CUDA."""
    devices = range(torch.cuda.device_count())
    infiniband = Path("/sys/class/infiniband")
    return NcclSetup(
        version=tuple(torch.cuda.nccl.version()),
        interfaces=tuple(name for _, name in socket.if_nameindex() if name != "lo"),
        infiniband=tuple(sorted(path.name for path in infiniband.iterdir())) if infiniband.is_dir() else (),
        variables={name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        peers={(a, b): torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a < b},
    )


def peak_memory_gib(device: torch.device) -> float:
    """Of this rank so far: allocated device memory on CUDA, otherwise the process's resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
