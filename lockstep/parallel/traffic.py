"""What ranks send each other, counted: bytes by mesh axis and kind of collective, and the time spent waiting.

Counted where Python hands tensors to a process group: there our collectives, FSDP2's and DDP's (in our hook) pass. A
byte is one that this rank sends when the ranks of a group stand in a ring. Must not know models or what is sent.
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

# A process group's methods, of older and newer torch: what they are, and the argument that holds the whole of what is
# exchanged. Receiving sends nothing.
_METHODS = {
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
STRAGGLES = 1.2  # times the median rank's compute time
_FACTS = 3  # that each rank tells the others: seconds of computing, seconds of waiting, GiB at the peak


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
    """Counts what passes while `counting`; `current` is the open step, which `end_step` closes.

    Waiting is measured on CPU, where a collective blocks the thread that needs it. On CUDA collectives run beside
    the computation and nobody blocks: seconds are left out there.
    """

    def __init__(self, group: ProcessGroup, unseen: Collection[str] = ()) -> None:
        """`unseen`: axes whose collectives are in compiled code, which does not pass here. They are left out."""
        self._group, self._unseen = group, unseen
        self.current = Counts()
        self._axes: dict[str, str | None] = {}
        self._measures_time = group.num_ranks > 1 and group.device.type == "cpu"
        self._flights = _Flights()
        self._counts = False
        self._thread, self._started_at, self._waited_before = 0, 0.0, 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Not to be nested. All ranks may, none must."""
        if self._group.num_ranks == 1:
            yield
            return
        assert not self._counts, "this is counted already"
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
        """This rank's facts since `counting` began, and zero in the places of others: their sum has everybody's."""
        if self._group.num_ranks == 1:
            return torch.zeros(0, dtype=torch.float64, device=self._group.device)
        # DDP has waited for what it sent, out of our sight: from the last gradient to the last arrival.
        self.current.wait_s += self._flights.land()
        wait_s = self.current.wait_s - self._waited_before
        compute_s = max(time.perf_counter() - self._started_at - wait_s, 0.0)
        mine = (compute_s, wait_s) if self._measures_time else (0.0, 0.0)
        ranks = torch.zeros(self._group.num_ranks, _FACTS, dtype=torch.float64)
        ranks[self._group.rank] = torch.tensor([*mine, peak_memory_gib(self._group.device)])
        return ranks.flatten().to(self._group.device, non_blocking=True)  # nobody waits for the device

    def read_facts(self, summed: Sequence[float]) -> Metrics:
        """What `facts` of all ranks say. The same on every rank."""
        if self._group.num_ranks == 1:
            return {}
        compute_s, wait_s, memory_gib = (list(summed[i::_FACTS]) for i in range(_FACTS))
        found = {"memory_gib_max": max(memory_gib)}
        if self._measures_time:
            found |= {"compute_s": statistics.median(compute_s), "wait_s": statistics.fmean(wait_s)}
            found |= self._compare_stages(compute_s)
        return found

    def _compare_stages(self, compute_s: Sequence[float]) -> Metrics:
        """Every rank's seconds by stage, and the slow rank: stages differ by what they are, ranks of one should not."""
        found: Metrics = {}
        stage_size = self._group.num_ranks // self._group.degrees.pipeline  # stages are the outermost axis
        for stage, first in enumerate(range(0, len(compute_s), stage_size)):
            seconds = compute_s[first : first + stage_size]
            found |= {f"busy_s/{stage}/{first + place}": mine for place, mine in enumerate(seconds)}
            slow = find_straggler(seconds)
            if slow is not None and seconds[slow] > found.get("straggler_compute_s", 0.0):
                found |= {"straggler": first + slow, "straggler_compute_s": seconds[slow]}
        return found

    # --- called by the hooks ----------------------------------------------------------------------------------------

    def note(self, kind: str, exchanged: Any, process_group: dist.ProcessGroup) -> None:
        name = process_group.group_name
        if name not in self._axes:
            self._axes = self._name_axes()
        axis = self._axes.get(name, "other")
        if axis is None or axis in self._unseen:
            return
        place = (axis, kind)
        self.current.num_calls[place] += 1
        self.current.sent_bytes[place] += _num_bytes(exchanged) * sent_share(kind, process_group.size())

    def note_flight(self, work: Any) -> None:
        if self._measures_time:
            self._flights.start(work)

    def note_wait(self, work: Any, seconds: float) -> None:
        if self._measures_time and threading.get_ident() == self._thread:
            self._flights.forget(work)
            self.current.wait_s += seconds

    def _name_axes(self) -> dict[str, str | None]:
        """Group name -> axis; None for groups whose traffic is not the step's."""
        mesh, degrees, world = self._group.mesh, self._group.degrees, dist.group.WORLD
        assert mesh is not None
        assert world is not None
        large = [axis for axis in AXES if getattr(degrees, axis) > 1]
        found: dict[str, str | None] = {world.group_name: large[0] if len(large) == 1 else "world"}
        for axis in AXES:
            found[mesh.get_group(axis).group_name] = axis
        if degrees.context > 1:
            with contextlib.suppress(KeyError, RuntimeError):  # not flattened, so nobody uses it
                both = "shard_context" if degrees.shard > 1 else "context"
                found[mesh["shard_context"].get_group().group_name] = both
        if self._group.background is not None:
            found[self._group.background.group_name] = None
        return found


def find_straggler(compute_s: Sequence[float]) -> int | None:
    """The rank that computes longest, if that is clearly longer than the median of the others."""
    if len(compute_s) < 2:
        return None
    slowest = max(range(len(compute_s)), key=compute_s.__getitem__)
    others = [seconds for rank, seconds in enumerate(compute_s) if rank != slowest]
    # The higher of the middle two, where there are two: one fast rank makes nobody slow.
    return slowest if compute_s[slowest] > STRAGGLES * statistics.median_high(others) > 0 else None


class _Flights:
    """Collectives that were started and that nobody in Python waits for."""

    def __init__(self) -> None:
        self._works: dict[int, Any] = {}
        self._started_at = 0.0
        self._landed_at: dict[int, float] = {}

    def start(self, work: Any) -> None:
        key, landed_at = id(work), self._landed_at
        self._works[key], self._started_at = work, time.perf_counter()
        work.get_future().add_done_callback(lambda _: landed_at.__setitem__(key, time.perf_counter()))

    def forget(self, work: Any) -> None:
        self._works.pop(id(work), None)

    def land(self) -> float:
        """Seconds from the last start to the last landing."""
        landings = [self._landed_at[key] for key in self._works if key in self._landed_at]
        waited = max(max(landings, default=0.0) - self._started_at, 0.0) if landings else 0.0
        self._works.clear()
        self._landed_at.clear()
        return waited


# --- hooks in torch, while somebody counts ---------------------------------------------------------------------------


@contextlib.contextmanager
def _watching(traffic: Traffic) -> Iterator[None]:
    """Torch's own methods stay what does the work: they know how to let go of the interpreter while they do.

    Not the dispatcher below them, where compiled code passes too: a kernel in Python holds on to the interpreter, and
    gloo's threads, which need it to free tensors, then never finish.
    """
    # From the classes' own dictionaries: what attribute access gives no longer binds when it is put back.
    places: list[tuple[Any, str]] = [(dist.ProcessGroup, name) for name in _METHODS if name in vars(dist.ProcessGroup)]
    own = {(owner, name): vars(owner)[name] for owner, name in (*places, (dist.Work, "wait"))}
    for owner, name in places:
        setattr(owner, name, _counted(traffic, getattr(owner, name), *_METHODS[name]))
    dist.Work.wait = _timed(traffic, dist.Work.wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for (owner, name), method in own.items():
            setattr(owner, name, method)


def _counted(traffic: Traffic, method: Callable[..., Any], kind: str, exchanged_at: int) -> Callable[..., Any]:
    def call(process_group: Any, *given: Any, **options: Any) -> Any:
        work = method(process_group, *given, **options)
        traffic.note(kind, given[exchanged_at], process_group)
        if kind == "all_reduce" and given[-1].asyncOp:
            traffic.note_flight(work)
        return work

    return call


def _timed(traffic: Traffic, own_wait: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return own_wait(work, *arguments, **options)
        finally:
            traffic.note_wait(work, time.perf_counter() - started)

    return wait


def _num_bytes(exchanged: Any) -> int:
    if isinstance(exchanged, Tensor):
        return exchanged.nbytes
    return sum(_num_bytes(part) for part in exchanged)
