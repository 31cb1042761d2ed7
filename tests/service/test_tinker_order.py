"""Requests of the Tinker API that arrive in any order, twice, late, never, or are never asked for again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_process import wait_for
from tinker_service import MODEL, TinkerService, datum, tinker_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    folder = tmp_path_factory.mktemp("tinker")
    with tinker_service(folder, order_timeout_s=2, poll_s=0.3, kept_s=0.4, max_unnamed=2) as running:
        yield running


@pytest.fixture
def model(service: TinkerService) -> str:
    return service.open_model(service.open_session())


def passes_of(service: TinkerService, model: str) -> list[int]:
    """How many tokens each pass had, in the order in which they ran."""
    return [each["lengths"][0] for each in service.journal("forward_backward") if each["model_id"] == model]


def until_done(service: TinkerService, request_id: str) -> dict[str, object]:
    return wait_for(lambda: (found := service.fetch(request_id)).get("type") != "try_again" and found, 20)


def test_the_number_decides_not_the_arrival(service, model):
    for number in (3, 2, 4):
        service.send_pass(model, number, datum(*range(number)))
    step = service.step(model, 5).json()["request_id"]
    assert service.fetch(step) == {"type": "try_again", "request_id": step, "queue_state": "active"}
    assert passes_of(service, model) == []
    service.send_pass(model, 1, datum(9))
    assert until_done(service, step)["metrics"]["grad_norm"] == 4
    assert passes_of(service, model) == [1, 2, 3, 4]


def test_what_is_sent_again_is_done_once(service, model):
    (service.model / "delay").write_text("0.2")
    try:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: service.send_pass(model, 1).json(), range(8)))
    finally:
        (service.model / "delay").unlink()
    assert len({answer["request_id"] for answer in answers}) == 1
    steps = [service.step(model, 2).json()["request_id"] for _ in range(3)]
    assert until_done(service, steps[0])["metrics"] == {"grad_norm": 1.0, "step": 1}
    assert passes_of(service, model) == [2]
    # Also long after its result was dropped.
    wait_for(lambda: service.post("retrieve_future", {"request_id": steps[0]}).status_code == 410, 20)
    assert service.step(model, 2).json()["request_id"] == steps[0]
    assert len([each for each in service.journal("optim_step") if each["model_id"] == model]) == 1


def test_models_and_samplers_are_created_once(service):
    session = service.open_session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2}}
    ids = {service.post("create_model", body).json()["request_id"] for _ in range(3)}
    assert ids == {f"{session}:train:0:0"}
    until_done(service, ids.pop())
    assert len([each for each in service.journal("create_model") if each["model_id"] == f"{session}:train:0"]) == 1
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    assert {service.post("create_sampling_session", sampler).json()["sampling_session_id"] for _ in range(2)} == {
        f"{session}:sample:0"
    }


def sample_body(sampler: str, number: int) -> dict[str, object]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": {"max_tokens": 1}}


def test_samples_are_drawn_once(service):
    session = service.open_session()
    sampler = service.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 3, "base_model": MODEL}
    ).json()["sampling_session_id"]
    big = 10**18
    answers = [service.post("asample", sample_body(sampler, number)).json() for number in (0, big, 0)]
    assert [answer["request_id"] for answer in answers] == [f"{sampler}:0", f"{sampler}:{big}", f"{sampler}:0"]
    wait_for(lambda: service.post("retrieve_future", {"request_id": f"{sampler}:0"}).content, 20)
    assert len([each for each in service.journal("sample") if each["call"].startswith(sampler)]) == 2


def test_a_number_that_never_comes_is_named(service, model):
    ids = [service.send_pass(model, number).json()["request_id"] for number in (1, 3, 5)]
    assert service.post("retrieve_future", {"request_id": ids[0]}).headers["content-type"] == "application/x-protobuf"
    for request_id in ids[1:]:
        failed = until_done(service, request_id)
        assert f"request 2 of model {model} did not arrive within 2 s" in failed["error"]
        assert failed["category"] == "user"
    late = service.send_pass(model, 2).json()["request_id"]
    assert "did not arrive" in until_done(service, late)["error"]
    assert len(passes_of(service, model)) == 1
    step = service.step(model, 6).json()["request_id"]
    assert until_done(service, step)["metrics"]["grad_norm"] == 1


def test_numbers_out_of_reach_are_refused(service, model):
    for number in (0, -1, 20_000):
        answer = service.step(model, number)
        assert answer.status_code == 422
        assert f"seq_id {number} " in answer.json()["error"]
    service.send_pass(model, 1)
    answer = service.step(model, 1)
    assert answer.status_code == 422
    assert "taken by another request: forward_backward" in answer.json()["error"]


def test_many_polls_wait_without_a_thread(service, model):
    """More than there are threads, each for as long as a poll waits."""
    request_id = service.step(model, 2).json()["request_id"]
    began = time.monotonic()
    with ThreadPoolExecutor(60) as threads:
        answers = list(threads.map(lambda _: service.fetch(request_id), range(60)))
    assert {answer.get("type", "failed") for answer in answers} <= {"try_again", "failed"}
    assert time.monotonic() - began < 10


def test_results_are_dropped_a_while_after_they_were_fetched(service, model):
    request_id = service.step(model, 1).json()["request_id"]
    unasked = service.step(model, 2).json()["request_id"]
    until_done(service, request_id)
    wait_for(lambda: service.post("retrieve_future", {"request_id": request_id}).status_code == 410, 20)
    assert "metrics" in service.fetch(unasked)  # nobody had asked for it
    assert service.post("retrieve_future", {"request_id": f"{model}:9"}).status_code == 404


def test_unnamed_weights_beyond_the_bound_are_deleted(service, model):
    samplers = []
    for number in range(3):
        body = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
        request_id = service.post("save_weights_for_sampler", body).json()["request_id"]
        samplers.append(until_done(service, request_id)["sampling_session_id"])
    statuses = [service.post("asample", sample_body(sampler, 0)).status_code for sampler in samplers]
    assert statuses == [404, 200, 200]
    folders = service.data_dir / "tinker" / "unnamed"
    mine = f"{model.partition(':')[0]}-*"
    wait_for(lambda: len(list(folders.glob(mine))) == 2, 20)


def test_too_much_at_once_is_refused_or_told_to_wait(tmp_path):
    with tinker_service(tmp_path, max_models=1, max_samples=1, max_waiting_bytes=100, max_kept=3) as service:
        session = service.open_session()
        model = service.open_model(session)
        body = {"session_id": session, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 2}}
        refused = service.post("create_model", body)
        assert refused.status_code == 422  # not 429: its client would send it again for minutes
        assert "as many as this server holds" in refused.json()["error"]
        service.open_model(session, 2, base="other")
        many = service.send_pass(model, 1, *(datum(1, 2, 3, 4) for _ in range(20)))
        assert many.status_code == 429
        (service.model / "sample_delay").write_text("5")
        made = service.post(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        )
        sampler = made.json()["sampling_session_id"]
        assert [service.post("asample", sample_body(sampler, number)).status_code for number in range(2)] == [200, 429]
        assert service.post("cancel_future", {"request_id": f"{sampler}:0"}).status_code == 204
        assert "was cancelled" in service.fetch(f"{sampler}:0")["error"]
        for number in range(1, 6):
            service.step(model, number)
        assert "metrics" in until_done(service, f"{model}:5")
        statuses = [service.post("retrieve_future", {"request_id": f"{model}:{n}"}).status_code for n in range(1, 6)]
        assert statuses == [410, 410, 200, 200, 200]
        service.post("unload_model", {"model_id": model})
        assert service.open_model(session, 3)
