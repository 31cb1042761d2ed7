"""Whole runs on preferences with a tiny model: every reference, what is kept on disk, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.config import ConfigError, load_config
from lockstep.rundir import RunDir
from lockstep.train.describe import describe
from lockstep.train.run import run

TIMES = {"time", "time_s", "step_time_s", "tokens_per_s", "memory_gib"}


def write_pairs(path: Path, count: int, *, seed: int = 0, words: int = 6) -> Path:
    """The preferred answer ends in "yes", the other in "no"."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        texts = [" ".join(draw.choices(["red", "blue", "cat", "sun"], k=draw.randint(1, words))) for _ in range(3)]
        lines.append(json.dumps({"prompt": texts[0], "chosen": f"{texts[1]} yes", "rejected": f"{texts[2]} no"}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    tiny.write_model(folder / "model")
    tiny.write_model(folder / "other", seed=1)
    write_pairs(folder / "pairs.jsonl", 16)
    write_pairs(folder / "held-out.jsonl", 6, seed=1)
    tiny.write_rows(folder / "answers.jsonl", 8)
    labelled = [{"prompt": f"q {i}", "completion": f"a {i}", "label": True} for i in range(8)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return


def settings(place: Path, tmp_path: Path, algorithm: dict[str, Any], *, base: str = "model", **changes: Any) -> Any:
    """Six steps of four pairs, with validation before and after."""
    held_out = {"train": str(place / "pairs.jsonl"), "validation": str(place / "held-out.jsonl"), "max_length": 128}
    changes = {
        "data": held_out,
        "optim": {"learning_rate": 0.003, "epochs": 1.5},
        "checkpoint": {"export": "none"},
        "algorithm": {"kind": "dpo", **algorithm},
        **changes,
    }
    tmp_path.mkdir(parents=True, exist_ok=True)
    return load_config(tiny.write_config(tmp_path, place / base, **changes))


def do(place: Path, folder: Path, algorithm: dict[str, Any], **changes: Any) -> RunDir:
    RunDir.create(folder / "run", settings(place, folder, algorithm, **changes))
    run(folder / "run")
    return RunDir(folder / "run")


def numbers(done: RunDir) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in done.metrics()]


def assert_close(one: RunDir, two: RunDir) -> None:
    for left, right in zip(numbers(one), numbers(two), strict=True):
        assert (left.pop("split"), left.pop("row_range", None)) == (right.pop("split"), right.pop("row_range", None))
        assert left == pytest.approx(right, rel=1e-5, abs=1e-6)


def reference_of(done: RunDir) -> str:
    (event,) = [e for e in done.events() if e["event"] == "reference"]
    return str(event["kind"])


def test_a_reference_made_ahead_gives_the_numbers_of_a_copy(place: Path, tmp_path: Path):
    ahead = do(place, tmp_path / "ahead", {})
    copy = do(place, tmp_path / "copy", {"reference": "copy"})
    assert (reference_of(ahead), reference_of(copy)) == ("precomputed", "copy")
    assert len(numbers(ahead)) == len(numbers(copy)) == 6 + 2
    assert_close(ahead, copy)
    first, last = (record for record in numbers(ahead) if record["split"] == "validation")
    assert (first["margin"], first["accuracy"]) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1))
    assert last["margin"] > 0.05
    assert last["loss"] < first["loss"]


def test_it_is_kept_for_the_next_run_and_computed_again_when_the_model_is_another(place: Path, tmp_path: Path):
    kept = tmp_path / "cache" / "data" / "reference"
    do(place, tmp_path / "one", {})
    entries = sorted(path.name for path in kept.iterdir())
    assert len(entries) == 2
    do(place, tmp_path / "two", {"beta": 0.3})
    assert sorted(path.name for path in kept.iterdir()) == entries
    do(place, tmp_path / "three", {}, base="other")
    assert len(list(kept.iterdir())) == 4


def test_a_damaged_reference_is_made_again_with_a_warning(place: Path, tmp_path: Path):
    good = do(place, tmp_path / "one", {})
    for entry in (tmp_path / "cache" / "data" / "reference").iterdir():
        (entry / "values.bin").write_bytes(b"\0" * (entry / "values.bin").stat().st_size)
    again = do(place, tmp_path / "two", {})
    assert numbers(again) == numbers(good)
    assert any("cannot be used" in e["message"] for e in again.events() if e["event"] == "warning")


def test_a_resumed_run_has_the_reference_it_began_with_even_if_nothing_was_kept(place: Path, tmp_path: Path):
    done = do(place, tmp_path, {}, checkpoint={"export": "none", "every_steps": 3, "keep_last": 9, "keep_best": 0})
    before = numbers(done)
    shutil.rmtree(done.checkpoints / "step-6")
    shutil.rmtree(tmp_path / "cache" / "data" / "reference")
    run(done.path)
    assert [event["step"] for event in done.events() if event["event"] == "resumed"] == [3]
    assert done.metrics()[-1]["step"] == 6
    assert numbers(done) == before


def test_adapters_switched_off_are_the_reference_of_lora(place: Path, tmp_path: Path):
    off = do(place, tmp_path / "off", {}, lora={"rank": 4})
    ahead = do(place, tmp_path / "ahead", {"reference": "precomputed"}, lora={"rank": 4})
    assert (reference_of(off), reference_of(ahead)) == ("adapter_off", "precomputed")
    assert_close(off, ahead)


def test_another_model_as_the_reference(place: Path, tmp_path: Path):
    done = do(place, tmp_path, {"reference_model": str(place / "other")})
    first = numbers(done)[0]
    assert first["split"] == "validation"
    assert abs(first["margin"]) > 0.01, "the policy is not its own reference here"
    again = do(place, tmp_path / "again", {"reference_model": str(place / "other")})
    assert numbers(again) == numbers(done)


def test_a_reference_with_another_vocabulary_is_refused_before_it_is_loaded(place: Path, tmp_path: Path):
    tiny.write_model(tmp_path / "foreign")
    file = tmp_path / "foreign" / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tree))
    (tmp_path / "foreign" / "model.safetensors").unlink()
    config = settings(place, tmp_path, {"reference_model": str(tmp_path / "foreign")})
    for way in (lambda: describe(config), lambda: run(RunDir.create(tmp_path / "run", config).path)):
        (tmp_path / "foreign" / "model.safetensors").touch()
        with pytest.raises(ConfigError, match="has another vocabulary than"):
            way()


def test_pairs_are_labels_too(place: Path, tmp_path: Path):
    done = do(place, tmp_path, {"kind": "kto"}, lora={"rank": 4})
    records = [r for r in numbers(done) if r["split"] == "train"]
    assert len(records) == 12
    assert {"kl", "chosen_reward", "rejected_reward"} <= records[-1].keys() | records[-2].keys()


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        (
            "sft",
            "pairs",
            "data.train holds preference pairs, and algorithm.kind sft learns answers: set algorithm.kind",
        ),
        ("sft", "labelled", "algorithm.kind sft learns answers: set algorithm.kind to kto"),
        ("dpo", "answers", "data.train holds answers, and algorithm.kind dpo learns from pairs: give rows with chosen"),
        ("dpo", "labelled", "algorithm.kind dpo learns from pairs: set algorithm.kind to kto"),
        ("kto", "answers", "algorithm.kind kto learns from labels: give rows with a label"),
    ],
)
def test_rows_of_another_sort_are_refused_kindly(kind, file, message, place: Path, tmp_path: Path):
    data = {"train": str(place / f"{file}.jsonl"), "max_length": 128}
    with pytest.raises(ConfigError, match=message):
        describe(settings(place, tmp_path, {"kind": kind}, data=data))


def test_a_plan_says_which_reference_and_what_padding_would_cost(place: Path, tmp_path: Path):
    facts = describe(settings(place, tmp_path, {}))
    assert facts["reference"].startswith("precomputed: every row once")
    assert (facts["algorithm"], facts["samples"], facts["steps"]) == ("dpo", 4, 6)
    assert 0 < int(facts["padding_saved"].rstrip("%")) < 100
    assert facts["warnings"] == []
    short = describe(settings(place, tmp_path, {}, optim={"max_steps": 2}))
    assert short["reference"].startswith("copy: the run takes 8 of 16 training rows")


def test_pairs_that_need_a_second_pass_and_labels_of_one_sort_are_warned_of(place: Path, tmp_path: Path):
    long = write_pairs(tmp_path / "long.jsonl", 8, words=24)
    data = {"train": str(long), "max_length": 256}
    (warning,) = describe(settings(place, tmp_path, {}, data=data))["warnings"]
    assert (
        "of 8 pairs have more than 256 tokens with both answers, so a step with one of them takes a second" in warning
    )
    data = {"train": str(place / "labelled.jsonl"), "max_length": 128}
    (warning,) = describe(settings(place, tmp_path, {"kind": "kto"}, data=data))["warnings"]
    assert warning == "every training row is labelled good: kto learns more from both kinds"
