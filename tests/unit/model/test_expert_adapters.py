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
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model import lora
from lockstep.model.experts import compute_experts, compute_in_two, follows_transformers
from lockstep.model.export import merge, save_weights
from lockstep.model.grouped_product import grouped_product
from lockstep.model.lora import add_lora, measure_coverage
from lockstep.model.parts import describe_parts, measure_parts
from lockstep.model.policy import decoder_layers
from lockstep.model.quantised import quantise_base
from lockstep.types import Completion, Datum, LossSpec

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


@pytest.mark.parametrize("held", ["plain", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_operations_of_a_gpu_give_the_same_numbers(family: str, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed matrices with biases too, and an expert that no token has chosen."""
    model = build_mixture(family, lora=True)
    if held == "nf4":
        quantise_base(model, "nf4")
    expected = logits(model), gradients(model)
    model.zero_grad(set_to_none=True)
    calls = []

    def in_two(*given: Any) -> Tensor:
        calls.append(given[2])
        return compute_in_two(*given)

    monkeypatch.setattr(lora, "compute_experts", in_two)
    torch.testing.assert_close(logits(model), expected[0], rtol=0, atol=1e-10)
    for name, gradient in gradients(model).items():
        wanted = expected[1][name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()), msg=name)
    assert calls


def test_products_of_experts_are_not_computed_again_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "compute_experts", compute_in_two)
    counts = {}
    for way in ("full", "selective"):
        model = build_mixture("qwen3_moe", lora=True)
        backend = TorchBackend(model, precision="fp32", activation_checkpointing=way, device="cpu")
        with _Counted() as found:
            backend.forward_backward([Datum([1], [Completion([2, 3, 4], [1.0] * 3)])], LossSpec())
        counts[way] = found.products
    assert counts["selective"] == 2 * len(decoder_layers(model))
    assert counts["full"] > counts["selective"]


class _Counted(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.lockstep.expert_product.default
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_compiled_recomputation_leaves_out_the_products_whose_result_backward_does_not_need() -> None:
    model = build_mixture("qwen3_moe", lora=True)
    layer: Any = next(m for m in model.modules() if type(m).__name__ == "NarrowExperts")
    hidden = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    chosen, weights = torch.tensor([[0, 3]] * 9), torch.full((9, 2), 0.5, dtype=torch.float64)
    graphs = []

    def experts(hidden: Tensor) -> Tensor:
        found = (
            {"gate_up_proj": lora.expert_adapter(layer, "default")} if layer.parameter_name == "gate_up_proj" else {}
        )
        return compute_in_two(layer.get_base_layer(), hidden, chosen, weights, found)

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append([node.args[1] for node in graph.graph.nodes if "expert_product.default" in str(node.target)])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda hidden: checkpoint(experts, hidden, use_reentrant=False),
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition),
        fullgraph=True,
    )
    compiled(hidden).sum().backward()
    assert graphs == [[True, False], [True]]  # those that enter the experts, and those that leave them


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
