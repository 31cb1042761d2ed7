"""evaluation.metrics: the model in training answers validation rows, on every layout, and trains on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from ranks import run_to_the_end

from lockstep.config import load_config
from lockstep.rundir import RunDir, read_jsonl

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"replicate": 2, "shard": 1}),
    "fsdp": (2, {"shard": 2}),
    "tensor": (2, {"tensor": 2}),
}
QUICK = ("one", "fsdp")


def train(folder: Path, model: Path, layout: str, **evaluation: Any) -> RunDir:
    procs, parallel = LAYOUTS[layout]
    folder.mkdir()
    tiny.write_rows(folder / "validation.jsonl", 5, seed=1)
    config = tiny.write_config(
        folder,
        model,
        data={"validation": "validation.jsonl"},
        evaluation={"every_steps": 6, **evaluation},
        parallel=parallel,
        launch={"procs": procs},
    )
    run = RunDir.create(folder / "run", load_config(config))
    run_to_the_end(run, procs)
    return run


def validations(run: RunDir) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["split"] == "validation"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """Without metrics: what generating must not disturb."""
    return validations(train(tmp_path_factory.mktemp("plain") / "run", tiny_model, "one"))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_answers_are_scored_and_training_is_not_disturbed(
    layout: str, tmp_path: Path, tiny_model: Path, plain: list[dict[str, Any]]
) -> None:
    run = train(tmp_path / layout, tiny_model, layout, metrics=["exact_match", "rouge"], rows=3, max_tokens=6)
    found = validations(run)
    assert [record["step"] for record in found] == [0, 6, 12]
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in plain], rel=1e-4)
    for record in found:
        assert {"exact_match", "rouge1", "rouge2", "rougeL", "answers_cut"} <= record.keys()
        assert 0 <= record["answers_cut"] <= 1
    assert run.status()["validation_scores"]["answers_cut"] == found[-1]["answers_cut"]
    samples = list(read_jsonl(run.path / "samples.jsonl"))  # three rows each time, for people
    assert [sample["step"] for sample in samples] == [0] * 3 + [6] * 3 + [12] * 3
    assert all({"prompt", "answer", "reference"} <= sample.keys() and sample["prompt"] for sample in samples)
