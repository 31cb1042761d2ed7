"""Newer weights into an engine: from memory in place, checked before anything changes; and from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build_model, build_tokenizer, write_model

from lockstep.config import LoraConfig
from lockstep.inference.cuda_graphs import model_fingerprint
from lockstep.inference.engine import LocalEngine
from lockstep.model.lora import add_lora
from lockstep.types import SamplingParams

PARAMS = SamplingParams(max_tokens=6, logprobs=True)
PROMPTS = [[10, 20, 30], [11, 12]]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_lora(seed: int) -> Any:
    model = add_lora(build_model(seed=0), LoraConfig(rank=2, alpha=4))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_from_memory_are_applied_in_place(tied: bool) -> None:
    engine = LocalEngine(build_model(tie_word_embeddings=tied), build_tokenizer())
    other = build_model(seed=1, tie_word_embeddings=tied)
    before = engine.sample(PROMPTS, PARAMS)
    model, place = engine.model, engine.model.lm_head.weight.data_ptr()
    weights = weights_of(other)
    if tied:
        del weights["lm_head.weight"]  # the embedding says it all
    engine.load_weights(weights, 7)
    assert engine.model is model
    assert engine.model.lm_head.weight.data_ptr() == place
    after = engine.sample(PROMPTS, PARAMS)
    expected = LocalEngine(other, build_tokenizer()).sample(PROMPTS, PARAMS)
    assert [a[0].logprobs for a in after] == [a[0].logprobs for a in expected] != [a[0].logprobs for a in before]
    assert [answer.version for (answer,) in after] == [7, 7]
    assert [answer.version for (answer,) in before] == [0, 0]


def test_adapters_alone_are_enough() -> None:
    engine = LocalEngine(make_lora(1), build_tokenizer())
    engine.sample(PROMPTS, PARAMS)
    other = make_lora(2)
    engine.load_weights({name: tensor for name, tensor in weights_of(other).items() if "lora_" in name}, 1)
    found, expected = engine.sample(PROMPTS, PARAMS), LocalEngine(other, build_tokenizer()).sample(PROMPTS, PARAMS)
    assert [a[0].logprobs for a in found] == [a[0].logprobs for a in expected]


def spoil(weights: dict[str, Any], kind: str) -> dict[str, Any]:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = weights[name]
    changes: dict[str, dict[str, Any]] = {
        "unknown": {"model.layers.9.mlp.up_proj.weight": tensor},
        "missing": {},
        "shape": {name: tensor[:-1]},
        "dtype": {name: tensor.to(torch.bfloat16)},
        "not a tensor": {name: tensor.tolist()},
        "contradiction": {"lm_head.weight": weights["lm_head.weight"] + 1},
    }
    if kind == "missing":
        weights.pop(name)
    return {**weights, **changes[kind]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unknown", r"1 of 22 tensors are not of this model, first 'model\.layers\.9\.mlp"),
        ("missing", r"1 of 21 tensors of the model are missing, first 'model\.layers\.1\.mlp\.up_proj"),
        ("shape", r"up_proj\.weight has the shape \[63, 32\]: the model's is \[64, 32\]"),
        ("dtype", r"up_proj\.weight is torch\.bfloat16: the model holds torch\.float32"),
        ("not a tensor", r"up_proj\.weight is a list, not a tensor"),
        ("contradiction", r"embed_tokens\.weight and lm_head\.weight|lm_head\.weight and model\.embed"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(kind: str, message: str) -> None:
    engine = LocalEngine(build_model(tie_word_embeddings=True), build_tokenizer())
    before = weights_of(engine.model)
    other = weights_of(build_model(seed=1, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=message):
        engine.load_weights(spoil(other, kind), 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert engine.version == 0


def test_part_of_the_adapters_is_not_enough() -> None:
    engine = LocalEngine(make_lora(1), build_tokenizer())
    adapters = {name: tensor for name, tensor in weights_of(make_lora(2)).items() if "lora_" in name}
    adapters.pop(next(iter(adapters)))
    with pytest.raises(ValueError, match=f"1 of {len(adapters) + 1} tensors of the model are missing"):
        engine.load_weights(adapters, 1)
    with pytest.raises(ValueError, match="are missing"):
        engine.load_weights({}, 1)


def test_weights_from_a_folder_replace_the_model(tmp_path: Path) -> None:
    engine = LocalEngine(build_model(), build_tokenizer())
    engine.sample(PROMPTS, PARAMS)
    engine.load_weights(write_model(tmp_path / "new", seed=1), 3)
    found = engine.sample(PROMPTS, PARAMS)
    expected = LocalEngine(build_model(seed=1), build_tokenizer()).sample(PROMPTS, PARAMS)
    assert [a[0].logprobs for a in found] == [a[0].logprobs for a in expected]
    assert {answer.version for (answer,) in found} == {3}


def test_a_graph_would_notice_other_weights_and_other_adapters() -> None:
    """Captured steps read where the weights were, and do what the model did then."""
    model = make_lora(1)
    first = model_fingerprint(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert model_fingerprint(model) == first
    with model.disable_adapter():
        assert model_fingerprint(model) != first
    assert model_fingerprint(model) == first
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    layer.scaling["default"] *= 2
    assert model_fingerprint(model) != first
    layer.scaling["default"] /= 2
    layer.base_layer.weight.data = layer.base_layer.weight.data.clone()
    assert model_fingerprint(model) != first
