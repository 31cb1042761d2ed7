"""Linear layers that take the same input as one product: the same numbers, whatever changes between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_inference_exact import SHAPE, make_model
from tiny import build_tokenizer
from torch import Tensor, nn

from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.fused_linear import FusedLinears, recorded_groups
from lockstep.inference.token_sampling import Truncation
from lockstep.model.lora import speed_up_eager
from lockstep.types import SamplingParams

GREEDY = Truncation(0.0)
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-12}


def step(decoder: Decoder, num_slots: int, batch_size: int | None = None) -> list[float]:
    """Log-probs of the tokens after some prompts."""
    with decoder.in_use():
        decoder.prepare(num_slots, 32)
        decoder.prefill([(slot, [3 + slot, 5, 7]) for slot in range(num_slots)])
        decoder.slots.place(list(range(num_slots)), [9] * num_slots, [3] * num_slots, torch.arange(num_slots))
        _, logprobs = decoder.launch(3, batch_size or num_slots, 8, GREEDY).read()
    return [number for row in logprobs for number in row]


def assert_fuses(model: Any, num_slots: int = 6, batch_size: int | None = None) -> Decoder:
    """And gives what the model gives without."""
    fused, plain = Decoder(model), Decoder(model, fuses=False)
    assert fused.linears is not None
    dtype = next(model.parameters()).dtype
    logprobs = step(fused, num_slots, batch_size)
    assert fused.linears.is_laid_out
    assert logprobs == pytest.approx(step(plain, num_slots, batch_size), abs=TOLERANCES[dtype], rel=0)
    return fused


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_numbers_are_the_models_own(family: str, lora: bool, dtype: torch.dtype) -> None:
    model = make_model(family, dtype, lora)
    for num_slots, batch_size in ((4, 4), (8, 5), (11, 11), (64, 33)):
        assert_fuses(model, num_slots, batch_size)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_biases_are_added(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape), dtype=dtype)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            nn.init.normal_(part.bias)
        layer.self_attn.k_proj.bias = None
    assert_fuses(model)


def test_neighbours_are_one_product() -> None:
    model = make_model("llama", lora=True)
    linears = assert_fuses(model).linears
    assert linears is not None
    groups = linears.groups
    layers = model.get_base_model().model.layers
    names = [tuple(name for name, part in layers[0].named_modules() if part in group) for group in groups[:4]]
    attention, mlp = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    assert names == [attention, ("self_attn.o_proj",), mlp, ("mlp.down_proj",)]
    assert len(groups) == 4 * len(layers) + 1


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight.mul_(1.5)


def change_through_data(model: Any) -> None:
    model.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight.data.mul_(1.5)


def change_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(0.5)


def change_scaling(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] = 7.0


def add_second_adapter(model: Any) -> None:
    import peft

    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.double()
    model.base_model.set_adapter(["default", "other"])


def add_weight_decomposition(model: Any) -> None:
    import peft

    settings = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    model.add_adapter("other", settings)
    model.double()
    model.base_model.set_adapter("other")


CHANGES: list[Callable[[Any], None]] = [
    change_in_place,
    change_through_data,
    change_adapters,
    change_scaling,
    add_second_adapter,
    add_weight_decomposition,
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.base_model.merge_adapter(),
]
NAMES = ["in-place", "data", "adapters", "scaling", "second", "dora", "disabled", "merged"]


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_change_between_two_calls_counts(change: Callable[[Any], None]) -> None:
    model = make_model("llama", lora=True)
    fused = assert_fuses(model)
    before = step(fused, 6)
    change(model)
    after = step(fused, 6)
    assert after == pytest.approx(step(Decoder(model, fuses=False), 6), abs=1e-12, rel=0)
    if change is not CHANGES[-1]:
        assert after != pytest.approx(before, abs=1e-6, rel=0)


def test_adapters_that_were_sped_up_are_fused() -> None:
    model = make_model("llama", lora=True)
    speed_up_eager(model)
    held = {layer: layer.__dict__.get("forward") for layer in model.modules()}
    assert_fuses(model)
    assert held == {layer: layer.__dict__.get("forward") for layer in model.modules()}


def test_a_forward_that_somebody_has_put_in_place_is_taken() -> None:
    model = make_model("llama")
    fused = assert_fuses(model)
    value = model.model.layers[0].self_attn.v_proj
    value.forward = lambda x: nn.Linear.forward(value, x) * 2
    changed = step(fused, 6)
    assert changed == pytest.approx(step(Decoder(model, fuses=False), 6), abs=1e-12, rel=0)
    assert changed == pytest.approx(step(Decoder(model), 6), abs=1e-12, rel=0)


def test_a_single_sequence_and_very_many_take_plain_products() -> None:
    model = make_model("llama")
    decoder = Decoder(model)
    assert decoder.linears is not None
    for num_slots, fuses in ((1, False), (4, True), (3, False), (64, True), (65, False)):
        step(decoder, num_slots)
        assert decoder.linears.is_laid_out == fuses


def test_without_memory_for_a_copy_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr("lockstep.inference.kv_cache.total_bytes", lambda device: 8000)
    assert Decoder(model).linears is None


def test_samples_are_those_of_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3", lora=True)
    params = SamplingParams(max_tokens=15, temperature=1.0, seed=3, num_samples=9)
    prompts = [[5, 6, 7], [8]]
    found = LocalEngine(model, build_tokenizer()).sample(prompts, params)
    monkeypatch.setattr("lockstep.inference.kv_cache.total_bytes", lambda device: 0)
    assert found == LocalEngine(model, build_tokenizer()).sample(prompts, params)


# --- modules that do not behave like those of a language model ------------------------------------------------------


class Awkward(nn.Module):
    """Two layers with one input, which may be changed between them, or be another one in the next pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.twice, self.named = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        if self.way == "other":
            x = x + 1
        second = self.second(x)
        if self.way == "again":
            x.mul_(3)
            second = second + self.second(x)
        return self.twice(first) + self.twice(second) + self.named(input=x)


@pytest.mark.parametrize("way", ["", "other", "again"])
def test_a_neighbour_with_another_input_is_right(way: str) -> None:
    module, x = Awkward(), torch.randn(5, 6, dtype=torch.float64)
    with torch.inference_mode():
        with recorded_groups(module) as groups:
            module(x)
        assert groups == [[module.first, module.second]]  # what is called twice, or by name, stays as it is
        fused = FusedLinears(groups)
        fused.lay_out(5)
        module.way = way
        expected = [module(x.clone()), module(x.clone())]
        with fused.installed():
            same = x.clone()
            found = [module(same), module(x.clone())]
        assert "forward" not in module.first.__dict__
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)


def test_forwards_come_back_after_an_exception() -> None:
    module = Awkward()
    with torch.inference_mode(), recorded_groups(module) as groups:
        module(torch.zeros(5, 6, dtype=torch.float64))
    fused = FusedLinears(groups)
    fused.lay_out(5)
    with pytest.raises(ValueError, match="9 features a token, and the layer takes 6"), fused.installed():
        module(torch.zeros(5, 9, dtype=torch.float64))
    assert "forward" not in module.first.__dict__
