"""Schedules with several stages on each rank, on models with enough layers: the plain step, to 1e-10 in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.layouts import spawn
from equivalence.mixtures import Float64, build_mixture
from equivalence.plain import make_batch
from equivalence.test_expert_parallel import make_backend, plain, take_step
from equivalence.test_mixtures import assert_same_step

from lockstep.backend.torch_backend import join_group
from lockstep.config import ConfigError, ParallelConfig

CELLS = [("mixtral", False), ("qwen3_moe", True)]
LAYOUTS = {
    "interleaved": (2, ParallelConfig(pipeline=2, schedule="interleaved")),
    "zero_bubble": (2, ParallelConfig(pipeline=2, schedule="zero_bubble")),
    "zero_bubble-tensor-2": (4, ParallelConfig(tensor=2, pipeline=2, schedule="zero_bubble")),
    "interleaved-expert-2": (4, ParallelConfig(shard=2, expert=2, pipeline=2, schedule="interleaved")),
}


def build(family: str, lora: bool) -> Any:
    return build_mixture(family, lora=lora, changes={"num_hidden_layers": 4})


def _run(layout: str, out: Path) -> None:
    torch.set_num_threads(1)
    parallel = LAYOUTS[layout][1]
    group = join_group("cpu", parallel, timeout_s=60)
    with Float64():
        found = {cell: take_step(make_backend(build(*cell), group, parallel), make_batch()) for cell in CELLS}
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_schedule_makes_the_plain_step(layout: str, tmp_path: Path) -> None:
    spawn(LAYOUTS[layout][0], _run, layout, tmp_path / "found.pt")
    for (family, lora), found in torch.load(tmp_path / "found.pt", weights_only=False).items():
        assert_same_step(found, plain(lambda family=family, lora=lora: build(family, lora), make_batch()))


@pytest.mark.parametrize("others", [{"shard": 2}, {"shard": 1, "replicate": 2}, {"shard": 1, "context": 2}])
def test_gradients_of_weights_apart_do_not_go_with_sharding(others: dict[str, int]) -> None:
    """FSDP2 does not see gradients that are computed for weights alone: they would be lost."""
    with pytest.raises(ConfigError, match="zero_bubble does not go with shard, context or replicate"):
        ParallelConfig(pipeline=2, schedule="zero_bubble", **others).degrees(4)


def test_gradients_of_weights_apart_do_not_go_with_narrow_copies() -> None:
    """torch takes a stage's parameters to be leaves: with copies it would give them the gradients of others."""
    chosen = ParallelConfig(pipeline=2, shard=1, schedule="zero_bubble")
    with pytest.raises(ConfigError, match=r"zero_bubble does not go with bf16: .* use interleaved"):
        chosen.check_precision("bf16")
    chosen.check_precision("fp32")
    ParallelConfig(pipeline=2, shard=1, schedule="interleaved").check_precision("bf16")
