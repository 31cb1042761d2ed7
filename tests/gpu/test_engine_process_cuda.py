"""An engine in a process of its own, on the GPU of the trainer: it reads new weights there, and nothing is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_model

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import RunConfig
from lockstep.config.loading import parse_config
from lockstep.model.load import build_model
from lockstep.rollouts.engines import device_memory, publishing
from lockstep.rollouts.engines.pool import start_engines
from lockstep.rundir import RunDir
from lockstep.types import Completion, Datum, LossSpec, OptimStep, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0, seed=3, num_samples=2, logprobs=True)


def configure(model: Path, lora: str) -> RunConfig:
    return parse_config(
        f"model: {{path: {model}, precision: bf16, compile: false}}\ndata: {{train: a}}\n{lora}"
        "algorithm: {kind: grpo, reward: [{name: numeric}]}\nrollouts: {engines: 1}\nlaunch: {device: cuda}\n"
    )


@pytest.mark.parametrize("lora", ["", "lora: {rank: 2}\n"], ids=["full", "lora"])
def test_new_weights_are_read_where_they_are(lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(write_model(tmp_path / "model"), lora)
    run = RunDir.create(tmp_path / "run", config)
    model = build_model(config.model, config.lora, "bf16", with_weights=True)
    backend = TorchBackend(model, precision="bf16", device="cuda", compile=False)
    pool = start_engines(config, run, precision="bf16", choose_device=lambda name: "cuda")
    try:
        assert pool.shares_gpu == (torch.cuda.device_count() == 1)
        expected: list[Any] = []
        for version, on_device in ((1, False), (2, True), (3, True)):
            if version < 3:  # the second and the third are the same weights
                backend.forward_backward([Datum([5, 6], [Completion([8, 9], [1.0, 1.0])])], LossSpec())
                backend.optim_step(OptimStep(learning_rate=0.05))
            weights = backend.read_weights(on_device=on_device)
            assert {tensor.device.type for tensor in weights.values()} == {"cuda" if on_device else "cpu"}
            if on_device:
                monkeypatch.setattr(publishing, "_cut", lambda *_: pytest.fail("weights were copied to the host"))
            pool.publish(version, weights)
            found = pool.sample(PROMPTS, PARAMS, [0, 1, 2], versions=(version, version))
            expected.append([[(answer.tokens, answer.logprobs) for answer in group] for group in found])
        assert expected[1] == expected[2] != expected[0]
        events = [event for event in run.events() if "host's memory" in str(event.get("message"))]
        assert not [event for event in events if "no room" not in event["message"]]
    finally:
        pool.close()
        backend.close()


def test_one_gpu_has_one_name_in_every_process() -> None:
    assert device_memory.device_id(torch.device("cuda", 0)).count("-") >= 4
    assert device_memory.device_id(torch.device("cpu")) == ""
