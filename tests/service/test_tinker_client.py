"""Tinker's own client against the service: what its users call, and what it is told when they are mistaken."""

from __future__ import annotations

import asyncio
import math
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from service_process import wait_for
from tinker_service import KEY, MODEL, TinkerService, datum, tinker_service

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
ADAM = tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerService]:
    with tinker_service(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: TinkerService) -> tinker.ServiceClient:
    return service.client()


@pytest.fixture
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=7)


def rest(service: TinkerService) -> tinker.RestClient:
    return tinker.RestClient(base_url=service.url, api_key=KEY)


def test_a_step(service, client, trainer):
    models = client.get_server_capabilities().supported_models
    assert [model.model_name for model in models] == [MODEL, "other"]
    passes = trainer.forward_backward([datum(1, 2, 3), datum(4, 5)], "cross_entropy")
    step = trainer.optim_step(ADAM)  # both are on their way
    result = passes.result()
    assert [each["logprobs"].tolist() for each in result.loss_fn_outputs] == [[-2.5, -3.5, -0.5], [-5.5, -0.5]]
    assert result.metrics["loss:sum"] == pytest.approx(12.5)
    assert step.result().metrics == {"grad_norm": 1.0, "step": 1.0}
    assert math.isnan(trainer.optim_step(ADAM).result().metrics["grad_norm"])  # there was no gradient
    info = trainer.get_info()
    assert (info.model_data.model_name, info.lora_rank) == (MODEL, 4)
    created = service.journal("create_model")[-1]
    assert created == {
        "method": "create_model",
        "pid": created["pid"],
        "model_id": trainer.model_id,
        "rank": 4,
        "seed": 7,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }
    sent = service.journal("optim_step")[-1]
    assert {
        name: sent[name] for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    } == {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }


def test_a_forward_pass_and_a_loss_of_the_clients_own(service, trainer):
    assert trainer.forward([datum(1, 2)], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(3.0)
    assert service.journal("forward_backward")[-1]["forward_only"] is True

    def squares(data: Any, logprobs: Any) -> Any:
        loss = sum((each**2).sum() for each in logprobs)
        return loss, {"mine": loss.item()}

    metrics = trainer.forward_backward_custom([datum(1, 2)], squares).result().metrics
    assert metrics["mine"] == pytest.approx(2.5**2 + 0.5**2)
    assert service.journal("forward_backward")[-1]["forward_only"] is False


def test_chunks_run_in_the_order_of_their_numbers(service, trainer):
    """More data than go into one request are sent at once, the first of them last."""
    data = [datum(1, number % 50) for number in range(2500)]
    result = trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    asked = [each for each in service.journal("forward_backward", "optim_step") if each["model_id"] == trainer.model_id]
    assert [each["method"] for each in asked] == ["forward_backward"] * 3 + ["optim_step"]
    assert [len(each["lengths"]) for each in asked[:3]] == [1024, 1024, 452]
    expected = [-(number % 50 % 7) - 0.5 for number in range(2500)]
    assert [each["logprobs"].data[0] for each in result.loss_fn_outputs] == expected


def test_checkpoints_are_named_listed_loaded_and_deleted(service, client, trainer):
    trainer.optim_step(ADAM).result()
    path = trainer.save_state("step-1", ttl_seconds=7200).result().path
    assert path == f"tinker://{trainer.model_id}/weights/step-1"
    sampler_path = trainer.save_weights_for_sampler("step-1").result().path
    api = rest(service)
    listed = {each.tinker_path: each for each in api.list_checkpoints(trainer.model_id).result().checkpoints}
    assert listed.keys() == {path, sampler_path}
    assert (listed[path].checkpoint_type, listed[sampler_path].checkpoint_type) == ("training", "sampler")
    assert listed[path].size_bytes
    assert listed[path].expires_at is not None
    run = api.get_training_run(trainer.model_id).result()
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == (MODEL, 4, path)
    assert trainer.model_id in [
        each.training_run_id for each in api.list_training_runs(limit=100).result().training_runs
    ]
    everything = api.list_user_checkpoints(limit=1, offset=0).result()
    assert len(everything.checkpoints) == 1
    assert everything.cursor.total_count >= 2
    info = api.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_attn) == (MODEL, True, 4, True)
    api.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert api.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at is None

    for make in (client.create_training_client_from_state, client.create_training_client_from_state_with_optimizer):
        again = make(path)
        assert again.optim_step(ADAM).result().metrics["step"] == 2
    assert [each["with_optimizer"] for each in service.journal("load_weights")][-2:] == [False, True]
    api.delete_checkpoint_from_tinker_path(sampler_path).result()
    assert [each.tinker_path for each in api.list_checkpoints(trainer.model_id).result().checkpoints] == [path]
    with pytest.raises(tinker.APIStatusError, match="there is no checkpoint"):
        client.create_sampling_client(model_path=sampler_path)
    with pytest.raises(tinker.APIStatusError, match="no public checkpoints"):
        api.publish_checkpoint_from_tinker_path(path).result()


def test_a_name_is_taken_until_it_may_be_overwritten(service, trainer):
    trainer.save_state("same").result()
    trainer.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="there is already a checkpoint") as caught:
        trainer.save_state("same").result()
    assert caught.value.category == "user"
    path = trainer.save_state("same", overwrite=True).result().path
    sampler = trainer.create_sampling_client(path)
    assert sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=2)).result().sequences[0].tokens[0] == 1
    assert (
        service.journal("close_adapter")[-1]["adapter"] == service.journal("sample")[-1]["adapter"]
    )  # the old weights


def test_samples_of_the_base_model_of_checkpoints_and_of_unnamed_weights(service, client, trainer):
    params = tinker.SamplingParams(max_tokens=4, temperature=0.5, seed=3, top_k=5, top_p=0.9, stop=["x"])
    base = client.create_sampling_client(base_model=MODEL)
    response = base.sample(PROMPT, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert [list(each.tokens) for each in response.sequences] == [[0, 1, 2, 3]] * 2
    assert len({each.sequence_id for each in response.sequences}) == 2
    assert response.prompt_logprobs == [None, -2.0, -3.0]
    sent = service.journal("sample")[-1]
    assert (sent["adapter"], sent["seed"], sent["stop"], sent["top_k"]) == ("", 3, ["x"], 5)
    assert base.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result() == [None, None, -3.0]
    for _ in range(2):
        trainer.optim_step(ADAM).result()
    unnamed = trainer.save_weights_and_get_sampling_client()
    path = trainer.save_weights_for_sampler("two").result().path
    trainer.optim_step(ADAM).result()
    for sampler in (unnamed, client.create_sampling_client(model_path=path)):
        assert sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1)).result().sequences[0].tokens[0] == 2
    assert rest(service).get_sampler(unnamed._sampling_session_id).result().base_model == MODEL  # the client's own


def test_weights_for_other_programs_are_downloaded_by_signed_addresses(service, trainer):
    path = trainer.save_weights_external("peft").result().path
    urls = rest(service).get_external_weights_urls(path).result().urls
    assert urls.keys() == {"adapter_model.safetensors"}
    (url,) = urls.values()
    with urllib.request.urlopen(url) as answer:
        assert b"step" in answer.read()
    for wrong in (
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("expires=1", "expires=2"),
        url.split("?")[0],
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(wrong)
        assert caught.value.code in (403, 422)


def test_mistakes_are_told_at_once_and_the_model_goes_on(trainer):
    began = time.monotonic()
    wrong = [
        (trainer.forward_backward([datum(1, 2)], "no_such_loss"), "there is no loss 'no_such_loss'"),
        (trainer.forward_backward([datum(1, 2, target_tokens=[1])], "cross_entropy"), "model_input 2 tokens"),
        (trainer.optim_step(tinker.types.DimuonParams(learning_rate=0.1)), "no 'dimuon'"),
        (trainer.save_state("../other"), "no name for a checkpoint"),
        (trainer.save_state(".hidden"), "no name for a checkpoint"),
        (trainer.save_weights_for_sampler("a/b"), "no name for a checkpoint"),
        (trainer.optim_step(tinker.AdamParams(beta1=1.0)), "adam_params.beta1"),
    ]
    for future, sentence in wrong:
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            future.result()
        assert caught.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="out of memory") as failed:
        trainer.forward_backward([datum(1, 2)], "explode").result()
    assert failed.value.category == "server"
    assert trainer.optim_step(ADAM).result().metrics["step"] == 1
    assert time.monotonic() - began < 5


def test_mistakes_in_what_is_created_are_told_at_once(client):
    began = time.monotonic()
    for call, sentence in (
        (lambda: client.create_lora_training_client("no/model"), "there is no base model 'no/model'"),
        (lambda: client.create_lora_training_client(MODEL, rank=0), "lora_config.rank"),
        (lambda: client.create_sampling_client(base_model="no/model"), "there is no base model"),
        (lambda: client.create_sampling_client(model_path="tinker://no/weights/x"), "there is no checkpoint"),
        (lambda: client.create_sampling_client(model_path="tinker://no/such"), "no path of a checkpoint"),
        (lambda: client.create_training_client_from_state("tinker://no/weights/x"), "there is no checkpoint"),
        (
            lambda: client.create_sampling_client(base_model=MODEL).sample(PROMPT, 0, tinker.SamplingParams()).result(),
            "num",
        ),
    ):
        with pytest.raises(tinker.APIStatusError, match=sentence):
            call()
    assert time.monotonic() - began < 5


def test_an_abandoned_sample_is_cancelled(service, client):
    (service.model / "sample_delay").write_text("30")
    sampler = client.create_sampling_client(base_model=MODEL)

    async def abandon() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample_async(PROMPT, 1, tinker.SamplingParams(max_tokens=1)), 0.5)

    try:
        asyncio.run(abandon())
        wait_for(lambda: service.journal("cancel"), 10)
        assert service.journal("cancel")[-1]["call"] == service.journal("sample")[-1]["call"]
    finally:
        (service.model / "sample_delay").unlink()


def test_a_finished_session_frees_what_it_had(service):
    mine = service.client()
    trainer = mine.create_lora_training_client(MODEL, rank=4)
    trainer.save_weights_and_get_sampling_client()
    folder = Path(service.journal("save_weights")[-1]["folder"])
    assert folder.exists()
    mine.close("success").result()
    wait_for(lambda: [each for each in service.journal("unload_model") if each["model_id"] == trainer.model_id], 10)
    wait_for(lambda: not folder.exists(), 10)
    assert [each for each in service.journal("close_adapter") if each["adapter"] == str(folder)]
    answer = service.step(trainer.model_id, 5)
    assert answer.status_code == 410
    assert "its session was finished; it has no checkpoint" in answer.json()["error"]


def test_a_long_poll_ends_with_the_result(service, trainer):
    (service.model / "delay").write_text("0.3")
    try:
        began = time.monotonic()
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result()
    finally:
        (service.model / "delay").unlink()
    assert 0.3 < time.monotonic() - began < 10  # a poll waits for 30
