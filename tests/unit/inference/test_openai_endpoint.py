"""The client of OpenAI-compatible servers, against a real HTTP server that fails as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from told_server import ToldServer, told_server

from lockstep.inference.openai.endpoint import Answer, EndpointEngine
from lockstep.inference.openai.http import LONGEST_PAUSE_S, EndpointError, normalise_url
from lockstep.inference.prompts import PromptRow
from lockstep.types import SamplingParams

GREEDY = SamplingParams(max_tokens=16)


@pytest.fixture
def server() -> Iterator[ToldServer]:
    with told_server() as told:
        yield told


def connect(server: ToldServer, **settings: Any) -> tuple[EndpointEngine, list[float]]:
    """An engine, and the list into which its pauses go instead of being waited for."""
    pauses: list[float] = []
    return EndpointEngine(server.url, **{"model": "told", "sleep": pauses.append, **settings}), pauses


def chat(text: str, origin: str = "test.jsonl:1") -> PromptRow:
    return PromptRow(origin, [{"role": "user", "content": text}])


def test_conversations_go_to_chat_and_plain_text_to_completions(server: ToldServer):
    engine, _ = connect(server)
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [PromptRow("a:1", [{"role": "user", "content": "hello"}], tools), PromptRow("a:2", "once upon")]
    answers = dict(engine.answer(rows, SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=("END",))))
    assert answers == {0: Answer("HELLO", "stop"), 1: Answer("ONCE UPON", "stop")}
    asked = dict(server.asked)
    shared = {"model": "told", "max_tokens": 7, "temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["END"]}
    assert asked["/v1/chat/completions"] == {**shared, "messages": rows[0].content, "tools": tools}
    assert asked["/v1/completions"] == {**shared, "prompt": "once upon"}


def test_what_openai_does_not_have_goes_by_the_names_of_vllm_and_sglang(server: ToldServer):
    engine, _ = connect(server)
    params = SamplingParams(max_tokens=7, temperature=0.5, top_k=40, min_p=0.1, stop_tokens=(5, 6))
    dict(engine.answer([chat("hello")], params))
    asked = dict(server.asked)["/v1/chat/completions"]
    assert (asked["top_k"], asked["min_p"], asked["stop_token_ids"]) == (40, 0.1, [5, 6])


def test_many_rows_at_once_keep_their_places(server: ToldServer):
    engine, _ = connect(server, batch_size=4)
    rows = [chat(f"row {i}", f"test.jsonl:{i}") for i in range(40)]
    answers = list(engine.answer(rows, GREEDY))
    assert sorted(place for place, _ in answers) == list(range(40))
    assert all(answer.text == f"ROW {place}" for place, answer in answers)


def test_an_answer_that_was_cut_says_so(server: ToldServer):
    server.finish_reason = "length"
    engine, _ = connect(server)
    assert engine.answer_one(chat("hi"), GREEDY).finish_reason == "length"


def test_the_key_is_sent_and_none_is_sent_without_one(server: ToldServer):
    connect(server, api_key="secret")[0].answer_one(chat("hi"), GREEDY)
    connect(server)[0].answer_one(chat("hi"), GREEDY)
    assert server.keys == ["Bearer secret", None]


def test_the_only_model_of_a_server_is_the_default(server: ToldServer):
    assert EndpointEngine(server.url).model == "told"
    server.models = ["one", "two"]
    with pytest.raises(ValueError, match=r"serves one, two: choose one with --endpoint-model"):
        EndpointEngine(server.url)


def test_a_server_error_passes_after_a_pause_that_grows(server: ToldServer):
    server.script = [(500, {}, b"oops"), (503, {}, b"busy")]
    engine, pauses = connect(server)
    assert engine.answer_one(chat("hi"), GREEDY).text == "HI"
    assert pauses == [0.5, 1.0]


def test_retry_after_is_honoured_up_to_a_limit(server: ToldServer):
    server.script = [(429, {"Retry-After": "3"}, b"slow down"), (429, {"Retry-After": "100000"}, b"slower")]
    engine, pauses = connect(server)
    assert engine.answer_one(chat("hi"), GREEDY).text == "HI"
    assert pauses == [3.0, LONGEST_PAUSE_S]


def test_a_broken_connection_is_tried_again(server: ToldServer):
    server.script = ["cut"]
    engine, pauses = connect(server)
    assert engine.answer_one(chat("hi"), GREEDY).text == "HI"
    assert len(pauses) == 1


def test_the_tries_are_bounded_and_the_error_names_server_row_and_reason(server: ToldServer):
    server.script = [(500, {}, b'{"error": {"message": "out of memory"}}')] * 9
    engine, pauses = connect(server, num_tries=3)
    with pytest.raises(EndpointError) as caught:
        list(engine.answer([chat("hi", "test.jsonl:7")], GREEDY))
    message = str(caught.value)
    assert f"{server.url}/v1/chat/completions" in message
    assert "test.jsonl:7 in 3 tries: HTTP 500: out of memory" in message
    assert len(pauses) == 2


def test_a_server_that_hangs_meets_the_deadline(server: ToldServer):
    server.script = ["hang", "hang"]
    engine, _ = connect(server, timeout_s=0.2, num_tries=2)
    with pytest.raises(EndpointError, match=r"in 2 tries: no reply within 0\.2 s"):
        engine.answer_one(chat("hi"), GREEDY)


def test_a_server_that_drips_meets_the_deadline_too(server: ToldServer):
    server.script = ["drip"]
    engine, _ = connect(server, timeout_s=0.5, num_tries=1)
    with pytest.raises(EndpointError, match=r"no reply within 0\.5 s"):
        engine.answer_one(chat("hi"), GREEDY)


def test_nobody_at_the_address_is_one_sentence():
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1/models .* in 2 tries: .*refused"):
        EndpointEngine("127.0.0.1:9", num_tries=2, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "bad key"}}', "bad key"),
        (b'{"message": "bad key"}', "bad key"),
        (b'{"detail": [{"loc": "key"}]}', '[{"loc": "key"}]'),
        (b"not allowed", "not allowed"),
        (b"", "Unauthorized"),
    ],
)
def test_a_refusal_is_not_tried_again_and_shows_what_the_server_says(server: ToldServer, body: bytes, shown: str):
    server.script = [(401, {}, body)]
    engine, pauses = connect(server)
    with pytest.raises(ValueError) as caught:
        engine.answer_one(chat("hi", "test.jsonl:2"), GREEDY)
    assert str(caught.value).endswith(f"refused test.jsonl:2: HTTP 401: {shown}")
    assert pauses == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>hello</html>", "something that is not JSON: '<html>hello</html>'"),
        (b"[1]", "JSON that is not an object"),
        (b'{"choices": []}', "a reply of an unknown shape"),
        (b'{"choices": [{"delta": {}}]}', "a reply of an unknown shape"),
        (b'{"choices": [{"message": {"content": 5}}]}', "an answer that is not text: 5"),
    ],
)
def test_a_reply_of_another_shape_is_an_error(server: ToldServer, body: bytes, shown: str):
    server.script = [(200, {}, body)]
    engine, _ = connect(server)
    with pytest.raises(EndpointError) as caught:
        engine.answer_one(chat("hi"), GREEDY)
    assert shown in str(caught.value)


def test_an_answer_without_text_is_empty(server: ToldServer):
    server.script = [(200, {}, {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]})]
    engine, _ = connect(server)
    assert engine.answer_one(chat("hi"), GREEDY) == Answer("", "stop")


@pytest.mark.parametrize(
    "given",
    ["h:1", "http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"],
)
def test_an_address_may_be_written_in_many_ways(given: str):
    assert normalise_url(given) == "http://h:1/v1"


def test_an_address_may_have_a_path_of_its_own():
    assert normalise_url("https://h/team/openai/v1") == "https://h/team/openai/v1"
    with pytest.raises(ValueError, match="not an address"):
        normalise_url("ftp://h")
