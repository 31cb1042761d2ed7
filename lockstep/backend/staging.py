"""Host memory that the checkpoints of a GPU run are copied to while its next step is computed.

Copies run on a stream of their own. Whatever changes what is being copied calls `StagingArea.before_change` first: the
device then waits, not the host. The memory is pinned, and kept from one checkpoint to the next.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.parallel.tensor import local

_BLOCK_BYTES = 256 << 20
_ALIGNED_BYTES = 64
_TOUCH_THREADS = 4
_HOST_SHARE = 4  # at most a fourth of the host's free memory is kept


@dataclass(frozen=True)
class Snapshot:
    """Tensors as they were, on the host, from `wait` on. `release` when they have been read.

    `problem`: why they were copied while training stood still, where that was not meant to be.
    """

    tensors: Mapping[str, Tensor]
    wait: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    problem: str = ""


class StagingArea:
    """One checkpoint at a time: while another is still being written, and where the host lacks the memory, tensors are
    copied as they are, and training waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._blocks = PinnedBlocks()
        self._pinning: threading.Thread | None = None
        self._in_use = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._blocks.num_bytes

    def reserve(self, expect_sizes: Callable[[], Sequence[int]]) -> None:
        """Once: pin memory for tensors of about these bytes, in a thread, as it takes seconds for some gigabytes."""
        if self._pinning is None:
            self._pinning = threading.Thread(target=self._reserve, args=(expect_sizes(),), daemon=True)
            self._pinning.start()

    def _reserve(self, sizes: Sequence[int]) -> None:
        if self._in_use.acquire(blocking=False):  # otherwise a checkpoint has come first, and has its memory
            try:
                self._divide(sizes)
            finally:
                self._in_use.release()

    def copy(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Tensors of the device are copied while it goes on; those of the host are copied when this returns."""
        if self._pinning is not None:
            self._pinning.join()
        if not self._in_use.acquire(blocking=False):
            return copy_now(tensors, "the one before it was still being written")
        try:
            parts = self._divide([local(t).nbytes for t in tensors.values() if local(t).device.type == "cuda"])
            if parts is not None:
                return self._copy_aside(tensors, parts)
        except BaseException:
            self._in_use.release()  # nobody else will
            raise
        self._in_use.release()
        return copy_now(tensors, "this host lacks the memory to copy it to while training goes on")

    def _copy_aside(self, tensors: Mapping[str, Tensor], parts: Sequence[Tensor]) -> Snapshot:
        spaces = iter(parts)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies: dict[str, Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name, value in tensors.items():
                source = local(value).detach()
                if source.device.type == "cuda":
                    target = next(spaces).view(source.dtype).view(source.shape)
                    copies[name] = like(value, target.copy_(source, non_blocking=True))
                else:
                    copies[name] = like(value, source.clone())
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(self._stream)
        # Their memory must not be given to others before it is copied.
        kept, copied = list(tensors.values()), self._copied

        def wait() -> None:
            copied.synchronize()
            kept.clear()

        return Snapshot(copies, wait, self._in_use.release)

    def before_change(self) -> None:
        """Later work of this device waits for the copies. The host does not."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _divide(self, sizes: Sequence[int]) -> list[Tensor] | None:
        """Pinned memory for each; None where there is not enough of it."""
        if (parts := self._blocks.divide(sizes)) is not None:
            return parts
        wanted = sum(plan_blocks(sizes)) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if wanted > free_host_bytes() // _HOST_SHARE:
            return None
        torch.cuda.set_device(self._device)  # of this thread
        self._blocks.free()  # before more is taken
        try:
            for size in plan_blocks(sizes):
                self._blocks.add(pin_block(size))
        except RuntimeError:  # the system does not pin as much
            self._blocks.free()
            return None
        return self._blocks.divide(sizes)


def pin_block(size: int) -> Tensor:
    """The driver, which lets no other call in meanwhile, pins memory that is there: to get it first takes seconds.

    Whole pages that are nobody else's; `PinnedBlocks` gives them back.
    """
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    touch_pages(block)
    if problem := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0)):
        raise RuntimeError(f"memory was not pinned: CUDA error {problem}")
    return block


def touch_pages(block: Tensor) -> None:
    """Writes to every page, in several threads: the system clears each when it is first written to."""
    with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
        for _ in pool.map(Tensor.zero_, block.chunk(_TOUCH_THREADS)):
            pass


class PinnedBlocks:
    """Pieces of memory, of powers of two: few, since to pin one more takes the driver some time."""

    def __init__(self, blocks: Sequence[Tensor] = ()) -> None:
        self._blocks = list(blocks)

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def add(self, block: Tensor) -> None:
        self._blocks.append(block)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # an interpreter that ends has taken torch away
            self.free()

    def free(self) -> None:
        for block in self._blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._blocks.clear()

    def divide(self, sizes: Sequence[int]) -> list[Tensor] | None:
        """A part of the memory for each size, in their order; None if they do not fit."""
        parts: list[Tensor] = []
        number, used = 0, 0
        for size in sizes:
            while number < len(self._blocks) and used + size > self._blocks[number].nbytes:
                number, used = number + 1, 0
            if number == len(self._blocks):
                return None
            parts.append(self._blocks[number][used : used + size])
            used += _aligned(size)
        return parts


def plan_blocks(sizes: Sequence[int]) -> list[int]:
    """Bytes of blocks that hold tensors of these sizes one after the other, in this order."""
    smallest = min(_BLOCK_BYTES, _power_of_two(sum(map(_aligned, sizes))))
    blocks: list[int] = []
    room = 0
    for size in map(_aligned, sizes):
        if size > room or not blocks:
            room = max(smallest, _power_of_two(size))
            blocks.append(room)
        room -= size
    return blocks


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()


def copy_now(tensors: Mapping[str, Tensor], problem: str = "") -> Snapshot:
    """Copies that later steps cannot touch."""
    copies = {name: like(t, local(t).detach().to("cpu", copy=True)) for name, t in tensors.items()}
    return Snapshot(copies, problem=problem)


def like(tensor: Tensor, copy: Tensor) -> Tensor:
    """This rank's copy as the tensor that it is a part of."""
    # Not DTensor.from_local, which would move the copy back to the mesh's device.
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def free_host_bytes() -> int:
    """What may still be taken, also where the process is in a container with a limit of its own."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        entries = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(entries["MemAvailable"].split()[0]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):  # another system, or no limit
        pass
    return max(free, 0)
