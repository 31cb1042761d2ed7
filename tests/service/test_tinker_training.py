"""Tinker's own client against a real model: it learns, what it learned is sampled, and what is saved is not lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_service import MODEL, TinkerService, tinker_service
from tiny import write_model

ADAM = tinker.AdamParams(learning_rate=0.02)
GREEDY = tinker.SamplingParams(max_tokens=3, temperature=0.0)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7])


REAL = {"precision": "fp32", "entry": "lockstep.tenants.worker:start"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    folder = tmp_path_factory.mktemp("tinker")
    write_model(folder / "model")
    with tinker_service(folder, **REAL) as made:
        yield made


def row(*tokens: int, **inputs: Any) -> tinker.Datum:
    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **given},
    )


def learn(training: tinker.TrainingClient, *rows: tinker.Datum, steps: int = 1) -> list[float]:
    """All of it is sent before the first answer is read."""
    sent = []
    for _ in range(steps):
        sent.append(training.forward_backward(list(rows), "cross_entropy"))
        done = training.optim_step(ADAM)
    done.result()
    return [future.result().metrics["loss:sum"] for future in sent]


def sampled(sampler: tinker.SamplingClient) -> list[int]:
    return list(sampler.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens)


def test_two_users_learn_different_things_on_one_base_model(service: TinkerService) -> None:
    client = service.client()
    wanted = {(8, 9, 10): {}, (20, 21, 22): {"train_unembed": False}}
    models = {
        answer: client.create_lora_training_client(MODEL, rank=8, seed=1, **options)
        for answer, options in wanted.items()
    }
    for answer, training in models.items():
        losses = learn(training, row(5, 6, 7, *answer), steps=60)
        assert losses[-1] < losses[0] / 5
    samplers = {answer: training.save_weights_and_get_sampling_client() for answer, training in models.items()}
    asked = [(answer, sampler.sample(PROMPT, 2, GREEDY)) for answer, sampler in samplers.items() for _ in range(3)]
    for answer, future in asked:
        assert [tuple(sequence.tokens) for sequence in future.result().sequences] == [answer, answer]
    untrained = client.create_sampling_client(base_model=MODEL)
    assert tuple(sampled(untrained)) not in wanted


def test_what_is_sampled_has_the_log_probs_that_training_computes(service: TinkerService) -> None:
    training = service.client().create_lora_training_client(MODEL, rank=4)
    learn(training, row(5, 6, 7, 8, 9, 30, 31), steps=3)
    sampler = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    answer = sampler.sample(PROMPT, 1, params).result().sequences[0]
    text = [*PROMPT.to_ints(), *answer.tokens]
    found = training.forward([row(*text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    np.testing.assert_allclose(found[2:], answer.logprobs, atol=1e-4)
    prompt_logprobs = sampler.compute_logprobs(tinker.ModelInput.from_ints(text)).result()
    assert prompt_logprobs[0] is None
    np.testing.assert_allclose(prompt_logprobs[1:], found, atol=1e-4)
    policy = row(*text, logprobs=[0.0, 0.0, *answer.logprobs], advantages=[0.0, 0.0, *[1.0] * len(answer.tokens)])
    result = training.forward_backward([policy], "importance_sampling").result()
    assert result.metrics["loss:sum"] == pytest.approx(-len(answer.tokens), abs=1e-3), "every ratio is one"


def test_a_loss_of_the_clients_own_has_its_gradient(service: TinkerService) -> None:
    torch = pytest.importorskip("torch")
    one, other = (service.client().create_lora_training_client(MODEL, rank=4, seed=2) for _ in range(2))
    text = row(5, 6, 7, 8, 9)

    def squared(data: Any, logprobs: Any) -> Any:
        return (logprobs[0] ** 2).sum(), {}

    one.forward_backward_custom([text], squared).result()
    before = other.forward([text], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    weights = (-2 * before).to(torch.float32)  # d(lp^2) = 2 lp d(lp), and cross entropy weighs -lp
    other.forward_backward([row(5, 6, 7, 8, 9, weights=weights.tolist())], "cross_entropy").result()
    norms = [training.optim_step(ADAM).result().metrics["grad_norm"] for training in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_bad_data_are_told_and_never_half_applied(service: TinkerService) -> None:
    training = service.client().create_lora_training_client(MODEL, rank=4)
    good = training.forward_backward([row(5, 6, 7)], "cross_entropy")
    bad = training.forward_backward([row(5, 6, 999)], "cross_entropy")
    step = training.optim_step(ADAM)
    good.result()
    with pytest.raises(tinker.RequestFailedError, match="token 999, and the model knows 0 to 287"):
        bad.result()
    with pytest.raises(tinker.RequestFailedError, match="nothing is applied"):
        step.result()
    assert learn(training, row(5, 6, 7), steps=5)[-1] > 0


def test_a_restarted_service_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    text = row(5, 6, 7, 8, 9, 10)
    with tinker_service(tmp_path, **REAL) as service:
        training = service.client().create_lora_training_client(MODEL, rank=4, seed=1)
        learn(training, text, steps=10)
        state = training.save_state("ten").result().path
        weights = training.save_weights_for_sampler("ten").result().path
        expected, tokens = learn(training, text, steps=5), sampled(service.client().create_sampling_client(weights))
    with tinker_service(tmp_path, **REAL) as service:
        again = service.client().create_training_client_from_state_with_optimizer(state)
        assert learn(again, text, steps=5) == expected, "bit for bit"
        assert sampled(service.client().create_sampling_client(weights)) == tokens
        fresh = service.client().create_training_client_from_state(state)
        assert learn(fresh, text, steps=5) != expected, "without its optimizer it goes another way"
