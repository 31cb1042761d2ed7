"""What SageMaker puts below /opt/ml of a container, in a folder, and the entry of the container started on it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tiny
import yaml


def load_start_job() -> ModuleType:
    """The example that starts a job. Without the SDK, which only its main imports."""
    path = Path(__file__).parents[1] / "examples" / "sagemaker" / "start_job.py"
    spec = importlib.util.spec_from_file_location("start_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_job(
    base: Path,
    model: Path,
    *,
    hyperparameters: Mapping[str, str] | None = None,
    hosts: Sequence[str] = ("algo-1",),
    current: str | None = None,
    settings: Mapping[str, Any] | None = None,
    saves: bool = True,
    **resources: Any,
) -> Path:
    """A job of 48 rows with the channels config, model and train; `saves`: it has a place for checkpoints."""
    data, config = base / "input" / "data", base / "input" / "config"
    for folder in (config, data / "config", data / "train", base / "model", base / "output"):
        folder.mkdir(parents=True, exist_ok=True)
    if saves:
        (base / "checkpoints").mkdir(exist_ok=True)
    if not (data / "model").exists():
        (data / "model").symlink_to(model)
    tiny.write_rows(data / "train" / "rows.jsonl", 48)
    defaults: dict[str, Any] = {
        "model": {"path": "some/model", "precision": "fp32"},
        "data": {"train": "elsewhere.jsonl", "max_length": 128},
        "batch": {"samples": 4, "micro_batch_tokens": 256},
        "launch": {"device": "cpu", "timeout_s": 60},
        "logging": {"tensorboard": False},
    }
    (data / "config" / "lockstep.yaml").write_text(yaml.safe_dump({**defaults, **(settings or {})}))
    write_input(base, "hyperparameters", dict(hyperparameters or {"optim.learning_rate": "0.01"}))
    write_input(base, "inputdataconfig", {name: channel() for name in ("config", "model", "train")})
    current = current or hosts[0]
    write_input(base, "resourceconfig", {"current_host": current, "hosts": list(hosts), **resources})
    return base


def channel(**settings: str) -> dict[str, str]:
    return {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
        **settings,
    }


def write_input(base: Path, name: str, value: object) -> Path:
    path = base / "input" / "config" / f"{name}.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def start_container(base: Path, *arguments: str, before: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """`lockstep sagemaker train`, as the platform starts an image whose entry it is."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "lockstep", "sagemaker", *(arguments or ("train",))],
        env={**inherited, "SAGEMAKER_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_container(base: Path, *arguments: str, timeout_s: float = 900.0, **variables: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    process = start_container(base, *arguments, **variables)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, out, err


def failure_of(base: Path) -> str:
    """The first line of the file in which the platform looks for the reason; empty where there is none."""
    path = base / "output" / "failure"
    return path.read_text().splitlines()[0] if path.exists() else ""
