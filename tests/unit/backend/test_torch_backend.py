"""TorchBackend around a model that its user built, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence.plain import make_batch, make_model

from lockstep import Completion, Datum, LossSpec, OptimStep, TorchBackend
from lockstep.backend.build import settle_dtypes
from lockstep.config import ParallelConfig


def test_a_model_loaded_in_bf16_is_trained_in_float32() -> None:
    model = make_model("llama", lora=False).to(torch.bfloat16)
    backend = TorchBackend(model, precision="fp32", device="cpu")
    assert {p.dtype for p in backend.parameters().values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in backend.parameters().items()}
    backend.forward_backward(make_batch(), LossSpec(scale=1e-2))
    assert backend.optim_step(OptimStep(learning_rate=1e-6)).applied
    assert all(not torch.equal(p, before[name]) for name, p in backend.parameters().items())


def test_what_is_frozen_is_held_in_the_dtype_of_the_computation() -> None:
    backend = TorchBackend(make_model("qwen3", lora=True).to(torch.bfloat16), precision="fp64", device="cpu")
    assert {p.dtype for p in backend.policy.parameters()} == {torch.float64}


def test_frozen_weights_of_a_narrow_computation_are_narrow_and_trained_ones_wide() -> None:
    model = make_model("qwen3", lora=True)
    settle_dtypes(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_gradients_of_several_batches_add_up_until_the_step() -> None:
    first, second = make_batch(0), make_batch(1)
    norms = []
    for parts in ([first, second], [[*first, *second]]):
        backend = TorchBackend(make_model("llama", lora=False), precision="fp64", device="cpu")
        for part in parts:
            backend.forward_backward(part, LossSpec(scale=1e-2))
        norms.append(backend.optim_step(OptimStep(learning_rate=1e-3)).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_an_error_inside_an_evaluation_leaves_the_model_in_training_mode() -> None:
    backend = TorchBackend(make_model("llama", lora=False), precision="fp64", device="cpu", micro_batch_tokens=64)
    batch = make_batch()
    backend.policy.forward = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        backend.forward(batch)
    assert backend.policy.training


def test_an_unknown_loss_and_a_batch_without_weights_are_refused() -> None:
    backend = TorchBackend(make_model("llama", lora=False), precision="fp64", device="cpu")
    with pytest.raises(ValueError, match="unknown loss 'nonsense': known are cross_entropy"):
        backend.forward_backward(make_batch(), LossSpec("nonsense"))


def test_rows_that_the_model_cannot_read_are_named_before_anything_is_computed() -> None:
    backend = TorchBackend(make_model("llama", lora=False), precision="fp64", device="cpu")
    known, nan = backend.policy.num_tokens, float("nan")
    assert known is not None
    good = Datum([1, 2], [Completion([3], [1.0])])
    bad = {
        f"x.jsonl:7 has token {known}, and the model knows 0 to {known - 1}": Datum(
            [1], [Completion([known], [1.0])], "x.jsonl:7"
        ),
        "row 1 of the batch has token -1": Datum([2, -1], [Completion([3], [1.0])]),
        "tokens are whole numbers, and these are float64: [1.5]": Datum([1.5], [Completion([3], [1.0])]),  # type: ignore[list-item]
        "weights that are not finite": Datum([1], [Completion([3], [nan])]),
    }
    for sentence, datum in bad.items():
        for compute in (backend.forward, lambda batch: backend.forward_backward(batch, LossSpec())):
            with pytest.raises(ValueError) as refused:
                compute([good, datum])
            assert sentence in str(refused.value)
    edge = Datum(torch.tensor([0, known - 1]), [Completion([], []), Completion((known - 1,), [1.0])])  # type: ignore[arg-type]
    assert len(backend.forward([edge])[0]) == 2


@pytest.mark.parametrize(
    "step",
    [
        {"learning_rate": float("nan")},
        {"learning_rate": -1e-4},
        {"learning_rate": 0.1, "beta2": 1.0},
        {"learning_rate": 0.1, "weight_decay": float("inf")},
        {"learning_rate": 0.1, "max_grad_norm": 0.0},
    ],
)
def test_a_step_that_would_spoil_every_weight_cannot_be_written_down(step: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"step\.{[*step][-1]} is"):
        OptimStep(**step)


def test_a_scale_is_finite_and_results_can_be_printed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the scale of a loss is nan"):
        LossSpec(scale=float("nan"))
    backend = TorchBackend(make_model("llama", lora=False), precision="fp64", device="cpu")
    result = backend.forward_backward(make_batch(), LossSpec(scale=1e-2))
    assert repr(result) == "LossResult(not read yet)"
    assert repr(result.loss) in repr(result)
    backend.save_state(str(tmp_path / "state")).result(timeout=60)  # type: ignore[arg-type]
    backend.load_state(str(tmp_path / "state"))  # type: ignore[arg-type]


def test_offloading_where_nothing_is_sharded_is_told() -> None:
    backend = TorchBackend(make_model("llama", lora=False), device="cpu", parallel=ParallelConfig(offload=True))
    assert [w for w in backend.warnings if "parallel.offload does nothing here" in w]
    assert not TorchBackend(make_model("llama", lora=False), device="cpu").warnings
