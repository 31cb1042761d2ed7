"""Callers that ask too much, ask nonsense, leave, or never finish asking: each gets a sentence, and no row is lost."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from served_model import BASE, ServedModel, serve
from tiny import build_tokenizer
from torch import Tensor

from lockstep.inference.decoder import Decoder
from lockstep.inference.server.requests import ChatBody, parse_body
from lockstep.inference.server.served import ServedModels
from lockstep.inference.server.settings import ServerSettings
from lockstep.inference.server.tool_calls import read_calls, why_no_tools

TURNS = [{"role": "user", "content": "red blue"}]


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    with serve(batch_size=2, max_waiting=3, max_body_bytes=100_000, body_timeout_s=0.5, header_s=0.5) as served:
        yield served


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps wait for this event: answers stay in progress as long as a test wants."""
    goes_on, launch = threading.Event(), Decoder.launch

    def wait(self: Decoder, *arguments: Any) -> Any:
        goes_on.wait()
        return launch(self, *arguments)

    monkeypatch.setattr(Decoder, "launch", wait)
    yield goes_on
    goes_on.set()


@contextmanager
def streaming(served: ServedModel, **body: Any) -> Iterator[Iterator[str]]:
    """A request whose answer has begun."""
    asked = {"model": BASE, "messages": TURNS, "max_tokens": 100, "stream": True, **body}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=asked, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(lines))["choices"][0]["delta"]["role"] == "assistant"
        yield lines


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"n": 129}, 400, "n: input should be less than or equal to 128"),
        ({"n": 6, "temperature": 1}, 400, "6 answers: at most 5"),
        ({"n": 2, "temperature": 0}, 400, "would all be the same"),
        ({"max_tokens": 10**25}, 400, "max_tokens: input should be less than"),
        ({"max_tokens": 500}, 400, "and 500 new ones: the model takes 512 in all"),
        ({"max_tokens": 0}, 400, "at least 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "differ"),
        ({"temperature": "hot"}, 400, "temperature: input should be a valid number"),
        ({"temperature": True}, 400, "temperature"),
        ({"temperature": -1}, 400, "greater than or equal to 0"),
        ({"top_p": 0}, 400, "top_p"),
        ({"stop": [""]}, 400, "stop.0"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"seed": 1.5}, 400, "seed"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "only for stream: true"),
        ({"top_logprobs": 3}, 400, "only for logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"presence_penalty": 0.5}, 400, "'presence_penalty' is not supported here"),
        ({"response_format": {"type": "json_object"}}, 400, "'response_format' is not supported"),
        ({"something_new": 1}, 400, "'something_new' is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, 400, "does not show tools"),
        ({"tool_choice": "required"}, 400, "nothing here forces a call"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "owl", "content": "?"}]}, 400, "role must be"),
        ({"messages": [{"role": "user"}]}, 400, "has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only parts of type text"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "the model takes 512 in all"),
        ({"model": "nobody"}, 404, "there is no model 'nobody': there is tiny"),
        ({"model": None}, 400, "model"),
    ],
)
def test_a_chat_that_cannot_be_answered_gets_a_sentence(
    served: ServedModel, body: dict[str, Any], status: int, message: str
) -> None:
    answer = served.post("chat/completions", **{"messages": TURNS, **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": []}, "must be a text, a list of token ids"),
        ({"prompt": ""}, "an empty prompt"),
        ({"prompt": [1, "a"]}, "must be a text, a list of token ids"),
        ({"prompt": [True]}, "must be a text, a list of token ids"),
        ({"prompt": [[1], []]}, "an empty prompt"),
        ({"prompt": [288]}, "there is no token 288"),
        ({"prompt": [-1]}, "there is no token -1"),
        ({"prompt": [10**30]}, "there is no token"),
        ({"prompt": "a", "max_tokens": 0}, "only for echo: true"),
        ({"prompt": "a", "echo": True, "stream": True}, "echo is not for stream"),
        ({"prompt": "a", "suffix": "b"}, "'suffix' is not supported"),
        ({"prompt": "a", "best_of": 3}, "'best_of' is not supported"),
        ({"prompt": ["a"] * 129}, "at most 128 answers"),
        ({"prompt": "x" * 50_000}, "tokens at most"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_a_completion_that_cannot_be_given_gets_a_sentence(
    served: ServedModel, body: dict[str, Any], message: str
) -> None:
    answer = served.post("completions", **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_fields_that_change_nothing_are_taken(served: ServedModel) -> None:
    more = {"user": "me", "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "n": None}
    answer = served.post("chat/completions", messages=TURNS, max_tokens=2, metadata={"a": "b"}, **more)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b'{"model": "\xff"}', "application/json", 400, "not UTF-8"),
        (b"{", "application/json", 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json", 400, "half of a surrogate pair"),
        (b'{"model": "tiny", "prompt": "a", "\\udfff": 1}', "application/json", 400, "half of a surrogate pair"),
        (b"[]", "application/json", 400, "must be a JSON object"),
        (b'{"a":' * 20_000, "application/json", 400, "nesting"),
        (b'{"temperature": NaN}', "application/json", 400, "NaN is no JSON number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "not JSON"),
        (b"{}", "application/json", 400, "the body has no"),
        (b"{}", "text/plain", 415, "must be application/json"),
        (b" " * 200_000, "application/json", 413, "larger than the 100,000 bytes"),
    ],
)
def test_bodies_that_are_none(served: ServedModel, content: bytes, kind: str, status: int, message: str) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


def test_other_routes_and_methods_have_the_same_shape(served: ServedModel) -> None:
    for answer, status in (
        (httpx.get(f"{served.url}/v2"), 404),
        (httpx.get(f"{served.url}/v1/completions"), 405),
        (httpx.get(f"{served.url}/v1/models/nobody"), 404),
        (httpx.get(f"{served.url}/v1/models", headers={"host": "evil.example"}), 421),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert httpx.get(f"{served.url}/v1/models/tiny").json()["max_model_len"] == 512


def test_a_full_queue_says_when_to_come_again_and_takes_others_later(
    served: ServedModel, held: threading.Event
) -> None:
    with streaming(served, n=5) as lines:
        answer = served.post("chat/completions", messages=TURNS)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        held.set()
        assert list(lines)[-1] == "[DONE]"
    assert served.post("chat/completions", messages=TURNS, max_tokens=2).status_code == 200


def test_a_client_that_leaves_frees_its_rows(served: ServedModel, held: threading.Event) -> None:
    before = served.server.engine.counts["cancelled"]
    with streaming(served, n=5):
        assert served.server.engine.num_rows == 5
    with pytest.raises(httpx.ReadTimeout):  # one that waits for a whole answer
        served.post("chat/completions", messages=TURNS, timeout=0.2)
    held.set()
    served.wait_until_idle()
    assert served.server.engine.counts["cancelled"] == before + 2
    assert served.post("chat/completions", messages=TURNS, max_tokens=2, n=2).status_code == 200


def test_an_answer_that_takes_too_long_is_cut(held: threading.Event) -> None:
    with serve(timeout_s=0.3) as served:
        with streaming(served) as lines:
            assert json.loads(list(lines)[-1])["error"]["code"] == "deadline"
        answer = served.post("chat/completions", messages=TURNS)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        held.set()
        served.wait_until_idle()


def test_a_failed_step_loses_its_answers_and_no_later_ones(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "launch", fail)
        answer = served.post("chat/completions", messages=TURNS)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the engine failed: out of memory"
    assert served.post("chat/completions", messages=TURNS, max_tokens=2).status_code == 200


def test_who_never_finishes_asking_is_let_go(served: ServedModel) -> None:
    address = httpx.URL(served.url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    silent, slow_head, slow_body = (socket.create_connection((address.host, address.port)) for _ in range(3))
    slow_head.sendall(head)
    slow_body.sendall(head + b"Content-Length: 50\r\n\r\n{")
    assert served.post("chat/completions", messages=TURNS, max_tokens=2).status_code == 200
    with silent, slow_head, slow_body:
        for connection in (silent, slow_head, slow_body):
            connection.settimeout(60)
        assert silent.recv(100) == b""
        assert slow_head.recv(100) == b""
        assert b"408" in slow_body.recv(100)


def test_a_server_that_is_stopped_lets_answers_end_and_cuts_the_rest(held: threading.Event) -> None:
    with serve(grace_s=0.2) as served, streaming(served) as lines:
        served.web.should_exit = True
        *_, last = lines
        assert json.loads(last)["error"]["code"] == "shutting_down"
        held.set()
    with serve(grace_s=60.0) as served, streaming(served, max_tokens=300) as lines:
        served.web.should_exit = True
        assert list(lines)[-1] == "[DONE]"


def test_a_key_is_asked_for() -> None:
    with serve(api_key="secret-key") as served:
        assert httpx.get(f"{served.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sécret-key"}):
            answer = httpx.get(f"{served.url}/v1/models", headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401
            assert "API key" in answer.json()["error"]["message"]
        with_key = {"authorization": "Bearer secret-key", "host": "models.example"}
        assert httpx.get(f"{served.url}/v1/models", headers=with_key).status_code == 200
    with pytest.raises(ValueError, match="lets other machines in"):
        ServerSettings(host="0.0.0.0")


def test_calls_of_tools_are_read_and_nothing_else() -> None:
    said, (call,) = read_calls('Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert said == "Wait."
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    for text in ("no call", "<tool_call>{broken</tool_call>", '<tool_call>["a"]</tool_call>'):
        assert read_calls(text) == (text, [])
    tokenizer = build_tokenizer()
    assert why_no_tools("{{ tools }} <tool_call>", tokenizer) is None
    assert "no others can be read" in str(why_no_tools("{{ tools }}", tokenizer))


def test_tools_go_to_the_template_and_calls_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is random: what it says is put into its mouth."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}<tool_call>{{ messages[0].content }}"
    said = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    script = itertools.cycle([*tokenizer(said)["input_ids"], tokenizer.eos_token_id])

    def draw(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.full((len(logits),), next(script)), torch.zeros(len(logits))

    monkeypatch.setattr("lockstep.inference.decoder.sample_tokens", draw)
    seen = []
    encode = ServedModels.encode
    monkeypatch.setattr(ServedModels, "encode", lambda *given: seen.append(given[3]) or encode(*given))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with serve(tokenizer=tokenizer) as served:
        answer = served.post("chat/completions", messages=TURNS, tools=tools).json()["choices"][0]
        chunks = served.post("chat/completions", messages=TURNS, tools=tools, stream=True).text
    assert seen[0] == tools
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "add"
    last = json.loads(chunks.split("data: ")[-2])["choices"][0]
    assert last["delta"]["tool_calls"][0]["index"] == 0
    assert last["finish_reason"] == "tool_calls"


def test_messages_are_read_as_templates_want_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    body = parse_body(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    system, assistant, tool = body.conversation()
    assert (system["role"], system["content"]) == ("system", "ab")
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert tool["tool_call_id"] == "1"
