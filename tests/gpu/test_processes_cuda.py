"""Two processes on one GPU: the layouts' own code with CUDA tensors, streams and bf16, for want of several GPUs.

Against one rank on a CPU, in float64; and in bf16 as near to it as bf16 is. What goes between ranks takes the way over
the host, see staged_group.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from equivalence import layouts
from equivalence.plain import plain_run
from gpu import staged_group

from lockstep.backend.torch_backend import join_group
from lockstep.config import ParallelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

DEVICE = "cuda"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"replicate": 2, "shard": 1},
    "fsdp": {"shard": 2},
    "tensor": {"tensor": 2, "shard": 1},
    "pipeline": {"pipeline": 2, "shard": 1},
    "context": {"context": 2, "shard": 1},
}
PRECISIONS = ("fp64", "bf16")


def take_part(device: str, parallel: ParallelConfig, out: Path) -> None:
    os.environ["LOCAL_RANK"] = "0"  # both have the first GPU
    staged_group.register()
    dist.init_process_group(staged_group.NAME)
    group = join_group(device, parallel, timeout_s=60)
    found = {
        name: layouts.run_cell(("llama", False, 96), group, parallel, {"compile": False, "precision": name})
        for name in PRECISIONS
    }
    if group.rank == 0:
        torch.save(found, out)
    group.barrier()
    group.leave()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_on_one_gpu_make_the_step_of_one_rank(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run_together(2, take_part, DEVICE, ParallelConfig(**LAYOUTS[layout]), tmp_path / "found.pt")
    every = torch.load(tmp_path / "found.pt", map_location="cpu")
    expected = plain_run("llama", lora=False, batches=layouts.batches())
    for name, found in every.items():
        exact = name == "fp64"
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9 if exact else 0.02)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-8 if exact else 0.05)
        distances = {kind: distance(found[kind], expected[kind]) for kind in ("gradients", "weights")}
        with capsys.disabled():
            print(f"\n{layout}, {name}: gradients {distances['gradients']:.1e}, weights {distances['weights']:.1e} off")
        assert max(distances.values()) < (1e-8 if exact else 0.05), name


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    above = sum(float((found[name].double() - t).square().sum()) for name, t in expected.items())
    return (above / sum(float(t.square().sum()) for t in expected.values())) ** 0.5
