"""The client of OpenAI-compatible servers, against a real HTTP server that fails as its script says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer, scripted_server

from lockstep.inference.chat import TextPrompt
from lockstep.inference.openai.endpoint import (
    MAX_PAUSE_S,
    EndpointCompletion,
    EndpointEngine,
    EndpointError,
    normalise_url,
)
from lockstep.types import SamplingParams

GREEDY = SamplingParams(max_tokens=16)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


def connect(server: ScriptedServer, **settings: Any) -> tuple[EndpointEngine, list[float]]:
    """An engine, and the list into which its pauses go instead of being waited for."""
    pauses: list[float] = []
    return EndpointEngine(server.url, **{"model": "scripted", "sleep": pauses.append, **settings}), pauses


def chat(text: str, origin: str = "test.jsonl:1") -> TextPrompt:
    return TextPrompt(origin, [{"role": "user", "content": text}])


def test_conversations_go_to_chat_and_plain_text_to_completions(server: ScriptedServer):
    engine, _ = connect(server)
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [TextPrompt("a:1", [{"role": "user", "content": "hello"}], tools), TextPrompt("a:2", "once upon")]
    answers = dict(engine.complete_all(rows, SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=("END",))))
    assert answers == {0: EndpointCompletion("HELLO", "stop"), 1: EndpointCompletion("ONCE UPON", "stop")}
    sent = dict(server.requests)
    shared = {"model": "scripted", "max_tokens": 7, "temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["END"]}
    assert sent["/v1/chat/completions"] == {**shared, "messages": rows[0].content, "tools": tools}
    assert sent["/v1/completions"] == {**shared, "prompt": "once upon"}


def test_what_openai_does_not_have_goes_by_the_names_of_vllm_and_sglang(server: ScriptedServer):
    engine, _ = connect(server)
    params = SamplingParams(max_tokens=7, temperature=0.5, top_k=40, min_p=0.1, stop_tokens=(5, 6))
    dict(engine.complete_all([chat("hello")], params))
    sent = dict(server.requests)["/v1/chat/completions"]
    assert (sent["top_k"], sent["min_p"], sent["stop_token_ids"]) == (40, 0.1, [5, 6])


def test_many_rows_at_once_keep_their_places(server: ScriptedServer):
    engine, _ = connect(server, batch_size=4)
    rows = [chat(f"row {i}", f"test.jsonl:{i}") for i in range(40)]
    answers = list(engine.complete_all(rows, GREEDY))
    assert sorted(place for place, _ in answers) == list(range(40))
    assert all(answer.text == f"ROW {place}" for place, answer in answers)


def test_an_answer_that_was_cut_says_so(server: ScriptedServer):
    server.finish_reason = "length"
    engine, _ = connect(server)
    assert engine.complete(chat("hi"), GREEDY).finish_reason == "length"


def test_the_key_is_sent_and_none_is_sent_without_one(server: ScriptedServer):
    connect(server, api_key="secret")[0].complete(chat("hi"), GREEDY)
    connect(server)[0].complete(chat("hi"), GREEDY)
    assert server.keys == ["Bearer secret", None]


def test_the_only_model_of_a_server_is_the_default(server: ScriptedServer):
    assert EndpointEngine(server.url).model == "scripted"
    server.models = ["one", "two"]
    with pytest.raises(ValueError, match=r"serves one, two: choose one with --endpoint-model"):
        EndpointEngine(server.url)


def test_a_server_error_passes_after_a_pause_that_grows(server: ScriptedServer):
    server.script = [(500, {}, b"oops"), (503, {}, b"busy")]
    engine, pauses = connect(server)
    assert engine.complete(chat("hi"), GREEDY).text == "HI"
    assert pauses == [0.5, 1.0]


def test_retry_after_is_honoured_up_to_a_limit(server: ScriptedServer):
    server.script = [(429, {"Retry-After": "3"}, b"slow down"), (429, {"Retry-After": "100000"}, b"slower")]
    engine, pauses = connect(server)
    assert engine.complete(chat("hi"), GREEDY).text == "HI"
    assert pauses == [3.0, MAX_PAUSE_S]


def test_a_broken_connection_is_tried_again(server: ScriptedServer):
    server.script = ["cut"]
    engine, pauses = connect(server)
    assert engine.complete(chat("hi"), GREEDY).text == "HI"
    assert len(pauses) == 1


def test_the_tries_are_bounded_and_the_error_names_server_row_and_reason(server: ScriptedServer):
    server.script = [(500, {}, b'{"error": {"message": "out of memory"}}')] * 9
    engine, pauses = connect(server, num_tries=3)
    with pytest.raises(EndpointError) as caught:
        list(engine.complete_all([chat("hi", "test.jsonl:7")], GREEDY))
    message = str(caught.value)
    assert f"{server.url}/v1/chat/completions" in message
    assert "test.jsonl:7 in 3 tries: HTTP 500: out of memory" in message
    assert len(pauses) == 2


def test_a_server_that_hangs_meets_the_deadline(server: ScriptedServer):
    server.script = ["hang", "hang"]
    engine, _ = connect(server, timeout_s=0.2, num_tries=2)
    with pytest.raises(EndpointError, match=r"in 2 tries: no reply within 0\.2 s"):
        engine.complete(chat("hi"), GREEDY)


def test_a_server_that_drips_meets_the_deadline_too(server: ScriptedServer):
    server.script = ["drip"]
    engine, _ = connect(server, timeout_s=0.5, num_tries=1)
    with pytest.raises(EndpointError, match=r"no reply within 0\.5 s"):
        engine.complete(chat("hi"), GREEDY)


def test_nobody_at_the_address_is_one_sentence():
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1/models .* in 2 tries: .*refused"):
        EndpointEngine("127.0.0.1:9", num_tries=2, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "bad key"}}', "bad key"),
        (b'{"message": "bad key"}', "bad key"),
        (b'{"detail": [{"loc": "key", "msg": "Field required"}]}', "Field required"),
        (b"not allowed", "Unauthorized"),
        (b'{"AccessKeyId": "secret"}', "Unauthorized"),
        (b'{"error": {"secret": "secret"}}', "Unauthorized"),
        (b"", "Unauthorized"),
    ],
)
def test_a_refusal_is_not_tried_again_and_shows_what_the_server_says(server: ScriptedServer, body: bytes, shown: str):
    server.script = [(401, {}, body)]
    engine, pauses = connect(server)
    with pytest.raises(ValueError) as caught:
        engine.complete(chat("hi", "test.jsonl:2"), GREEDY)
    assert str(caught.value).endswith(f"refused test.jsonl:2: HTTP 401: {shown}")
    assert pauses == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>hello</html>", "with 18 bytes that are not JSON"),
        (b"[1]", "JSON that is not an object"),
        (b'{"choices": []}', "a reply of an unknown shape"),
        (b'{"AccessKeyId": "secret"}', "a reply of an unknown shape"),
        (b'{"choices": [{"delta": {}}]}', "a reply of an unknown shape"),
        (b'{"choices": [{"message": {"content": 5}}]}', "an answer that is not text but int"),
    ],
)
def test_a_reply_of_another_shape_is_an_error(server: ScriptedServer, body: bytes, shown: str):
    server.script = [(200, {}, body)]
    engine, _ = connect(server)
    with pytest.raises(EndpointError) as caught:
        engine.complete(chat("hi"), GREEDY)
    assert shown in str(caught.value)
    assert "secret" not in str(caught.value), "of what is no model server nothing comes back"
    assert "hello" not in str(caught.value)


def test_an_answer_without_text_is_empty(server: ScriptedServer):
    server.script = [(200, {}, {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]})]
    engine, _ = connect(server)
    assert engine.complete(chat("hi"), GREEDY) == EndpointCompletion("", "stop")


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
    with pytest.raises(ValueError, match="not an address"):
        normalise_url("http://h:99999")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_refused_and_not_followed(server: ScriptedServer, status: int):
    server.script = [(status, {"Location": f"{server.url}/v1/elsewhere"}, b"")]
    engine, pauses = connect(server)
    with pytest.raises(ValueError, match=rf"HTTP {status}: a redirect, which is not followed"):
        engine.complete(chat("hi"), GREEDY)
    assert [path for path, _ in server.requests] == ["/v1/chat/completions"]
    assert pauses == []


def test_a_reply_that_is_too_large_is_not_read_to_its_end(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.inference.openai.endpoint._MAX_REPLY_BYTES", 1 << 20)
    server.script = [(200, {}, b" " * (2 << 20))]
    engine, _ = connect(server)
    with pytest.raises(EndpointError, match="a reply of more than 1 MiB"):
        engine.complete(chat("hi"), GREEDY)
