"""What a backend gives to engines: by the model's own names, in the dtype that is sampled with, and a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.load import apply_weights
from lockstep.model.lora import add_lora
from lockstep.types import Completion, Datum, LossSpec, OptimStep


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):  # CPUs that show AMX but forbid it die in its bf16 products
        yield


ROW = Datum([1, 2, 3], [Completion([4, 5, 6], [1.0, 1.0, 1.0])], "row")


def make_backend(model: Any, precision: str) -> TorchBackend:
    return TorchBackend(model, precision=precision, device="cpu")


def step(backend: TorchBackend) -> None:
    backend.forward_backward([ROW], LossSpec())
    backend.optim_step(OptimStep(0.1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_an_engine_with_them_is_the_model_in_training(tied, precision, dtype):
    backend = make_backend(tiny.build_model(tie_word_embeddings=tied), precision)
    step(backend)
    weights = backend.read_weights()
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights), "of tied tensors one"
    engine = tiny.build_model(seed=1, tie_word_embeddings=tied).eval()
    for parameter in engine.parameters():  # buffers stay wide, as in training
        parameter.data = parameter.data.to(dtype)
    apply_weights(engine, weights)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with backend.lend_model() as model, torch.no_grad():
        expected = model(tokens).logits
        assert torch.equal(engine(tokens).logits, expected)
    backend.close()


def test_they_do_not_change_when_training_goes_on():
    backend = make_backend(tiny.build_model(), "fp32")
    weights = backend.read_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    step(backend)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    after = backend.read_weights()
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    backend.close()


def test_with_adapters_only_these_travel():
    model = add_lora(tiny.build_model(), LoraConfig(rank=2))
    backend = make_backend(model, "fp32")
    step(backend)
    weights = backend.read_weights()
    assert weights.keys() == backend.parameters().keys()
    assert all("lora_" in name for name in weights)
    engine = add_lora(tiny.build_model(), LoraConfig(rank=2)).eval()
    apply_weights(engine, weights)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with backend.lend_model() as lent, torch.no_grad():
        assert torch.equal(engine(tokens).logits, lent(tokens).logits)
    backend.close()
