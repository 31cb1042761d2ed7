"""Runs on rows with images: killed and resumed bit for bit, and exports that transformers loads and answers with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from distributed.test_resume import assert_same_result, kill_at_step
from ranks import exported, run_to_the_end
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import draw, write_model, write_rows

from lockstep.config import load_config
from lockstep.model.export import export_run
from lockstep.rundir import RunDir


def make_run(folder: Path, vision: str = "trained", family: str = "idefics3", **changes: Any) -> RunDir:
    folder.mkdir(exist_ok=True)
    write_rows(folder, 16)
    if not (folder.parent / family).exists():
        write_model(folder.parent / family, family)
    settings = {
        "data": {"validation_fraction": 0.25, "max_length": 256},
        "optim": {"epochs": 6, "learning_rate": 0.003},
        "checkpoint": {"every_steps": 3, "asynchronous": True},
        "evaluation": {"every_steps": 6, "metrics": ["exact_match"], "max_tokens": 4, "rows": 2},
        **changes,
    }
    config = tiny.write_config(folder, folder.parent / family, **settings)
    return RunDir.create(folder / "run", load_config(config, [f"model.vision={vision}"]))


@pytest.mark.slow
@pytest.mark.parametrize("procs", [1, 2])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, procs: int) -> None:
    layout = {"launch": {"procs": procs}}
    whole, killed = make_run(tmp_path / "whole", **layout), make_run(tmp_path / "killed", **layout)
    run_to_the_end(whole, procs)
    kill_at_step(killed, 7, 0.0, None)
    run_to_the_end(killed, procs)
    assert_same_result(killed, whole)
    trained = whole.status()["trained"]
    assert "vision tower" in trained
    assert "frozen" not in trained


@pytest.mark.slow
def test_a_run_on_other_images_does_not_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    kill_at_step(run, 7, 0.0, None)
    draw(99).save(tmp_path / "run" / "0-0.png")
    with pytest.raises(AssertionError):
        run_to_the_end(run, 1)
    (error,) = [json.loads(path.read_text()) for path in run.logs.glob("rank-*.error.json")]
    assert "the data is not what step" in json.dumps(error)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_an_export_loads_in_transformers_with_its_processor(tmp_path: Path, lora: Any) -> None:
    run = make_run(tmp_path / "run", "connector", lora=lora, optim={"max_steps": 3})
    run_to_the_end(run, 1)
    folder = Path(export_run(run.path)["path"]) if lora else exported(run)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is 0?"}]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    inputs = processor(text=text, images=[draw(0)], return_tensors="pt")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    with torch.no_grad():
        trained, untrained = model(**inputs).logits, base(**inputs).logits
    assert bool(trained.isfinite().all())
    assert float((trained - untrained).abs().max()) > 1e-3
    asked = tmp_path / "asked.jsonl"
    draw(0).save(tmp_path / "0.png")
    turns[0]["content"][0]["path"] = "0.png"  # type: ignore[index]
    asked.write_text(json.dumps({"messages": turns}))
    code, out, err = tiny.run_lockstep("generate", run.path, "--prompts", asked, "--max-tokens", 5)
    assert code == 0, err
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert json.loads(out)["completion"] == processor.tokenizer.decode(expected, skip_special_tokens=True)
    tower = [name for name, _ in model.named_parameters() if "vision_model" in name]
    assert all(torch.equal(model.get_parameter(name), base.get_parameter(name)) for name in tower)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"tensor": 2}, "launch": {"procs": 2}}, "parallel.tensor above 1"),
        ({"parallel": {"context": 2}, "launch": {"procs": 2}}, "parallel.context above 1"),
        ({"parallel": {"pipeline": 2}, "launch": {"procs": 2}}, "parallel.pipeline above 1"),
    ],
)
def test_layouts_that_do_not_see_are_refused_before_a_model_is_loaded(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = make_run(tmp_path / "run", **changes).path / "config.yaml"
    code, _, err = tiny.run_lockstep("train", config, "--dry-run")
    assert code == 2
    assert f"rows with images are not learned from with {words}" in err


@pytest.mark.slow
def test_the_example_learns_to_read_six_digits(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "examples" / "vision"
    subprocess.run([sys.executable, folder / "draw_digits.py", tmp_path], check=True, timeout=300)
    places = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl"]
    places += [f"data.validation={tmp_path}/validation.jsonl", "launch.device=cpu"]
    options = ["--run-dir", tmp_path / "run"]
    code, _, err = tiny.run_lockstep("train", folder / "digits.yaml", *places, *options, timeout_s=1500)
    assert code == 0, err
    scores = [record["exact_match"] for record in RunDir(tmp_path / "run").metrics() if "exact_match" in record]
    assert scores[0] == 0
    assert scores[-1] > 0.8
