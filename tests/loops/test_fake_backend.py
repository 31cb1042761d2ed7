"""The shipped fake keeps the contract of a TrainingBackend, so that a loop tested with it is tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from lockstep.backend.fake import FakeBackend
from lockstep.types import Completion, Datum, LossSpec, OptimStep, TrainingBackend

ROWS = [
    Datum([1], [Completion([3, 4, 5], [0.0, 1.0, 0.5])], "a:1"),
    Datum([1, 2], [Completion([6], [2.0]), Completion([7, 8], [1.0, 1.0])], "a:2"),
]


def step(backend: FakeBackend, rate: float = 0.1) -> float:
    loss = backend.forward_backward(ROWS, LossSpec(scale=0.25)).loss
    backend.optim_step(OptimStep(rate))
    return loss


def test_the_loss_is_the_sum_of_its_own_weighted_log_probs():
    backend: TrainingBackend = FakeBackend()
    result = backend.forward_backward(ROWS, LossSpec(scale=0.25))
    found = backend.forward(ROWS)
    assert [[len(row) for row in rows] for rows in found] == [[3], [1, 2]]
    assert found[0][0][0] == 0.0
    pairs = [
        (w, lp)
        for datum, rows in zip(ROWS, found, strict=True)
        for c, row in zip(datum.completions, rows, strict=True)
        for w, lp in zip(c.weights, row, strict=True)
    ]
    assert result.loss == pytest.approx(-0.25 * sum(w * lp for w, lp in pairs), rel=1e-14)
    assert (result.num_tokens, result.num_supervised) == (4 + 5, 5)  # a prompt counts once


def test_gradients_add_up_until_they_are_applied():
    whole, halves = FakeBackend(), FakeBackend()
    whole.forward_backward(ROWS, LossSpec(scale=0.25))
    for row in ROWS:
        halves.forward_backward([row], LossSpec(scale=0.25))
    norms = [backend.optim_step(OptimStep(0.1)).grad_norm for backend in (whole, halves)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-14)
    assert whole.weight == pytest.approx(halves.weight, rel=1e-14)


def test_the_loss_depends_on_the_learning_rate():
    slow, fast = FakeBackend(), FakeBackend()
    losses = [(step(slow, 0.01), step(fast, 0.1)) for _ in range(5)]
    assert losses[0][0] == losses[0][1]
    assert all(f < s for s, f in losses[1:])


def test_a_saved_state_comes_back_with_or_without_the_optimizer(tmp_path):
    backend = FakeBackend()
    step(backend)
    step(backend)
    backend.save_state(tmp_path).result(timeout=0)
    whole, weights = FakeBackend(), FakeBackend()
    whole.load_state(tmp_path, with_optimizer=True)
    weights.load_state(tmp_path, with_optimizer=False)
    assert step(whole) == step(weights) == step(backend)
    with_momentum, without, expected = step(whole), step(weights), step(backend)
    assert with_momentum == expected
    assert without != expected


def test_an_export_holds_the_weight(tmp_path):
    backend = FakeBackend()
    step(backend)
    backend.export_weights(tmp_path / "export" / "model")
    assert json.loads((tmp_path / "export" / "model" / "weights.json").read_text()) == {"weight": backend.weight}


def test_a_step_that_is_not_finite_is_not_applied():
    backend = FakeBackend(nonfinite_at=[2])
    step(backend)
    before = backend.weight
    result = backend.forward_backward(ROWS, LossSpec())
    optim = backend.optim_step(OptimStep(0.1))
    assert math.isnan(result.loss)
    assert result.nonfinite_origins == ("a:1",)
    assert not optim.applied
    assert backend.weight == before


def test_it_fails_where_it_was_told_to_and_remembers_the_call(tmp_path):
    failures = {("forward_backward", 1): RuntimeError("no"), ("save_state", 1): OSError("full")}
    backend = FakeBackend(failures=failures)
    step(backend)
    with pytest.raises(RuntimeError, match="no"):
        step(backend)
    assert isinstance(backend.save_state(tmp_path).exception(timeout=0), OSError)
    assert list(tmp_path.iterdir()) == []
    backend.close()
    names = ["forward_backward", "read", "optim_step", "forward_backward", "save_state", "close"]
    assert [call.name for call in backend.calls] == names


def test_the_loop_and_the_fake_run_without_torch():
    program = "import sys, lockstep.backend.fake, lockstep.train.sft; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
