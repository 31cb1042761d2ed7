"""A real fine-tuning through the service, as a person types it: serve, submit, logs -f, artifacts --download."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny
import transformers
import yaml
from equivalence.families import tiny_config
from served_model import serve_command
from service_process import free_port, processes_of, wait_for

from lockstep.rundir import RunDir
from lockstep.service.client import Client, ServiceFault


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("LOCKSTEP_SERVER", url)
    options = ["--data-dir", tmp_path / "data", "--port", port, "--procs", 1]
    options += ["--allow-path", tiny_model, "--allow-path", tmp_path / "models"]
    process = tiny.start_lockstep("serve", *options)
    try:
        wait_for(lambda: is_up(url))
        yield url
    finally:
        end(process)


def is_up(url: str) -> bool:
    try:
        with Client(url) as client:
            return client.health().status == "ok"
    except ServiceFault:
        return False


def end(process: subprocess.Popen[str]) -> str:
    """As Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    return err


def test_a_real_job_from_submit_to_a_model_on_disk(server: str, tmp_path: Path, tiny_model: Path) -> None:
    config = tiny.write_config(tmp_path, tiny_model, lora={"rank": 4}, checkpoint={"every_steps": 5})
    code, out, err = tiny.run_lockstep("submit", config, "optim.max_steps=8", "--id", "first", "--name", "First job")
    assert (code, out.split()[:2]) == (0, ["first", "queued:"]), err
    assert "uploading" in err
    code, out, err = tiny.run_lockstep("logs", "first", "-f")
    assert (code, "first completed" in err) == (0, True), out + err

    code, out, _ = tiny.run_lockstep("jobs", "--json")
    (job,) = json.loads(out)["jobs"]
    assert (job["name"], job["state"], job["kind"], job["progress"]["step"]) == ("First job", "completed", "sft", 8)
    assert job["metrics"]["train"]["step"] == 8
    _, out, _ = tiny.run_lockstep("jobs")
    assert "8/8" in out

    code, out, err = tiny.run_lockstep("artifacts", "first", "--download", tmp_path / "fetched")
    assert (code, "export/adapter/adapter_model.safetensors" in out) == (0, True), err
    kept = tmp_path / "data" / "jobs" / "first" / "export" / "adapter"
    assert tiny.digest_weights(tmp_path / "fetched" / "export" / "adapter") == tiny.digest_weights(kept)

    assert_download_goes_on(tmp_path, kept)
    with Client(server) as client:
        assert [checkpoint.step for checkpoint in client.checkpoints("first")] == [5, 8]
        assert {"data", "model"} <= {event["event"] for event in client.events("first")}
        assert [record["step"] for record in client.metrics("first", follow=True)] == list(range(1, 9))
    code, out, err = tiny.run_lockstep("submit", config, "optim.max_steps=8", "--id", "first", "--name", "First job")
    assert (code, out.split()[:2], "uploading" in err) == (0, ["first", "completed:"], False), "the same job"
    code, _, err = tiny.run_lockstep("submit", config, "--id", "first")
    assert (code, "already a job first" in err) == (2, True)


def assert_download_goes_on(tmp_path: Path, exported: Path) -> None:
    """What --all fetches is a run: without its last checkpoint it goes on from the one before, to the same weights."""
    from lockstep.train.run import run as train_run

    code, _, err = tiny.run_lockstep("artifacts", "first", "--all", "--download", tmp_path / "copy")
    assert code == 0, err
    # Its model and data where they are here: in answers the service does not say where it has them.
    shutil.copy(tmp_path / "data" / "jobs" / "first" / "config.yaml", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "step-8")
    shutil.rmtree(tmp_path / "copy" / "export")
    train_run(tmp_path / "copy")
    copy = RunDir(tmp_path / "copy")
    assert [event["step"] for event in copy.events() if event["event"] == "resumed"] == [5]
    assert tiny.digest_weights(copy.export / "adapter") == tiny.digest_weights(exported)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "qwen3_moe"])
def test_a_hybrid_or_a_mixture_is_trained_and_then_served(server: str, family: str, tmp_path: Path) -> None:
    settings = tiny_config(family)
    settings.vocab_size = tiny.VOCABULARY
    model = tmp_path / "models" / family
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(model)
    tiny.build_tokenizer().save_pretrained(model)
    config = tiny.write_config(tmp_path, model, lora={"rank": 2})
    code, _, err = tiny.run_lockstep("submit", config, "optim.max_steps=3", "--id", family)
    assert code == 0, err
    with Client(server) as client:
        job = client.wait(family, timeout_s=300)
        assert (job.state, job.progress.step) == ("completed", 3)
    code, _, err = tiny.run_lockstep("artifacts", family, "--download", tmp_path / "fetched")
    assert code == 0, err
    with serve_command(tmp_path / "fetched" / "export" / "adapter") as (_, url):
        (served,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        body = {"model": served["id"], "messages": [{"role": "user", "content": "red"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] >= 1


@pytest.mark.slow
def test_a_real_job_whose_process_is_killed_goes_on(server: str, tmp_path: Path, tiny_model: Path) -> None:
    tiny.write_rows(tmp_path / "train.jsonl", 2000)
    changes = {"checkpoint": {"every_steps": 10}, "optim": {"learning_rate": 0.01, "max_steps": 400}}
    config = tiny.write_config(tmp_path, tiny_model, **changes)
    code, _, err = tiny.run_lockstep("submit", config, "--id", "hit", "--max-restarts", "1")
    assert code == 0, err
    run_dir = tmp_path / "data" / "jobs" / "hit"
    with Client(server) as client:
        wait_for(lambda: client.checkpoints("hit"))
        (pid,) = processes_of(run_dir)
        os.kill(pid, signal.SIGKILL)
        job = client.wait("hit", timeout_s=300)
        assert (job.state, job.restarts, job.progress.step) == ("completed", 1, 400)
        (resumed,) = [event for event in client.events("hit") if event["event"] == "resumed"]
        assert resumed["step"] >= 10


def test_commands_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SERVER", f"http://127.0.0.1:{free_port()}")
    code, _, err = tiny.run_lockstep("jobs")
    assert (code, "start it with lockstep serve" in err) == (2, True)
    code, _, err = tiny.run_lockstep("serve", "--host", "0.0.0.0", "--data-dir", tmp_path / "data")
    assert (code, "give a token file" in err) == (2, True)


@pytest.mark.slow
def test_a_layout_is_chosen_for_jobs_of_both_interfaces(tmp_path: Path, tiny_model: Path) -> None:
    """`parallel: auto` on two processes: over the service's own HTTP interface and over Llama Stack's."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = yaml.safe_load(tiny.write_config(tmp_path, tiny_model, optim={"max_steps": 3}).read_text())
    options = ["--data-dir", tmp_path / "data", "--port", port, "--procs", 2, "--allow-path", tiny_model]
    process = tiny.start_lockstep("serve", *options)
    try:
        wait_for(lambda: is_up(url))
        with httpx.Client(base_url=url, timeout=60) as http:
            assert http.post("/api/datasets/rows", content=(tmp_path / "train.jsonl").read_bytes()).status_code == 201
            config |= {"parallel": "auto", "data": {**config["data"], "train": "dataset:rows"}}
            config["launch"] = {**config["launch"], "procs": 2}
            answer = http.post("/api/jobs", json={"id": "own", "config": config})
            assert answer.status_code < 300, answer.text
            data = {"dataset_id": "rows", "batch_size": 4, "shuffle": True, "data_format": "instruct"}
            given = {"parallel": "auto", "launch": {"procs": 2, "device": "cpu"}, "data": {"max_length": 128}}
            body = {
                "job_uuid": "stack",
                "model": str(tiny_model),
                "training_config": {"n_epochs": 1, "max_steps_per_epoch": 3, "data_config": data},
                "provider_config": {**given, "model": {"precision": "fp32"}},
            }
            answer = http.post("/v1/post-training/supervised-fine-tune", json=body)
            assert answer.status_code < 300, answer.text
            wrong = {**body, "job_uuid": "wrong", "provider_config": {**given, "parallel": "automatic"}}
            answer = http.post("/v1/post-training/supervised-fine-tune", json=wrong)
            assert (answer.status_code, "automatic is no layout: write auto" in answer.text) == (400, True), answer.text
            answer = http.post("/api/jobs", json={"id": "wrong", "config": {**config, "parallel": "automatic"}})
            assert (answer.status_code, "automatic is no layout: write auto" in answer.text) == (422, True), answer.text
        for job in ("own", "stack"):
            run = RunDir(tmp_path / "data" / "jobs" / job)
            wait_for(lambda run=run: run.status().get("state") in ("completed", "failed"))
            assert run.status()["state"] == "completed", run.status()
            assert run.config().parallel.chosen_for(2)
            assert run.status()["layout"] == run.config().parallel.degrees(2).name
            (said,) = [event["message"] for event in run.events() if event["event"] == "layout"]
            assert said.startswith("parallel auto: ")
            print(job, said)
    finally:
        end(process)
