"""Layouts in bf16: parameters that are split over ranks have narrow copies too; a step is near that of float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from equivalence import layouts
from equivalence.plain import plain_run

from lockstep.backend.torch_backend import join_group
from lockstep.config import ParallelConfig

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2, "shard": 1},
    "ddp": {"replicate": 2, "shard": 1},
    "fsdp": {"shard": 2},
    "pipeline": {"pipeline": 2, "shard": 1},
    "context": {"context": 2, "shard": 1},
}


def take_part(parallel: ParallelConfig, family: str, lora: bool, out: Path) -> None:
    group = join_group("cpu", parallel, timeout_s=60)
    found = layouts.run_cell((family, lora, 96), group, parallel, {"precision": "bf16"})
    if group.rank == 0:
        torch.save(found, out)
    group.barrier()
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_in_bf16_make_about_the_step_of_one_in_float64(layout: str, lora: bool, tmp_path: Path) -> None:
    ranks.run_together(2, take_part, ParallelConfig(**LAYOUTS[layout]), "llama", lora, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    expected = plain_run("llama", lora=lora, batches=layouts.batches())
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
    assert found["norm"] == pytest.approx(expected["norm"], rel=0.05)
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        above = sum(float((found[kind][name].double() - t).square().sum()) for name, t in expected[kind].items())
        below = sum(float(t.square().sum()) for t in expected[kind].values())
        assert (above / below) ** 0.5 < 0.05, kind
