"""The examples for clouds: the request of a SageMaker job, a SkyPilot task, and the image."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from sagemaker_container import load_start_job

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
SAGEMAKER = Path(os.environ.get("SAGEMAKER_VENV", ROOT / ".venv-sagemaker")) / "bin" / "python"
SKYPILOT = Path(os.environ.get("SKYPILOT_VENV", ROOT / ".venv-skypilot")) / "bin" / "python"


@pytest.fixture(scope="module")
def start_job() -> ModuleType:
    """Without the SDK, which only its main imports."""
    return load_start_job()


ARGUMENTS = ["--image", "1.dkr.ecr.eu-west-1.amazonaws.com/lockstep", "--role", "arn:aws:iam::123456789012:role/train"]
ARGUMENTS += ["--input", "s3://b/in", "--output", "s3://b/out", "--spot", "optim.epochs=2", "config=sft.yaml"]


def test_the_request_of_a_job(start_job: ModuleType) -> None:
    request = start_job.make_request(start_job.read_arguments(ARGUMENTS))
    assert request["HyperParameters"] == {"optim.epochs": "2", "config": "sft.yaml"}
    assert request["EnableManagedSpotTraining"] is True
    stop = request["StoppingCondition"]
    assert stop["MaxWaitTimeInSeconds"] >= stop["MaxRuntimeInSeconds"]
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["config", "train"]
    assert request["CheckpointConfig"]["S3Uri"].startswith("s3://b/out/")


def test_metrics_are_caught_and_not_too_many(start_job: ModuleType) -> None:
    from lockstep.launch.sagemaker import metric_line

    definitions = {definition["Name"]: definition["Regex"] for definition in start_job.METRIC_DEFINITIONS}
    assert len(definitions) <= 40
    for name, pattern in definitions.items():
        split, _, key = name.partition(":")
        line = metric_line({"step": 1, "split": split, "val_" + key: 7.0, key: 1.5e-07})
        assert [float(value) for value in re.findall(pattern, line)] == [1.5e-07], line


@pytest.mark.slow
@pytest.mark.skipif(not SAGEMAKER.exists(), reason="needs boto3 in an environment of its own: make test-sagemaker")
def test_the_request_is_what_the_api_takes(start_job: ModuleType) -> None:
    program = (
        "import json, sys, botocore.session, botocore.validate\n"
        "service = botocore.session.get_session().get_service_model('sagemaker')\n"
        "shape = service.operation_model('CreateTrainingJob').input_shape\n"
        "report = botocore.validate.ParamValidator().validate(json.load(sys.stdin), shape)\n"
        "sys.exit(report.generate_report() or 0)"
    )
    request = json.dumps(start_job.make_request(start_job.read_arguments(ARGUMENTS)))
    result = subprocess.run([SAGEMAKER, "-c", program], input=request, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SKYPILOT.exists(), reason="needs skypilot in an environment of its own: make test-sagemaker")
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    program = "import sky, sys\ntask = sky.Task.from_yaml(sys.argv[1])\nprint(task.name, task.num_nodes, *task.envs)"
    result = subprocess.run(
        [SKYPILOT, "-c", program, ROOT / "examples" / "skypilot" / "train.yaml"],
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-4:] == ["lockstep", "1", "CONFIG", "RUN"]


# --- the image --------------------------------------------------------------------------------------------------------


def test_the_image_is_made_with_the_steps_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    default = re.search(r"^TORCH [?]= (.*)$", makefile, re.MULTILINE)
    assert default
    assert f"ARG TORCH={default[1]}\n" in CONTAINERFILE
    steps = ["-m venv", "-m pip install", "-m pip install"]  # an environment, torch, Lockstep
    install = makefile[makefile.index("$(STAMP): pyproject.toml") :]
    for text in (install, CONTAINERFILE):
        assert re.findall(r"-m (?:venv|pip install)", text) == steps


def test_the_image_copies_what_the_package_is_made_of() -> None:
    copied = {name for line in re.findall(r"^COPY (.*)$", CONTAINERFILE, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "lockstep"}
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_only_the_image_for_sagemaker_runs_as_root() -> None:
    stages = re.split(r"^FROM ", CONTAINERFILE, flags=re.MULTILINE)[1:]
    entries = {stage.split("\n")[0]: re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE) for stage in stages}
    users = {stage.split("\n")[0]: re.findall(r"^USER (.*)$", stage, re.MULTILINE) for stage in stages}
    assert entries["installed AS sagemaker"] == ['["lockstep", "sagemaker"]']
    last = list(entries)[-1]
    assert (entries[last], users[last]) == (['["lockstep"]'], ["lockstep"])
