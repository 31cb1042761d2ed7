"""Adapters of one base model on a GPU: trained and sampled by different callers, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import write_model

from lockstep.config import ModelConfig
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.sampling import AnswerRequest, SharedSampler
from lockstep.tenants.shared_prefixes import TrainingRow
from lockstep.tenants.training import TrainedModel
from lockstep.types import OptimStep, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PROMPT = (7, 9, 11, 30, 31)


def make_rows() -> list[TrainingRow]:
    """Two of them begin alike."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 280, length) for length in (40, 25, 60)]
    texts.append(np.concatenate([texts[0][:30], draw.integers(3, 280, 20)]))
    return [TrainingRow(text[:-1], {"target_tokens": text[1:]}) for text in texts]


def learn(model: TrainedModel, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(model.forward_backward(make_rows(), "cross_entropy", {}, forward_only=False).loss)
        model.optim_step(OptimStep(learning_rate=0.01))
    return losses


def test_steps_are_those_of_a_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    losses = {}
    for device in ("cpu", "cuda"):
        base = BaseModel(ModelConfig(path=str(folder), precision="fp32"), device)
        model = TrainedModel(base, AdapterSpec(4, seed=1), micro_batch_tokens=256, compile=False)
        losses[device] = learn(model, 4)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_adapters_train_in_bf16_and_are_sampled_in_one_batch(compiled: bool, tmp_path: Path) -> None:
    base = BaseModel(ModelConfig(path=str(write_model(tmp_path / "model")), precision="bf16"), "cuda")
    models = {}
    for seed in (1, 2):
        model = TrainedModel(base, AdapterSpec(4, seed=seed), micro_batch_tokens=256, compile=compiled)
        losses = learn(model, 12)
        assert losses[-1] < losses[0] * 0.8
        model.save(tmp_path / str(seed), with_optimizer=True)
        models[str(tmp_path / str(seed))] = model
    sampler = SharedSampler(base, 8, lambda message: None)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, num_samples=3, logprobs=True)
    requests = [AnswerRequest(PROMPT, params, adapter=folder, ignores_end=True) for folder in ("", *models)]
    futures = [sampler.submit(str(number), request) for number, request in enumerate(requests)]
    while sampler.has_work:
        sampler.advance()
    for request, future in list(zip(requests, futures, strict=True))[1:]:
        for answer in future.result(timeout=0).answers:
            text = np.array([*PROMPT, *answer.tokens])
            row = TrainingRow(text[:-1], {"target_tokens": text[1:]})
            model = models[request.adapter]
            found = model.forward_backward([row], "cross_entropy", {}, forward_only=True).logprobs[0]
            assert np.abs(found[len(PROMPT) - 1 :] - np.array(answer.logprobs)).mean() < 0.1, "but for bf16"
