"""The same work through TorchBackend, on real gloo processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ranks
import torch
from equivalence.plain import STEP, make_batch, make_model, scale_of
from torch.distributed.tensor import DTensor

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Datum, LossSpec

BUDGETS = (48, 96, 512)  # several micro-batches a rank; about one; everything at once
Cell = tuple[str, bool, int]  # family, LoRA, budget


def batches() -> list[list[Datum]]:
    return [make_batch(0), make_batch(1, rows=5)]


def run_cell(
    cell: Cell, group: ProcessGroup, parallel: ParallelConfig | None = None, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `plain_run` returns, from the backend; `settings` are more of its arguments. All ranks."""
    family, lora, budget = cell
    settings = {"micro_batch_tokens": budget, "precision": "fp64", "parallel": parallel, **(settings or {})}
    backend = TorchBackend(make_model(family, lora=lora), group=group, **settings)
    first, second = batches()
    found: dict[str, Any] = {"logprobs": backend.forward(first), "slow": backend.slow}
    found["loss"] = backend.forward_backward(first, LossSpec(scale=scale_of(first))).loss
    found["gradients"] = everywhere({name: whole(p.grad) for name, p in backend.parameters().items()}, group)
    found["norm"] = backend.optim_step(STEP).grad_norm
    backend.forward(second)  # an evaluation between steps must not disturb them
    backend.forward_backward(second, LossSpec(scale=scale_of(second)))
    backend.optim_step(STEP)
    found["weights"] = everywhere({name: whole(p.detach()) for name, p in backend.parameters().items()}, group)
    return found


def everywhere(tensors: dict[str, torch.Tensor], group: ProcessGroup) -> dict[str, torch.Tensor]:
    """What all ranks have between them: stages have different parameters, and what several have must be the same."""
    found: dict[str, torch.Tensor] = {}
    for part in group.gather_objects(tensors):
        for name, tensor in part.items():
            assert name not in found or torch.equal(found[name], tensor), f"ranks disagree about {name}"
            found.setdefault(name, tensor)
    return found


def run_small_batch(parallel: ParallelConfig, out: Path) -> None:
    """One row for several ranks, as at the end of an epoch: those without a row run along and add nothing."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    backend = TorchBackend(make_model("qwen3", lora=False), micro_batch_tokens=64, precision="fp64", group=group)
    batch = make_batch(2, rows=1)
    logprobs = backend.forward(batch)
    result = backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    gradients = {name: whole(p.grad) for name, p in backend.parameters().items()}
    if group.rank == 0:
        torch.save({"loss": result.loss, "logprobs": logprobs, "gradients": gradients}, out)
    group.leave()


def run_cells(
    cells: Sequence[Cell], parallel: ParallelConfig, out: Path, settings: Mapping[str, Any] | None = None
) -> None:
    """The body of each process: all cells of one layout; rank 0 writes what it found."""
    torch.set_num_threads(1)
    group = join_group("cpu", parallel, timeout_s=60)
    found = {cell: run_cell(cell, group, parallel, settings) for cell in cells}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


def spawn(num_ranks: int, body: Callable[..., None], *arguments: Any) -> None:
    """Run `body(*arguments)` in each of `num_ranks` real processes that can meet, forked from the server of `ranks`."""
    places = (num_ranks, ranks.free_port(), body, arguments)
    torch.multiprocessing.start_processes(_enter, places, nprocs=num_ranks, start_method="forkserver")


def _enter(rank: int, num_ranks: int, port: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    body(*arguments)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
