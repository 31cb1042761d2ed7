"""The process of a base model, as the service talks to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_model

from lockstep.config import ModelConfig
from lockstep.processes.local import LocalWorker
from lockstep.processes.worker import WorkerDied

STEP = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "max_grad_norm": None}
SAMPLE = {
    "adapter": "", "num_samples": 1, "max_tokens": 8, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
    "stop": [], "stop_tokens": [], "ignore_eos": True,
    "prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    folder = tmp_path_factory.mktemp("model")
    model = ModelConfig(path=str(write_model(folder / "tiny")), precision="fp32").model_dump(mode="json")
    settings = {"model": model, "batch_size": 4, "micro_batch_tokens": 256, "device": "cpu"}
    worker = LocalWorker.spawn("tiny", "lockstep.tenants.worker:start", settings, log_path=folder / "log")
    yield worker
    worker.close()


def call(worker: LocalWorker, method: str, **body: Any) -> dict[str, Any]:
    return worker.call(method, body, timeout_s=120).result().body


def learn(
    worker: LocalWorker, model: str, *rows: list[int], forward_only: bool = False, **changes: Any
) -> dict[str, Any]:
    body = {
        "model_id": model,
        "loss_fn": "cross_entropy",
        "loss_fn_config": {},
        "forward_only": forward_only,
        "lengths": [len(row) - 1 for row in rows],
        "shapes": [[len(row) - 1] for row in rows],
        "inputs": ["target_tokens", "weights"],
        "tokens": np.concatenate([row[:-1] for row in rows]).astype(np.int32).tobytes(),
        "input.target_tokens": np.concatenate([row[1:] for row in rows]).astype(np.int64).tobytes(),
        "input.weights": np.ones(sum(len(row) - 1 for row in rows), dtype=np.float32).tobytes(),
    }
    return call(worker, "forward_backward", **{**body, **changes})


def create(worker: LocalWorker, model: str, rank: int = 4) -> dict[str, Any]:
    spec = {"rank": rank, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    return call(worker, "create_model", model_id=model, **spec)


def sample(worker: LocalWorker, name: str = "one", **changes: Any) -> Any:
    prompt = np.array([5, 6, 7], dtype=np.int32).tobytes()
    return worker.call("sample", {"call": name, "prompt": prompt, **SAMPLE, **changes}, timeout_s=120)


def test_a_model_learns_is_saved_sampled_and_unloaded(worker: LocalWorker, tmp_path: Path) -> None:
    about = call(worker, "describe")
    assert about == {"max_context_length": 512, "device": "cpu", "precision": "fp32", "slow": []}
    assert create(worker, "a")["num_trained"] > 0
    rows = [[5, 6, 7, 8, 9], [10, 11, 12]]
    before = learn(worker, "a", *rows)
    assert before["metrics"]["loss:sum"] == pytest.approx(
        -np.frombuffer(before["logprobs"], np.float32).sum(), rel=1e-5
    )
    assert call(worker, "optim_step", model_id="a", **STEP)["metrics"]["grad_norm"] > 0
    for _ in range(30):
        last = learn(worker, "a", *rows)
        call(worker, "optim_step", model_id="a", **STEP)
    assert last["metrics"]["loss:sum"] < before["metrics"]["loss:sum"] / 5
    folder = tmp_path / "weights"
    assert call(worker, "save_weights", model_id="a", folder=str(folder), with_optimizer=False)["size_bytes"] > 0
    greedy = {"adapter": str(folder), "temperature": 0.0, "max_tokens": 2, "prompt_logprobs": True}
    answer = sample(worker, **greedy).result().body
    assert answer["sequences"][0]["tokens"] == [8, 9]
    assert len(answer["sequences"][0]["logprobs"]) == 2
    assert np.isnan(np.frombuffer(answer["prompt_logprobs"], np.float32)).tolist() == [True, False, False]
    base = sample(worker, temperature=0.0, max_tokens=2).result().body
    assert base["sequences"][0]["tokens"] != [8, 9]
    call(worker, "close_adapter", adapter=str(folder))
    call(worker, "unload_model", model_id="a")
    assert learn(worker, "a", *rows) == {"mistake": "the model a is not loaded"}


def test_sampling_goes_on_while_others_train(worker: LocalWorker) -> None:
    create(worker, "busy")
    answers = [sample(worker, f"answer {n}", max_tokens=200, seed=n) for n in range(6)]
    training = [learn(worker, "busy", list(range(5, 60))) for _ in range(12)]
    assert any(answer.done() for answer in answers), "answers came between the calls that train"
    assert all("mistake" not in result for result in training)
    assert [len(answer.result().body["sequences"][0]["tokens"]) for answer in answers] == [200] * 6
    assert worker.call("ping", {}, timeout_s=60).result().body["models"] >= 1


def test_a_mistake_is_an_answer_and_costs_nobody_anything(worker: LocalWorker) -> None:
    create(worker, "careful")
    assert "token 999" in learn(worker, "careful", [5, 999, 7])["mistake"]
    assert "no loss 'nonsense'" in learn(worker, "careful", [5, 6], loss_fn="nonsense")["mistake"]
    assert "came for data" in learn(worker, "careful", [5, 6, 7], lengths=[5])["mistake"]
    assert "must be from 0" in call(worker, "optim_step", model_id="careful", **{**STEP, "beta1": 1.5})["mistake"]
    assert "adapter folder" in sample(worker, adapter="/nowhere").result().body["mistake"]
    assert "num_samples must be" in sample(worker, num_samples=0).result().body["mistake"]
    assert len(sample(worker).result().body["sequences"][0]["tokens"]) == 8


def test_several_samples_without_chance_are_the_same(worker: LocalWorker) -> None:
    sequences = sample(worker, num_samples=3, temperature=0.0).result().body["sequences"]
    assert len(sequences) == 3
    assert sequences[0] == sequences[1] == sequences[2]


def test_a_request_can_be_cancelled(worker: LocalWorker) -> None:
    long = sample(worker, "long", max_tokens=500)
    call(worker, "cancel", call="long")
    assert long.result().body == {"mistake": "it was cancelled"}


def test_a_lost_process_is_told_at_once(worker: LocalWorker) -> None:
    doomed = sample(worker, max_tokens=500)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="signal 9"):
        doomed.result(timeout=60)
