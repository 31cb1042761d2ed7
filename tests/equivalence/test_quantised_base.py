"""LoRA on a quantised base: the step of a plain model that has the dequantised weights, on every layout."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import Cell, batches, run_cell, run_cells, spawn
from equivalence.plain import make_model, plain_run
from equivalence.test_layouts import LAYOUTS, assert_same_step

from lockstep.model.quantised_layers import QuantisedLinear
from lockstep.parallel.group import ProcessGroup

ON_RANKS: list[Cell] = [("llama+nf4", True, 48), ("qwen3+fp8", True, 96)]
QUICK = ("fsdp-2",)
ALL = ("fsdp-2", "ddp-2", "grad-op-2", "offload-2", "hybrid-2x2", "context-2", "pipeline-2", "shard-2-pipeline-2")


@lru_cache
def reference(family: str) -> dict[str, Any]:
    return plain_run(family, lora=True, batches=batches())


# Odd sizes (32 and 48 columns, no whole blocks), fused matrices, biases, matrices stored the other way around.
@pytest.mark.parametrize("family", ["llama+nf4", "phi3+nf4", "llama-biased+fp8", "gpt2+nf4"])
@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"activation_checkpointing": "selective"}, marks=pytest.mark.slow)],
    ids=["plain", "selective"],
)
def test_a_quantised_base_makes_the_step_of_its_dequantised_weights(family: str, settings: dict[str, Any]) -> None:
    found = run_cell((family, True, 64), ProcessGroup(0, 1, torch.device("cpu")), settings=settings)
    assert_same_step(found, reference(family))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL]
)
def test_a_layout_makes_the_same_step_on_a_quantised_base(layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    spawn(num_ranks, run_cells, ON_RANKS, parallel, tmp_path / "found.pt")
    for cell, found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, reference(cell[0]))


def test_only_the_base_is_quantised() -> None:
    model = make_model("llama+nf4", lora=True)
    held = {name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(held) == 2 * 7
    assert not any("lm_head" in name or "lora_" in name for name in held)
    assert all(not p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
