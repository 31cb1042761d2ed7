"""The tensors of a checkpoint: trained parameters, optimizer state, and the random generator of every rank.

Written under the model's own parameter names, whole or in pieces: another layout can read it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.backend.optimizers import prepare_state
from lockstep.backend.staging import StagingArea, copy_now
from lockstep.config.parallel import AXES
from lockstep.model.checkpoint_storage import rank_file, read_index, read_tensors, write_tensors
from lockstep.model.export import PARAMETER_PREFIX
from lockstep.parallel import host_files
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.tensor import local
from lockstep.types import SavedState


def seed_rank(seed: int, rank: int) -> None:
    """Dropout differs between ranks, and is the same in every run of the same size."""
    torch.manual_seed((seed * 1_000_003 + rank) % 2**63)


def save(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    group: ProcessGroup,
    numbers: Mapping[str, Tensor] | None = None,
    staging: StagingArea | None = None,
) -> Future[SavedState]:
    """Copy now, write in a thread. On rank 0 the future ends when every rank's part is on its disk. All ranks.

    `numbers` are the same on every rank. With `staging`, training goes on while tensors are copied.
    """
    started = time.perf_counter()
    everything = {**_collect(parameters, optimizer, group), **(numbers or {})}
    snapshot = copy_now(everything) if staging is None else staging.copy(everything)
    copy_s = time.perf_counter() - started
    done: Future[SavedState] = Future()

    def write() -> None:
        try:
            try:
                snapshot.wait()
                digests = write_tensors(
                    path,
                    snapshot.tensors,
                    group=group.background,
                    no_dist=group.num_ranks == 1,
                    one_file=bool(group.remote_ranks),
                )
            finally:
                snapshot.release()  # before those who wait for this one can begin the next
            host_files.collect(path, rank_file, group)
        except BaseException as error:  # torch's CheckpointException is no Exception: the waiting thread would miss it
            failure = RuntimeError(f"the checkpoint could not be written: {error}")
            failure.__cause__ = error
            done.set_exception(failure)
        else:
            kept_bytes = staging.num_bytes if staging is not None else 0
            done.set_result(SavedState(digests, copy_s, kept_bytes, snapshot.problem))

    threading.Thread(target=write, name="checkpoint-writer", daemon=True).start()
    return done


def expect_sizes(parameters: Mapping[str, nn.Parameter]) -> list[int]:
    """About the bytes of what `save` copies of this rank's parameters and of AdamW's state, before that exists."""
    values = [local(p).nbytes for p in parameters.values() if local(p).device.type == "cuda"]
    moments = [size for nbytes in values for size in (4, nbytes, nbytes)]
    return [*values, *moments]


def load(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    group: ProcessGroup,
    numbers: Mapping[str, Tensor] | None = None,
) -> set[str]:
    """Read in place; random generators only if the layout is the one they were saved with. All ranks.

    `numbers` are read if they were saved. Returns the names of what was read.
    """
    if optimizer is not None:
        for p in parameters.values():
            optimizer.state[p] = prepare_state(optimizer, p)
    wanted = _collect(parameters, optimizer, group)
    rng = {name: wanted.pop(name) for name in _random_names(group) if name in wanted}
    stored = read_index(path)
    if optimizer is not None:
        _forget_unused(parameters, optimizer, wanted, stored)
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise ValueError(f"the checkpoint {path} lacks {len(missing)} tensors this model has, first {missing[0]!r}")
    if optimizer is not None:
        wanted |= {name: value for name, value in {**rng, **(numbers or {})}.items() if name in stored}
    read_tensors(path, wanted, group=group.background, no_dist=group.num_ranks == 1)
    _set_random_state(wanted, group)
    return set(wanted)


Copy: TypeAlias = Callable[[Tensor, torch.dtype], Tensor]


def gather(
    model: nn.Module,
    group: ProcessGroup,
    dtypes: Mapping[str, torch.dtype] | None = None,
    copy: Copy = lambda tensor, dtype: tensor.detach().to(dtype).cpu(),
    *,
    trained_only: bool = False,
) -> dict[str, Tensor]:
    """Every tensor of the model's state dict, whole, on rank 0; other ranks get nothing. All ranks.

    `dtypes`: of those to be converted. `copy`: where to; the CPU, and no copy of what is there already. In the model's
    own order, also where rank 0 has some of its layers. Tied parameters are gathered once and stay one tensor: that is
    how the writer recognises them.
    """
    held = model.state_dict(keep_vars=True)
    mine = {name: tensor for name, tensor in held.items() if tensor.requires_grad or not trained_only}
    whole: dict[str, Tensor] = {}
    for name, home in _find_homes(model, mine, group).items():
        full = None
        if home.first_name == name:
            if group.place("pipeline") == home.place:
                full = mine[name].full_tensor() if isinstance(mine[name], DTensor) else mine[name]
            if home.place > 0:
                full = _pass_to_first_place(full, home, group)
        if group.rank == 0:
            if full is None:
                whole[name] = whole[home.first_name]
            else:
                whole[name] = copy(full, (dtypes or {}).get(name, full.dtype))
    return whole


def copy_for_rank_0(tensor: Tensor, dtype: torch.dtype, *, on_device: bool) -> Tensor:
    """A copy that training does not change: on the CPU, or on the tensor's own device while that has room."""
    tensor = tensor.detach()
    if on_device:
        with contextlib.suppress(torch.OutOfMemoryError):
            return tensor.to(dtype, copy=True)
    return tensor.to(dtype, copy=True) if tensor.device.type == "cpu" else tensor.to(dtype).cpu()


class _Home(NamedTuple):
    """Of one tensor: who on the pipeline axis sends it, its first name there, and its whole shape and dtype."""

    place: int
    first_name: str
    shape: torch.Size
    dtype: torch.dtype


def _find_homes(model: nn.Module, mine: Mapping[str, Tensor], group: ProcessGroup) -> dict[str, _Home]:
    """Where each tensor of the whole model is, in the model's own order. The same on every rank. All ranks."""
    place, first_names = group.place("pipeline"), dict[int, str]()
    homes = {
        name: _Home(place, first_names.setdefault(id(value), name), value.shape, value.dtype)
        for name, value in mine.items()
    }
    if group.degrees.pipeline == 1:
        return homes
    for part in group.gather_objects(homes):
        # A tied tensor is on the first and the last stage: the first sends it.
        homes |= {name: home for name, home in part.items() if name not in homes or home.place < homes[name].place}
    # Modules of other stages have placeholders, so that rank 0 knows the order of all.
    places = {name: number for number, (name, _) in enumerate(model.named_modules())}

    def place_of(name: str) -> int:
        while name not in places:
            name = name.rpartition(".")[0]
        return places[name]

    order = group.broadcast_object(sorted(homes, key=place_of) if group.rank == 0 else None)
    return {name: homes[name] for name in order}


def _pass_to_first_place(tensor: Tensor | None, home: _Home, group: ProcessGroup) -> Tensor | None:
    """From the rank at `home` to rank 0, where both have the same place on the other axes. All ranks."""
    assert group.mesh is not None
    axis = group.mesh.get_group("pipeline")
    if dist.get_global_rank(axis, 0) != 0:
        return tensor
    if tensor is not None:
        # From the device, also where parameters are offloaded: both sides must agree.
        dist.send(tensor.detach().to(group.device).contiguous(), group=axis, group_dst=0)
    elif group.rank == 0:
        tensor = torch.empty(home.shape, dtype=home.dtype, device=group.device)
        dist.recv(tensor, group=axis, group_src=home.place)
    return tensor


def _collect(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, group: ProcessGroup
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {PARAMETER_PREFIX + name: p.detach() for name, p in parameters.items()}
    if optimizer is not None:
        for name, p in parameters.items():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
    host, device = _random_names(group)
    tensors[host] = torch.get_rng_state()
    if group.device.type == "cuda":
        tensors[device] = torch.cuda.get_rng_state(group.device)
    return tensors


def _random_names(group: ProcessGroup) -> tuple[str, str]:
    """(host's, device's). With the layout in the name: the same rank of another one computes something else."""
    layout = "x".join(str(getattr(group.degrees, axis)) for axis in AXES)
    return f"rng.{layout}.{group.rank}", f"rng_cuda.{layout}.{group.rank}"


def _forget_unused(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    wanted: dict[str, Tensor],
    stored: Mapping[str, object],
) -> None:
    """A parameter that never had a gradient has no optimizer state, before and after a resume. None has before the
    first step."""
    keys = {name: [f"optimizer.{name}.{key}" for key in optimizer.state[p]] for name, p in parameters.items()}
    unused = [name for name in keys if not any(key in stored for key in keys[name])]
    if len(unused) == len(parameters) and any(name.startswith("optimizer.") for name in stored):
        return  # that is the state of another optimizer
    for name in unused:
        del optimizer.state[parameters[name]]
        for key in keys[name]:
            del wanted[key]


def _set_random_state(tensors: Mapping[str, Tensor], group: ProcessGroup) -> None:
    host, device = _random_names(group)
    if host in tensors:
        torch.set_rng_state(tensors[host])
    if device in tensors:
        torch.cuda.set_rng_state(tensors[device], group.device)
