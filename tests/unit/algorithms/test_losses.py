"""Losses are sums of what they are given, and the short way for linear ones is the long way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equivalence.plain import make_batch, make_model, scale_of

from lockstep.algorithms.losses import LOSSES, LossInputs
from lockstep.backend.torch_backend import TorchBackend
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec

LINEAR = [kind for kind, loss in LOSSES.items() if loss.linear]


@pytest.mark.parametrize("kind", LINEAR)
def test_a_linear_loss_is_minus_the_weighted_sum_times_the_scale(kind):
    logprobs = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    assert LOSSES[kind].fn(logprobs, LossInputs(weights))[0].item() == 0.5 + 0.5 + 4.0
    assert LOSSES[kind].fn(logprobs, LossInputs(weights, scale=0.5))[0].item() == 2.5


@pytest.mark.parametrize("kind", LINEAR)
def test_the_loss_of_a_batch_is_the_sum_of_its_parts(kind):
    logprobs, weights = -torch.rand(10, dtype=torch.float64), torch.rand(10, dtype=torch.float64)
    whole, _ = LOSSES[kind].fn(logprobs, LossInputs(weights))
    parts = [LOSSES[kind].fn(logprobs[p], LossInputs(weights[p]))[0] for p in (slice(3), slice(3, 10))]
    assert whole.item() == pytest.approx(sum(parts).item(), rel=1e-14)


def test_cross_entropy_needs_no_other_model_and_measures_nothing_else():
    loss = LOSSES["cross_entropy"]
    assert loss.metrics({}) == ()
    assert loss.is_separable({})
    assert not loss.needs_reference({})
    assert not loss.needs_log_sum_sq_probs({})


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_linear_loss_gives_the_same_gradient_when_it_is_not_treated_as_one(lora, monkeypatch):
    batch = make_batch()
    found = []
    for linear in (True, False):
        monkeypatch.setitem(LOSSES, "cross_entropy", dataclasses.replace(LOSSES["cross_entropy"], linear=linear))
        model = make_model("llama", lora=lora)
        backend = TorchBackend(
            model, micro_batch_tokens=64, precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu"))
        )
        loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
        found.append((loss, {name: p.grad for name, p in backend.parameters().items()}))
    (short, gradients), (long, others) = found
    assert short == pytest.approx(long, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-10, atol=1e-12)


def test_a_loss_that_is_not_known_names_those_that_are():
    backend = TorchBackend(
        make_model("llama", lora=False), precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu"))
    )
    with pytest.raises(ValueError, match="unknown loss 'hinge': known are cross_entropy"):
        backend.forward_backward(make_batch(), LossSpec("hinge"))
