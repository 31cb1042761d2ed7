"""Models with uncommon parts, on real processes: each document as the plain model computes it alone.

Adapters on a tied embedding, which two stages have; positions that depend on the length of a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from equivalence.layouts import everywhere, spawn, whole
from equivalence.plain import TINY, keep_float64, make_batch, make_model, plain_loss, scale_of

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import ParallelConfig
from lockstep.types import LossSpec, OptimStep

LAYOUTS = {"pipeline": ParallelConfig(shard=1, pipeline=2), "context": ParallelConfig(shard=1, context=2)}
STEP = OptimStep(0.01, eps=1e-4)


def tied_embedding() -> Any:
    """A head that is also the embedding, and an adapter on the embedding: PEFT leaves the head without."""
    settings = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(make_model("qwen3", lora=False), settings).double()


def longrope() -> Any:
    """Texts of more than 17 tokens have other frequencies."""
    factors = {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 5.0, 7.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **factors, "original_max_position_embeddings": 17}
    config = transformers.Phi3Config(**TINY, original_max_position_embeddings=17, rope_parameters=rope)
    torch.manual_seed(0)
    return keep_float64(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64))


def dynamic_ntk() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    config = transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 17}, rope_parameters=rope)
    torch.manual_seed(0)
    return keep_float64(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64))


MODELS = {"tied": tied_embedding, "longrope": longrope, "dynamic": dynamic_ntk}


def compute_step(layout: str, out: Path) -> None:
    """The body of each process."""
    torch.set_num_threads(1)
    parallel = LAYOUTS[layout]
    group, batch = join_group("cpu", parallel, timeout_s=60), make_batch()
    results = {}
    for name, build in MODELS.items():
        backend = TorchBackend(build(), micro_batch_tokens=96, precision="fp64", parallel=parallel, group=group)
        loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
        gradients = everywhere({n: whole(p.grad) for n, p in backend.parameters().items()}, group)
        norm = backend.optim_step(STEP).grad_norm
        everywhere({n: whole(p.detach()) for n, p in backend.parameters().items()}, group)
        results[name] = {"loss": loss, "gradients": gradients, "norm": norm}
        backend.policy.stop_packing()
    if group.rank == 0:
        torch.save(results, out)
    group.leave()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_makes_the_step_of_the_plain_model(layout: str, tmp_path: Path) -> None:
    spawn(2, compute_step, layout, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    batch = make_batch()
    for name, build in MODELS.items():
        model = build()
        loss = plain_loss(model, batch, scale_of(batch))
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert found[name]["loss"] == pytest.approx(loss.item(), rel=1e-10)
        assert found[name]["gradients"].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(found[name]["gradients"][parameter], gradient, rtol=1e-10, atol=1e-12)
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        assert found[name]["norm"] == pytest.approx(norm, rel=1e-10)
