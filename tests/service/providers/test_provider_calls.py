"""What both providers do with a stack's calls, without a stack: rows, names, settings, errors, both calling styles."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError

from lockstep.service.access import make_token
from lockstep.service.app import create_app, make_manager
from lockstep.service.llama_stack.mapping import RequestError
from lockstep.service.llama_stack.providers.inline import InlineConfig, get_provider_impl
from lockstep.service.llama_stack.providers.remote import (
    RemoteConfig,
    RemoteService,
    ServiceUnavailable,
    get_adapter_impl,
)
from lockstep.service.llama_stack.providers.settings import ProviderConfig
from lockstep.service.llama_stack.providers.training import (
    StackTraining,
    build_provider,
    find_datasetio,
    name_by_content,
)
from lockstep.service.llama_stack.providers.versions import PostTrainingByKeywords, PostTrainingByRequest
from lockstep.service.llama_stack.schemas import (
    Checkpoint,
    DPOAlignmentConfig,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    TrainingConfig,
    TrainingMetrics,
)
from lockstep.service.settings import ServiceSettings

CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": str(i)}]} for i in range(4)]
STACK = {"chat": CHAT, "gaps": [{**CHAT[0], "system": float("nan")}], "none": [], "dialog": [{"dialog": "no JSON"}]}


class Api(Enum):
    """As the stack's, which lies elsewhere in every second version."""

    inference = "inference"
    datasetio = "datasetio"


class DatasetIO:
    """As the stack's: rows by id, up to 0.4 by keywords."""

    async def iterrows(self, dataset_id: str, start_index: int | None = None, limit: int | None = None) -> Any:
        assert limit == -1, "all rows"
        return SimpleNamespace(data=STACK[dataset_id])


class RecordedService:
    """Takes everything, and remembers it."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.requests: list[Any] = []

    async def add_rows(self, name: str, lines: bytes) -> None:
        self.rows[name] = lines

    async def submit(self, request: Any) -> PostTrainingJob:
        self.requests.append(request)
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def jobs(self) -> JobList:
        return JobList(data=[])

    async def status(self, job_uuid: str) -> JobStatusResponse:
        made = datetime.fromtimestamp(0, UTC)
        metrics = [TrainingMetrics(epoch=1, train_loss=1.0), TrainingMetrics(epoch=2, train_loss=1.0)]
        metrics[1].validation_loss, metrics[1].perplexity = 2.0, 7.0
        checkpoints = [
            Checkpoint(
                identifier=str(number),
                created_at=made,
                epoch=number,
                post_training_job_id=job_uuid,
                path="/somewhere",
                training_metrics=found,
                format="model",
                step=number,
            )
            for number, found in enumerate(metrics)
        ]
        return JobStatusResponse(
            job_uuid=job_uuid, status="in_progress", checkpoints=checkpoints, warnings=["gamma is not used"]
        )

    async def artifacts(self, job_uuid: str) -> JobArtifactsResponse:
        return JobArtifactsResponse(job_uuid=job_uuid)

    async def cancel(self, job_uuid: str) -> None:
        self.requests.append(job_uuid)

    async def close(self) -> None:
        pass


def training(rows: str = "chat", **changes: Any) -> TrainingConfig:
    data = {"dataset_id": rows, "batch_size": 2, "shuffle": True, "data_format": "dialog", **changes.pop("data", {})}
    return TrainingConfig(**{"n_epochs": 1, "max_steps_per_epoch": 3, "data_config": data, **changes})


def provider(service: Any, config: Mapping[str, Any] | None = None) -> PostTrainingByKeywords:
    made = build_provider(service, {Api.datasetio: DatasetIO()}, ProviderConfig(**(config or {})))
    if not isinstance(
        made, PostTrainingByKeywords
    ):  # a newer stack is installed here: its rows are asked for otherwise
        pytest.skip("for the calling style of stacks up to 0.4")
    return made


def fine_tune(target: PostTrainingByKeywords, rows: str = "chat", **changes: Any) -> PostTrainingJob:
    config = changes.pop("training_config", None) or training(rows)
    return asyncio.run(target.supervised_fine_tune("one", config, {}, {}, model="org/model", **changes))


# --- rows and settings ------------------------------------------------------------------------------------------------


def test_rows_go_to_the_service_under_a_name_of_their_content():
    service = RecordedService()
    fine_tune(provider(service), training_config=training(data={"validation_dataset_id": "gaps"}))
    (request,) = service.requests
    data = request.training_config.data_config
    assert data.dataset_id.startswith("chat-")
    assert data.validation_dataset_id.startswith("gaps-")
    assert [json.loads(line) for line in service.rows[data.dataset_id].splitlines()] == CHAT
    assert json.loads(service.rows[data.validation_dataset_id]) == CHAT[0]  # a gap is no column


def test_a_name_follows_the_content():
    same, other = name_by_content("my/rows!", b"a"), name_by_content("my/rows!", b"b")
    assert same == name_by_content("my/rows!", b"a")
    assert same != other
    assert same.startswith("my-rows-")
    assert len(name_by_content("x" * 200, b"")) <= 64
    assert name_by_content("...", b"").startswith("rows-")


@pytest.mark.parametrize(
    ("rows", "words"),
    [("none", "has no rows"), ("dialog", "row 1 of data set dialog"), ("unknown", "data set unknown cannot be read")],
)
def test_bad_rows_are_refused_before_anything_is_sent(rows, words):
    service = RecordedService()
    with pytest.raises(RequestError, match=words):
        fine_tune(provider(service), rows)
    assert not service.rows
    assert not service.requests


def test_rows_that_are_no_json_are_named(monkeypatch):
    monkeypatch.setitem(STACK, "dates", [CHAT[0], {**CHAT[0], "when": datetime.now(UTC)}])
    with pytest.raises(RequestError, match="row 2 of data set dates cannot be sent as JSON"):
        fine_tune(provider(RecordedService()), "dates")


def test_the_operators_settings_lie_under_those_of_a_request():
    service = RecordedService()
    settings = {"launch": {"device": "cpu", "procs": 2}, "seed": 1}
    fine_tune(provider(service, {"settings": settings}), provider_config={"launch": {"procs": 1}})
    assert service.requests[0].provider_config == {"launch": {"device": "cpu", "procs": 1}, "seed": 1}
    assert settings == {"launch": {"device": "cpu", "procs": 2}, "seed": 1}


TRL = {  # as its run.yaml has them
    "device": "cpu",
    "dpo_beta": 0.3,
    "dpo_loss_type": "ipo",
    "use_reference_model": True,
    "max_seq_length": 512,
    "gradient_checkpointing": True,
    "logging_steps": 10,
    "warmup_ratio": 0.1,
    "weight_decay": 0.01,
}
FSDP = {
    "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision_policy": "bf16", "cpu_offload": True},
    "torch_run_config": {"nnodes": 1, "nproc_per_node": 2, "master_port": 29500},
}


def prefer(target: PostTrainingByKeywords, algorithm: Any, **changes: Any) -> PostTrainingJob:
    config = changes.pop("training_config", None) or training("pairs", data={"data_format": None})
    return asyncio.run(
        target.preference_optimize(
            job_uuid="one", training_config=config, algorithm_config=algorithm, finetuned_model="org/model", **changes
        )
    )


@pytest.mark.parametrize("nested", [False, True])
def test_keys_of_other_providers_are_taken(nested, monkeypatch):
    monkeypatch.setitem(STACK, "pairs", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    service = RecordedService()
    target = provider(service, {**FSDP, **({"training_config": TRL} if nested else TRL)})
    prefer(target, DPOAlignmentConfig())
    prefer(
        target,
        DPOAlignmentConfig(beta=0.7),
        training_config=training("pairs", data={"data_format": None}, dtype="fp32"),
    )
    fine_tune(target)
    left_out, said, tuned = service.requests
    assert left_out.provider_config == {
        "launch": {"device": "cpu", "procs": 2},
        "data": {"max_length": 512},
        "model": {"activation_checkpointing": "full"},
        "logging": {"every_steps": 10},
        "parallel": {"shard": "grad_op", "offload": True},
    }
    assert left_out.algorithm_config == DPOAlignmentConfig(beta=0.3, loss_type="ipo")
    optimizer = left_out.training_config.optimizer_config
    assert (optimizer.warmup_ratio, optimizer.weight_decay, left_out.training_config.dtype) == (0.1, 0.01, "bf16")
    assert (said.algorithm_config.beta, said.training_config.dtype) == (0.7, "fp32")
    assert tuned.algorithm_config is None, "a beta is no setting of fine-tuning"


def test_defaults_never_contradict_a_request():
    service = RecordedService()
    target = provider(service, TRL)
    fine_tune(target, training_config=training(optimizer_config={"optimizer_type": "adam", "num_warmup_steps": 3}))
    fine_tune(target, training_config=training(data={"packed": True}))
    adam, packed = (request.training_config.optimizer_config for request in service.requests)
    assert (adam.weight_decay, adam.warmup_ratio, adam.num_warmup_steps) == (None, None, 3)
    assert (packed.weight_decay, packed.warmup_ratio) == (0.01, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"device": "mps"}, "device: 'mps' is not available here: use cuda or cpu or auto"),
        ({"device": ["cuda"]}, "device: "),
        ({"dpo_beta": -1}, "greater than 0"),
        ({"dpo_loss_type": "exo"}, "loss_type"),
        ({"label_smoothing": 0.1}, "label_smoothing: 0.1 is not available"),
        ({"checkpoint_format": "full_state"}, "checkpoint_format: 'full_state' is not available"),
        ({"chat_template": "{prompt}"}, "chat_template: the model's own template is used"),
        ({"model_specific_config": {"trust_remote_code": True}}, "model_specific_config.trust_remote_code: True"),
        ({"fsdp_config": "full"}, "fsdp_config: 'full' holds no settings"),
        ({"fsdp_config": {"sharding": 1}}, "fsdp_config.sharding: there is no such setting"),
        ({"fsdp_config": {"sharding_strategy": "SOME"}}, "use FULL_SHARD or SHARD_GRAD_OP"),
        ({"torch_run_config": {"nnodes": 2}}, "torch_run_config.nnodes: 2 is not available here: use 1"),
        ({"training_config": {"devise": "cpu"}}, "training_config.devise: there is no such setting"),
        ({"request_defaults": {"training_config": {"epochs": 1}}}, "training_config.epochs"),
        ({"unheard_of": 1}, "unheard_of: there is no such setting"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused_by_name(config, words):
    with pytest.raises(ValidationError, match=re.escape(words)):
        ProviderConfig(**config)


def test_keys_without_effect_are_said(caplog):
    assert ProviderConfig(dataloader_num_workers=4, max_retries=3, device=None).settings == {}
    assert "dataloader_num_workers in run.yaml is not used" in caplog.text
    config = RemoteConfig(base_url="http://127.0.0.1:8080", timeout=3600)
    assert (config.url, config.timeout_s) == ("http://127.0.0.1:8080", 3600)
    with pytest.raises(ValidationError, match="base_url"):
        InlineConfig(base_url="http://127.0.0.1:8080")


def test_what_was_left_out_stays_left_out():
    service = RecordedService()
    fine_tune(provider(service))
    sent = service.requests[0].model_dump(mode="json", exclude_unset=True)
    assert "max_validation_steps" not in sent["training_config"]
    assert "provider_config" not in {key for key, value in sent.items() if value is not None}


def test_a_stack_without_datasetio_is_told_so():
    with pytest.raises(ValueError, match="add datasetio"):
        find_datasetio({Api.inference: object()})


# --- the two calling styles -------------------------------------------------------------------------------------------


def test_every_method_of_the_protocol_is_there():
    expected = {
        "supervised_fine_tune": {"job_uuid", "training_config", "hyperparam_search_config", "logger_config", "model"}
        | {"checkpoint_dir", "algorithm_config"},
        "preference_optimize": {"job_uuid", "finetuned_model", "algorithm_config", "training_config"}
        | {"hyperparam_search_config", "logger_config"},
        "get_training_jobs": set(),
        "get_training_job_status": {"job_uuid"},
        "cancel_training_job": {"job_uuid"},
        "get_training_job_artifacts": {"job_uuid"},
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(PostTrainingByKeywords, name))
        assert parameters <= set(signature.parameters), name
        # The stack reads classes, not their names.
        assert not any(isinstance(p.annotation, str) for p in signature.parameters.values()), name


class Body(BaseModel):
    """Like a stack's request class: with defaults that its caller did not write."""

    job_uuid: str
    finetuned_model: str
    training_config: dict[str, Any]
    algorithm_config: dict[str, Any]
    logger_config: dict[str, Any] = {}
    checkpoint_dir: str = "/filled/in"


def test_a_request_object_is_taken_as_its_caller_wrote_it():
    service = RecordedService()

    async def rows(dataset_id: str) -> Any:
        return STACK[dataset_id]

    target = PostTrainingByRequest(StackTraining(service, rows, ProviderConfig()))
    body = Body(
        job_uuid="two",
        finetuned_model="org/model",
        training_config=training().model_dump(exclude_unset=True),
        algorithm_config={"beta": 0.2},
        logger_config={"tensorboard": False, "lockstep": {"seed": 3}},
    )
    assert asyncio.run(target.preference_optimize(body)).job_uuid == "two"
    assert service.requests[0].provider_config == {"seed": 3}
    assert service.requests[0].logger_config == {"tensorboard": False}
    assert service.requests[0].algorithm_config == DPOAlignmentConfig(beta=0.2)
    asyncio.run(target.cancel_training_job(SimpleNamespace(job_uuid="two")))
    assert service.requests[1] == "two"


def test_metrics_with_a_gap_are_left_out_for_stacks_that_refuse_them():
    async def rows(dataset_id: str) -> Any:
        return []

    target = PostTrainingByRequest(StackTraining(RecordedService(), rows, ProviderConfig()))
    answer = asyncio.run(target.get_training_job_status(SimpleNamespace(job_uuid="two")))
    first, second = answer["checkpoints"]
    assert first["training_metrics"] is None
    assert second["training_metrics"]["perplexity"] == 7.0
    assert answer["resources_allocated"]["lockstep"]["warnings"] == ["gamma is not used"]
    assert "warnings" not in answer


def test_annotations_are_classes_because_older_stacks_make_their_schema_from_them():
    for method in (PostTrainingByKeywords.supervised_fine_tune, PostTrainingByKeywords.preference_optimize):
        parameters = inspect.signature(method).parameters.values()
        assert not [p.name for p in parameters if isinstance(p.annotation, str)]


def test_a_provider_is_loaded_without_heavy_libraries():
    names = ("inline", "remote", "training", "versions", "provider")
    modules = ", ".join(f"lockstep.service.llama_stack.providers.{name}" for name in names)
    program = f"import sys, {modules}; print(*{{'torch', 'transformers', 'numpy', 'llama_stack'}} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


# --- the service over HTTP --------------------------------------------------------------------------------------------


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    """A service behind whatever URL; it wants the token in `tokens`."""
    token, line = make_token("ann", "submit")
    (tmp_path / "tokens").write_text(line)
    monkeypatch.setenv("LOCKSTEP_TOKEN", token)
    settings = ServiceSettings(data_dir=tmp_path / "data", token_file=tmp_path / "tokens")
    manager = make_manager(settings)
    app = create_app(settings, manager)
    plain = httpx.AsyncClient

    def connect(**options: Any) -> httpx.AsyncClient:
        return plain(transport=httpx.ASGITransport(app), **options)

    monkeypatch.setattr(httpx, "AsyncClient", connect)
    yield app
    manager.close()


def remote(**config: Any) -> PostTrainingByKeywords:
    return provider(RemoteService(RemoteConfig(**config)))


def test_a_job_on_a_service(application):
    target = remote()
    assert fine_tune(target).job_uuid == "one"
    assert fine_tune(target).job_uuid == "one"  # a client that tries again
    assert [job.job_uuid for job in asyncio.run(target.get_training_jobs()).data] == ["one"]
    assert asyncio.run(target.get_training_job_status("one")).status == "scheduled"
    assert asyncio.run(target.get_training_job_artifacts("one")).checkpoints == []
    asyncio.run(target.cancel_training_job("one"))
    assert asyncio.run(target.get_training_job_status("one")).status == "cancelled"


def test_what_the_service_refuses_keeps_its_words(application):
    target = remote()
    fine_tune(target)
    with pytest.raises(ValueError, match="another content"):
        fine_tune(target, training_config=training(n_epochs=2))
    with pytest.raises(ValueError, match="there is no job none"):
        asyncio.run(target.get_training_job_status("none"))
    with pytest.raises(PermissionError, match="not in a folder"):
        asyncio.run(target.supervised_fine_tune("two", training(), {}, {}, model="/etc"))


def test_a_wrong_token(application):
    with pytest.raises(PermissionError, match="wants a token"):
        fine_tune(remote(api_token="wrong"))


def test_a_token_is_not_shown():
    assert "secret" not in repr(RemoteConfig(api_token="secret"))


def test_a_service_that_is_down_is_a_clear_error_of_each_request():
    target = asyncio.run(get_adapter_impl(RemoteConfig(url="http://127.0.0.1:9"), {Api.datasetio: DatasetIO()}))
    for _ in range(2):
        with pytest.raises(
            ServiceUnavailable, match=r"http://127.0.0.1:9 does not answer .*start it with lockstep serve"
        ):
            asyncio.run(target.get_training_jobs())
    assert issubclass(ServiceUnavailable, TimeoutError)  # what stacks answer as 504 with its text


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (httpx.Response(200, text="<html>"), ServiceUnavailable, "not a Lockstep service"),
        (httpx.Response(404, text="<html>"), ValueError, "is it a Lockstep service"),
        (
            httpx.Response(503, json={"error": {"code": "busy", "message": "try again"}}),
            ServiceUnavailable,
            "try again",
        ),
        (httpx.Response(403, json={"error": {"code": "x", "message": "not yours"}}), PermissionError, "not yours"),
    ],
)
def test_other_answers(monkeypatch, answer, error, words):
    plain = httpx.AsyncClient
    transport = httpx.MockTransport(lambda request: answer)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: plain(transport=transport, **options))
    with pytest.raises(error, match=words):
        asyncio.run(RemoteService(RemoteConfig()).jobs())


# --- the service inside -----------------------------------------------------------------------------------------------


def test_jobs_inside_the_stack_survive_it(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.service.scheduler.Scheduler.start", lambda self: None)  # the queue stands still
    deps = {Api.datasetio: DatasetIO()}
    config = InlineConfig(data_dir=str(tmp_path / "data"))
    first = asyncio.run(get_provider_impl(config, deps))
    if not isinstance(first, PostTrainingByKeywords):
        pytest.skip("for the calling style of stacks up to 0.4")
    fine_tune(first)
    with pytest.raises(PermissionError, match="not in a folder"):
        asyncio.run(first.supervised_fine_tune("two", training(), {}, {}, model="/etc"))
    asyncio.run(first.shutdown())
    second = asyncio.run(get_provider_impl(config, deps))
    assert asyncio.run(second.get_training_job_status("one")).status == "scheduled"
    asyncio.run(second.cancel_training_job("one"))
    assert asyncio.run(second.get_training_job_status("one")).status == "cancelled"
    asyncio.run(second.shutdown())
