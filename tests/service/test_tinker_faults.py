"""What is left of the Tinker API's models when a process, the service or a session ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from service_process import HERE, wait_for
from tinker_service import KEY, MODEL, TinkerService, datum, tinker_service

from lockstep.config import ConfigError
from lockstep.service.tinker.runs import Runs
from lockstep.service.tinker.settings import TinkerModel, TinkerSettings

ADAM = tinker.AdamParams()
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
ONE = tinker.SamplingParams(max_tokens=1)


def test_a_lost_process_takes_its_models_and_no_others(tmp_path):
    with tinker_service(tmp_path) as service:
        client = service.client()
        saved, unsaved, quiet = (client.create_lora_training_client(MODEL, rank=2) for _ in range(3))
        other = client.create_lora_training_client("other", rank=2)
        saved.optim_step(ADAM).result()
        path = saved.save_state("one").result().path
        (service.model / "delay").write_text("0.3")
        slow = unsaved.forward_backward([datum(1, 2)], "cross_entropy")
        waiting = unsaved.optim_step(ADAM)
        wait_for(lambda: service.journal("forward_backward"), 10)
        os.kill(service.journal("create_model")[0]["pid"], signal.SIGKILL)
        began = time.monotonic()
        for future in (slow, waiting):
            with pytest.raises(tinker.RequestFailedError, match="it has no checkpoint") as caught:
                future.result()
            assert caught.value.category == "server"
        with pytest.raises(tinker.APIStatusError, match=f"its newest checkpoint is {path}"):
            saved.optim_step(ADAM).result()
        assert time.monotonic() - began < 5
        assert other.optim_step(ADAM).result().metrics["step"] == 1
        (service.model / "delay").unlink()
        again = client.create_training_client_from_state_with_optimizer(path)  # starts the process again
        assert again.optim_step(ADAM).result().metrics["step"] == 2
        with pytest.raises(tinker.APIStatusError, match="not in memory any more"):
            quiet.optim_step(ADAM).result()
        assert len({each["pid"] for each in service.journal("describe")}) == 2
        assert client.create_sampling_client(model_path=path).sample(PROMPT, 1, ONE).result().sequences[0].tokens == [1]


def test_a_sample_that_ends_the_process_is_told_and_the_next_one_starts_it(tmp_path):
    with tinker_service(tmp_path) as service:
        sampler = service.client().create_sampling_client(base_model=MODEL)
        with pytest.raises(tinker.RequestFailedError, match="exit") as caught:
            sampler.sample(tinker.ModelInput.from_ints([13]), 1, ONE).result()
        assert caught.value.category == "server"
        assert sampler.sample(PROMPT, 1, ONE).result().sequences[0].tokens == [0]


def test_a_process_that_gives_no_answer_is_ended(tmp_path):
    with tinker_service(tmp_path, call_timeout_s=0.5) as service:
        trainer = service.client().create_lora_training_client(MODEL, rank=2)
        (service.model / "delay").write_text("60")
        with pytest.raises(tinker.RequestFailedError, match=r"gave no answer to forward_backward within 0\.5 s"):
            trainer.forward_backward([datum(1, 2)], "cross_entropy").result()
        (service.model / "delay").unlink()
        assert (
            service.client().create_lora_training_client(MODEL, rank=2).optim_step(ADAM).result().metrics["step"] == 1
        )


def test_a_sample_that_takes_too_long_fails_alone(tmp_path):
    with tinker_service(tmp_path, call_timeout_s=0.5) as service:
        client = service.client()
        trainer = client.create_lora_training_client(MODEL, rank=2)
        (service.model / "sample_delay").write_text("60")
        with pytest.raises(tinker.RequestFailedError, match=r"gave no answer to sample within 0\.5 s"):
            client.create_sampling_client(base_model=MODEL).sample(PROMPT, 1, ONE).result()
        assert service.journal("cancel")
        assert trainer.optim_step(ADAM).result().metrics["step"] == 1


def test_a_base_model_that_cannot_be_loaded_is_told_each_time(tmp_path):
    with tinker_service(tmp_path) as service:
        wait_for(lambda: service.journal("describe"), 10)
        os.kill(service.journal("describe")[0]["pid"], signal.SIGKILL)
        shutil.rmtree(service.model)
        for _ in range(2):
            with pytest.raises(tinker.RequestFailedError, match=f"{MODEL} cannot be loaded: there is no model in"):
                service.client().create_lora_training_client(MODEL, rank=2)
        service.model.mkdir()
        assert service.client().create_lora_training_client(MODEL, rank=2).model_id


def test_a_disk_that_cannot_be_written_fails_requests_and_keeps_nothing_half_done(tmp_path):
    with tinker_service(tmp_path, max_models=1) as service:
        runs = service.data_dir / "tinker" / "runs"
        runs.rmdir()
        runs.write_text("no folder")
        with pytest.raises(tinker.RequestFailedError, match="cannot use its disk") as caught:
            service.client().create_lora_training_client(MODEL, rank=2)
        assert caught.value.category == "server"
        runs.unlink()
        trainer = service.client().create_lora_training_client(MODEL, rank=2)  # there is room for one
        assert len(service.journal("unload_model")) == 1
        weights = runs / trainer.model_id.replace(":", "-") / "weights"
        weights.write_text("no folder")
        with pytest.raises(tinker.RequestFailedError, match="cannot use its disk"):
            trainer.save_state("one").result()
        weights.unlink()
        assert trainer.save_state("one").result().path.endswith("/one")
        assert [path.name for path in weights.iterdir()] == ["one"]


def test_the_service_is_started_again(tmp_path):
    service = TinkerService(tmp_path)
    service.start()
    client = service.client()
    trainer = client.create_lora_training_client(MODEL, rank=2, user_metadata={"a": "b"})
    trainer.optim_step(ADAM).result()
    path = trainer.save_state("one", user_metadata={"step": "1"}).result().path
    sampler_path = trainer.save_weights_for_sampler("one").result().path
    trainer.save_weights_and_get_sampling_client()
    before = service.get(f"training_runs/{trainer.model_id}/checkpoints").json()
    service.stop()
    assert list((service.data_dir / "tinker" / "unnamed").iterdir())
    service.start()
    try:
        assert service.get(f"training_runs/{trainer.model_id}/checkpoints").json() == before
        assert service.get("training_runs").json()["training_runs"][0]["user_metadata"] == {"a": "b"}
        assert not list((service.data_dir / "tinker" / "unnamed").iterdir())
        for answer in (service.step(trainer.model_id, 9), service.post("get_info", {"model_id": trainer.model_id})):
            assert answer.status_code == 410
            assert f"the service was started again; its newest checkpoint is {path}" in answer.json()["error"]
        lost = service.fetch(f"{trainer.model_id}:9")  # a client that waits for a result of before
        assert lost["category"] == "server"
        assert path in lost["error"]
        old = client.holder.get_session_id()
        assert service.post("session_heartbeat", {"session_id": old}).status_code == 410  # ends the client's heartbeat
        assert service.get(f"sessions/{old}").json()["training_run_ids"] == [trainer.model_id]
        fresh = service.client()
        again = fresh.create_training_client_from_state_with_optimizer(path)
        assert again.optim_step(ADAM).result().metrics["step"] == 2
        sampler = fresh.create_sampling_client(model_path=sampler_path)
        assert sampler.sample(PROMPT, 1, ONE).result().sequences[0].tokens == [1]
    finally:
        service.close_clients()
        service.stop()


PROGRAM = """
import sys
from pathlib import Path
from tinker_service import TinkerService
service = TinkerService(Path(sys.argv[1]))
service.start()
print(service.url, flush=True)
sys.stdin.read()
"""


def test_a_killed_service_loses_no_checkpoint(tmp_path):
    """At any moment of a save: what is complete on disk is listed, what is not is gone."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()

    def post(path: str, /, **body: Any) -> dict[str, Any]:
        return httpx.post(f"{url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY}, timeout=30).json()

    session = post("create_session")["session_id"]
    made = post("create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 2})
    post("retrieve_future", request_id=made["request_id"])
    for number in range(1, 4):
        post("save_weights", model_id=made["model_id"], seq_id=number, path=f"s{number}")
    assert post("retrieve_future", request_id=f"{made['model_id']}:2")["path"].endswith("/weights/s2")
    process.kill()
    process.wait()
    with tinker_service(tmp_path) as service:
        listed = service.get(f"training_runs/{made['model_id']}/checkpoints").json()["checkpoints"]
        names = [each["checkpoint_id"] for each in listed]
        assert names[:2] == ["weights/s1", "weights/s2"]
        folder = tmp_path / "data" / "tinker" / "runs" / made["model_id"].replace(":", "-") / "weights"
        assert sorted(f"weights/{path.name}" for path in folder.iterdir()) == sorted(names)


def test_what_a_kill_leaves_between_two_writes_is_put_right(tmp_path):
    run_id = "s:train:0"
    folder = tmp_path / "runs" / "s-train-0"
    folder.mkdir(parents=True)
    fields = {"id": run_id, "session_id": "s", "owner": "", "base_model": MODEL, "rank": 2, "checkpoints": {}}
    fields |= {"train_unembed": True, "train_mlp": True, "train_attn": True, "created_at": 1.0, "last_request_at": 1.0}
    saved = {"kind": "weights", "created_at": 1.0, "size_bytes": 1}
    fields["checkpoints"] = {f"weights/{name}": {**saved, "name": name} for name in ("there", "deleted")}
    (folder / "run.json").write_text(json.dumps(fields))
    for path in ("there", "unrecorded", ".new-moved/complete", ".new-there/complete", ".new-half/complete.writing"):
        (folder / "weights" / path).mkdir(parents=True)
        (folder / "weights" / path / "adapter").write_text(path)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    for _ in range(2):  # the second time, from what the first has written
        runs = Runs(tmp_path, lambda path: None)
        runs.load()
        (run,) = runs.all()
        assert run.checkpoints.keys() == {"weights/there", "weights/unrecorded", "weights/moved"}
        assert {path.name for path in (folder / "weights").iterdir()} == {"there", "unrecorded", "moved"}
    assert (folder / "weights" / "there" / "adapter").read_text() == "there"


def test_a_silent_session_and_an_expired_checkpoint_are_ended(tmp_path):
    with tinker_service(tmp_path, session_timeout_s=1.0) as service:
        session = service.open_session()
        model = service.open_model(session)
        body = {"model_id": model, "seq_id": 1, "path": "short", "ttl_seconds": 1}
        path = service.fetch(service.post("save_weights", body).json()["request_id"])["path"]
        folder = Path(service.journal("save_weights")[-1]["folder"]).parent.parent / "short"
        assert folder.exists()
        for _ in range(4):
            time.sleep(0.3)
            assert service.post("session_heartbeat", {"session_id": session}).status_code == 200
        assert service.post("get_info", {"model_id": model}).status_code == 200  # the heartbeat kept it
        wait_for(lambda: not folder.exists(), 10)
        assert service.post("weights_info", {"tinker_path": path}).status_code == 404
        wait_for(lambda: service.journal("unload_model"), 10)
        answer = service.step(model, 2)
        assert answer.status_code == 410
        assert "its session was silent" in answer.json()["error"]
        assert service.post("session_heartbeat", {"session_id": session}).status_code == 410


def test_settings_say_what_is_wrong_with_them():
    assert TinkerModel.parse("Qwen/Qwen3-8B") == TinkerModel("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert TinkerModel.parse("policy=models/qwen") == TinkerModel("policy", "models/qwen")
    for text in ("", "=x", "x="):
        with pytest.raises(ConfigError, match="NAME=MODEL"):
            TinkerModel.parse(text)
    with pytest.raises(ConfigError, match="names a model twice"):
        TinkerSettings.parse(["a=x", "a=y"], "auto", "auto", 4)
    with pytest.raises(ConfigError, match="--tinker-device tpu"):
        TinkerSettings.parse(["a"], "tpu", "auto", 4)


def test_slow_ways_of_a_model_are_told_in_the_log_once(tmp_path, caplog):
    with tinker_service(tmp_path, session_timeout_s=0.8) as service:  # swept that often
        service.client().create_lora_training_client(MODEL, rank=2)
        (service.model / "slow").write_text("tokens come from generate\n")

        def told() -> list[str]:
            return [record.getMessage() for record in caplog.records if "generate" in record.getMessage()]

        wait_for(told, 10)
        time.sleep(0.6)
        assert told() == [f"{MODEL}: tokens come from generate"]
