"""Two ranks on texts with images, replicated and sharded, against the plain loop over single texts, in float64.

One group of processes does all the work; only rank 0 has the weights, as in a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_together
from torch.distributed.tensor import DTensor
from unit.backend.test_images import plain_gradients, read
from vision_models import write_rows

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import LoraConfig, ModelConfig, ParallelConfig
from lockstep.model.load import build_model
from lockstep.types import Datum, LossSpec, OptimStep

LAYOUTS = {"replicated": ParallelConfig(replicate=2), "sharded": ParallelConfig(shard=2)}
CELLS = {
    "idefics3": ("idefics3", False, "trained"),
    "gemma3": ("gemma3", False, "connector"),
    "qwen3_vl": ("qwen3_vl", False, "trained"),
    "qwen2_5_vl-lora": ("qwen2_5_vl", True, "frozen"),
}
# All rows; two of which one has no image, so that a rank has none; and a batch without any image.
BATCHES = {"all": range(8), "one": (0, 2), "none": (2, 6)}
STEP = OptimStep(learning_rate=1e-2, weight_decay=0.1)


def make(config: ModelConfig, *, lora: bool) -> Any:
    torch.manual_seed(0)
    model = build_model(config, LoraConfig(rank=4) if lora else None, "fp64", with_weights=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def choose(rows: list[Datum], name: str) -> tuple[list[Datum], float]:
    batch = [rows[i] for i in BATCHES[name]]
    return batch, 1 / sum(datum.total_weight for datum in batch)


def step(backend: TorchBackend, rows: list[Datum], name: str) -> dict[str, Any]:
    """Loss, gradients and, after an optimizer step, parameters."""
    batch, scale = choose(rows, name)
    loss = backend.forward_backward(batch, LossSpec("cross_entropy", scale=scale)).loss
    gradients = {n: _whole(p.grad) for n, p in backend.parameters().items() if p.grad is not None}
    backend.optim_step(STEP)
    return {"loss": loss, "gradients": gradients, "parameters": {n: _whole(p) for n, p in backend.parameters().items()}}


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def measure(folder: Path) -> None:
    found: dict[tuple[str, str, str], Any] = {}
    groups = {name: join_group("cpu", parallel, timeout_s=120) for name, parallel in LAYOUTS.items()}
    rank = groups["sharded"].rank
    for layout, parallel in LAYOUTS.items():
        for cell, (family, lora, vision) in CELLS.items():
            config, processor, rows = read(folder, family, vision)
            for name in BATCHES:
                model = make(config, lora=lora)
                for tensor in model.parameters() if rank else ():
                    tensor.data.fill_(3.0)
                backend = TorchBackend(
                    model,
                    precision="fp64",
                    micro_batch_tokens=120,
                    parallel=parallel,
                    images=processor,
                    group=groups[layout],
                )
                found[layout, cell, name] = step(backend, rows, name)
                backend.policy.stop_packing()
    if rank == 0:
        torch.save(found, folder / "found.pt")
    groups["sharded"].leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_rows(path / "rows")
    for family, _, vision in CELLS.values():
        read(path, family, vision)  # writes the model and compiles its rows
    run_together(2, measure, path, timeout_s=480)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_make_the_step_of_a_plain_loop(folder: Path, layout: str, cell: str, name: str) -> None:
    found = torch.load(folder / "found.pt")[layout, cell, name]
    family, lora, vision = CELLS[cell]
    config, processor, rows = read(folder, family, vision)
    batch, scale = choose(rows, name)
    model = make(config, lora=lora)
    loss, expected = plain_gradients(model, folder / family, batch, scale)
    assert found["loss"] == pytest.approx(loss, abs=1e-10)
    for key, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, expected.get(key, torch.zeros_like(gradient)), rtol=0, atol=1e-10)
    assert {key for key, gradient in expected.items() if gradient.abs().max() > 0} <= found["gradients"].keys()
    model.zero_grad(set_to_none=True)
    alone = TorchBackend(model, precision="fp64", micro_batch_tokens=400, images=processor, device="cpu")
    for key, parameter in step(alone, rows, name)["parameters"].items():
        torch.testing.assert_close(found["parameters"][key], parameter, rtol=0, atol=1e-10)
    alone.close()
