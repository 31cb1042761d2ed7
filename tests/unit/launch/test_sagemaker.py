"""The contract of a SageMaker job: what is read of it, every field wrong once, and what is left for the platform."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sagemaker_container as container
import yaml
from sagemaker_container import channel, failure_of, write_input
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config import RunConfig
from lockstep.launch import sagemaker
from lockstep.launch.launcher import Resources
from lockstep.rundir import RunDir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """No weights: nothing here loads them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def base(tmp_path: Path, model: Path) -> Path:
    return container.write_job(tmp_path / "ml", model)


def read(base: Path, **variables: str) -> sagemaker.SageMakerJob:
    return sagemaker.read_job({"SAGEMAKER_BASE_DIR": str(base), "SM_NUM_GPUS": "0", **variables})


def configure(base: Path, hyperparameters: Mapping[str, str] | None = None, **variables: str) -> RunConfig:
    if hyperparameters is not None:
        write_input(base, "hyperparameters", dict(hyperparameters))
    return sagemaker.make_config(read(base, **variables))


def edit_yaml(base: Path, **changes: Any) -> None:
    path = base / "input" / "data" / "config" / "lockstep.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def add_channel(base: Path, name: str, **settings: str) -> Path:
    channels = json.loads((base / "input" / "config" / "inputdataconfig.json").read_text())
    write_input(base, "inputdataconfig", {**channels, name: channel(**settings)})
    folder = base / "input" / "data" / name
    folder.mkdir()
    return folder


# --- the configuration ------------------------------------------------------------------------------------------------


def test_channels_take_the_place_of_what_the_file_names(base: Path, model: Path) -> None:
    add_channel(base, "validation")
    config = configure(base)
    assert config.model.path == str(model)
    assert [source.path for source in config.data.train] == [str(base / "input" / "data" / "train")]
    assert [source.path for source in config.data.validation] == [str(base / "input" / "data" / "validation")]


def test_a_channel_keeps_the_settings_of_the_source_it_replaces(base: Path) -> None:
    edit_yaml(base, data={"train": {"path": "elsewhere.csv", "format": "text"}, "max_length": 128})
    (source,) = configure(base).data.train
    assert (source.path, source.format) == (str(base / "input" / "data" / "train"), "text")


def test_paths_below_a_channel_stay_as_they_are(base: Path) -> None:
    file = str(base / "input" / "data" / "train" / "rows.jsonl")
    edit_yaml(base, data={"train": [{"path": file, "weight": 2.0}], "max_length": 128})
    (source,) = configure(base).data.train
    assert (source.path, source.weight) == (file, 2.0)


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ("0.001", "optim.learning_rate", 0.001),
        ("1e-05", "optim.learning_rate", 1e-5),
        ('"2e-4"', "optim.learning_rate", 2e-4),  # the SDK's way with a text that holds a number
        ("5", "optim.max_steps", 5),
        ("true", "data.shuffle", True),
        ('"linear"', "optim.schedule", "linear"),
        ("linear", "optim.schedule", "linear"),  # the console's way with a text
        ('"{question}: "', "data.input_template", "{question}: "),
        ('["q_proj", "v_proj"]', "lora.targets", ("q_proj", "v_proj")),
        ("null", "optim.max_grad_norm", None),
    ],
)
def test_hyperparameters_are_json_or_else_as_on_the_command_line(
    base: Path, given: str, key: str, expected: object
) -> None:
    other = {"data.output_template": '"{answer}"'} if key == "data.input_template" else {}
    config: Any = configure(base, {key: given, **other, "sagemaker_program": '"train.sh"', "sagemaker_region": "x"})
    for part in key.split("."):
        config = getattr(config, part)
    assert config == expected


def test_hyperparameters_win_over_channels_and_the_file(base: Path) -> None:
    rows = str(base / "input" / "data" / "train" / "rows.jsonl")
    config = configure(base, {"data.train": json.dumps(rows), "batch.samples": "8"})
    assert [source.path for source in config.data.train] == [rows]
    assert config.batch.samples == 8


def test_a_job_needs_no_file(base: Path) -> None:
    shutil.rmtree(base / "input" / "data" / "config")
    write_input(base, "inputdataconfig", {"model": channel(), "train": channel()})
    assert configure(base, {"optim.epochs": "2"}).optim.epochs == 2


def test_one_of_several_files_is_named(base: Path) -> None:
    folder = base / "input" / "data" / "config"
    (folder / "other.yaml").write_text("model: x\ndata: {train: x.jsonl}\nname: other\n")
    assert configure(base, {"config": '"other.yaml"'}).name == "other"
    assert configure(base, {"config": "other.yaml"}).name == "other"


def test_adapters_are_merged_so_that_the_model_can_be_served(base: Path) -> None:
    assert configure(base, {"lora": "true"}).checkpoint.export == "merged"
    assert configure(base, {"lora": "true", "checkpoint.export": "adapter"}).checkpoint.export == "adapter"
    assert configure(base, {}).checkpoint.export == "auto"


@pytest.mark.parametrize(
    ("device", "gpus", "hosts", "expected"),
    [("auto", "4", 2, 8), ("auto", "0", 2, 2), ("cpu", "4", 1, 1), ("auto", "1", 1, 1)],
)
def test_there_is_a_rank_for_every_gpu_or_host(base: Path, device: str, gpus: str, hosts: int, expected: int) -> None:
    names = [f"algo-{i + 1}" for i in range(hosts)]
    write_input(base, "resourceconfig", {"current_host": "algo-1", "hosts": names})
    edit_yaml(base, launch={"device": device})
    config = configure(base, {}, SM_NUM_GPUS=gpus)
    assert config.launch.procs == expected
    assert config.launch.max_restarts == (3 if hosts == 1 else 0)
    job = read(base, SM_NUM_GPUS=gpus)
    assert sagemaker.launcher_of(job, config)[1] == Resources(expected // hosts, device)


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_every_host_has_its_place_whatever_the_order_of_the_list(base: Path) -> None:
    for current, rank in (("algo-1", 0), ("algo-2", 1)):
        for hosts in (["algo-1", "algo-2"], ["algo-2", "algo-1"]):
            write_input(base, "resourceconfig", {"current_host": current, "hosts": hosts})
            job = read(base)
            assert (job.hosts, job.host_rank) == (("algo-1", "algo-2"), rank)


def test_only_the_first_host_writes_where_the_platform_saves(base: Path) -> None:
    hosts = {"hosts": ["algo-1", "algo-2"]}
    write_input(base, "resourceconfig", {"current_host": "algo-1", **hosts})
    assert read(base).run_dir == base / "checkpoints" / "run"
    write_input(base, "resourceconfig", {"current_host": "algo-2", **hosts})
    assert read(base).run_dir == base / "lockstep" / "run"


def test_code_of_the_user_finds_what_the_platforms_own_containers_set(base: Path) -> None:
    write_input(base, "resourceconfig", {"current_host": "a", "hosts": ["a", "b"], "network_interface_name": "lo"})
    environment = {"SM_MODEL_DIR": "/elsewhere", "GLOO_SOCKET_IFNAME": "eth7"}
    sagemaker.set_environment(read(base), environment)
    assert environment["SM_MODEL_DIR"] == "/elsewhere"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["SM_CHANNEL_TRAIN"] == str(base / "input" / "data" / "train")
    assert json.loads(environment["SM_HOSTS"]) == ["a", "b"]
    assert environment["SM_CURRENT_HOST"] == "a"


# --- every field wrong once -------------------------------------------------------------------------------------------


def write_yaml(base: Path, text: str) -> None:
    (base / "input" / "data" / "config" / "lockstep.yaml").write_text(text)


WRONG: dict[str, tuple[Any, str]] = {
    "no resources": (
        lambda base: (base / "input" / "config" / "resourceconfig.json").unlink(),
        "there is no {base}/input/config/resourceconfig.json: the platform writes it",
    ),
    "no hyperparameters": (
        lambda base: (base / "input" / "config" / "hyperparameters.json").unlink(),
        "there is no {base}/input/config/hyperparameters.json",
    ),
    "no channels": (
        lambda base: (base / "input" / "config" / "inputdataconfig.json").unlink(),
        "there is no {base}/input/config/inputdataconfig.json",
    ),
    "not JSON": (
        lambda base: write_input(base, "hyperparameters", "{'a': 1}"),
        "{base}/input/config/hyperparameters.json is damaged: it is not JSON",
    ),
    "empty": (
        lambda base: write_input(base, "resourceconfig", ""),
        "{base}/input/config/resourceconfig.json is damaged: it is empty",
    ),
    "a list": (
        lambda base: write_input(base, "inputdataconfig", []),
        "inputdataconfig.json is damaged: it holds list instead of an object",
    ),
    "channel is text": (
        lambda base: write_input(base, "inputdataconfig", {"train": "File"}),
        "channel train must be an object, and is 'File'",
    ),
    "host not in hosts": (
        lambda base: write_input(base, "resourceconfig", {"current_host": "algo-3", "hosts": ["algo-1", "algo-2"]}),
        "current_host 'algo-3' is none of the hosts algo-1, algo-2",
    ),
    "no hosts": (
        lambda base: write_input(base, "resourceconfig", {"current_host": "algo-1", "hosts": "algo-1"}),
        "hosts must be a list of names, and is 'algo-1'",
    ),
    "a host twice": (
        lambda base: write_input(base, "resourceconfig", {"current_host": "a", "hosts": ["a", "a"]}),
        "hosts names one host twice: a, a",
    ),
    "two kinds of machines": (
        lambda base: write_input(
            base, "resourceconfig", {"current_host": "a", "hosts": ["a"], "instance_groups": [{}, {}]}
        ),
        "the job has 2 instance groups, and every rank needs the same kind of machine",
    ),
    "unknown interface": (
        lambda base: write_input(
            base, "resourceconfig", {"current_host": "a", "hosts": ["a", "b"], "network_interface_name": "eth99"}
        ),
        "network_interface_name eth99 is none of this host's interfaces",
    ),
    "unknown hyperparameter": (
        lambda base: write_input(base, "hyperparameters", {"optim.learning_rat": "1"}),
        "hyperparameter optim.learning_rat: unknown key 'optim.learning_rat'; did you mean optim.learning_rate?",
    ),
    "bad value": (
        lambda base: write_input(base, "hyperparameters", {"optim.learning_rate": '"fast"'}),
        "hyperparameter optim.learning_rate: optim.learning_rate: ",
    ),
    "not YAML": (
        lambda base: write_input(base, "hyperparameters", {"optim.learning_rate": "[1"}),
        "hyperparameter optim.learning_rate: the value is not valid YAML",
    ),
    "config that is not there": (
        lambda base: write_input(base, "hyperparameters", {"config": '"other.yaml"'}),
        "hyperparameter config: there is no file other.yaml in {base}/input/data/config or {base}/code",
    ),
    "two configs": (
        lambda base: (base / "input" / "data" / "config" / "b.yaml").write_text(""),
        "the channel config must hold one YAML file, and has b.yaml, lockstep.yaml",
    ),
    "no config": (
        lambda base: (base / "input" / "data" / "config" / "lockstep.yaml").unlink(),
        "the channel config must hold one YAML file, and has none",
    ),
    "bad YAML": (lambda base: write_yaml(base, "model: ["), "lockstep.yaml:2: not valid YAML"),
    "unknown key": (lambda base: write_yaml(base, "modell: x\ndata: {}\n"), "lockstep.yaml:1: unknown key 'modell'"),
    "unused channel": (
        lambda base: add_channel(base, "extra"),
        "the configuration does not use the channel extra: give it one of the names train, training, validation",
    ),
    "channel without folder": (
        lambda base: shutil.rmtree(add_channel(base, "test")),
        "channel test has no folder {base}/input/data/test, although inputdataconfig.json lists it",
    ),
    "pipe": (
        lambda base: add_channel(base, "test", TrainingInputMode="Pipe"),
        "channel test has input mode Pipe, and files are read: use File or FastFile",
    ),
    "two channels for one": (
        lambda base: add_channel(base, "training"),
        "the channels train and training both are data.train: use one of them",
    ),
    "several sources": (
        lambda base: edit_yaml(base, data={"train": ["a.jsonl", "b.jsonl"]}),
        "data.train names 2 sources, and it is open which of them the channel train is",
    ),
    "an archive for a model": (
        lambda base: (
            (base / "input" / "data" / "model").unlink(),
            (base / "input" / "data" / "model").mkdir(),
            (base / "input" / "data" / "model" / "model.tar.gz").touch(),
        ),
        "the channel model must hold one model, and {base}/input/data/model has 0: unpack model.tar.gz in S3 first",
    ),
    "nothing to deliver": (
        lambda base: write_input(base, "hyperparameters", {"checkpoint.export": "none"}),
        "checkpoint.export none leaves nothing for {base}/model: remove it",
    ),
    "ray": (
        lambda base: write_input(base, "hyperparameters", {"launch.kind": "ray"}),
        "launch.kind is ray, and runs are started here with kind local",
    ),
    "a file for the model": (
        lambda base: ((base / "model").rmdir(), (base / "model").write_text("")),
        "{base}/model cannot be written (File exists)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_sentence(
    base: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damage, expected = WRONG[name]
    damage(base)
    for variable in [name for name in os.environ if name.startswith("SM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(base))
    (base / "output" / "failure").write_text("of an earlier start")
    result = CliRunner().invoke(app, ["sagemaker", "train"])
    assert isinstance(result.exception, ValueError), result.exception
    reason = failure_of(base)
    assert expected.format(base=base) in reason
    assert reason == str(result.exception).strip()
    assert not (base / "checkpoints" / "run").exists(), "nothing is written before the job is understood"


def test_rows_that_only_some_hosts_have_are_refused(base: Path) -> None:
    write_input(base, "resourceconfig", {"current_host": "a", "hosts": ["a", "b"]})
    add_channel(base, "validation", S3DistributionType="ShardedByS3Key")
    with pytest.raises(ValueError, match=r"channel validation is ShardedByS3Key.*use FullyReplicated"):
        read(base)


def test_ranks_that_cannot_be_shared_out_are_refused(base: Path) -> None:
    write_input(base, "resourceconfig", {"current_host": "a", "hosts": ["a", "b"]})
    with pytest.raises(ValueError, match=r"launch\.procs 3 cannot be shared out equally among 2 hosts"):
        configure(base, {"launch.procs": "3"})


def test_a_first_host_that_has_no_name_yet_is_waited_for_and_not_forever(base: Path) -> None:
    write_input(base, "resourceconfig", {"current_host": "b", "hosts": ["a.invalid", "b"]})
    with pytest.raises(ValueError, match=r"the first host, a\.invalid, was not known within 0 s"):
        sagemaker.wait_for_first_host(read(base), 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")
def test_a_folder_that_may_not_be_written_is_found_before_training(model: Path) -> None:
    program = (
        "import os, sys\n"
        "from lockstep.launch import sagemaker\n"
        "job = sagemaker.read_job({'SAGEMAKER_BASE_DIR': sys.argv[1]})\n"
        "os.setuid(65534)\n"
        "sagemaker.prepare(job)"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        base = container.write_job(Path(folder) / "ml", model)
        Path(folder).chmod(0o755)
        for name in ("output", "output/data", "checkpoints", "model"):
            (base / name).mkdir(exist_ok=True)
            (base / name).chmod(0o755 if name == "model" else 0o777)
        result = subprocess.run([sys.executable, "-c", program, str(base)], capture_output=True, text=True)
    assert (
        f"ValueError: {base}/model cannot be written (Permission denied): the container's user needs" in result.stderr
    )


# --- what is left for the platform ------------------------------------------------------------------------------------


def finished_run(base: Path) -> tuple[sagemaker.SageMakerJob, RunDir]:
    job = read(base)
    run, _, _ = sagemaker.open_run(job, sagemaker.make_config(job))
    (run.export / "model").mkdir(parents=True)
    (run.export / "model" / "config.json").write_text("{}")
    run.write_status(state="completed", export=str(run.export / "model"))
    return job, run


def test_the_model_is_delivered_with_the_code_that_serves_it(base: Path) -> None:
    job, run = finished_run(base)
    sagemaker.deliver_model(job, run)
    sagemaker.deliver_model(job, run)  # after an interruption it may be done again
    files = sorted(str(path.relative_to(job.model_dir)) for path in job.model_dir.rglob("*") if path.is_file())
    assert files == ["code/inference.py", "code/requirements.txt", "config.json"]
    assert (job.model_dir / "code" / "inference.py").read_text() == sagemaker.HANDLER.read_text()
    assert "transformers==" in (job.model_dir / "code" / "requirements.txt").read_text()


def test_a_handler_of_the_users_own_is_taken(base: Path) -> None:
    (base / "input" / "data" / "config" / "inference.py").write_text("# mine\n")
    job, run = finished_run(base)
    sagemaker.deliver_model(job, run)
    assert (job.model_dir / "code" / "inference.py").read_text() == "# mine\n"


def test_records_are_delivered_without_checkpoints(base: Path) -> None:
    job, run = finished_run(base)
    run.log_metrics({"step": 1, "loss": 2.0})
    (run.checkpoints / "step-1").mkdir()
    sagemaker.deliver_records(job, run)
    delivered = {path.name for path in (base / "output" / "data" / "algo-1").iterdir()}
    assert delivered == {"config.yaml", "status.json", "metrics.jsonl", "logs"}


def test_the_reason_of_a_failure_comes_first_and_fits_what_is_shown(base: Path) -> None:
    sagemaker.write_failure({"SAGEMAKER_BASE_DIR": str(base)}, "much\n " * 600, ["a traceback"])
    first, second = (base / "output" / "failure").read_text().splitlines()
    assert len(first) == 1024
    assert first.startswith("much much")
    assert first.endswith("...")
    assert second == "a traceback"


def test_metric_lines_hold_every_number_under_its_split() -> None:
    record = {"step": 3, "split": "validation", "time": 1.0, "loss": 1.25, "accuracy": 5e-07, "row_range": [0, 4]}
    assert sagemaker.metric_line(record) == "metrics step=3 validation:loss=1.25 validation:accuracy=5e-07"


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_with_its_run_and_not_with_another_one(base: Path) -> None:
    job = read(base)
    config = sagemaker.make_config(job)
    assert sagemaker.open_run(job, config)[2] is False
    assert sagemaker.open_run(job, config)[2] is True
    other = configure(base, {"optim.learning_rate": "0.5"})
    with pytest.raises(ValueError, match=r"optim.learning_rate.*give the job another checkpoint_s3_uri"):
        sagemaker.open_run(job, other)


def test_a_first_checkpoint_that_was_not_saved_as_a_whole_is_no_reason_to_fail(base: Path) -> None:
    job = read(base)
    config = sagemaker.make_config(job)
    run, _, _ = sagemaker.open_run(job, config)
    for step in (4, 8):
        run.begin_checkpoint(step).joinpath("rank-0.safetensors").write_text("weights")
        run.commit_checkpoint(step, {})
        run.log_event("checkpoint", step=step)
        (run.checkpoints / f"step-{step}" / "rank-0.safetensors").unlink()
        sagemaker.open_run(job, config)
        begins_again = any(event["event"] == "started_over" for event in run.events())
        assert begins_again == (step == 4), "later ones are an error, which resuming reports"
        if step == 4:
            assert (run.path / "checkpoints-aside-1" / "step-4").exists()
            (run.path / "events.jsonl").unlink()
            run.log_event("checkpoint", step=2)


def test_a_whole_first_checkpoint_is_kept(base: Path) -> None:
    job = read(base)
    config = sagemaker.make_config(job)
    run, _, _ = sagemaker.open_run(job, config)
    run.begin_checkpoint(4).joinpath("rank-0.safetensors").write_text("weights")
    run.commit_checkpoint(4, {})
    run.log_event("checkpoint", step=4)
    sagemaker.open_run(job, config)
    assert (run.checkpoints / "step-4").exists()
