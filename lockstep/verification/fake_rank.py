"""One process as any rank of any number: tensors without contents, a process group without others.

The code that runs inside is the real one. What it sends is written down (parallel/collectives.py), what it allocates is
counted, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers what C++ code sends with tensors that have no contents
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lockstep.config.parallel import Degrees
from lockstep.model.attention import forget_masks
from lockstep.parallel.collectives import Recorder
from lockstep.parallel.group import ProcessGroup, make_meshes

T = TypeVar("T")
CPU = torch.device("cpu")
_SMALL = 2**22  # entries: larger tensors have no contents, whatever they are made from
_KNOWN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class LoneGroup(ProcessGroup):
    """A rank without the others. `heard` are rank 0's objects, in order: rank 0 adds them, the others read them."""

    heard: list[Any] = field(default_factory=list)
    num_read: list[int] = field(default_factory=lambda: [0])

    def broadcast_object(self, value: T | None) -> T:
        if self.rank == 0:
            self.heard.append(value)
        number = self.num_read[0]
        assert number < len(self.heard), "rank 0 is simulated first: the others hear what it says"
        self.num_read[0] += 1
        heard: T = self.heard[number]
        return heard

    def gather_objects(self, value: T) -> list[T]:
        return [value] * self.num_ranks

    def barrier(self) -> None:
        pass


@dataclass
class FakeRank:
    """What runs inside of `fake_rank`, and what is known of it."""

    group: LoneGroup
    recorder: Recorder
    memory: Memory


@contextlib.contextmanager
def fake_rank(rank: int, degrees: Degrees, heard: list[Any] | None = None) -> Iterator[FakeRank]:
    """Until it ends, this process is that rank: tensors that are made have no contents, and calls to others return at
    once. Not inside of a real process group. `heard`: see `LoneGroup`."""
    memory, num_ranks = Memory(), degrees.num_ranks
    _forget_other_ranks()
    if num_ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        mesh, experts = make_meshes(CPU, degrees) if num_ranks > 1 else (None, None)
        said = [] if heard is None else heard
        group = LoneGroup(rank, num_ranks, CPU, degrees, mesh, expert_mesh=experts, heard=said)
        recorder = Recorder(group)
        with recorder.recording(), memory.counting(), _reading_lists(), _converting(), FakeTensors(memory):
            yield FakeRank(group, recorder, memory)
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()
        _forget_other_ranks()


def _forget_other_ranks() -> None:
    """torch takes two meshes of the same ranks for the same, and remembers what it did for one of them."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    forget_masks()


class FakeTensors(TorchDispatchMode):
    """Tensors have shapes and dtypes, and no contents, but for those that are made of known numbers: token ids,
    lengths and indices are small, and code decides by them."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        self._fake.__enter__()  # below this mode: what is not done here is done there
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for more often than all else together
        if not _KNOWN_TYPES.issuperset(types):
            return NotImplemented  # DTensors do their part first
        kwargs = kwargs or {}
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if _is_inference(tensors, fakes, kwargs, self._fake):
            return func(*args, **kwargs)
        if fakes and func in _READS:
            return _READS[func](*args)
        if not fakes and func.namespace != "c10d" and self._stays_small(func, tensors, args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func in _INDEXED:
            args = (args[0], _without_masks(args[1]), *args[2:])
        result = func(*args, **kwargs)
        self._memory.see(_tensors_in((result,)))
        return result

    def _stays_small(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        if not tensors:
            dtype = kwargs.get("dtype")
            if dtype is not None and dtype.is_floating_point:
                return False
        elif max(t.numel() for t in tensors) <= _SMALL**0.5:
            return True
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True  # no larger than what it is made from
        made = list(_tensors_in((result,)))
        is_new = not tensors and any(t.is_floating_point() for t in made)  # parameters, buffers to compute in
        return not is_new and all(t.numel() <= _SMALL for t in made)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Arguments and results of operators are tensors, or lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors_in(value)


def _is_inference(tensors: list[Tensor], fakes: list[FakeTensor], kwargs: Any, fake: FakeTensorMode) -> bool:
    """Of shapes, by torch itself: nothing of it is allocated."""
    if fakes:
        return any(t.fake_mode is not fake for t in fakes)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    return bool(tensors) and all(t.is_meta for t in tensors)


def _read_number(tensor: Tensor) -> float | int | bool:
    """What code reads from the device: losses and norms, which are finite."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@contextlib.contextmanager
def _reading_lists() -> Iterator[None]:
    """Many numbers at once: torch would read them one by one."""
    own = FakeTensor.tolist

    def read(tensor: Tensor) -> Any:
        result: object = _read_number(tensor)
        for size in reversed(tensor.shape):
            result = [result] * size
        return result

    FakeTensor.tolist = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensor.tolist = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Modules swap their parameters when they are moved, which torch forbids for tensors that it keeps references to,
    as to those without contents. They have nothing to be moved, but may change their dtype."""
    own = torch.utils.swap_tensors

    def swap(old: Tensor, new: Tensor) -> None:
        if old.dtype != new.dtype:
            old.data = new.data

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = own


_READS = {torch.ops.aten._local_scalar_dense.default: _read_number, torch.ops.aten.equal.default: lambda *_: True}
_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index.Tensor,
}


def _without_masks(indices: Any) -> list[Tensor | None]:
    """A mask that is known as indices: how many are chosen must be known."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with _disable_current_modes():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes of the tensors that are alive, by what `kind` was when they were made; `peak` is the largest sum so far.

    A step makes the same tensors as the one before it: which of them became gradients is known from there.
    """

    def __init__(self) -> None:
        self.kind = "weights"
        self.alive: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._peak_total = 0
        self._storages: dict[int, tuple[Any, int, str, int]] = {}
        """By address: reference, bytes, kind, number within the step."""
        self._num_made = 0
        self._gradients: set[int] = set()

    def start_step(self) -> None:
        """The peak is counted from here."""
        self.peak, self._peak_total, self._num_made = Counter(), 0, 0

    def name_gradients(self, gradients: Collection[Tensor]) -> None:
        """Those that are there after a backward pass."""
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        places = [self._storages.get(gradient.untyped_storage()._cdata) for gradient in gradients]
        self._gradients = {place[3] for place in places if place is not None and place[2] != "weights"}
        for place, gradient in zip(places, gradients, strict=True):
            if place is not None and place[2] not in ("weights", "gradients"):
                self._change(gradient.untyped_storage()._cdata, place[1], "gradients")

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        own = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> object:
            """FSDP2 empties and fills the storages of gathered parameters."""
            result = own(storage, size)
            if storage._cdata in self._storages:
                self._change(storage._cdata, size, "gathered parameters")
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            UntypedStorage.resize_ = own  # type: ignore[method-assign]

    def see(self, tensors: Iterable[object]) -> None:
        """Also called with what DTensors make past the mode: optimizer state."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, FakeTensor) and local.untyped_storage()._cdata not in self._storages:
                self._keep(local.untyped_storage())

    def _keep(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        self._num_made += 1
        kind = "gradients" if self._num_made in self._gradients and self.kind == "activations" else self.kind
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._storages[key] = (reference, storage.nbytes(), kind, self._num_made)
        self._add(kind, storage.nbytes())

    def _change(self, key: int, size: int, kind: str) -> None:
        reference, before, old_kind, number = self._storages[key]
        self._add(old_kind, -before)
        self._storages[key] = (reference, size, kind, number)
        self._add(kind, size)

    def _forget(self, key: int) -> None:
        _, size, kind, _ = self._storages.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self.alive[kind] += size
        self._total += size
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, self.alive.copy()
