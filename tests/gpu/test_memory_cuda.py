"""A GPU that is too small: a step that runs out of memory, with and without smaller micro-batches, and the door."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch

from lockstep.rundir import RunDir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

GIB = 2**30
LEFT_GIB = 12
NUM_STEPS = 4
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 2048, "initializer_range": 0.02,
}  # fmt: skip
SHAPE_OF_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": tiny.VOCABULARY, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def crowded() -> Iterator[None]:
    """Another process, this one, has all memory but LEFT_GIB: no plan can know."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - LEFT_GIB * GIB, dtype=torch.uint8, device="cuda")
    yield
    del ballast
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 texts of about 1,000 tokens a step, in one micro-batch: 30 GiB of activations."""
    folder = tmp_path_factory.mktemp("memory")
    draw = random.Random(0)

    def row() -> str:
        words = " ".join(draw.choices(tiny.WORDS, k=190))
        turns = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": words}]
        return json.dumps({"messages": turns}) + "\n"

    (folder / "train.jsonl").write_text("".join(row() for _ in range(64 * NUM_STEPS)))
    return tiny.write_config(
        folder,
        tiny.write_model(folder / "model", **SHAPE),
        deterministic=True,
        data={"max_length": 1024},
        batch={"samples": 64, "micro_batch_tokens": 65536},
        optim={"learning_rate": 1e-4},
        checkpoint={"export": "none"},
        launch={"device": "cuda", "timeout_s": 120},
    )


def train(config: Path, run_dir: Path, *overrides: str) -> tuple[int, RunDir, str]:
    started = time.perf_counter()
    given = ["model.precision=bf16", "model.compile=false", *overrides]
    code, out, err = tiny.run_lockstep("train", config, "--run-dir", run_dir, *given, timeout_s=150)
    print(f"{run_dir.name}: exit {code} after {time.perf_counter() - started:.1f} s\n{out[-300:]}{err[-1500:]}")
    return code, RunDir(run_dir), err


def losses(run: RunDir) -> list[float]:
    return [record["loss"] for record in run.metrics() if record["split"] == "train"]


@pytest.mark.timeout(320)
def test_a_step_without_memory_is_taken_in_smaller_micro_batches(crowded: None, config: Path, tmp_path: Path) -> None:
    code, run, _ = train(config, tmp_path / "shrinks", "batch.on_out_of_memory=shrink")
    assert code == 0
    warnings = [e["message"] for e in run.events() if e.get("kind") == "shrunk"]
    print("\n".join(warnings), run.status()["planned"], losses(run))
    assert warnings
    assert "CUDA out of memory" in warnings[0]
    tokens = run.status()["micro_batch_tokens"]
    assert 1024 <= tokens < 65536
    code, given, _ = train(config, tmp_path / "given", f"batch.micro_batch_tokens={tokens}")
    assert code == 0
    print(losses(given))
    assert len(losses(run)) == NUM_STEPS
    # Seen on an H200: 1e-6 apart before the first update, 4e-5 after the third.
    assert losses(run) == pytest.approx(losses(given), rel=2e-4)


@pytest.mark.timeout(200)
def test_a_run_that_ends_out_of_memory_says_why(crowded: None, config: Path, tmp_path: Path) -> None:
    code, run, err = train(config, tmp_path / "stops")
    assert code == 1
    said = " ".join(err.split())
    for part in ("CUDA out of memory", "the plan was ", "most of it for activations", "Lower batch.micro_batch_tokens"):
        assert part in said
    assert "out of memory" in run.status()["error"]


@pytest.mark.timeout(200)
def test_what_cannot_fit_is_refused_before_weights_are_read(config: Path, tmp_path: Path) -> None:
    model = tmp_path / "70b"
    tiny.build_tokenizer().save_pretrained(model)
    (model / "model.safetensors").write_bytes(b"never read")
    (model / "config.json").write_text(json.dumps(SHAPE_OF_70B))
    code, _, err = train(config, tmp_path / "refused", f"model.path={model}")
    assert code == 2
    said = " ".join(err.split())
    for part in ("this run does not fit: needs ", "optimizer ", "launch.check_memory false starts it all the same"):
        assert part in said
