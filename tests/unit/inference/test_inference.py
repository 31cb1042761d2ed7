"""The local engine on a tiny random model: batching, stopping, streaming, prompts from files, chat on a pipe."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.inference.chat import TextPrompt, answer_prompts, converse, read_prompts
from lockstep.inference.engine import LocalEngine, stop_token_ids
from lockstep.inference.fake import FakeSampler
from lockstep.types import Sampler, SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level without merges: every text has tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>")
    fast.chat_template = template
    return fast


def make_model(num_positions: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=num_positions,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    engine = LocalEngine(make_model(), make_tokenizer(), batch_size=4)
    engine.sample([[10]], SamplingParams(max_tokens=1))  # the model is looked at once, before a test scripts it
    return engine


def script(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Make the model say exactly these tokens, whatever it is asked; its first after the prompt is tokens[0]."""
    head: Any = engine.model.lm_head
    said = iter(tokens)

    def forward(hidden: Any) -> Any:
        logits = torch.full((*hidden.shape[:-1], head.out_features), -100.0)
        logits[..., next(said)] = 100.0
        return logits

    monkeypatch.setattr(head, "forward", forward)


def test_is_a_sampler(engine: LocalEngine) -> None:
    samplers: list[Sampler] = [engine, FakeSampler()]
    for sampler in samplers:
        (answers,) = sampler.sample([[10, 11, 12]], SamplingParams(max_tokens=2))
        assert len(answers) == 1
        assert len(answers[0].tokens) <= 2
    samplers[1].load_weights({}, 5)
    assert samplers[1].sample([[10]], SamplingParams(), keys=[3])[0][0].version == 5


def test_batch_gives_what_each_prompt_gives_alone(engine: LocalEngine) -> None:
    prompts = [engine.encode(text) for text in ("a", "a longer prompt", "mid size", "b", "the fifth is in batch two")]
    params = SamplingParams(max_tokens=12, logprobs=True)
    together = engine.sample(prompts, params)
    for prompt, (answer,) in zip(prompts, together):
        ((alone,),) = engine.sample([prompt], params)
        assert answer.tokens == alone.tokens
        assert answer.text == alone.text
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_logprobs_are_the_models_own_at_the_temperature(engine: LocalEngine) -> None:
    prompt = engine.encode("hello")
    params = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.8, seed=3, logprobs=True)
    ((answer,),) = engine.sample([prompt], params)
    with torch.no_grad():
        logits = engine.model(torch.tensor([[*prompt, *answer.tokens]])).logits[0] / params.temperature
    logits = logits.log_softmax(-1)
    expected = [logits[len(prompt) + i - 1, token].item() for i, token in enumerate(answer.tokens)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_seed_decides_samples(engine: LocalEngine) -> None:
    prompts = [engine.encode("x")]
    params = SamplingParams(max_tokens=16, temperature=1.0, num_samples=3, seed=1)
    state = torch.get_rng_state()
    first = engine.sample(prompts, params)
    assert torch.equal(state, torch.get_rng_state())
    assert first == engine.sample(prompts, params)
    assert len({answer.tokens for answer in first[0]}) > 1


def test_stops_at_the_templates_end_of_turn(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    hi, end = engine.tokenizer.encode("hi"), engine.tokenizer.convert_tokens_to_ids("<|end|>")
    assert stop_token_ids(make_model(), make_tokenizer()) == {1, end}
    script(engine, monkeypatch, [*hi, end, *hi])
    ((answer,),) = engine.sample([[10]], SamplingParams(max_tokens=5))
    assert (answer.text, answer.finish_reason, answer.tokens) == ("hi", "stop", (*hi, end))


def test_length_is_said(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    script(engine, monkeypatch, engine.tokenizer.encode("hihihi"))
    ((answer,),) = engine.sample([[10]], SamplingParams(max_tokens=4))
    assert (answer.text, answer.finish_reason) == ("hihi", "length")


def test_stop_text_ends_and_is_left_out(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    script(engine, monkeypatch, engine.tokenizer.encode("one;two"))
    ((answer,),) = engine.sample([[10]], SamplingParams(max_tokens=7, stop=(";",)))
    assert (answer.text, answer.finish_reason) == ("one", "stop")
    assert answer.tokens == tuple(engine.tokenizer.encode("one;"))  # what was sampled, up to what completed it


def test_stream_arrives_in_pieces(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    end = engine.tokenizer.convert_tokens_to_ids("<|end|>")
    script(engine, monkeypatch, [*engine.tokenizer.encode("one two tree"), end])
    pieces: list[str] = []
    answer = engine.stream([10], SamplingParams(max_tokens=30), pieces.append)
    assert "".join(pieces) == answer.text == "one two tree"
    assert len(pieces) > 1


def test_length_of_the_model_is_a_limit() -> None:
    engine = LocalEngine(make_model(num_positions=16), make_tokenizer())
    short, long = list(range(10, 14)), list(range(10, 24))
    answers = engine.sample([short, long], SamplingParams(max_tokens=100))
    assert [len(a.tokens) for (a,) in answers if a.finish_reason == "length"] == [12, 2]
    with pytest.raises(ValueError, match="a prompt of 16 tokens: the model takes 16 at most"):
        engine.sample([list(range(10, 26))], SamplingParams())


def test_defaults_of_a_model_do_not_shape_the_output() -> None:
    model = make_model()
    plain = LocalEngine(model, make_tokenizer()).sample([[10, 11]], SamplingParams(max_tokens=8))
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.min_length = 50
    assert LocalEngine(model, make_tokenizer()).sample([[10, 11]], SamplingParams(max_tokens=8)) == plain


def test_encode(engine: LocalEngine) -> None:
    ids = engine.encode([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(ids) == "<|user|>hi<|end|>\n<|assistant|>"
    plain = LocalEngine(make_model(), make_tokenizer(template=None))
    assert plain.tokenizer.decode(plain.encode([{"role": "user", "content": "hi"}])) == "hi"


def test_a_refusing_template_is_a_sentence() -> None:
    engine = LocalEngine(make_model(), make_tokenizer("{{ raise_exception('system role not supported') }}"))
    with pytest.raises(ValueError, match="cannot render this conversation: system role not supported"):
        engine.encode([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop": ("a", "")}, "empty text"),
        ({"num_samples": 2}, "all be the same"),
    ],
)
def test_params_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_reads_text_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n  two\r\n")
    assert [row.content for row in read_prompts(tmp_path / "p.txt")] == ["one", "  two"]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"prompt": "one", "completion": "ignored"}, {"messages": turns}, {"messages": turns[:1], "tools": [{}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = read_prompts(tmp_path / "p.jsonl")
    assert [row.content for row in found] == ["one", turns[:1], turns[:1]]
    assert found[2].tools == [{}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"text": "x"}', "this one has only text"),
        ('{"prompt": " "}', "an empty prompt"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] needs role and content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
        ('{"prompt": "x", "tools": 3}', "tools must be a list"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(ValueError, match=f"p.jsonl:3: .*{message}"):
        read_prompts(path)


def test_answers_come_in_order(engine: LocalEngine) -> None:
    rows = [TextPrompt(f"f:{i}", f"prompt {i}") for i in range(5)]
    answers = list(answer_prompts(engine, rows, SamplingParams(max_tokens=3), batch_size=2))
    assert [a["prompt"] for a in answers] == [row.content for row in rows]
    expected = engine.sample([engine.encode([{"role": "user", "content": "prompt 4"}])], SamplingParams(max_tokens=3))
    assert answers[4]["completion"] == expected[0][0].text
    raw = list(answer_prompts(engine, rows[4:], SamplingParams(max_tokens=3), batch_size=2, raw=True))
    assert raw[0]["completion"] == engine.sample([engine.encode("prompt 4")], SamplingParams(max_tokens=3))[0][0].text


def test_generate_and_chat_commands(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    options = ["--prompts", str(tmp_path / "p.txt"), "--max-tokens", "3"]
    printed = CliRunner().invoke(app, ["generate", str(tmp_path / "m"), *options])
    assert printed.exit_code == 0
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "two"]
    assert all(row.keys() == {"prompt", "completion", "finish_reason"} for row in rows)
    CliRunner().invoke(app, ["generate", str(tmp_path / "m"), *options, "--out", str(tmp_path / "o.jsonl")])
    assert (tmp_path / "o.jsonl").read_text() == printed.stdout
    talk = ["chat", str(tmp_path / "m"), "--max-tokens", "3", "--temperature", "0"]
    answer = CliRunner().invoke(app, talk, input="one\n")
    assert answer.stdout == rows[0]["completion"] + "\n"


def test_chat_on_a_pipe_remembers(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[dict[str, str]]] = []
    monkeypatch.setattr(engine, "encode", lambda messages: seen.append([dict(m) for m in messages]) or [10])
    end = engine.tokenizer.convert_tokens_to_ids("<|end|>")
    script(engine, monkeypatch, [*engine.tokenizer.encode("hi"), end, *engine.tokenizer.encode("ho"), end])
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    converse(engine, SamplingParams(max_tokens=9), system="be brief")
    assert capsys.readouterr().out == "hi\nho\n"
    assert [m["content"] for m in seen[1]] == ["be brief", "first", "hi", "second"]
