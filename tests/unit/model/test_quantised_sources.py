"""Models whose files are quantised already: plain weights when they are loaded, or refused before that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config import ConfigError, LoraConfig, ModelConfig, load_config
from lockstep.model.load import build_model, load_causal_lm
from lockstep.rundir import RunDir
from lockstep.train.run import run as train

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def add_settings(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def write_fp8(folder: Path, block: int = 32) -> dict[str, Tensor]:
    """As DeepSeek ships them: e4m3, with a scale for each square block. Returns what the weights are."""
    tiny.write_model(folder, hidden_size=64, intermediate_size=160)
    stored, plain = {}, load_file(folder / "model.safetensors")
    for name, weight in plain.items():
        stored[name] = weight
        if "_proj" not in name:
            continue
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // block), -(-columns // block)) / 1000
        spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        stored[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = stored[name].float() * spread
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    add_settings(folder, settings)
    return plain


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """As gpt-oss ships its experts: blocks of 32 FP4 values along the inputs, with a power of two each."""
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    stored, plain = {}, load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, weight in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=draw)
        powers = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=draw)
        plain[name] = (FP4[codes] * 2.0 ** (powers - 127)[..., None]).flatten(2).transpose(1, 2)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = powers.to(torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    add_settings(folder, {"quant_method": "mxfp4"})
    return plain


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_those_that_the_files_mean(write: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = write(tmp_path)
    model = load_causal_lm(ModelConfig(path=str(tmp_path)), dtype)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype, name
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=1e-6, atol=0, msg=name)
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_no_adapter_on_them_is_without_a_gradient(write: Any, quantization: Any, tmp_path: Path) -> None:
    write(tmp_path)
    model = build_model(
        ModelConfig(path=str(tmp_path), quantization=quantization), LoraConfig(rank=2), "fp32", with_weights=True
    )
    model(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert adapters
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters.values())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "something-new"}, "something-new"),
    ],
)
def test_others_are_refused_before_anything_is_loaded(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    add_settings(folder, settings)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"nobody reads this")
    config = load_config(tiny.write_config(tmp_path, folder, lora={"rank": 2}))
    with pytest.raises(ConfigError, match=rf"quantised already \({name}\).*name the model that they were made from"):
        train(RunDir.create(tmp_path / "run", config).path)
