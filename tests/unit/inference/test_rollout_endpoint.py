"""A run's engine behind HTTP: what it publishes is what answers, and a server that misbehaves is recognised."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from scripted_rollout_servers import ScriptedRolloutServer, ScriptedSglang, ScriptedVllm, draw
from scripted_server import scripted_server

from lockstep.inference.openai.endpoint import EndpointError, EndpointRefusal
from lockstep.inference.openai.rollout_endpoint import RolloutEndpoint, connect, draw_seeds
from lockstep.types import SamplingParams, TextCompletion

PROMPTS, KEYS = [[5, 6, 7], [8], [9, 10]], [11, 4, 30]
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=3, num_samples=4, stop=("END",), logprobs=True)
KINDS: dict[str, tuple[type[ScriptedRolloutServer], bool]] = {
    "vllm": (ScriptedVllm, False),
    "vllm adapters": (ScriptedVllm, True),
    "sglang": (ScriptedSglang, False),
    "sglang adapters": (ScriptedSglang, True),
}
FULL = ("vllm", "sglang")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(kind: str) -> Iterator[ScriptedRolloutServer]:
    with scripted_server(KINDS[kind][0]) as scripted:
        yield scripted


every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
whole_models = pytest.mark.parametrize("kind", FULL, indirect=True)


def write(tensors: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir()
    (folder / "weights.bin").write_bytes(tensors["w"])


def engine_for(server: ScriptedRolloutServer, kind: str, folder: Path, **options: Any) -> RolloutEndpoint:
    settings = {"timeout_s": 20.0, "num_tries": 1, "sleep": lambda _: None, **options}
    return connect(server.url, kind.split()[0], write, folder, adapters=KINDS[kind][1], **settings)


def sample(engine: RolloutEndpoint, version: int, params: SamplingParams = PARAMS) -> list[list[TextCompletion]]:
    return engine.sample(PROMPTS, params, KEYS, versions=(version, version))


def expected(weights: bytes, version: int, params: SamplingParams = PARAMS) -> list[list[TextCompletion]]:
    found = []
    for prompt, key in zip(PROMPTS, KEYS, strict=True):
        pairs = [draw(weights, prompt, seed, params.max_tokens) for seed in draw_seeds(params, key)]
        found.append([complete(own, version, params.max_tokens) for own in pairs])
    return found


def complete(pairs: list[tuple[int, float]], version: int, max_tokens: int) -> TextCompletion:
    tokens, logprobs = zip(*pairs, strict=True)
    return TextCompletion(
        tokens, " ".join(map(str, tokens)), "length" if len(tokens) == max_tokens else "stop", logprobs, version
    )


# --- as documented --------------------------------------------------------------------------------------------------


@every_kind
def test_answers_are_of_the_weights_that_were_published(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path / "published")
    for version, weights in ((3, b"one"), (4, b"two"), (6, b"three")):
        engine.publish(version, {"w": weights})
        assert engine.version == version
        assert sample(engine, version) == expected(weights, version)
    (last,) = (tmp_path / "published").iterdir()
    assert last.name.startswith("lockstep-6-")
    assert len(server.adapters) <= 1


@every_kind
def test_samples_of_a_group_differ_and_can_be_had_again(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path, num_at_once=2)
    engine.publish(0, {"w": b"one"})
    first = sample(engine, 0)
    assert len({answer.tokens for group in first for answer in group}) == 12
    assert sample(engine, 0) == first
    again = engine.sample(PROMPTS[::-1], PARAMS, KEYS[::-1], versions=(0, 5))
    assert again[::-1] == first


@every_kind
def test_everything_that_shapes_a_sample_is_said(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(0, {"w": b"one"})
    sample(engine, 0)
    body = next(body for path, body in server.requests if path in ("/v1/completions", "/generate"))
    said = body["sampling_params"][0] if "sampling_params" in body else body
    assert (said["temperature"], said["top_p"], said["min_p"], said["stop"]) == (1.0, 0.9, 0.0, ["END"])
    assert said["top_k"] in (0, -1)
    assert (said["repetition_penalty"], said["frequency_penalty"], said["presence_penalty"]) == (1.0, 0.0, 0.0)
    assert body.get("return_tokens_as_token_ids") or body.get("return_logprob")


def test_seeds_follow_from_seed_and_key():
    assert draw_seeds(PARAMS, 4) == draw_seeds(PARAMS, 4)
    first = draw_seeds(PARAMS, 4)[0]
    assert draw_seeds(PARAMS, 4) == list(range(first, first + 4))
    many = {seed for key in range(500) for seed in draw_seeds(PARAMS, key)}
    assert len(many) == 2000
    assert all(0 <= seed < 2**63 for seed in many)


@every_kind
def test_the_same_weights_again_are_not_sent_again(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(2, {"w": b"one"})
    before = len(server.visited)
    engine.publish(2, {"w": b"one"})
    assert len(server.visited) == before
    assert sample(engine, 2) == expected(b"one", 2)


@every_kind
def test_a_run_that_comes_back_publishes_what_the_server_has_already(
    server: ScriptedRolloutServer, kind: str, tmp_path: Path
):
    engine_for(server, kind, tmp_path).publish(2, {"w": b"one"})
    engine = engine_for(server, kind, tmp_path)
    engine.publish(2, {"w": b"one"})
    assert sample(engine, 2) == expected(b"one", 2)


@pytest.mark.parametrize("kind", ["sglang"], indirect=True)
def test_an_older_server_is_asked_by_its_older_names(server: ScriptedSglang, kind: str, tmp_path: Path):
    server.has_new_names = False
    engine = engine_for(server, kind, tmp_path)
    engine.publish(1, {"w": b"one"})
    assert sample(engine, 1) == expected(b"one", 1)


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_vllm_is_asked_for_nothing_but_temperature_one(server: ScriptedVllm, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(1, {"w": b"one"})
    with pytest.raises(ValueError, match=r"vLLM gives log-probs at temperature 1, and algorithm\.temperature is 0\.7"):
        sample(engine, 1, SamplingParams(max_tokens=4, temperature=0.7))
    greedy = SamplingParams(max_tokens=4)
    assert sample(engine, 1, greedy) == expected(b"one", 1, greedy)


# --- versions -------------------------------------------------------------------------------------------------------


@every_kind
def test_nothing_is_sampled_before_weights_are_published_or_from_a_version_that_is_not_wanted(
    server: ScriptedRolloutServer, kind: str, tmp_path: Path
):
    engine = engine_for(server, kind, tmp_path)
    with pytest.raises(EndpointError, match="serves version None, and 0 to 0 are requested"):
        sample(engine, 0)
    engine.publish(2, {"w": b"one"})
    with pytest.raises(EndpointError, match="serves version 2, and 3 to 3 are requested"):
        sample(engine, 3)


@every_kind
def test_a_server_that_was_restarted_is_found_out(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    """It answers with the weights it was started with, and would do so silently."""
    engine = engine_for(server, kind, tmp_path)
    engine.publish(2, {"w": b"one"})
    server.restart()
    with pytest.raises((EndpointError, EndpointRefusal), match=r"has the weights 'default'|not exist|not loaded"):
        sample(engine, 2)


@every_kind
def test_an_update_that_is_refused_twice_stops_sampling(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(2, {"w": b"one"})
    refused = [(400, {}, b'{"message": "out of memory"}')] * 4
    server.script = [*refused]
    with pytest.raises(EndpointRefusal, match=r"refused .*lockstep-3-.*HTTP 400: out of memory"):
        engine.publish(3, {"w": b"two"})
    server.script = []
    with pytest.raises(EndpointError, match="serves version None"):
        sample(engine, 2)
    engine.publish(3, {"w": b"two"})
    assert sample(engine, 3) == expected(b"two", 3)


@every_kind
def test_an_update_that_fails_once_is_sent_again(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    server.script = [(500, {}, b"oops")]
    engine.publish(3, {"w": b"two"})
    assert sample(engine, 3) == expected(b"two", 3)


def with_changes(path: str, change: Callable[[Any], None]) -> Callable[[str, Any], Any]:
    def spoil(visited: str, reply: Any) -> Any:
        if visited != path:
            return reply
        reply = copy.deepcopy(reply)
        change(reply)
        return reply

    return spoil


@pytest.mark.parametrize(
    ("kind", "path", "change", "said"),
    [
        ("vllm", "/weight_info", {"weight_version": "lockstep-2-old"}, "has the weights 'lockstep-2-old'"),
        ("vllm adapters", "/v1/models", {"data": [{"id": "base"}]}, "lists it with the folder None"),
        ("sglang", "/model_info", {"weight_version": "lockstep-2-old"}, "has the weights 'lockstep-2-old'"),
        ("sglang", "/model_info", {"model_path": "elsewhere"}, "says that it has elsewhere"),
        ("sglang", "/update_weights_from_disk", {"success": False, "message": "no"}, "did not take the weights"),
        ("sglang adapters", "/load_lora_adapter", {"loaded_adapters": {}}, "did not take the adapter"),
    ],
    indirect=["kind"],
)
def test_an_update_that_the_server_does_not_confirm_is_none(
    server: ScriptedRolloutServer, kind: str, tmp_path: Path, path: str, change: dict[str, Any], said: str
):
    engine = engine_for(server, kind, tmp_path)
    server.spoil = with_changes(path, lambda reply: reply.update(change))
    with pytest.raises(EndpointError, match=said):
        engine.publish(3, {"w": b"two"})
    assert engine.version is None


@pytest.mark.parametrize(
    ("kind", "route", "needed"),
    [("vllm", "on_pause", "VLLM_SERVER_DEV_MODE=1"), ("vllm adapters", "on_load_lora_adapter", "--enable-lora")],
    indirect=["kind"],
)
def test_a_server_without_the_routes_is_told_how_to_start(
    server: ScriptedVllm, kind: str, tmp_path: Path, route: str, needed: str
):
    engine = engine_for(server, kind, tmp_path)
    setattr(server, route, None)
    with pytest.raises(EndpointRefusal, match=f"HTTP 404: Not Found. Does .* started with .*{needed}"):
        engine.publish(0, {"w": b"one"})


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_a_reload_that_breaks_off_leaves_no_name_to_sample_from(server: ScriptedVllm, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(2, {"w": b"one"})
    server.on_collective_rpc = lambda body: (500, {"detail": "worker died"})  # type: ignore[method-assign]
    with pytest.raises(EndpointError, match="worker died"):
        engine.publish(3, {"w": b"two"})
    assert server.label.startswith("loading lockstep-3-")


@whole_models
def test_weights_change_between_answers_and_never_within(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    """A publication waits for the samples under way, and those that come meanwhile wait for it."""
    engine, seen, problems = engine_for(server, kind, tmp_path), [], []
    engine.publish(0, {"w": b"0"})
    stop = threading.Event()

    def keep_sampling() -> None:
        while not stop.is_set() and not problems:
            try:
                groups = engine.sample(PROMPTS, PARAMS, KEYS, versions=(0, 100))
                seen.append((groups[0][0].version, groups))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=keep_sampling, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, 6):
        engine.publish(version, {"w": str(version).encode()})
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert seen
    assert not problems
    for version, groups in seen:
        assert groups == expected(str(version).encode(), version)


# --- replies that are not sound -------------------------------------------------------------------------------------


def first_answer(reply: Any) -> Any:
    """Of either kind: what is said of one answer."""
    return reply["choices"][0] if isinstance(reply, dict) else reply[0]


def pairs_of(reply: Any) -> Any:
    answer = first_answer(reply)
    return answer["logprobs"] if "logprobs" in answer else answer["meta_info"]


FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "vllm: no log-probs": ("vllm", lambda r: first_answer(r).pop("logprobs"), "unknown shape .no 'logprobs'"),
    "vllm: null log-probs": ("vllm", lambda r: first_answer(r).update(logprobs=None), "unknown shape"),
    "vllm: a log-prob is null": ("vllm", lambda r: pairs_of(r)["token_logprobs"].__setitem__(0, None), "unknown shape"),
    "vllm: a log-prob above 0": (
        "vllm",
        lambda r: pairs_of(r)["token_logprobs"].__setitem__(0, 0.5),
        "not a number be",
    ),
    "vllm: words for tokens": ("vllm", lambda r: pairs_of(r)["tokens"].__setitem__(0, "hello"), "unknown shape"),
    "vllm: fewer log-probs": ("vllm", lambda r: pairs_of(r)["token_logprobs"].pop(), "tokens and .* log-probs"),
    "vllm: a token is missing": (
        "vllm",
        lambda r: [pairs_of(r)[key].append(v) for key, v in (("tokens", "token_id:1"), ("token_logprobs", -1.0))],
        "tokens, and gave",
    ),
    "vllm: an answer is missing": ("vllm", lambda r: r["choices"].pop(), "3 answers where 4 were asked for"),
    "vllm: a longer prompt": ("vllm", lambda r: r["usage"].update(prompt_tokens=99), "after 99 tokens of a prompt"),
    "vllm: aborted": ("vllm", lambda r: first_answer(r).update(finish_reason="abort"), "an answer ended with abort"),
    "vllm: another model": ("vllm", lambda r: r.update(model="other"), "with other and not base"),
    "adapters: the base": ("vllm adapters", lambda r: r.update(model="base"), "with base and not lockstep-0-"),
    "sglang: no log-probs": (
        "sglang",
        lambda r: pairs_of(r).pop("output_token_logprobs"),
        "no 'output_token_logprobs'",
    ),
    "sglang: old weights": ("sglang", lambda r: pairs_of(r).update(weight_version="old"), "has the weights 'old'"),
    "sglang: weights unsaid": ("sglang", lambda r: pairs_of(r).pop("weight_version"), "has the weights None"),
    "sglang: aborted": ("sglang", lambda r: pairs_of(r).update(finish_reason={"type": "abort"}), "ended with abort"),
    "sglang: an answer is missing": ("sglang", lambda r: r.pop(), "3 answers where 4 were asked for"),
    "sglang: tokens are missing": ("sglang", lambda r: pairs_of(r).update(completion_tokens=77), "and gave"),
}


@pytest.mark.parametrize(("kind", "change", "said"), FAULTS.values(), ids=FAULTS, indirect=["kind"])
def test_a_reply_that_is_not_sound_ends_it(
    server: ScriptedRolloutServer, kind: str, tmp_path: Path, change: Callable[[Any], Any], said: str
):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(0, {"w": b"one"})
    path = "/v1/completions" if "vllm" in kind else "/generate"
    server.spoil = with_changes(path, lambda reply: change(reply))
    with pytest.raises(EndpointError, match=said):
        sample(engine, 0)


@every_kind
def test_more_tokens_than_asked_for_are_refused(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path)
    engine.publish(0, {"w": b"one"})
    path = "/v1/completions" if "vllm" in kind else "/generate"
    one_token = SamplingParams(max_tokens=1, temperature=1.0, seed=1)

    def lengthen(reply: Any) -> None:
        pairs = pairs_of(reply)
        if "tokens" in pairs:
            pairs["tokens"].append("token_id:1")
            pairs["token_logprobs"].append(-1.0)
            reply["usage"]["completion_tokens"] += 1
        else:
            pairs["output_token_logprobs"].append([-1.0, 1, None])
            pairs["completion_tokens"] += 1

    server.spoil = with_changes(path, lengthen)
    with pytest.raises(EndpointError, match="with 2 tokens where at most 1 were asked for"):
        sample(engine, 0, one_token)


@every_kind
@pytest.mark.parametrize(
    ("fault", "said"),
    [("hang", r"no reply within 0\.5 s"), ((500, {}, b"oops"), "HTTP 500: Internal Server Error")],
    ids=["hang", "500"],
)
def test_a_server_that_hangs_or_fails_is_named_with_the_prompt(
    server: ScriptedRolloutServer, kind: str, tmp_path: Path, fault: Any, said: str
):
    engine = engine_for(server, kind, tmp_path, timeout_s=0.5)
    engine.publish(0, {"w": b"one"})
    server.script = [fault] * len(PROMPTS)
    with pytest.raises(EndpointError, match=rf"the prompt of key (11|4|30) in 1 tries: {said}"):
        sample(engine, 0)


@every_kind
def test_what_passes_is_tried_again(server: ScriptedRolloutServer, kind: str, tmp_path: Path):
    engine = engine_for(server, kind, tmp_path, num_tries=4)
    engine.publish(0, {"w": b"one"})
    server.script = [(503, {}, b"busy"), "cut", (500, {}, b"oops")]
    assert sample(engine, 0) == expected(b"one", 0)


def test_nobody_at_the_address_shows_at_once(tmp_path: Path):
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9.*refused"):
        connect("127.0.0.1:9", "sglang", write, tmp_path, adapters=False, num_tries=1)


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_which_of_several_models_must_be_said(server: ScriptedVllm, kind: str, tmp_path: Path):
    server.spoil = with_changes("/v1/models", lambda reply: reply["data"].append({"id": "second", "parent": None}))
    with pytest.raises(ValueError, match="serves base, second: name the one to train"):
        engine_for(server, kind, tmp_path)
    assert engine_for(server, kind, tmp_path, model="base").version is None
