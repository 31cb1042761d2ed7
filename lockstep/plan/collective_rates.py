"""Times collectives between processes of this machine: gloo between two on CPUs, NCCL between its GPUs."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from lockstep.parallel.traffic import sent_share

_NUM_BYTES = {"cpu": 2**24, "cuda": 2**28}  # of the whole tensor: as large as a layer's parameters
_TIMES = 5

# Newer versions of torch warn of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def measure_collectives(device: torch.device, *, timeout_s: float = 60.0) -> dict[str, float]:
    """Bytes that a rank sends in a second, by kind. Empty where there is one GPU, or the processes do not meet."""
    num_ranks = min(torch.cuda.device_count(), 8) if device.type == "cuda" else 2
    if num_ranks < 2:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, device.type, folder, timeout_s)
        ranks = multiprocessing.spawn(_rank, given, nprocs=num_ranks, join=False)
        deadline = time.monotonic() + timeout_s
        try:
            while not ranks.join(timeout=max(deadline - time.monotonic(), 0.1)):
                if time.monotonic() > deadline:
                    return {}
        except multiprocessing.ProcessRaisedException:  # no network between them, say: the rest is still known
            return {}
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
        return json.loads((Path(folder) / "rates.json").read_text(encoding="utf-8"))


def _rank(rank: int, num_ranks: int, kind: str, folder: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    whole = torch.zeros(_NUM_BYTES[kind] // 4 // num_ranks * num_ranks, device=device)
    rates = {name: _rate(name, call, whole, num_ranks) for name, call in _calls(whole, num_ranks).items()}
    if rank == 0:
        (Path(folder) / "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _calls(whole: torch.Tensor, num_ranks: int) -> dict[str, Callable[[], object]]:
    part = torch.zeros(len(whole) // num_ranks, device=whole.device)
    other = torch.empty_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _all_gather(whole, part),
        "reduce_scatter": lambda: _reduce_scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }


def _rate(name: str, call: Callable[[], object], whole: torch.Tensor, num_ranks: int) -> float:
    seconds = []
    for _ in range(_TIMES + 1):
        dist.barrier()
        started = time.perf_counter()
        call()
        if whole.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return whole.nbytes * sent_share(name, num_ranks) / statistics.median(seconds[1:])
