"""fp16: the loss is scaled, and nobody sees it but the gradients; an overflow costs one step and halves the scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence.plain import make_batch, make_model, plain_run, scale_of
from equivalence.preference_plain import make_pairs, plain_preference
from equivalence.test_preference import with_reference

from lockstep.backend.torch_backend import TorchBackend
from lockstep.parallel.group import ProcessGroup
from lockstep.parallel.loss_scale import LossScale
from lockstep.types import LossSpec, OptimStep


def make_backend(precision: str, *, lora: bool = False) -> TorchBackend:
    model = make_model("llama", lora=lora).float()
    return TorchBackend(
        model, precision=precision, micro_batch_tokens=96, group=ProcessGroup(0, 1, torch.device("cpu"))
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_step_in_fp16_is_the_plain_step_within_its_rounding(lora: bool) -> None:
    batch, backend = make_batch(0), make_backend("fp16", lora=lora)
    expected = plain_run("llama", lora=lora, batches=[batch])
    loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
    gradients = {name: p.grad.double() / 2.0**16 for name, p in backend.parameters().items()}
    optim = backend.optim_step(OptimStep(learning_rate=1e-2, max_grad_norm=0.5))
    assert loss == pytest.approx(expected["loss"], rel=1e-3)
    assert optim.grad_norm == pytest.approx(expected["norm"], rel=5e-3)
    assert optim.applied
    assert optim.loss_scale == 2.0**16
    for name, gradient in gradients.items():
        exact = expected["gradients"][name]
        assert float((gradient - exact).norm() / exact.norm()) < 1e-2, name
        assert backend.parameters()[name].dtype == torch.float32


def test_a_preference_step_in_fp16_is_scaled_once() -> None:
    """Its loss is no weighted sum of log-probs, and is scaled where it is computed."""
    reference, options = make_model("llama", lora=False), {"losses": {"sigmoid": 1.0}, "beta": 0.5}
    batch = with_reference(make_pairs(0), reference)
    loss, exact = plain_preference(make_model("llama", lora=True), batch, reference, options)
    backend = make_backend("fp16", lora=True)
    for _ in range(8):  # the first scales may be too large for this gradient
        result = backend.forward_backward(batch, LossSpec("preference", 1 / len(batch), options))
        assert result.loss == pytest.approx(loss.item(), rel=1e-2)
        optim = backend.optim_step(OptimStep(learning_rate=0.0))
        if optim.applied:
            break
    norm = float(torch.stack([gradient.norm() for gradient in exact.values()]).norm())
    assert optim.grad_norm == pytest.approx(norm, rel=2e-2)


def test_the_step_is_that_of_the_gradient_without_its_scale() -> None:
    """Seen with a large eps: without it, AdamW's step does not depend on the size of a gradient."""
    step, batch = OptimStep(learning_rate=1e-2, eps=1.0, max_grad_norm=None), make_batch(0)
    moved = {}
    for precision in ("fp32", "fp16"):
        backend = make_backend(precision)
        before = {name: p.detach().clone() for name, p in backend.parameters().items()}
        backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        assert backend.optim_step(step).applied
        moved[precision] = sum(
            float((p.detach() - before[name]).abs().sum()) for name, p in backend.parameters().items()
        )
    assert moved["fp16"] == pytest.approx(moved["fp32"], rel=1e-2)


def test_an_overflow_leaves_the_weights_and_halves_the_scale() -> None:
    batch, backend = make_batch(0), make_backend("fp16")
    before = {name: p.detach().clone() for name, p in backend.parameters().items()}
    backend.forward_backward(batch, LossSpec(scale=1e6))  # a gradient that fp16 cannot hold
    optim = backend.optim_step(OptimStep(learning_rate=1e-2))
    assert not optim.applied
    assert optim.overflowed
    assert optim.loss_scale == 2.0**15
    assert all(torch.equal(p, before[name]) for name, p in backend.parameters().items())
    assert all(p.grad is None for p in backend.parameters().values())


def test_in_other_precisions_a_gradient_that_is_not_finite_is_no_overflow() -> None:
    batch, backend = make_batch(0), make_backend("fp32")
    backend.forward_backward(batch, LossSpec(scale=1e38))
    backend.forward_backward(batch, LossSpec(scale=1e38))
    optim = backend.optim_step(OptimStep(learning_rate=1e-2))
    assert not optim.applied
    assert not optim.overflowed


def test_the_scale_grows_after_many_good_steps_and_comes_back_from_its_state() -> None:
    scale = LossScale()
    for _ in range(999):
        scale.update(finite=True)
    again = LossScale()
    again.restore(scale.state())
    assert again.value == 2.0**16
    again.update(finite=True)
    assert again.value == 2.0**17
    again.update(finite=False)
    assert again.value == 2.0**16


def test_an_overflow_starts_the_count_of_good_steps_anew() -> None:
    scale = LossScale()
    for finite in [True] * 999 + [False] + [True] * 999:
        scale.update(finite=finite)
    assert scale.value == 2.0**15
    scale.update(finite=True)
    assert scale.value == 2.0**16


def test_the_scale_has_an_upper_bound() -> None:
    scale = LossScale()
    for _ in range(9 * 1000):
        scale.update(finite=True)
    assert scale.value == 2.0**24


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    batch, backend = make_batch(0), make_backend("fp16")
    backend.forward_backward(batch, LossSpec(scale=1e6))
    backend.optim_step(OptimStep(learning_rate=1e-2))
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    backend.optim_step(OptimStep(learning_rate=1e-2))
    backend.save_state(tmp_path / "state").result(timeout=60)
    again = make_backend("fp16")
    again.load_state(tmp_path / "state")
    again.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    assert again.optim_step(OptimStep(learning_rate=1e-2)).loss_scale == 2.0**15
