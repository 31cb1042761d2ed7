"""Packed texts with images, in micro-batches, against the model's own forward over single texts, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from vision_models import FAMILIES, write_model, write_rows

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import DataConfig, LoraConfig, ModelConfig
from lockstep.data import compile_data
from lockstep.data.images import decode_image, read_image_bytes
from lockstep.model.load import build_model, load_processor, load_tokenizer
from lockstep.types import Datum, LossSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_rows(path / "rows")
    return path


def read(folder: Path, family: str, vision: str = "trained") -> tuple[ModelConfig, Any, list[Datum]]:
    if not (folder / family).exists():
        write_model(folder / family, family)
    config = ModelConfig(path=str(folder / family), vision=vision)
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, tokenizer)
    source = DataConfig(train=str(folder / "rows" / "train.jsonl"), cache_dir=str(folder / "cache"))
    data = compile_data(source, tokenizer, seed=0, images=processor)
    return config, processor, list(data.train)


def plain_gradients(model: Any, folder: Path, batch: list[Datum], scale: float) -> tuple[float, dict[str, Any]]:
    """One text at a time through transformers' own forward, with its own processor, positions and masks."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    total = torch.zeros((), dtype=torch.float64)
    body = getattr(model, "get_base_model", lambda: model)()
    for datum in batch:
        (answer,) = datum.completions
        ids = torch.tensor([[*map(int, datum.prompt), *map(int, answer.tokens)]])
        images = [decode_image(read_image_bytes(image, ""), "") for image in datum.images]
        inputs: dict[str, Any] = {}
        if images:
            made = processor([images], return_tensors="pt")
            kept = {key: value for key, value in made.items() if key not in ("rows", "cols", "num_crops")}
            inputs = {key: value.double() if value.is_floating_point() else value for key, value in kept.items()}
            types = (ids == body.config.image_token_id).long()
            inputs |= {"token_type_ids": types} if "Gemma" in type(body).__name__ else {}
            inputs |= {"mm_token_type_ids": types} if "Qwen" in type(body).__name__ else {}
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0].double()
        logprobs = torch.log_softmax(logits[len(datum.prompt) - 1 : -1], -1)
        picked = logprobs.gather(1, ids[0, len(datum.prompt) :, None])[:, 0]
        total = total - (picked * torch.tensor([float(w) for w in answer.weights], dtype=torch.float64)).sum() * scale
    total.backward()
    return float(total.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


QUICK = (("idefics3", False), ("gemma3", True))
CASES = [(family, lora) for family in FAMILIES for lora in (False, True)]


@pytest.mark.parametrize(
    ("family", "lora"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_packed_images_have_the_gradient_of_single_texts(folder: Path, family: str, lora: bool) -> None:
    config, processor, batch = read(folder, family)
    scale = 1 / sum(datum.total_weight for datum in batch)
    torch.manual_seed(0)
    whole = ("multi_modal_projector",) if family == "gemma3" else ()  # a matrix and no layer: it takes no adapter
    adapters = LoraConfig(rank=4, modules_to_save=whole) if lora else None
    model = build_model(config, adapters, "fp64", with_weights=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    loss, expected = plain_gradients(model, folder / family, batch, scale)
    model.zero_grad(set_to_none=True)
    for budget in (112, 400):
        backend = TorchBackend(model, precision="fp64", micro_batch_tokens=budget, images=processor, device="cpu")
        result = backend.forward_backward(batch, LossSpec("cross_entropy", scale=scale))
        assert result.loss == pytest.approx(loss, abs=1e-10)
        found = {name: p.grad for name, p in backend.parameters().items() if p.grad is not None}
        assert {n for n, g in expected.items() if g.abs().max() > 0} <= found.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), rtol=0, atol=1e-10)
        assert any("vis" in name for name in found)
        backend.close()
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("vision", ["connector", "trained"])
def test_a_connector_that_takes_no_adapter_is_not_left_out_silently(folder: Path, vision: str) -> None:
    config, _, _ = read(folder, "gemma3", vision)
    with pytest.raises(ValueError, match=r"take no adapter: set lora\.modules_to_save to \[multi_modal_projector\]"):
        build_model(config, LoraConfig(rank=4), "fp32", with_weights=False)
