"""What is answered: the engine's own numbers, whole or in pieces, for the base model and for adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
import transformers
from equivalence.families import tiny_config
from served_model import BASE, ServedModel, serve, write_adapter
from tiny import build_model, build_tokenizer, run_lockstep, write_config, write_model

import lockstep.inference.engine as engine_module
from lockstep.inference.engine import LocalEngine
from lockstep.inference.kv_cache import UnsupportedModelError
from lockstep.types import SamplingParams

TURNS: Any = [{"role": "user", "content": "red blue"}]
MODEL = build_model().double().eval()
ENGINE = LocalEngine(MODEL, build_tokenizer())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def served(adapters: dict[str, Path]) -> Iterator[ServedModel]:
    with serve(adapters=adapters) as served:
        yield served


@pytest.fixture
def client(served: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(max_tokens: int, **params: Any) -> Any:
    ((answer,),) = ENGINE.sample([ENGINE.encode(TURNS)], SamplingParams(max_tokens, **params))
    return answer


def test_chat_is_what_the_engine_answers_and_counts_every_token(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=BASE, messages=TURNS, max_tokens=20, temperature=0)
    answer = expected(20)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (answer.text, answer.finish_reason)
    assert found.usage is not None
    prompt = len(ENGINE.encode(TURNS))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (prompt, len(answer.tokens))
    assert found.usage.total_tokens == prompt + len(answer.tokens)
    assert found.object == "chat.completion"


def test_a_stream_has_the_same_text_scores_and_counts(client: openai.OpenAI) -> None:
    asked: Any = {"model": BASE, "messages": TURNS, "max_tokens": 40, "temperature": 0.9, "seed": 3, "n": 2}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, scores = ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            scores[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert scores == [choice.logprobs and choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "qwen3_moe"])
def test_hybrids_and_mixtures_are_served_by_the_engine(family: str) -> None:
    """Two at a time: log-probs are those of the likeliest tokens in the model's own forward pass."""
    settings = tiny_config(family)
    settings.vocab_size = len(ENGINE.tokenizer)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    with serve(model) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        def ask(text: str) -> list[float]:
            turns: Any = [{"role": "user", "content": text}]
            pieces = client.chat.completions.create(
                model=BASE, messages=turns, max_tokens=6, temperature=0, stream=True, logprobs=True
            )
            scores = [p.choices[0].logprobs.content or () for p in pieces if p.choices[0].logprobs]
            return [round(score.logprob, 3) for part in scores for score in part]

        texts = ["red blue", "a longer question: green?"]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(ask, texts))
    for text, answer in zip(texts, found, strict=True):
        assert answer == pytest.approx(
            likeliest(model, ENGINE.encode([{"role": "user", "content": text}]), 6), abs=2e-3
        )


@torch.no_grad()
def likeliest(model: Any, prompt: list[int], count: int) -> list[float]:
    """Log-probs of the likeliest tokens, one after another."""
    tokens, scores = list(prompt), list[float]()
    while len(scores) < count and tokens[-1] != ENGINE.tokenizer.eos_token_id:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        scores.append(float(logits.log_softmax(-1).max()))
    return scores


def test_stop_texts_end_an_answer_and_neither_text_nor_scores_have_them(client: openai.OpenAI) -> None:
    text = expected(60).text
    stop = text[12:14]
    asked: Any = {"model": BASE, "messages": TURNS, "max_tokens": 60, "temperature": 0, "stop": stop, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text[: text.index(stop)]
    assert whole.choices[0].logprobs is not None
    shown = whole.choices[0].logprobs.content or []
    streamed = [s for p in pieces if p.choices[0].logprobs for s in p.choices[0].logprobs.content or []]
    assert streamed == shown
    assert len(shown) < (whole.usage.completion_tokens if whole.usage else 0)


def test_a_seed_decides_whatever_else_is_asked_at_the_time(client: openai.OpenAI) -> None:
    def ask(seed: int, temperature: float) -> str | None:
        answer = client.chat.completions.create(
            model=BASE, messages=TURNS, max_tokens=30, temperature=temperature, seed=seed
        )
        return answer.choices[0].message.content

    ways = [(seed, temperature) for seed in range(3) for temperature in (0.7, 1.0, 0.0)]
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda way: ask(*way), ways))
    assert together == [ask(*way) for way in ways]
    assert together == [expected(30, temperature=temperature, seed=seed).text for seed, temperature in ways]


def test_adapters_in_one_batch_answer_as_each_alone(
    client: openai.OpenAI, adapters: dict[str, Path], served: ServedModel
) -> None:
    def ask(name: str) -> Any:
        answer = client.chat.completions.create(model=name, messages=TURNS, max_tokens=24, temperature=0, logprobs=True)
        assert answer.model == name
        return answer.choices[0]

    names = ["one", BASE, "two", "two", BASE, "one"]
    with ThreadPoolExecutor(len(names)) as pool:
        found = dict(zip(names, pool.map(ask, names), strict=True))
    assert len({choice.message.content for choice in found.values()}) == 3
    for name, choice in found.items():
        model = build_model()
        if name != BASE:
            model = peft.PeftModel.from_pretrained(model, str(adapters[name]))
        alone = LocalEngine(model.double().eval(), build_tokenizer())
        ((answer,),) = alone.sample([ENGINE.encode(TURNS)], SamplingParams(24, logprobs=True))
        assert choice.message.content == answer.text
        logprobs = [score.logprob for score in choice.logprobs.content]
        assert logprobs == pytest.approx((answer.logprobs or ())[: len(logprobs)], abs=1e-10, rel=0)
    assert [model.id for model in client.models.list()] == served.server.models.names == [BASE, "one", "two"]


def test_completions_take_texts_and_tokens(client: openai.OpenAI) -> None:
    texts = ["red", "one two three"]
    tokens = [ENGINE.encode(text) for text in texts]
    answers = ENGINE.sample(tokens, SamplingParams(16))
    for prompt in (texts, tokens):
        found = client.completions.create(model=BASE, prompt=prompt, temperature=0)  # type: ignore[arg-type]
        assert [choice.text for choice in found.choices] == [answer.text for (answer,) in answers]
        assert found.usage is not None
        assert found.usage.prompt_tokens == sum(map(len, tokens))
    single = client.completions.create(model=BASE, prompt=tokens[1], temperature=0)
    assert single.choices[0].text == answers[1][0].text
    pieces = client.completions.create(model=BASE, prompt=texts[0], temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answers[0][0].text


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_that_is_echoed_is_scored(client: openai.OpenAI, max_tokens: int) -> None:
    text = "grün und blue"
    tokens = ENGINE.encode(text)
    found = client.completions.create(
        model=BASE, prompt=[text, text], max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
    )
    with torch.no_grad():
        own = MODEL(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for choice in found.choices:
        assert choice.text.startswith(text)
        scores = choice.logprobs
        assert scores is not None
        assert scores.token_logprobs is not None
        assert scores.top_logprobs is not None
        assert scores.token_logprobs[0] is None
        assert scores.text_offset is not None
        assert len(scores.token_logprobs) == len(tokens) + max_tokens == len(scores.text_offset)
        wanted = [own[place, token].item() for place, token in enumerate(tokens[1:])]
        assert scores.token_logprobs[1 : len(tokens)] == pytest.approx(wanted, abs=1e-10)
        best = own.max(dim=-1).values.tolist()[: len(tokens) - 1]
        assert [max(top.values()) for top in scores.top_logprobs[1 : len(tokens)]] == pytest.approx(best, abs=1e-10)
        assert scores.text_offset[:5] == [0, 1, 2, 2, 3]  # ü is two tokens
    assert found.usage is not None
    assert found.usage.completion_tokens == 2 * max_tokens


def test_health_and_metrics(served: ServedModel) -> None:
    import httpx

    health = httpx.get(f"{served.url}/health").json()
    assert health["status"] == "ok"
    assert health["models"] == [BASE, "one", "two"]
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    counted = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(counted["lockstep_completion_tokens_total"]) > 0
    assert counted["lockstep_rows"] == "0"


@pytest.mark.slow
def test_a_run_is_an_adapter_with_the_template_that_it_was_trained_with(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    config = write_config(
        tmp_path, write_model(tmp_path / "base"), lora={"rank": 3, "alpha": 5}, optim={"epochs": 1},
        data={"chat_template": str(template)},
    )  # fmt: skip
    code, _, err = run_lockstep("train", config, "--run-dir", tmp_path / "run")
    assert code == 0, err
    trained = LocalEngine.load(tmp_path / "run", device="cpu")
    ((answer,),) = trained.sample([trained.encode(TURNS)], SamplingParams(20))
    model = LocalEngine.load(tmp_path / "base", device="cpu").model
    with serve(model, adapters={"run": tmp_path / "run"}) as served:
        found = served.post("chat/completions", model="run", messages=TURNS, temperature=0, max_tokens=20).json()
        other = served.post("chat/completions", messages=TURNS, temperature=0, max_tokens=20).json()
    assert found["usage"]["prompt_tokens"] == len(trained.encode(TURNS)) < other["usage"]["prompt_tokens"]
    assert found["choices"][0]["message"]["content"] == answer.text
    assert found["choices"][0]["finish_reason"] == answer.finish_reason


@pytest.mark.filterwarnings("ignore:.*transformers' generate")
def test_a_model_that_only_transformers_serves_is_answered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedModelError("it has no decoder")

    monkeypatch.setattr(engine_module, "Decoder", refuse)
    model = build_model().double()
    with serve(model) as served:
        whole = served.post("chat/completions", messages=TURNS, temperature=0, max_tokens=12)
        assert whole.json()["choices"][0]["message"]["content"] == expected(12).text
        stream = served.post("chat/completions", messages=TURNS, temperature=0, max_tokens=12, stream=True).text
        assert stream.endswith("data: [DONE]\n\n")
        refused = served.post("chat/completions", messages=TURNS, logprobs=True)
        assert refused.status_code == 400
        assert "not scored" in refused.json()["error"]["message"]
