"""What a run needs to go on: trained parameters, optimizer state, and the random generator of every rank.

Written with torch's distributed checkpoint under the model's own parameter names, so that another layout
can read it. Must not know the run directory: it is given a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from lockstep.model.export import PARAMETER_PREFIX
from lockstep.parallel.group import Group

_MOMENTS = ("exp_avg", "exp_avg_sq")


def seed_rank(seed: int, rank: int) -> None:
    """Dropout differs between ranks, and is the same in every run of the same size."""
    torch.manual_seed((seed * 1_000_003 + rank) % 2**63)


def save(
    path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, group: Group
) -> Future[None]:
    """Copy now, write in a thread. On rank 0 the future ends when every rank's part is on disk. All ranks."""
    snapshot = {name: _to_host(value) for name, value in _collect(parameters, optimizer, group).items()}
    done: Future[None] = Future()

    def write() -> None:
        try:
            dcp.save(snapshot, checkpoint_id=path, process_group=group.background, no_dist=group.num_ranks == 1)
        except BaseException as error:  # torch's CheckpointException is no Exception, and would pass by who waits
            failure = RuntimeError("the checkpoint could not be written")
            failure.__cause__ = error
            done.set_exception(failure)
        else:
            done.set_result(None)

    threading.Thread(target=write, name="checkpoint-writer", daemon=True).start()
    return done


def load(
    path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, group: Group
) -> None:
    """Read in place. Each rank's random generator comes back if the run has the size it was saved with. All ranks."""
    if optimizer is not None:
        _prepare_moments(parameters, optimizer)
    wanted = _collect(parameters, optimizer, group)
    rng = {name: wanted.pop(name) for name in list(wanted) if name.startswith(("rng.", "rng_cuda."))}
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    if optimizer is not None:
        _forget_unused(parameters, optimizer, wanted, stored)
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise ValueError(f"the checkpoint {path} lacks {len(missing)} tensors this model has, first {missing[0]!r}")
    if optimizer is not None and f"rng.{group.num_ranks - 1}" in stored and f"rng.{group.num_ranks}" not in stored:
        wanted |= {name: value for name, value in rng.items() if name in stored}
    dcp.load(
        wanted,
        checkpoint_id=path,
        planner=DefaultLoadPlanner(),
        process_group=group.background,
        no_dist=group.num_ranks == 1,
    )
    _set_random_state(wanted, group)


def gather(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """Every tensor of the model's state dict, whole, on rank 0's CPU; other ranks get nothing. All ranks.

    Tied parameters are gathered once and stay one tensor, by which the writer knows that they are tied.
    """
    whole: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            gathered[id(value)] = full.detach().cpu() if group.rank == 0 else full.new_empty(0)
        if group.rank == 0:
            whole[name] = gathered[id(value)]
    return whole


def _collect(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, group: Group
) -> dict[str, Any]:
    tensors: dict[str, Any] = {PARAMETER_PREFIX + name: p.detach() for name, p in parameters.items()}
    if optimizer is not None:
        for name, p in parameters.items():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
    tensors[f"rng.{group.rank}"] = torch.get_rng_state()
    if group.device.type == "cuda":
        tensors[f"rng_cuda.{group.rank}"] = torch.cuda.get_rng_state(group.device)
    return tensors


def _prepare_moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Lay out what AdamW creates at its first step, so that there is something to read into."""
    fused = bool(optimizer.defaults.get("fused"))
    for p in parameters.values():
        step = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
        optimizer.state[p] = {"step": step} | {moment: torch.zeros_like(p) for moment in _MOMENTS}


def _forget_unused(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    wanted: dict[str, Any],
    stored: Mapping[str, Any],
) -> None:
    """A parameter that never had a gradient has no optimizer state, before and after a resume."""
    keys = {name: [f"optimizer.{name}.{key}" for key in optimizer.state[p]] for name, p in parameters.items()}
    unused = [name for name in keys if not any(key in stored for key in keys[name])]
    if len(unused) == len(parameters):
        return  # no state at all is not a model with unused parameters
    for name in unused:
        del optimizer.state[parameters[name]]
        for key in keys[name]:
            del wanted[key]


def _set_random_state(tensors: Mapping[str, Any], group: Group) -> None:
    if f"rng.{group.rank}" in tensors:
        torch.set_rng_state(tensors[f"rng.{group.rank}"])
    if f"rng_cuda.{group.rank}" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng_cuda.{group.rank}"], group.device)


def _to_host(value: Any) -> Any:
    """A copy that later steps cannot touch."""
    if isinstance(value, DTensor):
        local = value.to_local().detach().to("cpu", copy=True)
        # Not DTensor.from_local, which would move the copy back to the mesh's device.
        return DTensor(local, value._spec, requires_grad=False)
    return value.detach().to("cpu", copy=True)
