"""A whole run through DeepSpeed: the same command, the same losses as without it, an export and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from lockstep.rundir import RunDir

pytest.importorskip("deepspeed", reason="needs lockstep[deepspeed]")


def train(folder: Path, model: Path, procs: int, **parallel: Any) -> RunDir:
    folder.mkdir()
    config = tiny.write_config(folder, model, parallel=parallel, launch={"procs": procs})
    code, _, err = tiny.run_lockstep("train", config, "--run-dir", folder / "run", timeout_s=300)
    assert code == 0, err
    return RunDir(folder / "run")


def losses(run: RunDir) -> list[float]:
    return [record["loss"] for record in run.metrics() if record["split"] == "train"]


def test_a_run_through_deepspeed_has_the_losses_of_one_without(tmp_path: Path, tiny_model: Path) -> None:
    plain = train(tmp_path / "plain", tiny_model, 1)
    zero = train(tmp_path / "zero", tiny_model, 2, backend="deepspeed", zero_stage=2)
    assert losses(zero) == pytest.approx(losses(plain), rel=1e-3)
    assert (zero.path / "export" / "model" / "model.safetensors").is_file()
    assert zero.latest_checkpoint() is not None
