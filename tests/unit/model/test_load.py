"""Models from folders: precision that this machine can compute in, sources that are refused, and empty skeletons."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from equivalence.plain import FAMILIES, make_model
from torch import nn
from transformers import GenerationConfig

from lockstep.config import ConfigError, LoraConfig, ModelConfig
from lockstep.model import load
from lockstep.model.load import (
    build_model,
    check_model_source,
    choose_precision,
    load_causal_lm,
    load_for_inference,
    load_hf_config,
    load_tokenizer,
)

CPU = torch.device("cpu")

# --- precision ------------------------------------------------------------------------------------------------------


@pytest.fixture
def probe_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Let a shell script answer in the place of the Python process that times bf16."""

    def install(script: str, *, claims: bool = True) -> Path:
        program = tmp_path / "probe.sh"
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr(load, "_cpu_claims_bf16", lambda: claims)
        return tmp_path / "asked"

    return install


@pytest.mark.parametrize("wanted", ["bf16", "fp32", "fp64"])
def test_a_precision_that_was_asked_for_is_taken_without_looking(wanted, probe_with):
    asked = probe_with("echo True")
    assert choose_precision(wanted, CPU) == wanted
    assert not asked.exists()


def test_auto_looks_at_this_machine_and_lives():
    assert choose_precision("auto", CPU) in ("fp32", "bf16")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo True", "bf16"),
        ("echo False", "fp32"),
        ("kill -ILL $$", "fp32"),  # a virtual machine that shows AMX and forbids it
        ("echo True; kill -SEGV $$", "fp32"),
        ("echo True; exit 3", "fp32"),
        ("exit 0", "fp32"),
    ],
)
def test_auto_is_bf16_only_if_another_process_computed_faster_in_it_and_lived(script, expected, probe_with):
    asked = probe_with(script)
    assert choose_precision("auto", CPU) == expected
    assert asked.exists()


def test_a_probe_that_does_not_end_means_fp32(probe_with, monkeypatch):
    probe_with("sleep 60")
    honest = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **options: honest(*a, **{**options, "timeout": 0.1}))
    assert choose_precision("auto", CPU) == "fp32"


def test_a_cpu_that_does_not_claim_bf16_is_not_probed(probe_with):
    asked = probe_with("echo True", claims=False)
    assert choose_precision("auto", CPU) == "fp32"
    assert not asked.exists()


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
def test_on_cuda_auto_asks_the_device_and_does_not_count_emulation(supported, expected, monkeypatch):
    def answer(including_emulation: bool = True) -> bool:
        return supported or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
    assert choose_precision("auto", torch.device("cuda")) == expected


# --- sources --------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_tokenizer_that_is_missing_or_broken_is_refused_in_one_sentence(tmp_path):
    model = tiny.write_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"^model\.path .*model: its tokenizer cannot be read \(.*\): copy its files again$"
    ):
        load_tokenizer(ModelConfig(path=str(model)))
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"model has no tokenizer \(tokenizer\.json\): copy its files from"):
        load_tokenizer(ModelConfig(path=str(model)))


def test_a_tokenizer_that_is_made_of_nothing_is_none(tmp_path):
    """Of some families transformers makes one from the class alone, with a token or two."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json\): copy its files from"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ('{"model_type": "nosuch"}', "knows no model of type 'nosuch': take a newer version, or another model$"),
        ('{"model_type": "t5"}', "a T5Config is of no causal language model, .*: take another model$"),
    ],
)
def test_a_model_that_transformers_cannot_build_is_one_sentence(tmp_path, tree: str, said: str):
    (tmp_path / "config.json").write_text(tree)
    with torch.device("meta"), pytest.raises(ConfigError, match=said) as raised:
        load_causal_lm(ModelConfig(path=str(tmp_path)), torch.float32, with_weights=False)
    assert len(str(raised.value)) < 300


def test_a_source_that_cannot_be_a_model_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "model.zip").write_text("")
    bad = {
        tmp_path / "nowhere": "does not exist: check the path",
        "job:mine/export": "is a name within a job service: write the folder on this machine",
        tmp_path / "model.zip": "is a file: give a model folder, a .gguf file or a Hub id",
        write_folder(tmp_path / "empty"): "is not a model folder: it has no config.json",
        write_folder(tmp_path / "bare", "config.json"): "has no weights (*.safetensors)",
        write_folder(tmp_path / "pickled", "config.json", "pytorch_model.bin"): (
            "has only pickled weights (*.bin), which are not loaded: convert them to safetensors"
        ),
    }
    for path, why in bad.items():
        with pytest.raises(ConfigError) as caught:
            check_model_source(ModelConfig(path=str(path)))
        assert str(caught.value) == f"model.path {path} {why}"
        with pytest.raises(ConfigError) as caught:  # as a command names it, which knows no such key
            load_for_inference(path)
        assert str(caught.value) == f"{path} {why}"


def test_a_run_or_an_adapter_as_the_model_says_how_to_make_a_model_of_it(tmp_path):
    run = write_folder(tmp_path / "my run", "config.yaml")
    (run / "export").mkdir()
    adapter = write_folder(run / "export" / "adapter", "adapter_config.json")
    export = f"write one with 'lockstep export '{run}'', and name that"
    told = {
        run: f"is a run directory, not a model folder: {export}",
        adapter: f"is the adapter of a run, not a model folder: {export}",
        write_folder(tmp_path / "foreign", "adapter_config.json"): "is an adapter, not a whole model: merge it into",
    }
    for path, why in told.items():
        with pytest.raises(ConfigError) as caught:
            check_model_source(ModelConfig(path=str(path)))
        assert str(caught.value).startswith(f"model.path {path} {why}")
    write_folder(run / "export" / "merged")
    with pytest.raises(ConfigError, match=r"name the model that the run exported, .*my run/export/merged$"):
        check_model_source(ModelConfig(path=str(adapter)))


def test_an_index_names_files_of_its_own_folder(tmp_path):
    for name in ("config.json", "model-1.safetensors"):
        (tmp_path / name).touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    check_model_source(ModelConfig(path=str(tmp_path)))
    for name in ("../secret.safetensors", "/secret/model.safetensors", "inner/model.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match="is not in its folder"):
            check_model_source(ModelConfig(path=str(tmp_path)))
    for text in ("[]", "{}", "nonsense", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ConfigError, match="does not list the files"):
            check_model_source(ModelConfig(path=str(tmp_path)))


def test_an_adapter_of_the_hub_does_not_choose_its_base(tiny_model, tmp_path, monkeypatch):
    """As the Hub's library sees it: a name that is no folder, with an adapter_config.json in its cache."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_model)}))
    seen = tmp_path / "adapter_config.json"
    monkeypatch.setattr("transformers.utils.peft_utils.cached_file", lambda *_, **__: str(seen))
    with pytest.raises(ConfigError, match="holds an adapter and not a whole model"):
        load_causal_lm(ModelConfig(path="some/adapter"), torch.float32)


def test_folders_with_safetensors_gguf_files_and_hub_names_are_let_through(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    folder = write_folder(tmp_path / "good", "config.json", "model-00001-of-00002.safetensors", "old.bin")
    for path in (tmp_path / "model.gguf", folder, "someone/some-model"):
        check_model_source(ModelConfig(path=str(path)))


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(answers, tiny_model, monkeypatch):
    asked, seen = [], []

    def is_up(url):
        asked.append(url)
        return answers

    def refuse(**options):
        seen.append(options)
        raise OSError("not in the cache")

    monkeypatch.setenv("HF_ENDPOINT", f"https://hub-{answers}.example")
    monkeypatch.setattr("lockstep.config.hub.is_hub_up", is_up)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    for load_it in (load_tokenizer, load_hf_config):
        with pytest.raises(ConfigError, match="neither on disk nor could it be fetched from the Hub"):
            load_it(ModelConfig(path="someone/some-model"))
    assert len(asked) == 1
    assert [options.get("local_files_only", False) for options in seen] == [not answers] * 2
    with pytest.raises(ConfigError, match="not in the cache"):
        load_tokenizer(ModelConfig(path=str(tiny_model)))
    assert len(asked) == 1
    assert "local_files_only" not in seen[2]


# --- skeletons ------------------------------------------------------------------------------------------------------


def layout_of(model: nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters(remove_duplicate=False))
    ties = defaultdict(set)
    for name, parameter in named.items():
        ties[id(parameter)].add(name)
    return {
        "parameters": {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in named.items()},
        "buffers": {name: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()},
        "ties": {frozenset(names) for names in ties.values() if len(names) > 1},
        "order": [name for name, _ in model.named_parameters()],
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_model_without_weights_has_the_names_shapes_and_ties_of_one_with(family, lora, tmp_path):
    make_model(family, lora=False).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    adapters = LoraConfig(rank=2) if lora else None
    full = build_model(config, adapters, "fp32", with_weights=True)
    skeleton = build_model(config, adapters, "fp32", with_weights=False)
    assert layout_of(skeleton) == layout_of(full)
    tied = load_hf_config(config).tie_word_embeddings
    assert bool(layout_of(skeleton)["ties"]) == tied


@pytest.mark.parametrize(
    ("precision", "lora", "trained", "frozen"),
    [
        ("bf16", False, torch.float32, None),
        ("fp32", False, torch.float32, None),
        ("fp64", False, torch.float64, None),
        ("bf16", True, torch.float32, torch.bfloat16),
        ("fp32", True, torch.float32, torch.float32),
    ],
)
def test_what_is_trained_is_never_narrower_than_float32(precision, lora, trained, frozen, tiny_model):
    adapters = LoraConfig(rank=2) if lora else None
    model = build_model(ModelConfig(path=str(tiny_model)), adapters, precision, with_weights=True)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {trained}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == ({frozen} if frozen else set())


def test_weights_are_those_of_the_folder(tiny_model):
    loaded = load_causal_lm(ModelConfig(path=str(tiny_model)), torch.float32)
    for name, tensor in tiny.build_model().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_an_adapter_folder_is_loaded_over_its_base(tiny_model, tmp_path, with_tokenizer):
    """As a run exports it: the adapter with the tokenizer it was trained with, which may have another template."""
    model = build_model(ModelConfig(path=str(tiny_model)), LoraConfig(rank=2), "fp32", with_weights=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    if with_tokenizer:
        tokenizer = load.load_tokenizer(ModelConfig(path=str(tiny_model)))
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        tokenizer.save_pretrained(tmp_path)
    loaded, tokenizer = load.load_for_inference(tmp_path, device="cpu")
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, model.eval()(tokens).logits, atol=1e-5)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert (rendered == "hello") == with_tokenizer


def test_a_skeleton_ends_its_answers_where_the_model_does(tiny_model, tmp_path):
    """What only generation_config.json says: several processes sample together, and one of them has the weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    config = ModelConfig(path=str(folder))
    whole, skeleton = (load_causal_lm(config, torch.float32, with_weights=given) for given in (True, False))
    assert whole.generation_config.eos_token_id == skeleton.generation_config.eos_token_id == [3, 5]


def test_fp64_is_float64_from_end_to_end(tmp_path: Path) -> None:
    """Norms would round to float32: what differs by 1e-16 could then differ by 1e-7."""
    config = ModelConfig(path=str(tiny.write_model(tmp_path)))
    norms = [
        m
        for m in build_model(config, None, "fp64", with_weights=True).modules()
        if type(m).__name__.endswith("RMSNorm")
    ]
    hidden = torch.randn(1, 5, 32, dtype=torch.float64)
    assert norms
    for norm in norms:
        plain = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
        torch.testing.assert_close(norm(hidden), plain, rtol=1e-13, atol=1e-13)


def test_scores_of_gemma2_are_capped_with_every_transformers(tmp_path):
    """5.17 leaves the cap out of its default attention."""
    folder = tmp_path / "gemma2"
    make_model("gemma2", lora=False).save_pretrained(folder)

    def logits(cap: float) -> torch.Tensor:
        settings = json.loads((folder / "config.json").read_text()) | {"attn_logit_softcapping": cap}
        (folder / "config.json").write_text(json.dumps(settings))
        model = load_causal_lm(ModelConfig(path=str(folder)), torch.float64).eval()
        with torch.no_grad():
            return model(input_ids=torch.arange(12)[None]).logits

    assert not torch.allclose(logits(50.0), logits(0.01))


# --- sources that transformers does not take --------------------------------------------------------------------------


def test_tensors_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    change_config(folder, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"its tensor '.*down_proj.weight' is 32 x 64, and .* asks for 32 x 48"):
        load_causal_lm(ModelConfig(path=str(folder)), torch.float32)


def test_code_of_a_model_is_named_with_the_key_that_allows_it(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text("from transformers import LlamaConfig\n\nclass Config(LlamaConfig): pass\n")
    with pytest.raises(ConfigError, match=r"code of its own, which is not run: set model\.trust_remote_code"):
        load_hf_config(ModelConfig(path=str(folder)))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
