"""The engine's log-probs are the trainer's to the last digits in float64, whatever the model, the batch and the slots.

And what it does not serve, it says.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from equivalence.families import build, in_float64
from tiny import VOCABULARY, build_model, build_tokenizer

import lockstep.inference.engine as engine_module
from lockstep.config import LoraConfig
from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.hf_generate import GenerateFacts
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.inference.token_sampling import random_streams, uniforms
from lockstep.model.head import LogitTransform
from lockstep.model.lora import add_lora
from lockstep.model.policy import PackedTokens, Policy
from lockstep.types import PartialCompletion, SamplingParams, TextCompletion

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, so that a wrong key shows in the logits
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}),
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": 15,
}
PROMPTS = [[10, 20, 30, 40, 50, 60, 70], [11], [12, 13], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5], [11, 12, 13, 14]]


def make_model(family: str, dtype: torch.dtype = torch.float64, lora: bool = False) -> Any:
    name, changes = SERVED[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SHAPE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora:
        model = add_lora(model, LoraConfig(rank=2, alpha=4))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.2)
        model = model.to(dtype)
    return model


def make_engine(family: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> LocalEngine:
    return LocalEngine(make_model(family, dtype, options.pop("lora", False)), build_tokenizer(), **options)


def trainer_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> list[float]:
    policy = Policy(model)
    transform = policy.head_options.transform
    assert transform.softcap is None
    policy.head_options = replace(policy.head_options, transform=LogitTransform(transform.scale / temperature))
    text = torch.tensor([*prompt, *answer])
    predictors = torch.arange(len(prompt) - 1, len(text) - 1)
    try:
        with torch.no_grad():
            found = policy(PackedTokens(text, torch.arange(len(text)), (len(text),), predictors, text[predictors + 1]))
    finally:
        policy.stop_packing()
    return found.tolist()


def assert_as_the_trainer(model: Any, prompts: Any, found: list[list[TextCompletion]], temperature: float) -> None:
    for prompt, answers in zip(prompts, found, strict=True):
        for answer in answers:
            assert answer.logprobs is not None
            expected = trainer_logprobs(model, prompt, answer.tokens, temperature)
            assert answer.logprobs == pytest.approx(expected, abs=1e-10, rel=0)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", SERVED)
def test_logprobs_are_the_trainers(family: str, lora: bool) -> None:
    engine = make_engine(family, lora=lora, batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy = engine.sample(PROMPTS, SamplingParams(max_tokens=12, logprobs=True))
        params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, num_samples=3, logprobs=True)
        sampled = engine.sample(PROMPTS, params)
    assert_as_the_trainer(engine.model, PROMPTS, greedy, 1.0)
    assert_as_the_trainer(engine.model, PROMPTS, sampled, 0.8)
    assert max(len(answer.tokens) for (answer,) in greedy) == 12


@pytest.mark.parametrize("family", SERVED)
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    engine = make_engine(family, batch_size=2)
    found = engine.sample(PROMPTS, SamplingParams(max_tokens=10))
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        own = engine.model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert list(answer.tokens) == own[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_company_order_and_slots_do_not_change_a_sample(dtype: torch.dtype) -> None:
    params = SamplingParams(max_tokens=15, temperature=1.0, seed=3, num_samples=4, logprobs=True)
    keys = [7, 3, 2**70, -5, 0]
    expected = make_engine(dtype=dtype, batch_size=1).sample(PROMPTS, params, keys)
    assert len({answer.tokens for answers in expected for answer in answers}) == 20
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4

    def assert_same(found: list[list[TextCompletion]], order: Sequence[int]) -> None:
        for place, answers in zip(order, found, strict=True):
            assert [a.tokens for a in answers] == [a.tokens for a in expected[place]]
            for answer, alone in zip(answers, expected[place], strict=True):
                assert answer.logprobs == pytest.approx(alone.logprobs, abs=tolerance)

    ways: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": 7, "steps_per_read": 4}, {"batch_size": 64}]
    for options in ways:
        engine = make_engine(dtype=dtype, **options)
        for order in ([0, 1, 2, 3, 4], [3, 4, 0, 2, 1], [2]):
            assert_same(engine.sample([PROMPTS[i] for i in order], params, [keys[i] for i in order]), order)


def test_a_sample_follows_from_seed_key_and_number() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, num_samples=2)

    def draw(params: SamplingParams, keys: list[int] | None = None) -> list[tuple[int, ...]]:
        return [answer.tokens for answers in engine.sample([PROMPTS[0]] * 2, params, keys) for answer in answers]

    first = draw(params)
    assert len(set(first)) == 4
    assert draw(params, [0, 1]) == first
    assert draw(params, [1, 0]) == first[2:] + first[:2]
    assert draw(params, [5, 5])[:2] == draw(params, [5, 5])[2:]
    assert not set(draw(replace(params, seed=2))) & set(first)
    assert draw(replace(params, num_samples=1)) == first[::2]
    unseeded = replace(params, seed=None)
    assert draw(unseeded) != draw(unseeded)


def test_a_part_of_an_answer_goes_on_as_the_whole_did() -> None:
    """Randomness belongs to the place in the text: what was begun can be finished by another call."""
    engine = make_engine()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    ((whole,),) = engine.sample([PROMPTS[0]], params)
    assert len(whole.tokens) == 12
    ((rest,),) = engine.sample([[*PROMPTS[0], *whole.tokens[:5]]], replace(params, max_tokens=7))
    assert rest.tokens == whole.tokens[5:]


def test_the_model_is_given_back_as_it_was() -> None:
    engine = make_engine()
    engine.model.train()
    engine.sample([[5, 6]], SamplingParams(max_tokens=2))
    own = engine.model.config._attn_implementation
    assert own == "sdpa"
    assert engine.model.training
    assert engine.model.model.layers[0].training

    def fail(text: str) -> None:
        assert engine.model.config._attn_implementation == "lockstep_cached"
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        engine.stream([50, 51], SamplingParams(max_tokens=50), fail)
    assert engine.model.config._attn_implementation == own
    loss = engine.model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    loss.backward()


def test_every_token_has_its_own_random_number() -> None:
    """Where all tokens are equally likely, the number itself can be read off the token."""
    engine = make_engine()
    torch.nn.init.zeros_(engine.model.lm_head.weight)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=8, num_samples=2)
    for prompt, answers in zip(PROMPTS, engine.sample(PROMPTS, params, keys=[9] * len(PROMPTS)), strict=True):
        for sample, answer in enumerate(answers):
            positions = len(prompt) + torch.arange(len(answer.tokens))
            numbers = uniforms(random_streams(8, [9], [sample]), positions)
            assert list(answer.tokens) == (numbers * VOCABULARY).long().tolist()


def test_weights_that_are_no_good_are_said_and_leave_no_trace() -> None:
    engine = make_engine(batch_size=1)
    params = SamplingParams(max_tokens=4, logprobs=True)
    before = engine.sample(PROMPTS[1:], params)
    value = engine.model.model.layers[1].self_attn.v_proj.weight
    good = value.detach().clone()
    with torch.no_grad():
        value[0, 0] = torch.nan
    with pytest.raises(ValueError, match="log-prob: its weights hold nan or inf"):
        engine.sample(PROMPTS, params)
    with torch.no_grad():
        value.copy_(good)
    assert engine.sample(PROMPTS[1:], params) == before  # shorter prompts, in the slot of a longer one


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_cache_stays_within_its_bound() -> None:
    per_token = 3 * 2 * 2 * 8 * 8  # layers, keys and values, heads, head size, bytes of float64
    engine = make_engine(batch_size=16, max_cache_bytes=3 * 64 * per_token)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=0, num_samples=4)
    found = engine.sample(PROMPTS, params)
    assert engine.cache_bytes == 3 * 64 * per_token  # three sequences of 52 tokens, in steps of 32
    assert found == make_engine(batch_size=16).sample(PROMPTS, params)
    engine.release_cache()
    assert engine.cache_bytes == 0
    small = make_engine(max_cache_bytes=64 * per_token)
    with pytest.raises(ValueError, match=r"12 tokens and 60 new ones need 0.070 MiB of cache, .* for 0.047: lower max"):
        small.sample(PROMPTS, SamplingParams(max_tokens=60))
    assert small.cache_bytes == 0


# --- positions that depend on length --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_read", [1, 4])
def test_an_answer_that_grows_past_a_limit_of_its_positions_is_computed_anew(steps_per_read: int) -> None:
    """Each token from all before it, as a plain forward of those gives it; in few slots, so that prompts are copied."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(**SHAPE, original_max_position_embeddings=15, rope_parameters={**LONGROPE})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    engine = LocalEngine(model, build_tokenizer(), batch_size=3, steps_per_read=steps_per_read)
    prompts = [*PROMPTS, list(range(20, 35)), list(range(20, 36)), list(range(20, 44))]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, num_samples=3, logprobs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = engine.sample(prompts, params)
    assert_from_each_prefix(model, prompts, found)
    one_sided = [
        (prompt, [answer for answer in answers if len(prompt) > 15 or len(prompt) + len(answer.tokens) <= 15])
        for prompt, answers in zip(prompts, found, strict=True)
    ]
    assert sum(len(answers) for _, answers in one_sided) >= 6
    assert_as_the_trainer(model, *zip(*one_sided, strict=True), 1.0)
    # A part that another engine sampled, across the limit, beside new samples of the same prompt.
    part = PartialCompletion(found[0][0].tokens[:10], found[0][0].logprobs[:10], (0,) * 10)
    again = engine.sample([prompts[0]], params, partial=[[part, None, None]])
    assert [answer.tokens for answer in again[0]] == [answer.tokens for answer in found[0]]
    assert_from_each_prefix(model, prompts[:1], again)


def assert_from_each_prefix(model: Any, prompts: Any, found: list[list[TextCompletion]]) -> None:
    for prompt, answers in zip(prompts, found, strict=True):
        for answer in answers:
            text = [*prompt, *answer.tokens]
            expected = []
            for end in range(len(prompt), len(text)):
                with torch.no_grad():
                    logits = model(torch.tensor([text[:end]]), use_cache=False).logits[0, -1]
                expected.append(logits.log_softmax(-1)[text[end]].item())
            assert answer.logprobs == pytest.approx(expected, abs=1e-10, rel=0)


def test_dynamic_positions_are_not_those_of_a_longer_text_before() -> None:
    engine = make_engine("dynamic", batch_size=3)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs=True)
    before = engine.sample(PROMPTS, params)
    with torch.no_grad():
        engine.model(torch.arange(200)[None], use_cache=False)  # leaves its frequencies in the model
    assert engine.sample(PROMPTS, params) == before


class RoundsByShape(torch.nn.Linear):
    """Its last digits depend on how much is computed at once, as those of matrix products do, and more than usual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(x.numel()))
        return outputs + 1.5e-4 * outputs.std() * noise


def test_a_model_that_amplifies_its_own_rounding_is_decoded() -> None:
    model = build_model()
    head = RoundsByShape(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    engine = LocalEngine(model, build_tokenizer(), 4, report=lambda message: pytest.fail(message))
    assert engine.find_decoder() is not None


# --- models that it does not serve ----------------------------------------------------------------------------------


def test_a_model_with_a_cache_of_its_own_has_no_decoder() -> None:
    """Its layers ask for one by its class."""
    torch.manual_seed(0)
    layers = ["linear_attention", "full_attention", "linear_attention"]
    config = transformers.MiniMaxConfig(**SHAPE, layer_types=layers, num_local_experts=2, block_size=8)
    with pytest.raises(UnsupportedModelError, match="carries more than keys and values from one token"):
        Decoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(**{**SHAPE, "query_pre_attn_scalar": 8}),
        transformers.Gemma2Config(
            **{**SHAPE, "query_pre_attn_scalar": 8},
            rope_parameters={**LONGROPE, "original_max_position_embeddings": 18},
        ),
    ],
    ids=["gemma2", "longrope"],
)
def test_models_that_are_not_served_are_answered_by_transformers(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "it has no decoder"

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedModelError(message)

    monkeypatch.setattr(engine_module, "Decoder", refuse)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    engine = LocalEngine(model, build_tokenizer(), batch_size=2)
    params = SamplingParams(max_tokens=6, logprobs=True)
    prompts = [*PROMPTS, list(range(20, 44))]
    with pytest.warns(UserWarning, match=message):
        greedy = engine.sample(prompts, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert engine.sample(prompts, params) == greedy
        sampled_params = SamplingParams(
            max_tokens=6, temperature=0.5, top_k=9, min_p=0.01, top_p=0.9, seed=1, num_samples=2, logprobs=True
        )
        sampled = engine.sample(prompts, sampled_params)
        pieces: list[str] = []
        streamed = engine.stream(prompts[0], replace(params, logprobs=False), pieces.append)
    assert model.config._attn_implementation != "lockstep_cached"
    assert streamed.tokens == greedy[0][0].tokens
    assert "".join(pieces) == streamed.text
    for temperature, found in ((1.0, greedy), (0.5, sampled)):
        for prompt, answers in zip(prompts, found, strict=True):
            for answer in answers:
                assert answer.logprobs is not None
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
                logprobs = (logits / temperature).log_softmax(-1)
                expected = [logprobs[i, token].item() for i, token in enumerate(answer.tokens)]
                assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_rows_that_would_disturb_each_other_are_generated_one_by_one() -> None:
    """transformers' RWKV computes something else for a row beside another one than for it alone."""
    said: list[str] = []
    with in_float64():
        engine = LocalEngine(build("rwkv"), build_tokenizer(), batch_size=4, report=said.append)
        params = SamplingParams(max_tokens=5, temperature=0.8, seed=1, num_samples=2, logprobs=True)
        prompts = [[10, 20, 30], [40, 50, 60]]
        found = engine.sample(prompts, params)
        assert not engine.decodes
        for prompt, answers in zip(prompts, found, strict=True):
            for answer in answers:
                text = torch.tensor([*prompt, *answer.tokens])
                with torch.no_grad():
                    logits = engine.model(input_ids=text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
                expected = (logits / 0.8).log_softmax(-1).gather(1, text[len(prompt) :, None])[:, 0]
                assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-10, rel=0)
    assert "one row after another, as rows of a batch would disturb each other" in said[0]


def test_what_generate_costs_is_said_beside_one_batch() -> None:
    facts = GenerateFacts(row_s=0.01, rows_s=0.02, num_rows=16, min_length=1)
    assert "10 ms for one token of one row" in facts.slowness
    assert "(16 of them take 8 times as long as one batch)" in facts.slowness
