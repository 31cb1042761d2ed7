"""GRPO of models that keep states from token to token: what the engine samples is what is trained, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from equivalence.families import tiny_config
from ranks import run_to_the_end

from lockstep.config import load_config
from lockstep.rundir import RunDir

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one": (1, {}), "fsdp": (2, {"shard": 2})}


def write_hybrid(folder: Path, family: str) -> Path:
    config = tiny_config(family)
    config.vocab_size, config.eos_token_id, config.bos_token_id = tiny.VOCABULARY, 2, None
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_samples_have_the_log_probs_of_training(family: str, layout: str, tmp_path: Path) -> None:
    """After each of three steps with new weights; prompts of several lengths, four samples of each."""
    procs, parallel = LAYOUTS[layout]
    rows = [{"prompt": f"say {' '.join(tiny.WORDS[: place % 5 + 1])}", "answer": "red"} for place in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny.write_config(
        tmp_path,
        write_hybrid(tmp_path / "model", family),
        algorithm={
            "kind": "grpo",
            "reward": [{"name": "length", "weight": 1.0, "options": {"most": 1, "soft": 9}}],
            "group_size": 4,
            "max_tokens": 10,
        },
        optim={"max_steps": 3},
        parallel=parallel,
        launch={"procs": procs},
    )
    run = RunDir.create(tmp_path / "run", load_config(config))
    run_to_the_end(run, procs)
    steps = [record for record in run.metrics() if record["split"] == "train"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["sampler_trainer_logprob_diff"] for record in steps) < 1e-4
    assert not any(
        "transformers' generate" in line for line in run.path.joinpath("status.json").read_text().split("\n")
    )
