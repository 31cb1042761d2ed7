"""Answers of a base model and its adapters in one batch: what trains and what samples are the same model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import VOCABULARY, build_tokenizer, write_model

from lockstep.config import ModelConfig
from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.tenants import sampling
from lockstep.tenants.base_model import AdapterSpec, BaseModel
from lockstep.tenants.sampling import AnswerRequest, SampleResult, SharedSampler
from lockstep.tenants.shared_prefixes import TrainingRow
from lockstep.tenants.training import TrainedModel
from lockstep.types import OptimStep, SamplingParams

PROMPT = (7, 9, 11, 30, 31)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = write_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)
    return BaseModel(ModelConfig(path=str(folder), precision="fp64"), "cpu")


@pytest.fixture(scope="module")
def trained(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedModel]:
    """By the folder that each was saved to."""
    models = {}
    for seed, spec in enumerate([{}, {"rank": 2, "train_mlp": False}, {"rank": 3, "train_unembed": False}]):
        model = TrainedModel(
            base, AdapterSpec(**{"rank": 4, "seed": seed, **spec}), micro_batch_tokens=64, compile=False
        )
        tokens = np.arange(5 + seed, 30 + seed)
        for _ in range(3):
            model.forward_backward(
                [TrainingRow(tokens, {"target_tokens": tokens[::-1].copy()})], "cross_entropy", {}, forward_only=False
            )
            model.optim_step(OptimStep(learning_rate=0.05))
        folder = tmp_path_factory.mktemp("adapters") / "saved"
        model.save(folder, with_optimizer=False)
        models[str(folder)] = model
    return models


@pytest.fixture
def sampler(base: BaseModel) -> SharedSampler:
    return SharedSampler(base, 4, lambda message: pytest.fail(message))


def ask(adapter: str = "", *, prompt: tuple[int, ...] = PROMPT, **options: Any) -> AnswerRequest:
    params = {"max_tokens": 9, "temperature": 1.0, "seed": 5, "logprobs": True}
    others = {name: options.pop(name) for name in list(options) if name in AnswerRequest.__dataclass_fields__}
    return AnswerRequest(
        prompt, SamplingParams(**{**params, **options}), adapter=adapter, **{"ignores_end": True, **others}
    )


def answer_all(sampler: SharedSampler, requests: list[AnswerRequest]) -> list[SampleResult]:
    futures = [sampler.submit(str(number), request) for number, request in enumerate(requests)]
    while sampler.has_work:
        sampler.advance()
    return [future.result(timeout=0) for future in futures]


def trainer_logprobs(model: TrainedModel, tokens: tuple[int, ...]) -> np.ndarray:
    """Of all tokens but the first."""
    ids = np.array(tokens)
    row = TrainingRow(ids[:-1], {"target_tokens": ids[1:]})
    return model.forward_backward([row], "cross_entropy", {}, forward_only=True).logprobs[0]


def test_the_sampler_and_the_trainer_are_one_model(
    base: BaseModel, sampler: SharedSampler, trained: dict[str, TrainedModel]
) -> None:
    untrained = TrainedModel(base, AdapterSpec(2), micro_batch_tokens=64, compile=False)
    models = {"": untrained, **trained}
    options = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"num_samples": 3}, {"top_p": 0.9, "top_k": 20}]
    requests = [ask(folder, prompt_logprobs=n % 2 == 0, **o) for n, o in enumerate(options) for folder in models]
    for request, result in zip(requests, answer_all(sampler, requests), strict=True):
        assert len(result.answers) == request.params.num_samples
        for answer in result.answers:
            expected = trainer_logprobs(models[request.adapter], (*request.prompt, *answer.tokens))
            np.testing.assert_allclose(answer.logprobs, expected[len(PROMPT) - 1 :], atol=1e-9)
            if request.prompt_logprobs:
                assert result.prompt_logprobs is not None
                assert math.isnan(result.prompt_logprobs[0])
                np.testing.assert_allclose(result.prompt_logprobs[1:], expected[: len(PROMPT) - 1], atol=1e-5)


def test_company_changes_no_answer(base: BaseModel, sampler: SharedSampler, trained: dict[str, TrainedModel]) -> None:
    requests = [ask(folder, seed=seed, num_samples=2) for seed in (1, 2) for folder in ("", *trained)]
    together = answer_all(sampler, requests)
    alone = [answer_all(SharedSampler(base, 4, print), [request])[0] for request in requests]
    for a, b in zip(together, alone, strict=True):
        assert [x.tokens for x in a.answers] == [x.tokens for x in b.answers]
    assert len({result.answers[0].tokens for result in together}) == len(requests)


def test_the_likeliest_tokens_come_with_prompt_and_answer(sampler: SharedSampler) -> None:
    (result,) = answer_all(sampler, [ask(num_top=3, num_prompt_top=2, prompt_logprobs=True, temperature=0.0)])
    (answer,) = result.answers
    assert [len(top) for top in answer.top] == [3] * len(answer.tokens)
    assert [top[0][0] for top in answer.top] == list(answer.tokens), "at temperature 0 the likeliest is taken"
    assert [top[0][1] for top in answer.top] == list(answer.logprobs)
    assert [len(top) for top in result.prompt_top] == [0, 2, 2, 2, 2]


def test_an_answer_ends_at_stop_tokens_and_at_its_end_unless_told(sampler: SharedSampler) -> None:
    (free,) = answer_all(sampler, [ask(max_tokens=40)])
    tokens = free.answers[0].tokens
    assert len(tokens) == 40
    assert free.answers[0].stop_reason == "length"
    place = next(n for n in range(3, 40) if tokens[n] not in tokens[:n])
    (stopped,) = answer_all(sampler, [ask(max_tokens=40, stop_tokens=(tokens[place],))])
    assert stopped.answers[0].tokens == tokens[: place + 1], "the stop token is part of what was sampled"
    assert stopped.answers[0].stop_reason == "stop"


def train_and_sample(base: BaseModel, folder: Path, *, interleaved: bool) -> tuple[list[float], list[tuple[int, ...]]]:
    """A loop of learning, saving and sampling. `interleaved`: answers are decoded a step at a time meanwhile, and
    another model is created."""
    sampler = SharedSampler(base, 4, lambda message: pytest.fail(message))
    model = TrainedModel(base, AdapterSpec(4, seed=1), micro_batch_tokens=64, compile=False)
    numbers, futures = list[float](), []
    for step in range(4):
        tokens = np.arange(5 + step, 25 + step)
        row = TrainingRow(tokens, {"target_tokens": tokens[::-1].copy()})
        numbers.append(model.forward_backward([row], "cross_entropy", {}, forward_only=False).loss)
        numbers.append(model.optim_step(OptimStep(learning_rate=0.02)))
        model.save(folder / str(step), with_optimizer=False)
        for adapter in ("", str(folder / str(step))):
            futures.append(sampler.submit(f"{step} {adapter}", ask(adapter, seed=step, max_tokens=20)))
        if interleaved:
            sampler.advance()
            TrainedModel(base, AdapterSpec(2), micro_batch_tokens=64, compile=False)
        while sampler.has_work and not interleaved:
            sampler.advance()
    while sampler.has_work:
        sampler.advance()
    return numbers, [future.result(timeout=0).answers[0].tokens for future in futures]


def test_training_and_sampling_in_one_process_do_not_disturb_each_other(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContinuousEngine, "slice_s", 0.0)
    apart = train_and_sample(base, tmp_path / "apart", interleaved=False)
    assert train_and_sample(base, tmp_path / "interleaved", interleaved=True) == apart


def test_idle_adapters_make_room_and_come_back(
    sampler: SharedSampler, trained: dict[str, TrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_ADAPTERS", 2)
    folders = list(trained)
    first = answer_all(sampler, [ask(folder) for folder in folders])  # all at once: those in use stay
    assert sorted(sampler.adapters) == sorted(folders)
    again = [answer_all(sampler, [ask(folder)])[0] for folder in (*folders, *folders)]
    assert len(sampler.adapters) == 2
    for number, result in enumerate(again):
        assert result.answers[0].tokens == first[number % len(folders)].answers[0].tokens
    sampler.close_adapter(folders[-1])
    assert folders[-1] not in sampler.adapters
    sampler.close_adapter("never loaded")


def build_mixture(folder: Path) -> BaseModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, initializer_range=0.2, eos_token_id=2)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return BaseModel(ModelConfig(path=str(folder), precision="fp64"), "cpu")


def test_adapters_on_experts_are_sampled_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_OWN_ENGINES", 1)
    base, said = build_mixture(tmp_path / "model"), list[str]()
    models: dict[str, TrainedModel] = {}
    for number, with_experts in enumerate([True, False, True]):
        spec = AdapterSpec(3, seed=number, train_mlp=with_experts)
        model = TrainedModel(base, spec, micro_batch_tokens=64, compile=False)
        row = TrainingRow(np.arange(5, 30), {"target_tokens": np.arange(29, 4, -1)})
        for _ in range(3):
            model.forward_backward([row], "cross_entropy", {}, forward_only=False)
            model.optim_step(OptimStep(learning_rate=0.05))
        model.save(tmp_path / str(number), with_optimizer=False)
        models[str(tmp_path / str(number))] = model
    sampler = SharedSampler(base, 4, said.append)
    requests = [ask(folder, seed=seed, prompt_logprobs=True) for seed in (1, 2) for folder in models]
    for request, result in zip(requests, answer_all(sampler, requests), strict=True):
        answer = result.answers[0]
        expected = trainer_logprobs(models[request.adapter], (*request.prompt, *answer.tokens))
        np.testing.assert_allclose(answer.logprobs, expected[len(PROMPT) - 1 :], atol=1e-9)
    (message,) = said
    assert "decoded apart from all others, each in a batch of its own: it sets target_parameters" in message
    answer_all(sampler, [ask(next(iter(models)))])
    assert len(sampler.adapters) == 2, "an idle one that has a cache of its own is let go"


def test_other_weights_in_the_same_folder_are_noticed_also_while_the_old_ones_answer(
    sampler: SharedSampler, trained: dict[str, TrainedModel], tmp_path: Path
) -> None:
    one, other, _ = trained
    expected = [answer_all(sampler, [ask(folder)])[0].answers[0].tokens for folder in (one, other)]
    folder = tmp_path / "weights"
    trained[one].save(folder, with_optimizer=False)
    old = sampler.submit("old", ask(str(folder)))
    trained[other].save(folder, with_optimizer=False)
    sampler.close_adapter(str(folder))  # which cannot be, yet
    new = sampler.submit("new", ask(str(folder)))
    while sampler.has_work:
        sampler.advance()
    assert [future.result(timeout=0).answers[0].tokens for future in (old, new)] == expected


def test_a_cancelled_request_leaves_the_others_alone(sampler: SharedSampler) -> None:
    (expected,) = answer_all(sampler, [ask(seed=8)])
    doomed, kept = sampler.submit("doomed", ask(max_tokens=400)), sampler.submit("kept", ask(seed=8))
    sampler.advance()
    sampler.cancel("doomed")
    sampler.cancel("doomed")
    while sampler.has_work:
        sampler.advance()
    with pytest.raises(ValueError, match="cancelled"):
        doomed.result(timeout=0)
    assert kept.result(timeout=0).answers[0].tokens == expected.answers[0].tokens


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: ask(prompt=()), "the prompt is empty"),
        (lambda: ask(prompt=(1, 288)), "token 288, and the model knows 0 to 287"),
        (lambda: ask(prompt=tuple(range(3, 280)) * 2), "554 tokens: the model takes 512"),
        (lambda: ask("/nowhere/at/all"), "is neither a run nor an adapter folder"),
    ],
)
def test_what_cannot_be_sampled_is_told(request_of: Any, message: str, sampler: SharedSampler) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.submit("bad", request_of())
    assert answer_all(sampler, [ask()])[0].answers
