"""Weights in few bits: the numbers of bitsandbytes, gradients of inputs, memory, and exports from the model's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.config import ConfigError, LoraConfig, ModelConfig, load_config
from lockstep.config.loading import resolve_config
from lockstep.model.codebooks import dequantise_nf4, dynamic_table, quantise_nf4
from lockstep.model.export import export_run
from lockstep.model.load import build_model, choose_precision
from lockstep.model.lora import measure_coverage
from lockstep.model.parts import measure_parts
from lockstep.model.quantised import dequantise_base, describe_rest, quantise_base
from lockstep.model.quantised_layers import QUANTISED, Format, QuantisedLinear, describe_fp8
from lockstep.rundir import RunDir
from lockstep.train.run import run as train

FORMATS: tuple[Format, ...] = ("nf4", "fp8")
# bitsandbytes 0.50.2: quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4") of `WAVE`.
WAVE = torch.sin(torch.arange(192.0) * 0.7) * (1 + torch.arange(192.0) / 64)
WAVE_FIRST_CODES = [123, 220, 149, 34, 55, 205, 218, 66, 19, 124, 237, 164, 17, 55, 222, 234, 65, 18, 141, 238]
WAVE_SCALES = ([1, 90, 255], [1.036057710647583], [2.882286787033081])
WAVE_EVERY_24TH = [0.0, -1.3005461692810059, 1.3505436182022095, 0.2272733598947525]
WAVE_EVERY_24TH += [-1.9882569313049316, 2.064692258834839, 0.9643527865409851, -3.918344497680664]


def test_nf4_is_that_of_bitsandbytes() -> None:
    stored = quantise_nf4(WAVE.view(3, 64))
    assert stored.codes[:20].tolist() == WAVE_FIRST_CODES
    assert tuple(part.tolist() for part in stored[1:]) == WAVE_SCALES
    assert dequantise_nf4(stored, 192)[::24].tolist() == WAVE_EVERY_24TH


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (64, 64), (7, 130), (257, 64)])
def test_odd_sizes_are_quantised_whole(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = dequantise_nf4(quantise_nf4(weight), weight.numel()).view(shape)
    # Half the widest gap of the table, of each block's largest; and what double quantisation adds to that.
    assert float((found - weight).abs().max()) <= 0.18 * float(weight.abs().max())
    assert torch.equal(dequantise_nf4(quantise_nf4(torch.zeros(shape)), weight.numel()), torch.zeros(weight.numel()))


def test_the_eight_bit_tables_cover_seven_decades() -> None:
    for signed in (True, False):
        table = dynamic_table(torch.device("cpu"), signed=signed)
        assert len(table) == len(table.unique()) == 256
        assert table.max() == 1
        assert 0 in table
        assert (table.min() < -0.99) == signed


def make_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 40, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("held", FORMATS)
def test_a_product_keeps_no_weight_for_backward(held: Format) -> None:
    linear = make_linear()
    layer = QUANTISED[held](linear, linear.weight)
    x = torch.randn(2, 5, 96, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert all(not tensor.is_floating_point() or tensor.numel() < 96 * 40 / 8 for tensor in kept)
    y.sum().backward()
    expected = (torch.ones(2, 5, 40) @ layer.weight).view(2, 5, 96)
    assert torch.allclose(x.grad, expected, atol=1e-6)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("held", FORMATS)
def test_a_compiled_layer_is_the_same(held: Format) -> None:
    linear = make_linear()
    layer = QUANTISED[held](linear, linear.weight)
    x = torch.randn(5, 96, requires_grad=True)
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(y, layer(x))
    assert torch.equal(gradient, expected)


def test_bits_per_weight() -> None:
    linear = nn.Linear(2048, 512, bias=False).requires_grad_(False)
    for held, most in (("nf4", 4.13), ("fp8", 8.02)):
        layer = QUANTISED[held](linear, linear.weight)  # type: ignore[index]
        size = sum(t.numel() * t.itemsize for t in (*layer.parameters(), *layer.buffers()))
        assert 8 * size / layer.num_weights <= most


@pytest.mark.parametrize("held", FORMATS)
def test_a_model_is_counted_by_its_weights(held: Format, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    settings: Any = {"quantization": "nf4"} if held == "nf4" else {"precision": "fp8_base"}
    config = ModelConfig(path=str(folder), **settings)
    model = build_model(config, LoraConfig(rank=2), "fp32", with_weights=True)
    plain = build_model(config, LoraConfig(rank=2), "fp32", with_weights=True, quantised=False)
    assert any(isinstance(m, QuantisedLinear) for m in model.modules())
    assert not any(isinstance(m, QuantisedLinear) for m in plain.modules())
    assert measure_parts(model) == measure_parts(plain)
    assert measure_coverage(model) == measure_coverage(plain)
    assert not describe_rest(model)
    # Ranks without weights build the same tensors, to be filled by rank 0.
    empty = build_model(config, LoraConfig(rank=2), "fp32", with_weights=False)
    shapes = [{n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (model, empty)]
    assert shapes[0] == shapes[1]


def make_experts(held: Format, kind: str = "Mixtral", **changes: Any) -> Any:
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    quantise_base(model.requires_grad_(False), held)
    return model


def test_experts_that_are_not_quantised_are_named() -> None:
    assert not describe_rest(make_experts("nf4"))
    assert "experts.gate_up_proj" in describe_rest(make_experts("fp8"))
    llama4 = make_experts("nf4", "Llama4Text", head_dim=8, intermediate_size_mlp=64)  # computed by its own code
    assert "experts.gate_up_proj" in describe_rest(llama4)


def test_experts_in_nf4_are_those_of_their_dequantised_matrices() -> None:
    """Inner sizes that are no whole blocks; an expert without a row; 4.13 bits a weight."""
    model = make_experts("nf4", intermediate_size=10, num_local_experts=5)
    experts = model.model.layers[0].mlp.experts
    assert sum(t.numel() for t in experts.parameters()) == 5 * (20 * 32 // 2 + 10 + 8 + 32 * 10 // 2 + 5 + 8)
    x = torch.randn(6, 32, requires_grad=True)
    chosen, weights = torch.tensor([[0, 3]] * 3 + [[4, 1]] * 3), torch.rand(6, 2)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = experts(x, chosen, weights)
    assert all(not t.is_floating_point() or t.numel() <= 12 * 32 for t in kept)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    dequantise_base(model, torch.float32)
    model.set_experts_implementation("eager")  # transformers' grouped products want whole 16 bytes
    expected = experts(x, chosen, weights)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])


def test_a_router_that_is_a_linear_layer_stays_as_it_is() -> None:
    import transformers

    config = transformers.AfmoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, num_dense_layers=1,
    )  # fmt: skip
    model = transformers.AfmoeForCausalLM(config).requires_grad_(False)
    quantise_base(model, "nf4")
    layer = model.model.layers[1]
    assert type(layer.mlp.router.gate) is nn.Linear
    assert isinstance(layer.self_attn.q_proj, QuantisedLinear)


def test_fp8_base_computes_the_rest_as_auto_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.model.load._cpu_claims_bf16", lambda: False)
    assert choose_precision("fp8_base", torch.device("cpu")) == "fp32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None}, "add a lora section"),
        ({"parallel": {"tensor": 2}}, "set parallel.tensor to 1"),
        ({"parallel": {"backend": "deepspeed"}}, "not for parallel.backend deepspeed"),
        ({"model": {"path": "m", "quantization": "nf4", "precision": "fp8_base"}}, "choose one of them"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any], message: str) -> None:
    tree = {"model": {"path": "m", "quantization": "nf4"}, "lora": {}, "data": {"train": "x.jsonl"}, **changes}
    with pytest.raises(ConfigError, match=message):
        resolve_config(tree)


def test_a_run_exports_from_the_models_own_weights(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    settings = tiny.write_config(tmp_path, folder, lora={"rank": 2}, optim={"max_steps": 2})
    settings.write_text(settings.read_text().replace("precision: fp32", "precision: fp32\n  quantization: nf4"))
    run = RunDir.create(tmp_path / "run", load_config(settings))
    train(run.path)
    merged = load_file(Path(export_run(run.path)["path"]) / "model.safetensors")
    adapter = load_file(run.export / "adapter" / "adapter_model.safetensors")
    for name, weight in load_file(folder / "model.safetensors").items():
        pair = [adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight") for half in "BA"]
        delta = 0 if pair[0] is None or pair[1] is None else 32 / 2 * pair[0] @ pair[1]
        assert torch.allclose(merged[name], weight + delta, atol=1e-6), name


def test_layers_that_a_gpu_does_not_multiply_in_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    held = nn.Sequential(*(QUANTISED["fp8"](layer, layer.weight) for layer in plain))
    gpu = torch.device("cuda", 0)
    assert "which GPUs before compute capability 8.9 lack" in describe_fp8(held, gpu)
    assert describe_fp8(held, torch.device("cpu")) == describe_fp8(plain, gpu) == ""
    about.minor = 9
    assert describe_fp8(held, gpu) == ""
    odd = nn.Linear(32, 40)
    held.append(QUANTISED["fp8"](odd, odd.weight))
    assert describe_fp8(held, gpu).startswith("1 layers of sizes that are no multiples of 16 (40 x 32) are not")
