"""Rows that begin alike are computed behind one copy of what they share, and nobody can tell by the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import write_model

from lockstep.config import ModelConfig
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.shared_prefixes import SharedBatch, TrainingRow
from lockstep.tenants.training import PassResult, TrainedModel

NAMES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    folder = write_model(tmp_path_factory.mktemp("model"))
    base = BaseModel(ModelConfig(path=str(folder), precision="fp64"), "cpu")
    trained = TrainedModel(base, AdapterSpec(4, seed=1), micro_batch_tokens=40, compile=False)
    for parameter in trained.backend.parameters().values():  # at first half of the gradient is zero
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    return trained


def draw_rows(seed: int, kind: str) -> list[TrainingRow]:
    """Of two tokens only, so that they begin alike in all ways; most targets have no part in the loss."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(draw.integers(1, 12)):
        length = int(draw.integers(1, 9))
        several = (3,) if kind == "cross_entropy" and seed % 2 else ()
        shape = (length, *several)
        inputs: dict[str, Any] = {"target_tokens": draw.integers(5, 7, shape)}
        for name in NAMES[kind]:
            inputs[name] = draw.normal(size=shape) * (draw.random(shape) < 0.3) - 4 * (name == "logprobs")
        rows.append(TrainingRow(draw.integers(5, 7, length), inputs))
    return rows


def gradients(model: TrainedModel) -> dict[str, torch.Tensor]:
    """They are taken away."""
    found = {}
    for name, parameter in model.backend.parameters().items():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return found


def learn(model: TrainedModel, rows: list[TrainingRow], kind: str) -> PassResult:
    return model.forward_backward(rows, kind, {}, forward_only=False)


@pytest.mark.parametrize("kind", NAMES)
def test_a_batch_is_the_sum_of_its_rows(kind: str, model: TrainedModel) -> None:
    for seed in range(6):
        rows = draw_rows(seed, kind)
        alone = [learn(model, [row], kind) for row in rows]
        expected = gradients(model)
        together = learn(model, rows, kind)
        assert together.loss == pytest.approx(sum(result.loss for result in alone), rel=1e-10, abs=1e-10)
        for found, single in zip(together.logprobs, alone, strict=True):
            np.testing.assert_allclose(found, single.logprobs[0], atol=1e-10)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-10)
        looked = model.forward_backward(rows, kind, {}, forward_only=True)
        assert looked.loss == pytest.approx(together.loss, rel=1e-10, abs=1e-10)


def group(prompt: list[int], answers: list[list[int]]) -> list[TrainingRow]:
    rows = []
    for answer in answers:
        text = np.array([*prompt, *answer])
        advantages = np.r_[np.zeros(len(prompt) - 1), np.ones(len(answer))]
        inputs = {"target_tokens": text[1:], "logprobs": -advantages, "advantages": advantages}
        rows.append(TrainingRow(text[:-1], inputs))
    return rows


def test_answers_to_one_prompt_share_it_and_prompts_that_begin_alike_do_not_disturb_that() -> None:
    system = list(range(10, 20))
    first = group([*system, *range(30, 50)], [[60 + n, 61, 62] for n in range(4)])
    second = group([*system, *range(130, 150)], [[60 + n, 61] for n in range(4)])
    rows = [row for pair in zip(first, second, strict=True) for row in pair]  # in any order
    data = SharedBatch(rows, "ppo").data
    assert sorted(len(datum.prompt) for datum in data) == [30, 30]
    assert [len(datum.completions) for datum in data] == [4, 4]
    for datum in data:
        targets = [0 if c.targets is None else len(c.targets) for c in datum.completions]
        answer = len(datum.completions[0].tokens)
        assert targets == [29 + answer, answer, answer, answer], "the prompt's own are computed once"


def test_rows_of_other_shapes_and_single_rows_stand_alone() -> None:
    wide = TrainingRow(np.array([5, 6, 7]), {"target_tokens": np.array([[1, 2], [3, 4], [5, 6]])})
    narrow = TrainingRow(np.array([5, 6, 7]), {"target_tokens": np.array([1, 2, 3])})
    data = SharedBatch([wide, narrow], "cross_entropy").data
    assert [(len(datum.prompt), len(datum.completions)) for datum in data] == [(1, 1), (1, 1)]
