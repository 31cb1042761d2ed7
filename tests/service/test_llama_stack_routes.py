"""Llama Stack's API as the service itself serves it, without llama-stack: paths, ownership, data sets, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lockstep.config import parse_config
from lockstep.rundir import RunDir
from lockstep.service.access import make_token
from lockstep.service.admission import Allowed
from lockstep.service.app import create_app, make_manager
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings

CHAT = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": str(i)}]} for i in range(8)
]
DIALOG = [{"dialog": json.dumps(row["messages"])} for row in CHAT]
PAIRS = [{"prompt": f"say {i}", "chosen": str(i), "rejected": "no"} for i in range(8)]


class Service:
    """The application and its manager. No job is ever started: the queue stands still."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        chosen = ServiceSettings(data_dir=folder, **settings)
        self.manager: JobManager = make_manager(chosen)
        self.client = TestClient(create_app(chosen, self.manager), base_url="http://127.0.0.1")

    def upload(self, name: str, rows: list[dict[str, Any]], **options: Any) -> None:
        body = "".join(json.dumps(row) + "\n" for row in rows)
        assert self.client.post(f"/api/datasets/{name}", content=body, **options).status_code == 201

    def fine_tune(self, job: str = "one", *, version: str = "v1", **changes: Any) -> Any:
        headers = {"Content-Type": "application/json", **changes.pop("headers", {})}
        body = {"job_uuid": job, "model": "org/model", "training_config": training(), **changes}
        return self.client.post(
            f"/{version}/post-training/supervised-fine-tune", content=json.dumps(body), headers=headers
        )

    def config(self, job: str = "one") -> Any:
        return parse_config(self.manager.store.get(job).config)


def training(rows: str = "chat", **changes: Any) -> dict[str, Any]:
    data = {"dataset_id": rows, "batch_size": 2, "shuffle": True, "data_format": "dialog", **changes.pop("data", {})}
    return {"n_epochs": 1, "max_steps_per_epoch": 10, "data_config": data, **changes}


def message(answer: Any) -> str:
    return answer.json()["error"]["message"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "data")
    made.upload("chat", CHAT)
    yield made
    made.manager.close()


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Headers of two people and of the operator; the file that lets them in is `tokens`."""
    made = {name: make_token(name, role) for name, role in (("ann", "submit"), ("bob", "submit"), ("eve", "read"))}
    (tmp_path / "tokens").write_text("".join(line + "\n" for _, line in made.values()))
    return {name: {"Authorization": f"Bearer {token}"} for name, (token, _) in made.items()}


@pytest.fixture
def guarded(tmp_path: Path, tokens: dict[str, dict[str, str]]) -> Iterator[Service]:
    made = Service(tmp_path / "data", token_file=tmp_path / "tokens")
    made.upload("chat", CHAT, headers=tokens["ann"])
    yield made
    made.manager.close()


# --- submitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_a_job_under_every_path(service, version):
    assert service.fine_tune(version=version).json() == {"job_uuid": "one"}
    listed = service.client.get(f"/{version}/post-training/jobs").json()
    assert listed == {"data": [{"job_uuid": "one", "status": "scheduled"}]}
    status = service.client.get(f"/{version}/post-training/job/status", params={"job_uuid": "one"}).json()
    assert (status["job_uuid"], status["status"]) == ("one", "scheduled")
    artifacts = service.client.get(f"/{version}/post-training/job/artifacts", params={"job_uuid": "one"}).json()
    assert artifacts == {"job_uuid": "one", "checkpoints": []}
    cancelled = service.client.post(f"/{version}/post-training/job/cancel", json={"job_uuid": "one"})
    assert (cancelled.status_code, cancelled.json()) == (200, None)
    assert service.manager.get("one").state == "cancelled"


def test_the_job_may_be_in_the_path(service):
    service.fine_tune()
    start = "/v1alpha/post-training/jobs/one"
    assert service.client.get(f"{start}/status").json()["status"] == "scheduled"
    assert service.client.get(f"{start}/artifacts").json()["checkpoints"] == []
    assert service.client.post(f"{start}/cancel").status_code == 200
    assert service.client.get(f"{start}/status").json()["status"] == "cancelled"


def test_the_configuration_is_the_one_asked_for(service):
    service.fine_tune(training_config=training(gradient_accumulation_steps=2, dtype="fp32"))
    config = service.config()
    assert (config.batch.samples, config.model.precision, config.model.path) == (4, "fp32", "org/model")
    assert [Path(source.path).name for source in config.data.train] == ["chat.jsonl"]


def test_preferences(service):
    service.upload("pairs", PAIRS)
    body = {
        "job_uuid": "two",
        "finetuned_model": "org/model",
        "algorithm_config": {"reward_scale": 0.2, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 0.9},
        "training_config": training("dataset:pairs"),
        "hyperparam_search_config": {},
        "logger_config": {},
    }
    assert service.client.post("/v1/post-training/preference-optimize", json=body).status_code == 200
    config = service.config("two")
    assert (config.algorithm.kind, config.algorithm.beta) == ("dpo", 0.2)
    warnings = service.client.get("/v1alpha/post-training/jobs/two/status").json()["warnings"]
    assert any("gamma" in warning for warning in warnings)
    events = [event["message"] for event in service.manager.run_dir("two").events()]
    assert events == warnings  # so that they are seen on the page, too


def prefer(service: Service, **body: Any) -> Any:
    service.upload("pairs", PAIRS)
    return service.client.post("/v1/post-training/preference-optimize", json=body)


def warnings_of(service: Service, job: str) -> str:
    return " ".join(service.client.get(f"/v1alpha/post-training/jobs/{job}/status").json()["warnings"])


def test_preferences_as_a_providers_document_writes_them(service):
    """Neither shape is Llama Stack's own; what each means is plain."""
    answer = prefer(
        service,
        job_uuid="fsdp-dpo-large-model",
        model="org/base",
        finetuned_model="llama-2-7b-dpo-fsdp",
        checkpoint_dir="./fsdp_checkpoints",
        algorithm_config={"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
        training_config={
            "n_epochs": 3,
            "max_steps_per_epoch": 100,
            "learning_rate": 5e-5,
            "data_config": {"dataset_id": "pairs", "batch_size": 4},
        },
    )
    assert answer.status_code == 200, message(answer)
    config = service.config("fsdp-dpo-large-model")
    assert (config.model.path, config.algorithm.kind, config.algorithm.beta) == ("org/base", "dpo", 1.0)
    assert (config.learning_rate, config.data.shuffle, config.optim.epochs) == (5e-5, True, 3)
    said = warnings_of(service, "fsdp-dpo-large-model")
    assert "finetuned_model llama-2-7b-dpo-fsdp is taken as a name for the result" in said
    assert "shuffle was not given" in said
    assert (service.manager.data_dir.path / "checkpoints" / "fsdp_checkpoints").is_symlink()


def test_preferences_as_a_providers_notebook_writes_them(service):
    optimizer = {"optimizer_type": "adamw", "weight_decay": 0.01, "num_warmup_steps": 0, "lr": 5e-5}
    answer = prefer(
        service,
        job_uuid="dpo",
        finetuned_model="org/model",
        algorithm_config={
            **dict.fromkeys(("reward_scale", "reward_clip", "epsilon", "gamma"), 0.0),
            "beta": 0.1,
            "loss_type": "sigmoid",
        },
        training_config={
            "n_epochs": 3,
            "max_steps_per_epoch": 50,
            "gradient_accumulation_steps": 1,
            "optimizer_config": {**optimizer, "warmup_ratio": 0.1, "lr_scheduler_type": "linear"},
            "data_config": {
                "data_format": "instruct",
                "dataset_id": "pairs",
                "batch_size": 2,
                "train_split_percentage": 0.75,
                "shuffle": True,
            },
        },
        hyperparam_search_config={},
        logger_config={},
    )
    assert answer.status_code == 200, message(answer)
    config = service.config("dpo")
    assert (config.algorithm.beta, config.data.validation_fraction, config.optim.schedule) == (0.1, 0.25, "linear")
    assert config.checkpoint.every_steps == 3  # of 8 rows 6 are trained on, 2 at a time
    assert config.optim.warmup_steps == 1  # a tenth of 9 steps, as Transformers rounds


def test_preferences_may_train_adapters(service):
    adapter = {"type": "LoRA", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False, "rank": 16, "alpha": 32}
    body = {"job_uuid": "dpo", "model": "org/base", "algorithm_config": adapter, "training_config": training("pairs")}
    answer = prefer(service, **body)
    assert answer.status_code == 200, message(answer)
    config = service.config("dpo")
    assert (config.algorithm.kind, config.lora.rank, config.lora.targets) == ("dpo", 16, ("q_proj",))


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ("finetuned_model is missing", {"finetuned_model": None}),
        ("finetuned_model: job:one is a model to train", {"finetuned_model": "job:one", "model": "org/base"}),
        ("algorithm_config", {"algorithm_config": {"type": "QAT", "quantizer_name": "x", "group_size": 1}}),
        ("algorithm_config.DPO.beta: ", {"algorithm_config": {"beta": 0}}),
        (
            "training_config.learning_rate: it is 0.1, and training_config.optimizer_config.lr, which means the same",
            {"training_config": training("pairs", learning_rate=0.1, optimizer_config={"lr": 0.2})},
        ),
        ("provider_confg: Extra inputs", {"provider_confg": {}}),
    ],
)
def test_bad_preferences_are_named(service, start, changes):
    body = {"job_uuid": "two", "finetuned_model": "org/model", "algorithm_config": {"beta": 0.1}}
    answer = prefer(service, **{**body, "training_config": training("pairs"), **changes})
    assert answer.status_code == 400
    assert message(answer).startswith(start)


def test_fine_tuning_as_llama_stacks_documents_write_it(service):
    """Of inline::huggingface and inline::torchtune; of remote::nvidia."""
    adapter = {"type": "LoRA", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": True, "rank": 1, "alpha": 1}
    wanted = training(max_steps_per_epoch=0, max_validation_steps=1, gradient_accumulation_steps=1, n_epochs=4)
    answer = service.fine_tune(
        training_config=wanted, algorithm_config={**adapter, "apply_lora_to_output": False}, checkpoint_dir="output"
    )
    assert answer.status_code == 200, message(answer)
    assert (service.config().optim.epochs, service.config().optim.max_steps) == (4, None)
    assert "max_steps_per_epoch" not in warnings_of(service, "one")
    least = {"n_epochs": 2, "optimizer_config": {"lr": 0.0001}, "data_config": {"dataset_id": "chat", "batch_size": 16}}
    answer = service.fine_tune(
        "two", training_config=least, algorithm_config={"type": "LoRA", "adapter_dim": 16}, checkpoint_dir=""
    )
    assert answer.status_code == 200, message(answer)
    config = service.config("two")
    assert (config.lora.rank, config.lora.targets, config.learning_rate) == (16, "all-linear", 0.0001)
    assert "every linear layer" in warnings_of(service, "two")


def test_the_same_request_again_is_the_same_job(service):
    assert service.fine_tune().status_code == 200
    assert service.fine_tune().status_code == 200
    assert service.manager.list()[1] == 1
    other = service.fine_tune(training_config=training(n_epochs=2))
    assert other.status_code == 409
    assert "one" in message(other)


def test_warnings_are_written_once(service):
    for _ in range(2):
        service.fine_tune(logger_config={"wandb": 1})
    assert len(service.manager.run_dir("one").events()) == 1


# --- data sets --------------------------------------------------------------------------------------------------------


def test_rows_in_llama_stacks_own_columns_are_converted(service):
    service.upload("stack-rows", DIALOG)
    assert service.fine_tune(training_config=training("stack-rows")).status_code == 200
    (source,) = service.config().data.train
    rows = [json.loads(line) for line in Path(source.path).read_text().splitlines()]
    assert rows == CHAT


def test_validation_is_as_long_as_asked(service):
    wanted = training(data={"validation_dataset_id": "chat"}, max_validation_steps=2)
    assert service.fine_tune(training_config=wanted).status_code == 200
    assert service.fine_tune(training_config=wanted).status_code == 200
    (source,) = service.config().data.validation
    rows = [json.loads(line) for line in Path(source.path).read_text().splitlines()]
    assert rows == CHAT[: 2 * 2]


def test_validation_without_a_limit_takes_all_rows(service):
    service.fine_tune(training_config=training(data={"validation_dataset_id": "chat"}))
    (source,) = service.config().data.validation
    assert Path(source.path).name == "chat.jsonl"


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ("training_config.n_epochs: ", {"training_config": training(n_epochs=0)}),
        ("training_config.data_config is missing", {"training_config": {"n_epochs": 1}}),
        ("training_config.data_config.dataset_id: there is no data set", {"training_config": training("nothing")}),
        (
            "training_config.data_config.validation_dataset_id: ",
            {"training_config": training(data={"validation_dataset_id": "nothing"})},
        ),
        ("training_config.epochs: Extra inputs", {"training_config": training(epochs=1)}),
        ("model is missing", {"model": None}),
        ("hyperparam_search_config: ", {"hyperparam_search_config": {"lr": [1]}}),
        ("the job cannot run as asked: ", {"provider_config": {"optim": {"learning_rat": 1}}}),
        (
            "the job cannot run as asked: the configuration: algorithm.label_smoothing: exo_pair needs more than 0",
            {"provider_config": {"algorithm": {"kind": "dpo", "loss": "exo_pair"}}},
        ),
        ("the job cannot run as asked: launch.kind", {"provider_config": {"launch": {"kind": "ray"}}}),
        ("checkpoint_dir: ", {"checkpoint_dir": "../../elsewhere"}),
        ("checkpoint_dir: ", {"checkpoint_dir": "/etc"}),
    ],
)
def test_a_bad_request_names_its_field(service, start, changes):
    answer = service.fine_tune(**changes)
    assert answer.status_code == 400
    assert message(answer).startswith(start)
    assert service.manager.list()[1] == 0


def test_dialog_needs_conversations(service):
    service.upload("questions", [{"prompt": "a", "completion": "b"}])
    answer = service.fine_tune(training_config=training("questions"))
    assert answer.status_code == 400
    assert "data_format" in message(answer)


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (403, {"model": "/etc"}),
        (403, {"provider_config": {"model": {"trust_remote_code": True}}}),
        (403, {"provider_config": {"data": {"train": "/etc/passwd"}}}),
        (422, {"provider_config": {"launch": {"procs": 4096}}}),
    ],
)
def test_what_the_service_forbids_stays_forbidden(service, status, changes):
    assert service.fine_tune(**changes).status_code == status
    assert service.manager.list()[1] == 0


def nested(depth: int) -> dict[str, Any]:
    return {"deeper": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "x" * 5000},
        {"model": "/" + "x" * 5000},
        {"model": "/" + "x" * 900},
        {"model": "a\0b"},
        {"model": "job:" + "x" * 500},
        {"model": "job:../one"},
        {"model": "\ud800"},
        {"checkpoint_dir": "x" * 5000},
        {"checkpoint_dir": "a\0b"},
        {"checkpoint_dir": "\ud800"},
        {"provider_config": {"job": {"priority": 2**63}}},
        {"provider_config": {"job": {"max_restarts": -1}}},
        {"logger_config": {"\ud800": 1}, "model": "/nowhere"},
        {"provider_config": nested(200)},
        {"provider_config": {"data": nested(200)}},
        {"provider_config": {"batch": {"samples": "many"}}},
        {"provider_config": {"batch": 3}},
        {"provider_config": {"data": {"max_length": "long"}}},
        {"provider_config": {"launch": {"procs": []}}},
        {"training_config": training("a\0b")},
        {"training_config": training("x" * 5000)},
        {"training_config": training(n_epochs=10**400)},
        {"training_config": training(n_epochs=10**400, optimizer_config={"warmup_ratio": 0.5})},
        {"training_config": training(data={"train_split_percentage": 1e-300})},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_strange_requests_are_refused_and_nothing_else(service, changes):
    answer = service.fine_tune(**changes)
    assert 400 <= answer.status_code < 500
    assert message(answer)
    assert service.manager.list()[1] == 0


def test_numbers_beyond_all_rows_mean_all_rows(service):
    service.upload("stack-rows", DIALOG)
    wanted = training(data={"validation_dataset_id": "stack-rows"}, max_validation_steps=10**30)
    assert service.fine_tune(training_config=wanted).status_code == 200
    (source,) = service.config().data.validation
    assert len(Path(source.path).read_text().splitlines()) == len(DIALOG)


@pytest.mark.parametrize("path", ["status", "artifacts"])
def test_an_unknown_job(service, path):
    assert service.client.get(f"/v1/post-training/job/{path}", params={"job_uuid": "none"}).status_code == 404
    assert service.client.get(f"/v1/post-training/job/{path}").status_code == 400


def test_a_body_that_is_no_json(service):
    answer = service.client.post("/v1/post-training/supervised-fine-tune", content=b"{")
    assert answer.status_code == 400


# --- ownership --------------------------------------------------------------------------------------------------------


def test_somebody_elses_job_is_no_job(guarded, tokens):
    assert guarded.fine_tune(headers=tokens["ann"]).status_code == 200
    for headers, status, jobs in ((tokens["ann"], 200, 1), (tokens["bob"], 404, 0), (tokens["eve"], 200, 1)):
        answer = guarded.client.get("/v1alpha/post-training/jobs/one/status", headers=headers)
        assert answer.status_code == status
        assert len(guarded.client.get("/v1/post-training/jobs", headers=headers).json()["data"]) == jobs


def test_only_its_owner_cancels_a_job(guarded, tokens):
    guarded.fine_tune(headers=tokens["ann"])
    for name, status in (("bob", 404), ("eve", 403), ("ann", 200)):
        answer = guarded.client.post("/v1alpha/post-training/jobs/one/cancel", headers=tokens[name])
        assert answer.status_code == status, name


def test_somebody_elses_rows_are_no_rows(guarded, tokens):
    answer = guarded.fine_tune(headers=tokens["bob"])
    assert answer.status_code == 400
    assert "there is no data set chat" in message(answer)


def test_without_a_token_nobody_comes_in(guarded, tokens):
    assert guarded.fine_tune().status_code == 401
    assert guarded.fine_tune(headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert guarded.fine_tune(headers=tokens["eve"]).status_code == 403
    assert guarded.client.get("/v1/post-training/jobs").status_code == 401


def test_health_is_told_to_everybody_and_nothing_else(guarded):
    assert guarded.client.get("/health").json() == {"status": "healthy"}  # what TRL's remote provider waits for
    for version in ("v1", "v1alpha"):
        assert guarded.client.get(f"/{version}/health").json() == {"status": "OK"}  # what Llama Stack answers itself
    assert guarded.client.get("/api/health").status_code == 401


# --- what jobs leave --------------------------------------------------------------------------------------------------


def complete(service: Service, job: str, kind: str) -> Path:
    """As if its processes had run: the truth about a run is in its directory."""
    run = RunDir(service.manager.run_dir(job).path, owner=True)
    folder = run.export / kind
    folder.mkdir(parents=True)
    if kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    run.write_status(state="completed", export=str(folder), step=4)
    found = service.manager.store.get(job)
    assert service.manager.store.change(found, state="completed")
    return folder


def test_the_model_of_an_earlier_job_can_be_named(service):
    service.fine_tune("first")
    early = service.fine_tune("second", model="job:first")
    assert early.status_code == 400
    assert "queued" in message(early)
    folder = complete(service, "first", "model")
    assert service.fine_tune("second", model="job:first").status_code == 200
    assert service.config("second").model.path == str(folder)
    answer = service.client.get("/v1/post-training/job/artifacts", params={"job_uuid": "first"}).json()
    (checkpoint,) = answer["checkpoints"]
    assert checkpoint["path"] == "job:first/export/model"  # as it is, it names the model of another request
    assert service.fine_tune("third", model=checkpoint["path"]).status_code == 200
    assert service.config("third").model.path == str(folder)


def test_an_adapter_is_no_model(service):
    service.fine_tune("first")
    folder = complete(service, "first", "adapter")
    for name in ("job:first", str(folder)):
        answer = service.fine_tune("second", model=name)
        assert answer.status_code == 400
        assert "merged" in message(answer)


@pytest.mark.parametrize("nothing", [None, "", "null"])
def test_no_checkpoint_dir(service, nothing):
    assert service.fine_tune(checkpoint_dir=nothing).status_code == 200
    assert not (service.manager.data_dir.path / "checkpoints").exists()


def test_a_checkpoint_dir_leads_to_the_result(service):
    assert service.fine_tune(checkpoint_dir="my-model").status_code == 200
    assert service.fine_tune(checkpoint_dir="my-model").status_code == 200
    taken = service.fine_tune("two", checkpoint_dir="my-model")
    assert taken.status_code == 400
    assert "another job" in message(taken)
    complete(service, "one", "adapter")
    place = service.manager.data_dir.path / "checkpoints" / "my-model"
    assert (place / "adapter" / "adapter_config.json").exists()


def test_a_checkpoint_dir_where_jobs_may_write(tmp_path):
    allowed, secret = tmp_path / "results", tmp_path / "secret"
    for folder in (allowed / "taken", secret):
        folder.mkdir(parents=True)
    (allowed / "out").symlink_to(secret)
    service = Service(tmp_path / "data", allowed=Allowed(write=(allowed,)))
    try:
        service.upload("chat", CHAT)
        for number, wanted in enumerate([f"{allowed}/mine", f"{allowed}/deep/er", "root:results/third"]):
            for _ in range(2):
                answer = service.fine_tune(f"job-{number}", checkpoint_dir=wanted)
                assert answer.status_code == 200, message(answer)
            place = allowed / wanted.partition("results/")[2]
            assert place.readlink() == service.manager.data_dir.jobs / f"job-{number}" / "export"
        for wanted in ("taken", "out/x", "out", "../secret/x", "mine", "deep/../../secret/x", "."):
            answer = service.fine_tune("refused", checkpoint_dir=f"{allowed}/{wanted}")
            assert answer.status_code == 400, wanted
            assert message(answer).startswith("checkpoint_dir: ")
        assert list(secret.iterdir()) == []
    finally:
        service.manager.close()
