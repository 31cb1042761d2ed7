"""LoRA on experts: what is adapted, the numbers of PEFT itself, and exports that PEFT and transformers load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from equivalence.mixtures import FAMILIES, Float64, build_mixture
from equivalence.plain import TINY, make_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import Tensor

from lockstep.config import LoraConfig
from lockstep.model.experts import compute_experts, follows_transformers
from lockstep.model.export import merge, save_weights
from lockstep.model.grouped_product import grouped_product
from lockstep.model.lora import add_lora, measure_coverage
from lockstep.model.parts import describe_parts, measure_parts
from lockstep.model.policy import decoder_layers
from lockstep.model.quantised import quantise_base

PROBE = torch.arange(1, 30)[None]
DECORATED = [family for family in FAMILIES if family != "llama4_text"]


def logits(model: Any) -> Tensor:
    with torch.no_grad(), Float64():
        return model.eval()(PROBE).logits


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: Any) -> dict[str, Tensor]:
    with Float64():
        model.eval()(PROBE).logits.square().sum().backward()
    return {name: p.grad for name, p in trained(model).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_same_model_in_peft_and_merged(family: str, tmp_path: Path) -> None:
    model = build_mixture(family, lora=True)
    expected, base = logits(model), logits(build_mixture(family))
    assert float((expected - base).abs().max()) > 0.1
    save_weights(model, model.state_dict(), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == len(trained(model))
    assert sum(".experts." in name for name in stored) == sum(".experts." in name for name in trained(model)) > 0
    loaded = peft.PeftModel.from_pretrained(build_mixture(family), str(tmp_path / "adapter")).double()
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-10)
    merged, _ = merge(model)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", DECORATED)
def test_adapters_have_pefts_own_gradients(family: str) -> None:
    model = build_mixture(family, lora=True)
    ours = gradients(model)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper  # PEFT's own: the sum of both matrices, for all experts
    for name, theirs in gradients(model).items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-10, atol=1e-10)
        assert float(ours[name].abs().max()) > 0


@pytest.mark.parametrize("family", DECORATED)
def test_grouped_products_give_the_numbers_of_the_models_own_loop(family: str) -> None:
    model = build_mixture(family)
    expected = logits(model), gradients(model)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if follows_transformers(module):
            module.forward = lambda *given, experts=module: compute_experts(experts, *given, {})  # type: ignore[method-assign]
    torch.testing.assert_close(logits(model), expected[0], rtol=0, atol=1e-10)
    for name, gradient in gradients(model).items():
        wanted = expected[1][name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()), msg=name)


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_grouped_product_is_that_of_each_group(dtype: torch.dtype, width: int) -> None:
    """Groups without a row, at the start, in the middle and at the end; a width that torch's kernel refuses."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=generator, dtype=dtype).requires_grad_()
    matrices = torch.randn(5, width, 8, generator=generator, dtype=dtype).requires_grad_()
    ends, seed = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32), torch.randn(9, width, generator=generator).to(dtype)

    def passes(product: Tensor) -> list[Tensor]:
        return [product.detach(), *torch.autograd.grad(product, (x, matrices), seed)]

    plain = torch.cat([x[0:4] @ matrices[1].T, x[4:9] @ matrices[3].T])
    for mine, own in zip(passes(grouped_product(x, matrices.transpose(1, 2), ends)), passes(plain), strict=True):
        torch.testing.assert_close(mine, own)


def test_all_linear_has_every_matrix_of_the_layers() -> None:
    """Also gate_proj, up_proj and down_proj, which PEFT takes for experts of an older version and would leave out."""
    model = build_mixture("deepseek_v3", lora=True)
    coverage = measure_coverage(model)
    assert coverage is not None
    assert {"gate_proj", "up_proj", "down_proj", "experts.gate_up_proj", "experts.down_proj"} < set(coverage.adapted)
    assert all(name.startswith("gate.") or "norm" in name for name in coverage.others)
    adapted = {name.partition(".lora_A")[0] for name in trained(model) if ".lora_A" in name}
    assert any(".0.mlp.gate_proj" in name for name in adapted)  # dense
    assert any(".1.mlp.shared_experts.gate_proj" in name for name in adapted)
    assert coverage.share > 0.95


def test_what_is_trained_is_told_by_kind() -> None:
    adapted = measure_parts(build_mixture("deepseek_v3", lora=True))
    assert adapted["experts"].trained == sum(
        p.numel() for name, p in trained(build_mixture("deepseek_v3", lora=True)).items() if ".mlp.experts." in name
    )
    told = describe_parts(adapted)
    assert "router frozen" in told
    assert "experts 1.34 k" in told
    assert told.index("attention") < told.index("router frozen")
    full = measure_parts(build_mixture("qwen3_moe"))
    assert all(part.trained == part.total for part in full.values())
    assert sum(part.total for part in full.values()) == build_mixture("qwen3_moe").num_parameters()
    dense = describe_parts(measure_parts(make_model("llama", lora=True)))
    assert dense == "mlp 1.92 k, attention 1.79 k, embedding frozen, head frozen, norms frozen"


def test_targets_may_name_experts() -> None:
    model = add_lora(build_mixture("mixtral"), LoraConfig(rank=2, targets=("q_proj", "experts.down_proj")))
    assert {name.split(".lora_")[0].split(".", 5)[-1] for name in trained(model)} == {"self_attn.q_proj", "mlp.experts"}
    assert model.peft_config["default"].target_parameters is not None
    with pytest.raises(
        ValueError, match=r"'w1' matches no module.*its experts experts.down_proj, experts.gate_up_proj"
    ):
        add_lora(build_mixture("mixtral"), LoraConfig(rank=2, targets=("w1",)))


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"dora": True}])
def test_what_an_adapter_on_experts_cannot_do_is_refused(settings: Mapping[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"lora.{key} is not possible on experts.down_proj.*lora.targets.*k_proj"):
        add_lora(build_mixture("mixtral"), LoraConfig(**settings))
    add_lora(build_mixture("mixtral"), LoraConfig(targets=("q_proj",), **settings))
    config = transformers.LlamaConfig(**TINY)
    add_lora(transformers.LlamaForCausalLM(config), LoraConfig(**settings))


def test_the_configuration_of_an_export_names_the_experts(tmp_path: Path) -> None:
    model = build_mixture("qwen3_moe", lora=True)
    save_weights(model, model.state_dict(), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(written["target_parameters"]) == {"experts.gate_up_proj", "experts.down_proj"}
    assert set(written["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=str)
def test_a_compiled_grouped_product_is_the_same(trained: tuple[bool, bool]) -> None:
    """Also of matrices whose layout torch's kernel does not take, as adapters have it; an expert has no row."""
    ends = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
    x = torch.randn(12, 16).to(torch.bfloat16)
    matrices = torch.randn(24, 16, 4).to(torch.bfloat16).permute(2, 1, 0)
    found = []
    for compiled in (False, True):
        operands = [x.clone().requires_grad_(trained[0]), matrices.detach().requires_grad_(trained[1])]

        def product(x: torch.Tensor, matrices: torch.Tensor, compiled: bool = compiled) -> torch.Tensor:
            return grouped_product(x, matrices if compiled else matrices.contiguous(), ends)

        y = (torch.compile(product, backend="aot_eager", fullgraph=True) if compiled else product)(*operands)
        gradients = torch.autograd.grad(y.float().square().sum(), [o for o in operands if o.requires_grad])
        found.append((y, *gradients))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["plain", "nf4"])
def test_all_layers_with_adapters_on_experts_are_one_compiled_function(held: str) -> None:
    plain = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"](), dtype=torch.bfloat16)
    model: Any = add_lora(plain, LoraConfig(rank=8)).to(torch.bfloat16)
    if held == "nf4":
        quantise_base(model, "nf4")
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=count)
    with torch.no_grad():
        model(input_ids=torch.arange(1, 30)[None], use_cache=False)
    assert len(decoder_layers(model)) > 1
    assert len(graphs) == 1
