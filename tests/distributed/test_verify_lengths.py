"""What a model does differently beyond some length is verified on both sides of it, however long that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faulty_worker
import pytest
import tiny
import torch
import transformers

from lockstep.config import RunConfig, load_config
from lockstep.verification import verify

FACTORS = {"short_factor": [1.0 + 0.02 * i for i in range(16)], "long_factor": [1.0 + 0.5 * i for i in range(16)]}
SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MODELS = {
    "one_length_for_all": lambda: transformers.Phi3Config(
        **SHAPE,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    ),
    "windows_forgotten": lambda: transformers.MistralConfig(**SHAPE, sliding_window=4096),
}
LIMITS = {"one_length_for_all": "longrope 4,096", "windows_forgotten": "sliding_window 4,096"}


def configure(folder: Path, fault: str) -> RunConfig:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[fault]()).save_pretrained(folder / "model")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    return load_config(tiny.write_config(folder, folder / "model", batch={"samples": 8, "micro_batch_tokens": 512}))


@pytest.mark.slow
@pytest.mark.parametrize("fault", MODELS)
def test_both_sides_of_a_limit_are_verified(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, fault)
    report = verify(config, layouts="context=2; pipeline=2")
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert report.tolerance == 1e-10
    assert any(f"what changes with the length of a text ({LIMITS[fault]}) does so at" in note for note in report.notes)
    monkeypatch.setenv("LOCKSTEP_TEST_FAULT", fault)
    monkeypatch.syspath_prepend(Path(faulty_worker.__file__).parent)
    report = verify(config, layouts="context=2", worker_module="faulty_worker")
    assert not report.passed
    assert all("log-probs (batch 1)" in verdict.problem for verdict in report.verdicts)
