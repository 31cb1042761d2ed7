"""What runs in an engine's process, without one: it holds the trainer's numbers, and messages lose nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import build_tokenizer, write_config, write_model

from lockstep.backend.torch_backend import TorchBackend
from lockstep.config import LoraConfig, ModelConfig, load_config
from lockstep.inference.engine import build_engine_model, load_engine, stop_token_ids
from lockstep.model.load import build_model
from lockstep.rollouts.engines import worker
from lockstep.rollouts.engines.publishing import Publication
from lockstep.rollouts.engines.worker import (
    EngineHandler,
    engine_settings,
    pack_completions,
    pack_request,
    start,
    unpack_completions,
    unpack_request,
)
from lockstep.rollouts.source import ColocatedEngine
from lockstep.types import Completion, Datum, LossSpec, OptimStep, PartialCompletion, SamplingParams, TextCompletion

PROMPTS = [[10, 20, 30], [11], [12, 13, 14, 15]]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, num_samples=2, logprobs=True)


def publish(handler: EngineHandler, version: int, tensors: dict[str, torch.Tensor]) -> None:
    publication = Publication.of(version, tensors, 10_000)
    handler.methods["begin_weights"](json.loads(json.dumps(publication.manifest.to_json())), {})
    for number, content in enumerate(publication.buckets):
        handler.methods["bucket"]({"version": version, "number": number}, {"content": content})
    assert handler.methods["commit_weights"]({"version": version}, {}) == {"version": version}


def ask(handler: EngineHandler, **changes: Any) -> Any:
    body = {**pack_request(PROMPTS, PARAMS, [0, 1, 2], None), "call": "first", "versions": [0, 99], **changes}
    return handler.methods["sample"](json.loads(json.dumps(body)), {})


def answer(handler: EngineHandler) -> list[list[TextCompletion]]:
    future = ask(handler)
    while handler.has_work():
        handler.work()
    reply = future.result(timeout=0)
    return unpack_completions(json.loads(json.dumps(reply.body)), reply.tensors)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
def test_an_engine_gives_what_the_trainer_itself_would_to_the_last_bit(
    is_adapted: bool, precision: str, tmp_path: Path
) -> None:
    lora: dict[str, Any] = {"lora": {"rank": 2, "alpha": 3}} if is_adapted else {}
    model_path = write_model(tmp_path / "model", tie_word_embeddings=True)
    config = load_config(write_config(tmp_path, model_path, **lora))
    model = build_model(config.model, config.lora, precision, with_weights=True)
    backend = TorchBackend(model, precision=precision, device="cpu", compile=False)
    rows = [Datum([5, 6, 7], [Completion([8, 9, 10], [1.0, 1.0, 1.0])])]
    for _ in range(2):  # also the second matrix of an adapter must have moved away from zero
        backend.forward_backward(rows, LossSpec())
        backend.optim_step(OptimStep(learning_rate=0.05))
    own = ColocatedEngine(backend.lend_model, build_tokenizer(), lambda mine: [mine])
    own.version = 7
    expected = own.sample(PROMPTS, PARAMS)
    handler = start(json.loads(json.dumps(engine_settings(config, precision=precision))))
    publish(handler, 7, backend.read_weights())
    assert answer(handler) == expected
    backend.close()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_a_narrow_engine_is_narrow_in_what_is_computed_with_and_nowhere_else(lora: Any, tmp_path: Path) -> None:
    """Built only: not every processor that names bf16 can compute with it."""
    config = ModelConfig(path=str(write_model(tmp_path / "model")))
    model = build_engine_model(config, lora, "bf16", "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}, "angles of positions stay exact"
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_template_of_the_run_decides_where_its_engines_stop(tmp_path: Path) -> None:
    """The template's end of a turn ends an answer, as it does in training."""
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m['content'] + '<|endoftext|>' }}{% endfor %}")
    changes = {"data": {"chat_template": str(tmp_path / "own.jinja")}}
    config = load_config(write_config(tmp_path, write_model(tmp_path / "model"), **changes))
    engine = load_engine(config.model, precision="fp32", chat_template=config.data.chat_template)
    assert stop_token_ids(engine.model, engine.tokenizer) == {2, 0}


def test_an_engine_says_which_fast_way_it_could_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any, report: Callable[[str], None], **options: Any) -> Any:
        engine = load_engine(*given, report=report, **options)
        report("decoding steps are not captured in CUDA graphs")
        return engine

    write_model(tmp_path / "model")
    settings = engine_settings(load_config(write_config(tmp_path, tmp_path / "model")), precision="fp32")
    assert start(settings).immediate["ping"]({}, {})["slow"] == []
    monkeypatch.setattr(worker, "load_engine", load)
    with pytest.warns(UserWarning, match="not captured"):  # in its own log, too
        handler = start(settings)
    assert handler.immediate["ping"]({}, {})["slow"] == ["decoding steps are not captured in CUDA graphs"]


def test_an_engine_without_weights_or_with_others_refuses(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    handler = start(engine_settings(load_config(write_config(tmp_path, tmp_path / "model")), precision="fp32"))
    with pytest.raises(ValueError, match="this engine has no weights yet"):
        ask(handler)
    model = build_model(ModelConfig(path=str(tmp_path / "model")), None, "fp32", with_weights=True)
    publish(handler, 4, model.state_dict())
    for versions in ([0, 3], [5, 9]):
        with pytest.raises(
            ValueError, match=f"has version 4, and versions {versions[0]} to {versions[1]} are accepted"
        ):
            ask(handler, versions=versions)
    assert len(answer(handler)) == 3


def test_a_ping_tells_how_far_answers_are_and_whether_there_is_progress(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lockstep.inference.continuous_engine.ContinuousEngine.slice_s", 0.0)
    write_model(tmp_path / "model")
    handler = start(engine_settings(load_config(write_config(tmp_path, tmp_path / "model")), precision="fp32"))
    model = build_model(ModelConfig(path=str(tmp_path / "model")), None, "fp32", with_weights=True)
    publish(handler, 4, model.state_dict())
    ping = handler.immediate["ping"]
    future, before = ask(handler), ping({}, {})
    handler.work()
    silent, asked = ping({}, {}), ping({"partial": True}, {})
    assert silent["partial"] == {}
    assert silent["progress"] == asked["progress"] == before["progress"] + 1
    assert asked["busy"]
    heard = {(place, sample): tokens for place, sample, (tokens, *_) in asked["partial"]["first"]}
    assert set(heard) == {(place, sample) for place in range(3) for sample in range(2)}
    while handler.has_work():
        handler.work()
    answers = unpack_completions(future.result().body, future.result().tensors)
    assert all(answers[place][sample].tokens[:1] == tuple(tokens) for (place, sample), tokens in heard.items())
    assert ping({"partial": True}, {})["partial"] == {}


# --- messages -------------------------------------------------------------------------------------------------------

numbers = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def completions(draw: Any, has_logprobs: bool) -> TextCompletion:
    count = draw(st.integers(1, 4))
    tokens = tuple(draw(numbers) for _ in range(count))
    logprobs = tuple(draw(floats) for _ in range(count)) if has_logprobs else None
    versions = tuple(draw(numbers) for _ in range(count)) if draw(st.booleans()) else ()
    reason = draw(st.sampled_from(["stop", "length"]))
    routing = draw(st.binary(max_size=6))
    return TextCompletion(tokens, draw(st.text(max_size=5)), reason, logprobs, draw(numbers), versions, routing)


@given(st.data(), st.booleans())
def test_answers_come_as_they_were_sent(data: Any, has_logprobs: bool) -> None:
    answers = data.draw(st.lists(st.lists(completions(has_logprobs), max_size=3), max_size=3))
    body, tensors = pack_completions(answers)
    found = unpack_completions(json.loads(json.dumps(body)), tensors)
    if any(answers):
        assert found == answers
    else:
        assert found == [[] for _ in answers]


@given(st.lists(numbers, min_size=1, max_size=4), floats, st.booleans(), st.binary(max_size=6))
def test_requests_come_as_they_were_sent(tokens: list[int], logprob: float, has_partial: bool, routing: bytes) -> None:
    params = SamplingParams(9, 0.5, 0.75, 3, ("a", "b"), 2, True, 4, 0.25, (7, 8))
    partial = PartialCompletion(tuple(tokens), (logprob,) * len(tokens), tuple(tokens), routing)
    given = [[partial, None], [None, partial]] if has_partial else None
    body = json.loads(json.dumps(pack_request([tokens, tokens[::-1]], params, [1, 2**70], given)))
    assert unpack_request(body) == ([tokens, tokens[::-1]], params, [1, 2**70], given)


def test_lora_settings_travel_whole(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = load_config(write_config(tmp_path, tmp_path / "model", lora={"rank": 3, "targets": ["q_proj"]}))
    settings = json.loads(json.dumps(engine_settings(config, precision="fp32")))
    assert LoraConfig(**settings["lora"]) == config.lora
    assert ModelConfig(**settings["model"]) == config.model
