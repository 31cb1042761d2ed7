"""Dropout in one process: in training alone, and the same in a pass that is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence.plain import make_batch, make_model, scale_of
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.lora import add_lora
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

BATCH = make_batch()
LOSS = LossSpec(scale=scale_of(BATCH))


def make_adapted(dropout: float) -> nn.Module:
    """Adapters that do something: their second halves are not zero."""
    model = add_lora(make_model("llama", lora=False), LoraConfig(rank=4, alpha=8, dropout=dropout)).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make_backend(dropout: float = 0.5, **settings: Any) -> TorchBackend:
    group = ProcessGroup(0, 1, torch.device("cpu"))
    return TorchBackend(make_adapted(dropout), micro_batch_tokens=96, precision="fp64", group=group, **settings)


def gradients_of(backend: TorchBackend) -> dict[str, Tensor]:
    backend.forward_backward(BATCH, LOSS)
    return {name: p.grad.clone() for name, p in backend.parameters().items() if p.grad is not None}


def test_an_evaluation_has_no_dropout() -> None:
    backend = make_backend()
    assert backend.forward(BATCH) == make_backend(0.0).forward(BATCH)
    backend.forward_backward(BATCH, LOSS)
    assert backend.forward(BATCH) == make_backend(0.0).forward(BATCH)


def test_training_has_dropout_also_after_an_evaluation() -> None:
    backend, plain = make_backend(), make_backend(0.0)
    backend.forward(BATCH)
    first, second = (backend.forward_backward(BATCH, LOSS).loss for _ in range(2))
    assert len({first, second, plain.forward_backward(BATCH, LOSS).loss}) == 3


def test_an_evaluation_draws_nothing() -> None:
    """So that evaluating more often does not change what is trained."""
    expected = make_backend().forward_backward(BATCH, LOSS).loss
    backend = make_backend()
    backend.forward(BATCH)
    assert backend.forward_backward(BATCH, LOSS).loss == expected


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_activations_have_the_dropout_of_the_first_time(kind: str) -> None:
    expected = gradients_of(make_backend())
    found = gradients_of(make_backend(activation_checkpointing=kind))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


def test_the_seed_decides_what_is_dropped() -> None:
    losses = [make_backend(seed=seed).forward_backward(BATCH, LOSS).loss for seed in (1, 1, 2)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
