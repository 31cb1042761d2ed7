"""Traffic between ranks, counted: bytes by mesh axis and kind of collective, and the time spent waiting.

Counted where Python hands tensors to a process group: our collectives, FSDP2's and DDP's (in our hook) pass there.
Bytes are those that this rank sends in a ring algorithm.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.parallel import AXES
from lockstep.parallel.group import ProcessGroup, peak_memory_gib
from lockstep.types import Metrics

Exchanged = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
# Methods of torch's ProcessGroup, in older and newer versions: (kind, index of the argument that holds all that is
# exchanged). Receiving sends nothing.
COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
}
STRAGGLER_RATIO = 1.2  # times the median rank's compute time
_NUM_FACTS = 3  # of each rank: seconds of computing, seconds of waiting, peak memory in GiB


def sent_share(kind: str, num_ranks: int) -> float:
    """Bytes that each rank of a ring sends for each byte exchanged; for one-sided kinds the mean over ranks."""
    if kind == "send":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (num_ranks - 1) / num_ranks


class Counts:
    """Of one step, on this rank."""

    def __init__(self) -> None:
        self.sent_bytes: dict[tuple[str, str], float] = defaultdict(float)
        """By (axis, kind)."""
        self.num_calls: dict[tuple[str, str], int] = defaultdict(int)
        self.wait_s = 0.0

    def as_metrics(self) -> Metrics:
        return {f"traffic/{axis}/{kind}": sent for (axis, kind), sent in sorted(self.sent_bytes.items()) if sent}


class Traffic:
    """Counts collectives while `counting`; `current` is the step in progress, which `end_step` closes.

    Waiting is measured on CPU, where a collective blocks the thread that needs it. On CUDA collectives run beside
    the computation: seconds are left out there.
    """

    def __init__(self, group: ProcessGroup, unseen: Collection[str] = ()) -> None:
        """`unseen`: axes whose collectives are in compiled code, which is not seen here. They are left out."""
        self._group, self._unseen = group, unseen
        self.current = Counts()
        self._axes = AxisNames(group)
        self._measures_time = group.num_ranks > 1 and group.device.type == "cpu"
        self._async_calls = AsyncCalls()
        self._counts = False
        self._thread, self._started_at, self._waited_before = 0, 0.0, 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Not nestable. Not collective."""
        if self._group.num_ranks == 1:
            yield
            return
        assert not self._counts, "counting is not nestable"
        self._counts, self._thread = True, threading.get_ident()
        self._started_at, self._waited_before = time.perf_counter(), self.current.wait_s
        try:
            with _watching(self):
                yield
        finally:
            self._counts = False

    def end_step(self) -> Counts:
        ended, self.current = self.current, Counts()
        return ended

    # --- between ranks ----------------------------------------------------------------------------------------------

    def facts(self) -> Tensor:
        """This rank's facts since `counting` began, and zeros for the others: the sum over ranks has all of them."""
        if self._group.num_ranks == 1:
            return torch.zeros(0, dtype=torch.float64, device=self._group.device)
        # DDP waits in C++, unseen here: from the last gradient to the last arrival.
        self.current.wait_s += self._async_calls.end()
        wait_s = self.current.wait_s - self._waited_before
        compute_s = max(time.perf_counter() - self._started_at - wait_s, 0.0)
        mine = (compute_s, wait_s) if self._measures_time else (0.0, 0.0)
        ranks = torch.zeros(self._group.num_ranks, _NUM_FACTS, dtype=torch.float64)
        ranks[self._group.rank] = torch.tensor([*mine, peak_memory_gib(self._group.device)])
        return ranks.flatten().to(self._group.device, non_blocking=True)  # does not wait for the device

    def read_facts(self, summed: Sequence[float]) -> Metrics:
        """Metrics from the summed `facts` of all ranks. The same on every rank."""
        if self._group.num_ranks == 1:
            return {}
        compute_s, wait_s, memory_gib = (list(summed[i::_NUM_FACTS]) for i in range(_NUM_FACTS))
        metrics = {"memory_gib_max": max(memory_gib)}
        if self._measures_time:
            metrics |= {"compute_s": statistics.median(compute_s), "wait_s": statistics.fmean(wait_s)}
            metrics |= self._compare_stages(compute_s)
        return metrics

    def _compare_stages(self, compute_s: Sequence[float]) -> Metrics:
        """Every rank's seconds by stage, and the slow rank: stages may differ, ranks of one stage should not."""
        metrics: Metrics = {}
        stage_size = self._group.num_ranks // self._group.degrees.pipeline  # stages are the outermost axis
        for stage, first in enumerate(range(0, len(compute_s), stage_size)):
            seconds = compute_s[first : first + stage_size]
            metrics |= {f"busy_s/{stage}/{first + index}": own for index, own in enumerate(seconds)}
            slow = find_straggler(seconds)
            if slow is not None and seconds[slow] > metrics.get("straggler_compute_s", 0.0):
                metrics |= {"straggler": first + slow, "straggler_compute_s": seconds[slow]}
        return metrics

    # --- called by the hooks ----------------------------------------------------------------------------------------

    def count_call(self, kind: str, exchanged: Exchanged, process_group: dist.ProcessGroup) -> None:
        axis = self._axes.of(kind, process_group)
        if axis is None or axis in self._unseen:
            return
        self.current.num_calls[axis, kind] += 1
        self.current.sent_bytes[axis, kind] += num_bytes(exchanged) * sent_share(kind, process_group.size())

    def count_async(self, work: dist.Work) -> None:
        if self._measures_time:
            self._async_calls.start(work)

    def count_wait(self, work: dist.Work, seconds: float) -> None:
        if self._measures_time and threading.get_ident() == self._thread:
            self._async_calls.forget(work)
            self.current.wait_s += seconds


class AxisNames:
    """Which mesh axis a call of a process group is of."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._by_name: dict[str, str | None] = {}

    def of(self, kind: str, process_group: dist.ProcessGroup) -> str | None:
        """None for groups whose traffic is not the step's."""
        name = process_group.group_name
        if name not in self._by_name:  # some groups are made when they are first used
            self._by_name = self._find()
        axis = self._by_name.get(name, "other")
        # torch has one group where all ranks of an axis divide the experts: what is traded there is theirs.
        degrees = self._group.degrees
        if kind == "all_to_all" and degrees.expert > 1 and axis == degrees.expert_axis:
            return "expert"
        return axis

    def _find(self) -> dict[str, str | None]:
        mesh, degrees, world = self._group.mesh, self._group.degrees, dist.group.WORLD
        assert mesh is not None
        assert world is not None
        large = [axis for axis in AXES if getattr(degrees, axis) > 1]
        names: dict[str, str | None] = {world.group_name: large[0] if len(large) == 1 else "world"}
        for axis in AXES:
            names[mesh.get_group(axis).group_name] = axis
        flat = [("shard", "shard_context")] if degrees.context > 1 else []
        if self._group.expert_mesh is not None:
            shared = f"expert_{degrees.expert_axis}"
            for axis in (shared, "expert"):
                names.setdefault(self._group.expert_mesh.get_group(axis).group_name, axis)
            flat += [("expert_shard", "expert_shard_context")] if degrees.context > 1 else []
        for axis, both in flat:
            with contextlib.suppress(KeyError, RuntimeError):  # not flattened, so not used
                size = degrees.shard // (degrees.expert if axis == "expert_shard" else 1)
                names[mesh.get_group(both).group_name] = both if size > 1 else "context"
        if self._group.background is not None:
            names[self._group.background.group_name] = None
        return names


def find_straggler(compute_s: Sequence[float]) -> int | None:
    """The rank that computes longest, if that is clearly longer than the median of the others."""
    if len(compute_s) < 2:
        return None
    slowest = max(range(len(compute_s)), key=compute_s.__getitem__)
    others = [seconds for rank, seconds in enumerate(compute_s) if rank != slowest]
    # The higher of the middle two, where there are two: one fast rank must not make another look slow.
    return slowest if compute_s[slowest] > STRAGGLER_RATIO * statistics.median_high(others) > 0 else None


class AsyncCalls:
    """Collectives that were started and that no Python code waits for."""

    def __init__(self) -> None:
        self._works: dict[int, dist.Work] = {}
        self._started_at = 0.0
        self._ended_at: dict[int, float] = {}

    def start(self, work: dist.Work) -> None:
        key, ended_at = id(work), self._ended_at
        self._works[key], self._started_at = work, time.perf_counter()
        work.get_future().add_done_callback(lambda _: ended_at.__setitem__(key, time.perf_counter()))

    def forget(self, work: dist.Work) -> None:
        self._works.pop(id(work), None)

    def end(self) -> float:
        """Seconds from the last start to the last end."""
        ends = [self._ended_at[key] for key in self._works if key in self._ended_at]
        waited = max(max(ends, default=0.0) - self._started_at, 0.0) if ends else 0.0
        self._works.clear()
        self._ended_at.clear()
        return waited


# --- hooks in torch, while counting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _watching(traffic: Traffic) -> Iterator[None]:
    """Wraps torch's own methods, which release the interpreter lock while they run.

    Not the dispatcher below them, where compiled code passes too: a kernel in Python holds the lock, and gloo's
    threads, which need it to free tensors, would never finish.
    """
    # From the classes' own dictionaries: what attribute access returns would not bind when put back.
    places: list[tuple[type, str]] = [
        (dist.ProcessGroup, name) for name in COLLECTIVES if name in vars(dist.ProcessGroup)
    ]
    own = {(owner, name): vars(owner)[name] for owner, name in (*places, (dist.Work, "wait"))}
    for owner, name in places:
        setattr(owner, name, _counted(traffic, getattr(owner, name), *COLLECTIVES[name]))
    dist.Work.wait = _timed(traffic, dist.Work.wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for (owner, name), method in own.items():
            setattr(owner, name, method)


def _counted(
    traffic: Traffic, method: Callable[..., dist.Work], kind: str, exchanged_at: int
) -> Callable[..., dist.Work]:
    def call(process_group: dist.ProcessGroup, *arguments: Any, **options: object) -> dist.Work:
        work = method(process_group, *arguments, **options)
        traffic.count_call(kind, arguments[exchanged_at], process_group)
        if kind == "all_reduce" and arguments[-1].asyncOp:
            traffic.count_async(work)
        return work

    return call


def _timed(traffic: Traffic, own_wait: Callable[..., bool]) -> Callable[..., bool]:
    def wait(work: dist.Work, *arguments: object, **options: object) -> bool:
        started = time.perf_counter()
        try:
            return own_wait(work, *arguments, **options)
        finally:
            traffic.count_wait(work, time.perf_counter() - started)

    return wait


def num_bytes(exchanged: Exchanged) -> int:
    if isinstance(exchanged, Tensor):
        return exchanged.nbytes
    return sum(num_bytes(part) for part in exchanged)
