"""Who may do what through the Tinker API, and what strangers and bad requests are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from fastapi.testclient import TestClient
from tinker_service import MODEL, PROTOBUF, TinkerService, datum, tinker_service

from lockstep.service.access import make_token
from lockstep.service.app import create_app
from lockstep.service.settings import ServiceSettings

USERS = {"ann": "submit", "bob": "submit", "eve": "read", "root": "admin"}


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinkerService, dict[str, str]]]:
    """A service with tokens, and the key of each user."""
    folder = tmp_path_factory.mktemp("tinker")
    made = {name: make_token(name, role) for name, role in USERS.items()}
    (folder / "tokens").write_text("".join(f"{line}\n" for _, line in made.values()))
    with tinker_service(folder, token_file=folder / "tokens") as service:
        yield service, {name: f"tml-{token}" for name, (token, _) in made.items()}


def test_strangers_are_told_in_the_clients_words(people):
    service, keys = people
    for key in ("tml-wrong", keys["ann"].removeprefix("tml-"), "tml-", ""):
        for answer in (service.post("create_session", key=key), service.get("training_runs", key=key)):
            assert answer.status_code == 401
            assert answer.json() == {"error": answer.json()["error"], "category": "user"}
    with pytest.raises(tinker.AuthenticationError, match="wants a token"):
        tinker.ServiceClient(base_url=service.url, api_key="tml-wrong").get_server_capabilities()
    assert service.get("healthz", key="").json() == {"status": "ok"}


def test_a_key_opens_what_the_token_opens(people):
    service, keys = people
    for headers in ({"X-API-Key": keys["ann"]}, {"Authorization": f"Bearer {keys['ann'].removeprefix('tml-')}"}):
        assert httpx.get(f"{service.url}/api/jobs", headers=headers).status_code == 200
        assert httpx.get(f"{service.url}/api/v1/training_runs", headers=headers).status_code == 200


def test_submitters_see_their_own_and_admins_all(people):
    service, keys = people
    mine = service.client(keys["ann"])
    trainer = mine.create_lora_training_client(MODEL, rank=2)
    path = trainer.save_state("one").result().path
    session, model = mine.holder.get_session_id(), trainer.model_id
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}

    def statuses(name: str) -> dict[str, int]:
        key = keys[name]
        sampler = {"session_id": service.open_session(key), "sampling_session_seq_id": 0, "model_path": path}
        return {
            "run": service.get(f"training_runs/{model}", key).status_code,
            "checkpoints": service.get(f"training_runs/{model}/checkpoints", key).status_code,
            "session": service.get(f"sessions/{session}", key).status_code,
            "weights": service.post("weights_info", {"tinker_path": path}, key).status_code,
            "step": service.post("optim_step", step, key).status_code,
            "info": service.post("get_info", {"model_id": model}, key).status_code,
            "result": service.post("retrieve_future", {"request_id": f"{model}:1"}, key).status_code,
            "again": service.post("save_weights", {"model_id": model, "seq_id": 1}, key).status_code,
            "sampler": service.post("create_sampling_session", sampler, key).status_code,
            "model": service.post(
                "create_model",
                {"session_id": session, "model_seq_id": 9, "base_model": MODEL, "lora_config": {"rank": 1}},
                key,
            ).status_code,
        }

    assert statuses("bob") == {**dict.fromkeys(statuses("bob"), 404), "model": 410}
    assert set(statuses("root").values()) == {200}
    for name, number in (("ann", 1), ("bob", 0), ("eve", 1), ("root", 1)):
        runs = service.get("training_runs", keys[name]).json()
        assert (runs["cursor"]["total_count"] >= 1) == bool(number), name
        assert bool(service.get("checkpoints", keys[name]).json()["checkpoints"]) == bool(number)
    theirs = service.client(keys["bob"]).create_lora_training_client(MODEL, rank=2)
    body = {"model_id": theirs.model_id, "seq_id": 1, "path": path, "optimizer": False}
    request_id = service.post("load_weights", body, keys["bob"]).json()["request_id"]
    told = service.post("retrieve_future", {"request_id": request_id}, keys["bob"]).json()
    assert "there is no checkpoint" in told["error"]
    delete = f"{service.url}/api/v1/training_runs/{model}/checkpoints/weights/one"
    assert httpx.delete(delete, headers={"X-API-Key": keys["bob"]}).status_code == 404
    assert httpx.delete(delete, headers={"X-API-Key": keys["eve"]}).status_code == 403
    assert httpx.delete(delete, headers={"X-API-Key": keys["ann"]}).status_code == 204


def test_readers_read(people):
    service, keys = people
    api = tinker.RestClient(base_url=service.url, api_key=keys["eve"])
    assert api.list_training_runs().result().training_runs is not None
    assert service.post("create_session", key=keys["eve"]).status_code == 403
    with pytest.raises(tinker.PermissionDeniedError, match="may only read"):
        service.client(keys["eve"]).create_lora_training_client(MODEL)


# --- bad requests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    with tinker_service(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.mark.parametrize(
    "path",
    [
        *("create_session", "session_heartbeat", "create_model", "get_info", "unload_model", "optim_step"),
        *("save_weights", "save_weights_for_sampler", "load_weights", "weights_info", "create_sampling_session"),
        *("asample", "retrieve_future", "cancel_future", "forward_backward"),
    ],
)
def test_bodies_that_are_not_what_they_should_be_are_a_sentence(service, path):
    deep = b"[" * 100_000
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", deep, b'{"seq_id": "x"}', b'{"session_id": 3, "tags": 5}'):
        for kind in ("application/json", PROTOBUF):
            answer = service.post(path, content=content, headers={"Content-Type": kind})
            if path == "create_session" and answer.status_code == 200:
                continue  # it needs nothing
            assert answer.status_code in (404, 410, 422), (path, content[:20], answer.text)
            assert answer.json().keys() == {"error", "category"}
            assert answer.json()["category"] == ("server" if answer.status_code == 410 else "user")


def test_what_is_not_there_is_said(service):
    session = service.open_session()
    for path, body in (
        ("get_info", {"model_id": "nobody"}),
        ("optim_step", {"model_id": "nobody", "seq_id": 1}),
        ("retrieve_future", {"request_id": "nothing"}),
        ("cancel_future", {"request_id": "nothing"}),
        ("weights_info", {"tinker_path": "tinker://a/weights/b"}),
        ("weights_info", {"tinker_path": "tinker://a/sampler_weights/.."}),
        ("create_custom_loss", {}),
        ("retrieve_futures", {}),
        ("no/such/thing", {}),
        ("auth/token", {}),
    ):
        answer = service.post(path, body)
        assert answer.status_code == 404, (path, answer.text)
        assert answer.json()["category"] == "user"
    for path in ("samplers/x", "training_runs/x", "training_runs/x/checkpoints", "sessions/x", "nothing"):
        assert service.get(path).status_code == 404
    for number in (0, 1):  # a sampler of nothing
        body = {"session_id": session, "sampling_session_seq_id": number}
        assert service.post("create_sampling_session", body).status_code == 422
    assert service.get("training_runs?limit=-1").status_code == 422
    assert service.get("checkpoints?offset=x").json()["category"] == "user"


def test_refused_requests_to_a_model_leave_no_hole(service):
    """Each is told at its turn; the next one is done."""
    model = service.open_model(service.open_session())
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("optim_step", {}, "adam_params is missing"),
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "no 'dimuon'"),
        ("save_weights", {}, "path is missing"),
        ("save_weights", {"path": "a\u0000b"}, "no name for a checkpoint"),
        ("save_weights", {"path": "x", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1"]}, "does not encrypt"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": False}, "there is no checkpoint"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": False}, "no path of a checkpoint"),
        ("load_weights", {"path": "tinker://x/weights/../..", "optimizer": False}, "no path of a checkpoint"),
        ("load_weights", {"optimizer": False}, "path"),
    ]
    for number, (path, body, sentence) in enumerate(wrong, start=1):
        request_id = service.post(path, {"model_id": model, "seq_id": number, **body}).json()["request_id"]
        told = service.fetch(request_id)
        assert sentence in told["error"]
        assert told["category"] == "user"
    bad = service.send_pass(model, len(wrong) + 1, datum(1, 2, target_tokens=[5])).json()["request_id"]
    assert "model_input 2 tokens" in service.fetch(bad)["error"]
    assert "metrics" in service.fetch(service.step(model, len(wrong) + 2).json()["request_id"])


def test_large_bodies_have_their_own_bounds(service):
    model = service.open_model(service.open_session())
    sent = service.send_pass(model, 1, datum(*range(600_000)))  # more than the service takes elsewhere
    assert sent.status_code == 200
    for path, size in (("forward_backward", (64 << 20) + 1), ("asample", (8 << 20) + 1), ("optim_step", (1 << 20) + 1)):
        answer = service.post(path, content=bytes(size), headers={"Content-Type": PROTOBUF})
        assert answer.status_code == 413
        assert "larger than" in answer.json()["error"]


def test_compressed_and_other_kinds_of_bodies_are_refused(service):
    for headers, sentence in (
        ({"Content-Type": "application/json"}, "is protobuf"),
        ({"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}, "compressed"),
    ):
        answer = service.post("forward_backward", content=b"{}", headers=headers)
        assert answer.status_code == 422
        assert sentence in answer.json()["error"]


def test_half_a_character_is_refused_and_a_whole_one_is_not(service):
    for text, status in (("\\ud83d", 422), ("\\ude00\\ud83d", 422), ("\\ud83d\\ude00", 200)):
        for body in (f'{{"display_name": "{text}"}}', f'{{"user_metadata": {{"a": ["{text}"]}}}}'):
            assert service.post("create_session", content=body.encode()).status_code == status


def test_what_clients_say_of_their_runs_is_listed_as_text(service):
    metadata = {"number": 1.5, "nested": {"a": [1]}, "nothing": None}
    session = service.post("create_session", {"user_metadata": metadata}).json()["session_id"]
    expected = {"number": "1.5", "nested": "{'a': [1]}", "nothing": "None"}
    assert service.get(f"sessions/{session}").json()["user_metadata"] == expected
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "user_metadata": metadata}
    sent = service.post("create_model", {**body, "lora_config": {"rank": 1}}).json()
    assert service.fetch(sent["request_id"])["model_id"]
    assert service.get("training_runs").json()["training_runs"][0]["user_metadata"] == expected


def test_a_request_that_cannot_be_cancelled(service):
    model = service.open_model(service.open_session())
    request_id = service.step(model, 1).json()["request_id"]
    answer = service.post("cancel_future", {"request_id": request_id})
    assert answer.status_code == 422
    assert "only sampling" in answer.json()["error"]


def test_there_is_no_tinker_api_unless_it_is_asked_for(make_manager, tmp_path: Path):
    app = create_app(ServiceSettings(data_dir=tmp_path / "data"), make_manager())
    with TestClient(app, base_url="http://localhost") as client:
        for answer in (client.post("/api/v1/create_session", json={}), client.get("/api/v1/healthz")):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        assert "/api/v1/" not in json.dumps(client.get("/api/openapi.json").json())
