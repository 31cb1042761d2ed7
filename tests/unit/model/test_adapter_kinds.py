"""rsLoRA, PiSSA, adapters on embedding and head, modules trained beside them: trained right, and loaded by PEFT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from equivalence.families import in_float64
from equivalence.plain import TINY, keep_float64, make_batch, plain_loss, scale_of
from torch import nn

from lockstep.backend.optimizers import OptimizerSettings
from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig
from lockstep.config.loading import resolve_config
from lockstep.config.reference import choose_reference
from lockstep.model.export import merge, save_weights
from lockstep.model.lora import add_lora
from lockstep.parallel.group import ProcessGroup
from lockstep.types import LossSpec, OptimStep

KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"rslora": True},
    "pissa": {"init": "pissa"},
    "pissa-rslora": {"init": "pissa", "rslora": True},
    "head": {"targets": ("q_proj", "lm_head")},
    "embedding": {"targets": ("v_proj", "embed_tokens")},
    "both": {"targets": ("q_proj", "embed_tokens", "lm_head")},
    "saved-head": {"modules_to_save": ("lm_head",)},
    "saved-both": {"modules_to_save": ("embed_tokens", "lm_head")},
    "saved-norm": {"modules_to_save": ("norm",)},
}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with in_float64():
        yield


def make_base(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=tied)
    return keep_float64(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64))


def make_adapted(kind: str, tied: bool) -> nn.Module:
    model = add_lora(make_base(tied), LoraConfig(rank=3, alpha=7, **KINDS[kind])).double()
    if "pissa" not in kind:
        draw = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:  # at first a part of it is zero, which would hide the other
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


SLOW = {
    ("rslora", False),
    ("rslora", True),
    ("pissa", True),
    ("embedding", False),
    ("embedding", True),
    ("head", False),
}
SLOW |= {("both", False), ("saved-head", False), ("saved-head", True), ("saved-both", False), ("saved-norm", True)}


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        pytest.param(kind, tied, marks=pytest.mark.slow if (kind, tied) in SLOW else ())
        for kind in KINDS
        for tied in (False, True)
    ],
)
def test_the_step_is_the_plain_one_and_peft_loads_and_merges_it(kind: str, tied: bool, tmp_path: Path) -> None:
    batch = make_batch(0)
    plain = make_adapted(kind, tied)
    plain_loss(plain, batch, scale_of(batch)).backward()
    model = make_adapted(kind, tied)
    backend = TorchBackend(
        model, micro_batch_tokens=64, precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu")), compile=False
    )
    backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert backend.parameters().keys() == expected.keys()
    for name, parameter in backend.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10, msg=name)
    backend.optim_step(OptimStep(learning_rate=1e-2))
    backend.export_weights(tmp_path / "adapter")
    backend.policy.stop_packing()
    loaded = peft.PeftModel.from_pretrained(make_base(tied), str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    trained = logits(model)
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-10, atol=1e-10)
    assert merge(model)[1] < 1e-5
    save_weights(merged := model.get_base_model(), merged.state_dict(), tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits(keep_float64(again)), trained, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["both", "saved-both"])
def test_a_reference_is_the_model_without_all_of_it(kind: str) -> None:
    batch, group = make_batch(0), ProcessGroup(0, 1, torch.device("cpu"))
    settings: dict[str, Any] = {"micro_batch_tokens": 512, "precision": "fp64", "group": group}
    found = TorchBackend(make_adapted(kind, True), reference="adapter_off", **settings).forward(batch, reference=True)
    expected = TorchBackend(make_base(True), **settings).forward(batch)
    for row, other in zip(found, expected, strict=True):
        assert [list(part) for part in row] == [pytest.approx(list(part), rel=1e-10) for part in other]


def test_pissa_begins_as_the_base() -> None:
    plain, model = make_base(False), make_adapted("pissa", False)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-10, atol=1e-10)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    weight = plain.get_submodule("model.layers.0.mlp.up_proj").weight
    left, sizes, right = torch.linalg.svd(weight)
    best = left[:, :3] * sizes[:3] @ right[:3]
    torch.testing.assert_close(layer.get_delta_weight("default"), best, rtol=1e-6, atol=1e-6)


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    layer = make_adapted("rslora", False).get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert layer.scaling["default"] == pytest.approx(7 / math.sqrt(3))


def test_the_second_matrix_may_learn_faster() -> None:
    batch, changes = make_batch(0), {}
    for ratio in (1.0, 16.0):
        model = make_adapted("rslora", False)
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        backend = TorchBackend(
            model, micro_batch_tokens=512, precision="fp64", group=ProcessGroup(0, 1, torch.device("cpu")),
            optimizer=OptimizerSettings(lora_b_ratio=ratio),
        )  # fmt: skip
        backend.forward_backward(batch, LossSpec(scale=scale_of(batch)))
        backend.optim_step(OptimStep(learning_rate=1e-3))
        changes[ratio] = {name: p.detach() - before[name] for name, p in backend.parameters().items()}
    for name, change in changes[1.0].items():
        factor = 16 if "lora_B" in name else 1
        torch.testing.assert_close(changes[16.0][name], factor * change, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", ["dpo", "grpo"])
def test_a_base_without_its_principal_part_is_no_reference(key: str) -> None:
    algorithm = {"kind": key, **({"kl_coefficient": 0.1, "reward": "exact"} if key == "grpo" else {})}
    tree = {"model": "m", "data": {"train": "x.jsonl"}, "lora": {"init": "pissa"}, "algorithm": algorithm}
    assert choose_reference(resolve_config(tree), num_rows=4, num_seen=4).kind == "copy"


def test_names_that_match_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="matches no module"):
        add_lora(make_base(False), LoraConfig(modules_to_save=("head",)))
