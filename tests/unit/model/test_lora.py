"""Which layers get an adapter, what is trained, and that it trains."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from equivalence.families import build as build_family
from equivalence.plain import FAMILIES, TINY, keep_float64, make_batch, make_model, plain_loss, scale_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from lockstep.backend.reference import AdapterOff
from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.model.export import merge
from lockstep.model.lora import add_lora, is_sped_up, measure_coverage, speed_up_eager
from lockstep.model.parts import measure_parts
from lockstep.model.policy import Policy, causal_lm, decoder_layers
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec, OptimStep

EVERY_LINEAR = {
    **{f: {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} for f in FAMILIES},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "bloom": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
}


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that carry an adapter, by their name in the transformers model."""
    return {name: m for name, m in causal_lm(model).named_modules() if hasattr(m, "lora_A")}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_means_every_linear_layer_inside_the_decoder_layers(family):
    plain = make_model(family, lora=False)
    inside = {id(m) for layer in decoder_layers(plain) for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))}
    expected = {name for name, m in plain.named_modules() if id(m) in inside}
    model = add_lora(plain, LoraConfig(rank=2))
    found = adapted(model)
    assert set(found) == expected
    assert {name.rsplit(".", 1)[-1] for name in found} == EVERY_LINEAR[family]
    assert type(causal_lm(model).get_output_embeddings()) is nn.Linear


def test_gpt2_has_adapters_on_its_transposed_linear_layers():
    model = add_lora(make_model("gpt2", lora=False), LoraConfig(rank=2))
    assert all(isinstance(m.get_base_layer(), Conv1D) for m in adapted(model).values())
    fan_out = adapted(model)["transformer.h.0.attn.c_attn"]
    assert fan_out.lora_A["default"].weight.shape == (2, 32)
    assert fan_out.lora_B["default"].weight.shape == (96, 2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_adapters_are_trained(family):
    model = add_lora(make_model(family, lora=False), LoraConfig(rank=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_A" in name or "lora_B" in name for name in trained)
    assert len(trained) == 2 * len(adapted(model))


def test_adapters_of_a_narrow_model_are_float32():
    model = add_lora(make_model("llama", lora=False).to(torch.bfloat16), LoraConfig(rank=2))
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_new_adapters_do_not_change_what_the_model_computes():
    tokens = torch.tensor([[3, 5, 8]])
    plain = make_model("llama", lora=False)
    expected = plain(tokens).logits
    assert torch.equal(add_lora(plain, LoraConfig(rank=2)).eval()(tokens).logits, expected)


def test_named_targets_alone_get_adapters():
    model = add_lora(make_model("llama", lora=False), LoraConfig(rank=2, targets=("q_proj", "layers.1.mlp.up_proj")))
    assert set(adapted(model)) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_targets_that_match_nothing_are_an_error_that_names_the_linear_layers():
    with pytest.raises(ValueError) as caught:
        add_lora(make_model("gpt2", lora=False), LoraConfig(targets=("c_attn", "q_proj")))
    message = "lora.targets 'q_proj' matches no module of GPT2LMHeadModel; "
    assert str(caught.value) == message + "its linear layers are c_attn, c_fc, c_proj"


def test_rank_alpha_and_dropout_are_passed_on():
    model = add_lora(make_model("llama", lora=False), LoraConfig(rank=3, alpha=12, dropout=0.25))
    layer = adapted(model)["model.layers.0.self_attn.q_proj"]
    assert layer.r["default"] == 3
    assert layer.scaling["default"] == 4.0
    assert layer.lora_dropout["default"].p == 0.25


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_train(family, dora):
    model = add_lora(make_model(family, lora=False), LoraConfig(rank=4, dora=dora)).double()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert any("magnitude" in name for name in before) == dora
    backend = TorchBackend(model, precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu")))
    batch = make_batch()
    losses = []
    for _ in range(4):
        losses.append(backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss)
        backend.optim_step(OptimStep(0.01))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], old) for name, old in before.items())
    assert all(torch.equal(after[name], old) for name, old in frozen.items())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [None, "none", "all", "lora_only"])
def test_sped_up_layers_give_pefts_own_numbers_and_gradients(bias: Any, dropout: float) -> None:
    """`bias`: as PEFT's setting of that name; None is of layers without one."""
    torch.manual_seed(0)
    has_bias = bias is not None
    net = nn.Sequential(nn.Linear(6, 9, bias=has_bias), nn.Tanh(), nn.Linear(9, 5, bias=has_bias)).double()
    settings = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        lora_dropout=dropout,
        target_modules=["0", "2"],
        init_lora_weights=False,
        bias=bias or "none",
    )
    model = peft.get_peft_model(net, settings).double()
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)

    def passes() -> list[torch.Tensor]:
        torch.manual_seed(1)
        out = model(x)
        (out**3).sum().backward()
        assert x.grad is not None
        found = [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
        x.grad = None
        model.zero_grad(set_to_none=True)
        return found

    expected = passes()
    speed_up_eager(model)
    assert any(is_sped_up(layer) for layer in model.modules())
    assert len(expected) == 2 + (6 if bias in ("all", "lora_only") else 4)
    for mine, own in zip(passes(), expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x.detach()), model.eval()(x).detach())


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_peft_trains_have_its_gradient(bias: Any) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        plain = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY)).double()  # q, k and v have biases
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], bias=bias, init_lora_weights=False)
        return keep_float64(peft.get_peft_model(plain, settings).double())

    batch, own = make_batch(), build()
    plain_loss(own, batch, scale_of(batch)).backward()
    expected = {name: p.grad for name, p in own.named_parameters() if p.requires_grad}
    assert sum(name.endswith("bias") for name in expected) == {"all": 6, "lora_only": 4}[bias]
    backend = TorchBackend(build(), precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu")))
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    for name, parameter in backend.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_adapter_that_is_switched_off_must_leave_the_base_model(bias: Any) -> None:
    """Trained biases stay when adapters are off: that would be another reference."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], bias=bias))
    with pytest.raises(ValueError, match=r"adapter_off.*bias.*copy"):
        AdapterOff(adapted)
    AdapterOff(peft.get_peft_model(make_model("qwen3", lora=False), peft.LoraConfig(target_modules=["embed_tokens"])))
    AdapterOff(add_lora(make_model("llama", lora=False), LoraConfig(dora=True)))


def test_an_adapter_on_a_tied_embedding_is_merged_into_the_embedding_alone(tmp_path: Any) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False)
    model: Any = peft.get_peft_model(make_model("qwen3", lora=False), settings).double()
    probe = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model.eval()(probe).logits
    merged, drift = merge(model)
    assert drift < 1e-6
    merged.save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(keep_float64(loaded.eval())(probe).logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["falcon", "ctrl", "doge"])
def test_all_linear_finds_layers_of_unusual_kinds_and_names(family: str) -> None:
    """Products by code of their own; layers of a Sequential, called like those of the model; weights of the layer."""
    coverage = measure_coverage(add_lora(build_family(family), LoraConfig(rank=2)))
    assert coverage is not None
    assert coverage.share > 0.95
    assert not coverage.is_partial


@pytest.mark.parametrize("family", ["afmoe", "hunyuan_v1_moe", "jetmoe", "zaya"])
def test_all_linear_leaves_routers_as_they_are(family: str) -> None:
    """Also those that are linear layers, or several."""
    parts = measure_parts(add_lora(build_family(family), LoraConfig(rank=2)))
    assert parts["router"].total > 0
    assert parts["router"].trained == 0
    assert parts["experts"].trained > 0


def test_a_gate_that_chooses_no_experts_gets_an_adapter() -> None:
    coverage = measure_coverage(add_lora(build_family("gemma4_text"), LoraConfig(rank=2)))
    assert coverage is not None
    assert coverage.adapted["per_layer_input_gate"] > 0


def test_what_peft_refuses_is_left_out_and_said() -> None:
    model = add_lora(build_family("mamba2"), LoraConfig(rank=2))
    coverage = measure_coverage(model)
    assert coverage is not None
    assert coverage.is_partial
    assert "PEFT takes none on out_proj here" in str(coverage)
    named = measure_coverage(add_lora(build_family("falcon_h1"), LoraConfig(rank=2, targets=("q_proj", "in_proj"))))
    assert named is not None
    assert not named.refused  # nobody asked for it


def test_a_kernel_that_reads_weights_does_not_leave_adapters_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `mamba-ssm` does on a GPU while a layer trains, which is given the plain weight of out_proj."""
    from transformers.models.bamba import modeling_bamba

    calls: list[bool] = []
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", lambda *_, **__: calls.append(True))
    probe = torch.arange(1, 9)[None]
    Policy(build_family("bamba")).train().model(probe, use_cache=False)
    assert calls
    calls.clear()
    model = add_lora(build_family("bamba"), LoraConfig(rank=2, targets=("out_proj",)))
    with_adapters = Policy(model).train().model(probe, use_cache=False).logits
    assert not calls
    with_adapters.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_a_model_without_a_layer_for_adapters_is_refused_in_a_sentence() -> None:
    from equivalence.families import build

    with pytest.raises(
        ValueError, match=r"^lora.targets all-linear finds no layer of GitForCausalLM that computes text"
    ):
        add_lora(build("git"), LoraConfig(rank=2))
