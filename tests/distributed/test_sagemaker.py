"""Whole jobs of SageMaker as the platform starts them: one host and two, interrupted and resumed, failed, served."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sagemaker_container as container
import tiny
from network_hosts import Host, made_hosts
from sagemaker_container import failure_of, load_start_job, run_container, start_container, write_job

from lockstep.rundir import EXIT_INTERRUPTED, RunDir

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = {"checkpoint": {"every_steps": 2, "asynchronous": False}}
pytestmark = pytest.mark.slow


def wait_for_step(bases: Sequence[Path], step: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 900
    runs = [RunDir(base / "checkpoints" / "run") for base in bases]
    while not any(c.step >= step for run in runs for c in run.list_checkpoints()):
        assert time.monotonic() < deadline, "no checkpoint"
        assert all(process.poll() is None for process in processes), "ended too early"
        time.sleep(0.01)


def call_handler(folder: Path, request: dict[str, Any]) -> Any:
    """As the platform's serving container does: code/inference.py in a process that has never seen Lockstep."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1] + '/code'); sys.modules['lockstep'] = None\n"
        "import inference\n"
        "model = inference.model_fn(sys.argv[1])\n"
        "answers = inference.predict_fn(inference.input_fn(sys.argv[2], 'application/json'), model)\n"
        "print(inference.output_fn(answers, 'application/json'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder), json.dumps(request)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# --- one host ---------------------------------------------------------------------------------------------------------


def test_a_job_trains_reports_delivers_and_what_it_delivers_serves(tmp_path: Path, tiny_model: Path) -> None:
    # The model learns the one thing it is shown, so that its answer tells whether these are the trained weights.
    settings = {"data": {"train": "x", "max_length": 128, "validation_fraction": 0.1}, "lora": {"rank": 8}}
    hyperparameters = {"optim.learning_rate": "0.02", "optim.epochs": "12", "batch.samples": "8"}
    base = write_job(tmp_path / "ml", tiny_model, settings=settings, hyperparameters=hyperparameters)
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "lockstep"}]
    (base / "input" / "data" / "train" / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    code, out, err = run_container(base)
    assert code == 0, err
    assert failure_of(base) == ""
    steps = len(re.findall(r"^metrics step=\d+ train:", out, re.MULTILINE))
    for definition in load_start_job().METRIC_DEFINITIONS:
        found = re.findall(definition["Regex"], out)
        if "reward" not in definition["Name"] and "margin" not in definition["Name"]:
            assert found, definition
            assert all(float(value) >= 0 for value in found)
        if definition["Name"] == "train:loss":
            assert len(found) == steps
    messages = turns[:1]
    (answer,) = call_handler(base / "model", {"messages": messages, "parameters": {"max_new_tokens": 12}})
    assert answer == {"generated_text": "lockstep"}
    assert (base / "output" / "data" / "algo-1" / "metrics.jsonl").exists()


def test_an_interrupted_job_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path, tiny_model: Path) -> None:
    long = {**CHECKPOINTS, "optim": {"epochs": 8}}  # 96 steps: not over before the signal comes
    undisturbed = write_job(tmp_path / "undisturbed", tiny_model, settings=long)
    assert run_container(undisturbed)[0] == 0

    base = write_job(tmp_path / "first", tiny_model, settings=long)
    process = start_container(base)
    wait_for_step([base], 4, [process])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=900)
    assert process.returncode == EXIT_INTERRUPTED, err
    assert failure_of(base) == "", "an interruption is no failure"
    run = RunDir(base / "checkpoints" / "run")
    assert run.list_checkpoints()[-1].step == run.metrics()[-1]["step"] < 96, "not a step is lost"

    # Another machine, with what the platform has saved: same paths, another container.
    shutil.rmtree(base / "lockstep", ignore_errors=True)
    code, out, err = run_container(base)
    assert code == 0, err
    assert re.search(r"step \d+  resumed", out)
    assert tiny.digest_weights(base / "model") == tiny.digest_weights(undisturbed / "model")

    # Interrupted once more while the model was delivered: it is delivered again, and nothing is trained.
    shutil.rmtree(base / "model")
    code, out, err = run_container(base)
    assert code == 0, err
    assert "metrics step=" not in out
    assert tiny.digest_weights(base / "model") == tiny.digest_weights(undisturbed / "model")


def test_a_failure_is_left_as_one_sentence(tmp_path: Path, tiny_model: Path) -> None:
    base = write_job(tmp_path / "ml", tiny_model)
    (base / "input" / "data" / "train" / "rows.jsonl").write_text('{"messages": 3}\n')
    code, _, err = run_container(base)
    assert code == 2
    reason = failure_of(base)
    assert "rows.jsonl:1" in reason
    assert f"error: {reason}" in err
    assert "rank-0.log:" in (base / "output" / "failure").read_text()
    assert (base / "output" / "data" / "algo-1" / "logs" / "rank-0.log").exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="takes root to make a small disk")
@pytest.mark.parametrize("full", ["model", "checkpoints"])
def test_a_full_disk_is_named(tmp_path: Path, tiny_model: Path, full: str) -> None:
    base = write_job(tmp_path / "ml", tiny_model)
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=120k none {base / full} && exec "$@"', "sh"]
    process = start_container(base, before=mount)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "No space left on device" in failure_of(base)
    if full == "model":
        assert failure_of(base) == f"the model cannot be delivered to {base}/model: No space left on device"
    assert f"error: {failure_of(base)}" in err


def test_a_container_that_should_serve_says_what_it_is_for(tmp_path: Path, tiny_model: Path) -> None:
    base = write_job(tmp_path / "ml", tiny_model)
    code, _, err = run_container(base, "serve")
    assert code == 2
    assert "started with 'serve', and it only trains" in err
    assert failure_of(base) in err


# --- two hosts that share nothing -------------------------------------------------------------------------------------


def write_two(folder: Path, model: Path, hosts: Sequence[Host], **settings: Any) -> list[Path]:
    names = [host.address for host in hosts]
    return [
        write_job(
            folder / f"host-{rank}",
            model,
            hosts=names,
            current=host.address,
            settings={**CHECKPOINTS, **settings},
            network_interface_name=host.device,
        )
        for rank, host in enumerate(hosts)
    ]


def start_two(bases: Sequence[Path], hosts: Sequence[Host]) -> list[subprocess.Popen[str]]:
    return [start_container(b, before=["ip", "netns", "exec", h.name]) for b, h in zip(bases, hosts)]


def end_all(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int | None], list[str]]:
    try:
        outputs = ["".join(filter(None, process.communicate(timeout=900))) for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    return [process.returncode for process in processes], outputs


@pytest.mark.parametrize("layout", ["shard", "replicate"])
def test_two_hosts_that_share_nothing(tmp_path: Path, tiny_model: Path, layout: str) -> None:
    parallel = {"parallel": {"shard": 2} if layout == "shard" else {"replicate": 2, "shard": 1}}
    with made_hosts() as hosts:
        undisturbed = write_two(tmp_path / "undisturbed", tiny_model, hosts, **parallel)
        codes, outputs = end_all(start_two(undisturbed, hosts))
        assert codes == [0, 0], outputs
        assert not any((undisturbed[1] / "checkpoints").iterdir()), "all hosts are saved to the same place"
        assert not any((undisturbed[1] / "model").iterdir())

        bases = write_two(tmp_path / "interrupted", tiny_model, hosts, **parallel)
        processes = start_two(bases, hosts)
        wait_for_step(bases, 4, processes)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes, outputs = end_all(processes)
        assert codes == [EXIT_INTERRUPTED] * 2, outputs
        assert [failure_of(base) for base in bases] == ["", ""]
        saved = RunDir(bases[0] / "checkpoints" / "run").list_checkpoints()
        assert saved, "complete on the first host"
        if layout == "shard":
            assert (saved[-1].path / "rank-1.safetensors").exists()

        # What the platform has saved comes to both; the second host's own folder is gone.
        shutil.copytree(bases[0] / "checkpoints", bases[1] / "checkpoints", dirs_exist_ok=True)
        for base in bases:
            shutil.rmtree(base / "lockstep", ignore_errors=True)
        codes, outputs = end_all(start_two(bases, hosts))
        assert codes == [0, 0], outputs
        assert re.search(r"step \d+  resumed", outputs[0])
    assert tiny.digest_weights(bases[0] / "model") == tiny.digest_weights(undisturbed[0] / "model")
    metrics = [RunDir(base / "checkpoints" / "run").metrics() for base in (bases[0], undisturbed[0])]
    assert [record["loss"] for record in metrics[0]] == [record["loss"] for record in metrics[1]]


def test_a_host_that_is_lost_ends_the_others_with_a_reason(tmp_path: Path, tiny_model: Path) -> None:
    with made_hosts() as hosts:
        bases = write_two(tmp_path / "job", tiny_model, hosts, optim={"epochs": 1000})
        processes = start_two(bases, hosts)
        wait_for_step(bases, 2, processes)
        os.kill(tiny.pid_of_rank(RunDir(bases[1] / "lockstep" / "run"), 1), signal.SIGKILL)
        codes, outputs = end_all(processes)
    assert codes == [1, 1], outputs
    assert "rank 1 was ended by signal 9" in failure_of(bases[1])
    assert "rank 0 lost its connection to rank 1" in failure_of(bases[0])


# --- the platform's own toolkit ---------------------------------------------------------------------------------------

TOOLKIT = Path(os.environ.get("SAGEMAKER_VENV", ROOT / ".venv-sagemaker")) / "bin"
needs_toolkit = pytest.mark.skipif(
    not (TOOLKIT / "train").exists(),
    reason="needs sagemaker-training in an environment of its own: make test-sagemaker",
)


def start_toolkit(base: Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The entry of the platform's framework containers, which runs a script of the user's."""
    code = base / "code"
    code.mkdir(exist_ok=True)
    (code / "train.sh").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep sagemaker\n')
    hyperparameters = json.loads((base / "input" / "config" / "hyperparameters.json").read_text())
    toolkit = {"sagemaker_program": '"train.sh"', "sagemaker_submit_directory": json.dumps(str(code))}
    container.write_input(base, "hyperparameters", {**hyperparameters, **toolkit})
    return subprocess.Popen(
        [*before, str(TOOLKIT / "train")],
        env={
            **os.environ,
            "PATH": f"{TOOLKIT}:{os.environ['PATH']}",
            "SAGEMAKER_BASE_DIR": str(base),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@needs_toolkit
def test_the_toolkit_starts_the_entry_on_one_host(tmp_path: Path, tiny_model: Path) -> None:
    direct = write_job(tmp_path / "direct", tiny_model)
    assert run_container(direct)[0] == 0
    base = write_job(tmp_path / "ml", tiny_model, hosts=["localhost"])  # the toolkit looks the name up
    (code,), (out,) = end_all([start_toolkit(base)])
    assert code == 0, out
    assert "Reporting training SUCCESS" in out
    assert tiny.digest_weights(base / "model") == tiny.digest_weights(direct / "model")


@needs_toolkit
def test_the_toolkit_starts_the_entry_on_two_hosts(tmp_path: Path, tiny_model: Path) -> None:
    with made_hosts() as hosts:
        bases = write_two(tmp_path / "job", tiny_model, hosts, parallel={"shard": 2})
        processes = [start_toolkit(b, ["ip", "netns", "exec", h.name]) for b, h in zip(bases, hosts)]
        codes, outputs = end_all([*processes])
    assert codes == [0, 0], outputs
    assert all("Reporting training SUCCESS" in out for out in outputs)
    assert (bases[0] / "model" / "model.safetensors").exists()


@needs_toolkit
def test_the_toolkit_keeps_the_reason_of_a_failure(tmp_path: Path, tiny_model: Path) -> None:
    wrong = {"optim.learning_rat": "1"}
    base = write_job(tmp_path / "ml", tiny_model, hosts=["localhost"], hyperparameters=wrong)
    (code,), (out,) = end_all([start_toolkit(base)])
    assert code != 0
    assert "Failure file exists. Skipping creation" in out
    assert failure_of(base).startswith("hyperparameter optim.learning_rat: unknown key")


SERVE = """
import json, sys
sys.path[:0] = [sys.argv[1] + "/code"]
sys.path.append(sys.argv[2])  # last: the toolkit's own, none of what it shares with us
sys.modules["lockstep"] = None
from sagemaker_inference.transformer import Transformer

class Request:
    def get_request_properties(self):
        return {"Content-Type": "application/json", "Accept": "application/json"}

class Context:  # multi-model-server's
    system_properties, request_processor, status = {"model_dir": sys.argv[1]}, [Request()], 200
    def set_response_content_type(self, index, kind):
        assert kind == "application/json"
    def set_response_status(self, code, phrase):
        self.status = code

transformer, context = Transformer(), Context()
for body in sys.stdin:
    (answer,) = transformer.transform([{"body": body.encode()}], context)
    print(json.dumps([context.status, answer]))
"""


@needs_toolkit
@pytest.mark.parametrize("export", ["model", "adapter"])
def test_the_inference_toolkit_serves_what_was_delivered(tmp_path: Path, tiny_model: Path, export: str) -> None:
    settings = {} if export == "model" else {"lora": {"rank": 4}, "checkpoint": {"export": "adapter"}}
    base = write_job(tmp_path / "ml", tiny_model, settings=settings)
    code, _, err = run_container(base)
    assert code == 0, err
    (packages,) = TOOLKIT.parent.glob("lib/python3*/site-packages")
    requests = [{"inputs": ["one two", "red"], "parameters": {"max_new_tokens": 4}}, {"inputs": 3}]
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(base / "model"), str(packages)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    (status, answer), (refused, why) = map(json.loads, result.stdout.splitlines()[-2:])
    assert status == 200, answer
    assert [list(entry) for entry in json.loads(answer)] == [["generated_text"]] * 2
    assert refused == 500
    assert '"inputs" must be a text or a list of texts' in why
