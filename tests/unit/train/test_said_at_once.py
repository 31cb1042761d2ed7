"""What is slow or left out is said before the first step: in events.jsonl, on the terminal and in the summary."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from equivalence.plain import TINY, make_model
from rich.console import Console

from lockstep.backend.torch_backend import TorchBackend
from lockstep.cli.display import RunDisplay, print_summary
from lockstep.config import ConfigError, LoraConfig, load_config
from lockstep.model.lora import add_lora, measure_coverage
from lockstep.parallel.group import ProcessGroup
from lockstep.rundir import RunDir
from lockstep.train.describe import check_positions, describe, describe_cost
from lockstep.train.run import run

ONE = ProcessGroup(0, 1, torch.device("cpu"))


def warnings_of(model: Any) -> str:
    backend = TorchBackend(model, precision="fp32", group=ONE)
    return "\n".join([*backend.warnings, *backend.slow])


def test_a_run_says_it_in_its_events_on_the_terminal_and_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    changes = {"lora": {"rank": 2, "targets": ["query_key_value"]}, "optim": {"max_steps": 1}}
    path = tiny.write_config(tmp_path, tmp_path / "model", **changes, checkpoint={"export": "none"})
    RunDir.create(tmp_path / "run", load_config(path))
    done, terminal = RunDir(tmp_path / "run"), Console(file=io.StringIO(), width=300)
    display = RunDisplay(done, terminal)
    run(tmp_path / "run")
    events = done.events()
    said = [str(event["message"]) for event in events if event["event"] == "warning"]
    expected = (
        "LoRA adapts 25% of the weights in the decoder layers: query_key_value. Without an adapter: dense_h_to_4h",
        "BloomAttention of BloomForCausalLM compute each document of a packed row by itself",
    )
    for sentence in expected:
        assert any(message.startswith(sentence) for message in said), sentence
    first_checkpoint = next(place for place, event in enumerate(events) if event["event"] == "checkpoint")
    assert all(place < first_checkpoint for place, event in enumerate(events) if event["event"] == "warning")

    display.print_plain(final=True)
    summary = Console(file=io.StringIO(), width=300)
    print_summary(summary, done)
    for console in (terminal, summary):
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for sentence in expected:
            assert f"warning: {sentence}" in shown


def test_a_summary_repeats_a_warning_once_and_counts_the_rest(tmp_path: Path) -> None:
    path = tiny.write_config(tmp_path, tiny.write_model(tmp_path / "model"))
    done = RunDir.create(tmp_path / "run", load_config(path))
    for number in [*range(11), 0, 0]:
        done.log_event("warning", message=f"warning number {number}.")
    console = Console(file=io.StringIO(), width=300)
    print_summary(console, done)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("warning number 0.") == 1
    assert "number 8." not in shown
    assert "and 3 more in" in shown


def test_adapters_that_leave_experts_out_are_told_with_shares() -> None:
    torch.manual_seed(0)
    experts = transformers.Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    )
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = add_lora(transformers.Qwen3MoeForCausalLM(experts), LoraConfig(rank=2, targets=attention))
    coverage = measure_coverage(model)
    assert coverage is not None
    base = [(n, p.numel()) for n, p in model.named_parameters() if ".layers." in n and "lora_" not in n]
    adapted = sum(size for name, size in base if "_proj.base_layer" in name)
    assert coverage.share == pytest.approx(adapted / sum(size for _, size in base))
    assert coverage.share < 0.5
    said = warnings_of(model)
    assert "LoRA adapts" in said
    assert "experts.gate_up_proj (" in said
    assert "experts.down_proj (" in said
    assert "q_proj" in said.split("Without an adapter")[0]


def test_a_dry_run_tells_it_too(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    partial = load_config(tiny.write_config(tmp_path, folder, lora={"rank": 2, "targets": ["k_proj"]}))
    assert any("LoRA adapts" in warning and "gate_proj" in warning for warning in describe(partial)["warnings"])
    whole = load_config(tiny.write_config(tmp_path, folder, lora={"rank": 2}))
    assert not describe(whole)["warnings"]


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_on_most_weights_and_packed_documents_need_no_word(dora: bool) -> None:
    model = add_lora(make_model("llama", lora=False), LoraConfig(rank=2, dora=dora))
    coverage = measure_coverage(model)
    assert coverage is not None
    assert coverage.share > 0.95
    assert warnings_of(model) == ""
    assert measure_coverage(make_model("llama", lora=False)) is None


@pytest.mark.parametrize(("limit", "kind", "count"), [(100, "sft", 1), (100, "grpo", 2), (128, "grpo", 0)])
def test_positions_that_depend_on_length_are_told_where_texts_are_so_long(
    limit: int, kind: str, count: int, tmp_path: Path
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    settings = transformers.LlamaConfig(**TINY, rope_parameters={**rope, "original_max_position_embeddings": limit})
    backend = TorchBackend(transformers.LlamaForCausalLM(settings), precision="fp32", group=ONE)
    algorithm = {"kind": "grpo", "max_tokens": 20, "reward": "exact"} if kind == "grpo" else {"kind": "sft"}
    path = tiny.write_config(tmp_path, tiny.write_model(tmp_path / "model"), algorithm=algorithm)
    rows: Any = None  # packed: not looked at
    said = list(describe_cost(load_config(path), backend, rows))
    assert len(said) == count
    assert all(f"{limit} tokens" in sentence for sentence in said)
    assert any("sampler and trainer differ" in sentence for sentence in said) == (count == 2)


def test_chunked_attention_is_computed_document_by_document() -> None:
    """Chunks are counted from the start of a row: packed, a document would see another part of itself."""
    torch.manual_seed(0)
    settings = {**TINY, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    config = transformers.Llama4TextConfig(**settings, **layers, attention_chunk_size=8, moe_layers=[])
    model = transformers.Llama4ForCausalLM(config)
    assert "Llama4TextAttention of Llama4ForCausalLM compute each document of a packed row by itself" in warnings_of(
        model
    )


def test_rows_beyond_a_table_of_positions_are_refused_before_the_first_step(tmp_path: Path) -> None:
    backend = TorchBackend(make_model("gpt2", lora=False), precision="fp64", group=ONE)
    path = tiny.write_config(tmp_path, tiny.write_model(tmp_path / "model"), data={"max_length": 256})
    config = load_config(path)
    rows: Any = SimpleNamespace(train=SimpleRows([40, 128]), validation=SimpleRows([]))
    check_positions(config, backend, rows)
    rows.validation = SimpleRows([129])
    with pytest.raises(
        ConfigError, match=r"data.max_length 256 lets texts of 129 tokens through.*set it to 128 or less"
    ):
        check_positions(config, backend, rows)


class SimpleRows(list[int]):
    @property
    def lengths(self) -> Any:
        return torch.tensor(self).numpy()
