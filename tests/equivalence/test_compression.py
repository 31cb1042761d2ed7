"""Compressed gradients are near the plain ones and not the same: the one setting that changes the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence.layouts import run_cells, spawn
from equivalence.test_layouts import reference

from lockstep.config import ParallelConfig

# How near: half precision of numbers of the gradient's size; PowerSGD sends the first steps whole.
NEAR = {"bf16": 1e-2, "fp16": 2e-3, "powersgd": 1e-10}


@pytest.mark.parametrize("compression", NEAR)
def test_compressed_gradients_are_near(compression: str, tmp_path: Path) -> None:
    cell = ("llama", False, 96)
    parallel = ParallelConfig(replicate=2, shard=1, compression=compression)
    spawn(2, run_cells, [cell], parallel, tmp_path / "found.pt")
    found, expected = torch.load(tmp_path / "found.pt", weights_only=False)[cell], reference("llama", False)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    distances = [
        float((found["gradients"][name] - exact).norm() / exact.norm()) for name, exact in expected["gradients"].items()
    ]
    assert max(distances) <= NEAR[compression]
    if compression != "powersgd":
        assert max(distances) > 1e-6, "nothing was compressed"
