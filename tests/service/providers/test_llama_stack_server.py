"""The providers in a real Llama Stack server, called with its real client, as a user would.

Needs the `llama` command beside this Python: `make test-llama-stack`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack_process import FINISHED, LLAMA, Server, ending, free_port, put_model, start_service, start_stack, wait_until

from lockstep.service.access import make_token

if not LLAMA.exists():
    pytest.skip("llama-stack is not installed beside this Python", allow_module_level=True)

from llama_stack_client import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    LlamaStackClient,
    PermissionDeniedError,
)

WORDS = ("red", "green", "blue", "cat", "dog", "sun")
CHAT = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
    for word in WORDS * 2
]
PAIRS = [{"prompt": f"say {word}", "chosen": word, "rejected": f"not {word}"} for word in WORDS * 2]
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}
ADAMW = {"optimizer_type": "adamw", "lr": 0.005, "weight_decay": 0.0, "num_warmup_steps": 0}
ON_CPU = {"launch": {"device": "cpu"}, "logging": {"tensorboard": False}}


def training(rows: str, **changes: Any) -> dict[str, Any]:
    data = {"dataset_id": rows, "batch_size": 2, "shuffle": True, "data_format": "dialog", **changes.pop("data", {})}
    known = {"n_epochs": 2, "max_steps_per_epoch": 100, "gradient_accumulation_steps": 2, "dtype": "fp32"}
    return {**known, "data_config": data, "optimizer_config": ADAMW, **changes}


class User:
    """What a person does with the client; every job is on CPU."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self.client = LlamaStackClient(base_url=url, max_retries=0, api_key=api_key)
        self.jobs = self.client.post_training.job
        self.model = model

    def register(self, name: str, rows: list[dict[str, Any]]) -> None:
        source = {"type": "rows", "rows": rows}
        self.client.datasets.register(purpose="post-training/messages", dataset_id=name, source=source)

    def fine_tune(self, job: str, rows: str = "chat", *, settings: dict[str, Any] | None = None, **changes: Any) -> Any:
        known = {"model": self.model, "training_config": training(rows), "algorithm_config": LORA}
        return self.client.post_training.supervised_fine_tune(
            job_uuid=job,
            hyperparam_search_config={},
            logger_config={},
            extra_body={"provider_config": {**ON_CPU, **(settings or {})}},
            **{**known, **changes},
        )

    def prefer(self, job: str, algorithm: dict[str, Any], rows: str = "pairs", **settings: Any) -> Any:
        return self.client.post_training.preference_optimize(
            job_uuid=job,
            finetuned_model=self.model,
            algorithm_config=algorithm,
            training_config=training(rows),
            hyperparam_search_config={},
            logger_config={},
            extra_body={"provider_config": {**ON_CPU, **settings}},
        )

    def wait(self, job: str) -> Any:
        def finished() -> Any:
            status = self.jobs.status(job_uuid=job)
            return status if status.status in FINISHED else None

        return wait_until(finished, f"the end of {job}")

    def endless(self, job: str, rows: str = "chat") -> None:
        """A job that is running, and would for hours."""
        self.fine_tune(job, rows, training_config=training(rows, n_epochs=100_000, max_steps_per_epoch=3))
        wait_until(lambda: self.jobs.status(job_uuid=job).status == "in_progress", f"{job} to run")


def load_artifact(user: User, job: str, data_dir: Path | None = None) -> Any:
    """With the libraries that others use. `data_dir`: of a service, whose answers name the job's folder by its id."""
    (checkpoint,) = user.jobs.artifacts(job_uuid=job).checkpoints
    path = checkpoint["path"]
    if data_dir is not None:
        assert path == f"job:{job}/export/{checkpoint['format']}"
        path = str(data_dir / "jobs" / path.removeprefix("job:"))
    if checkpoint["format"] == "adapter":
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(path)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path)
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(path)("say red", return_tensors="pt")
    assert model(**tokens).logits.shape[1] == tokens["input_ids"].shape[1]
    return checkpoint


def is_alive(run_dir: Path) -> bool:
    pid = json.loads((run_dir / "launch.json").read_text())["pid"]
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- inline::lockstep -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inline")


@pytest.fixture(scope="module")
def inline(inline_folder: Path, tiny_model: Path) -> Iterator[User]:
    model = put_model(tiny_model, inline_folder / "lockstep")
    with ending(start_stack("inline", inline_folder)) as server:
        user = User(server.url, model)
        user.register("chat", CHAT)
        user.register("pairs", PAIRS)
        yield user


def test_supervised_fine_tuning_from_rows_to_a_model_that_loads(inline):
    wanted = training("chat", data={"validation_dataset_id": "chat"}, max_validation_steps=3)
    assert inline.fine_tune("sft", training_config=wanted).job_uuid == "sft"
    status = inline.wait("sft")
    assert status.status == "completed", status.error
    assert status.scheduled_at <= status.started_at <= status.completed_at
    assert status.resources_allocated["processes"] == 1
    assert status.resources_allocated["peak_memory_gib"]["rank_0"] > 0
    assert (status.progress["step"], status.progress["total_steps"]) == (6, 6)
    assert status.metrics["validation"]["rows"] == 6
    checkpoint = load_artifact(inline, "sft")
    assert (checkpoint["epoch"], checkpoint["format"]) == (2, "adapter")
    metrics = checkpoint["training_metrics"]
    assert metrics["train_loss"] > 0
    assert metrics["perplexity"] == pytest.approx(2.718281828 ** metrics["validation_loss"], rel=1e-6)
    assert "sft" in [job.job_uuid for job in inline.jobs.list()]


@pytest.mark.parametrize(
    ("job", "algorithm", "settings", "kind"),
    [
        ("dpo", {"beta": 0.2, "loss_type": "ipo"}, {"lora": {"rank": 4}}, "adapter"),
        ("dpo-legacy", {"reward_scale": 0.2, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 0.99}, {}, "model"),
    ],
)
def test_preference_optimisation_in_both_shapes(inline, job, algorithm, settings, kind):
    assert inline.prefer(job, algorithm, **settings).job_uuid == job
    status = inline.wait(job)
    assert status.status == "completed", status.error
    assert load_artifact(inline, job)["format"] == kind
    assert any("gamma" in warning for warning in status.warnings) == ("gamma" in algorithm)


def test_rows_in_llama_stacks_own_columns(inline):
    rows = [
        {"input_query": f"say {word}", "expected_answer": word, "chat_completion_input": json.dumps(turns[:1])}
        for word, turns in zip(WORDS, (row["messages"] for row in CHAT))
    ]
    inline.register("instructions", rows)
    inline.fine_tune("instruct", training_config=training("instructions", data={"data_format": "instruct"}))
    status = inline.wait("instruct")
    assert status.status == "completed", status.error


def test_bad_data_fails_with_the_row_in_its_error(inline):
    inline.register(
        "same", [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    )
    inline.prefer("bad", {"beta": 0.1}, "same")
    status = inline.wait("bad")
    assert status.status == "failed"
    assert ":2: nothing to prefer" in status.error
    assert inline.jobs.artifacts(job_uuid="bad").checkpoints == []


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("data set nothing", {"training_config": training("nothing")}),
        ("optimizer_type", {"training_config": training("chat", optimizer_config={**ADAMW, "optimizer_type": "sgd"})}),
        ("epochs", {"training_config": training("chat", epochs=3)}),
        ("QAT", {"algorithm_config": {"type": "QAT", "quantizer_name": "q", "group_size": 8}}),
        ("learning_rat", {"settings": {"optim": {"learning_rat": 1}}}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(inline, words, changes):
    with pytest.raises(BadRequestError, match=words):
        inline.fine_tune("refused", **changes)
    with pytest.raises(BadRequestError, match="there is no job refused"):
        inline.jobs.status(job_uuid="refused")


@pytest.mark.parametrize("call", ["supervised-fine-tune", "preference-optimize"])
def test_a_misspelt_field_of_extra_body_is_refused_too(inline, call):
    """The stack itself would drop it without a word."""
    known = {"job_uuid": "refused", "model": inline.model, "training_config": training("pairs"), "provider_confg": {}}
    algorithm = LORA if call == "supervised-fine-tune" else {"beta": 0.1}
    with pytest.raises(BadRequestError, match="'provider_confg': there is no such field"):
        inline.client.post(f"/v1/post-training/{call}", cast_to=object, body={**known, "algorithm_config": algorithm})


def test_a_request_as_other_providers_documents_write_it(inline, inline_folder):
    body = {
        "job_uuid": "fsdp-dpo",
        "model": inline.model,
        "finetuned_model": "tiny-dpo-fsdp",
        "checkpoint_dir": "./fsdp_checkpoints",
        "algorithm_config": {"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
        "training_config": {
            "n_epochs": 3,
            "max_steps_per_epoch": 2,
            "learning_rate": 5e-5,
            "data_config": {"dataset_id": "pairs", "batch_size": 4},
        },
        "provider_config": ON_CPU,
    }
    inline.client.post("/v1/post-training/preference-optimize", cast_to=object, body=body)
    status = inline.wait("fsdp-dpo")
    assert status.status == "completed", status.error
    assert status.metrics["train"]["learning_rate"] <= 5e-5
    assert (inline_folder / "lockstep" / "checkpoints" / "fsdp_checkpoints").is_dir()


def test_keys_of_another_providers_run_yaml(tmp_path, tiny_model):
    model = put_model(tiny_model, tmp_path / "lockstep")
    keys = {"device": "cpu", "dpo_beta": 0.3, "torch_run_config": {"nproc_per_node": 1, "master_port": 29500}}
    with ending(start_stack("inline", tmp_path, config=keys)) as server:
        user = User(server.url, model)
        user.register("pairs", PAIRS)
        user.client.post_training.preference_optimize(
            job_uuid="dpo",
            finetuned_model=model,
            algorithm_config={"reward_scale": 1.0, "reward_clip": 0.0, "epsilon": 0.0, "gamma": 0.0},
            training_config=training("pairs"),
            hyperparam_search_config={},
            logger_config={},
        )
        status = user.wait("dpo")
        assert status.status == "completed", status.error
        assert "reward_scale 1.0 is not used: beta 0.3 says it" in " ".join(status.warnings)
    with pytest.raises(AssertionError, match="device: 'mps' is not available here: use cuda or cpu or auto"):
        start_stack("inline", tmp_path, config={"device": "mps"})


def test_a_model_elsewhere_on_the_machine_is_forbidden(inline):
    with pytest.raises(PermissionDeniedError, match="not in a folder"):
        inline.fine_tune("refused", model="/etc")


def test_the_same_job_again_and_another_under_its_name(inline):
    for _ in range(2):
        assert inline.fine_tune("twice").job_uuid == "twice"
    assert [job.job_uuid for job in inline.jobs.list()].count("twice") == 1
    with pytest.raises(BadRequestError, match="another content"):
        inline.fine_tune("twice", training_config=training("chat", n_epochs=3))
    inline.jobs.cancel(job_uuid="twice")


def test_cancel_ends_the_processes(inline, inline_folder):
    inline.endless("endless")
    inline.fine_tune("waiting")
    waiting = inline.jobs.status(job_uuid="waiting")
    assert (waiting.status, waiting.progress["queue_position"]) == ("scheduled", 1)  # one at a time
    run_dir = inline_folder / "lockstep" / "jobs" / "endless"
    assert is_alive(run_dir)
    inline.jobs.cancel(job_uuid="waiting")
    inline.jobs.cancel(job_uuid="endless")
    assert inline.wait("waiting").status == "cancelled"
    assert inline.wait("endless").status == "cancelled"
    assert not is_alive(run_dir)


def test_a_job_outlives_its_stack(tmp_path, tiny_model):
    model = put_model(tiny_model, tmp_path / "lockstep")
    run_dir = tmp_path / "lockstep" / "jobs" / "long"
    first = start_stack("inline", tmp_path)
    try:
        user = User(first.url, model)
        user.register("chat", CHAT)
        user.endless("long")
    finally:
        first.end(signal.SIGKILL)
    assert is_alive(run_dir)
    with ending(start_stack("inline", tmp_path)) as second:
        user = User(second.url, model)
        status = user.jobs.status(job_uuid="long")
        assert status.status == "in_progress"
        later = wait_until(lambda: _is_past(user, "long", status.progress["step"]), "the job to go on")
        assert later.metrics["train"]["loss"] > 0
        user.jobs.cancel(job_uuid="long")
        assert user.wait("long").status == "cancelled"
    assert not is_alive(run_dir)


def _is_past(user: User, job: str, step: int) -> Any:
    status = user.jobs.status(job_uuid=job)
    return status if status.progress["step"] > step else None


# --- remote::lockstep -------------------------------------------------------------------------------------------------


class Remote:
    """A service with tokens on a port of its own, and a stack that knows where; either can be down."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.data_dir = folder / "service"
        self.model = put_model(model, self.data_dir)
        self._folder = folder
        self.port, self._stack_port = free_port(), free_port()
        self.tokens = {}
        lines = []
        for name in ("stack", "stranger"):
            self.tokens[name], line = make_token(name, "submit")
            lines.append(line)
        (folder / "tokens").write_text("\n".join(lines))

    def start_service(self) -> Server:
        return start_service(self.data_dir, self.port, "--token-file", str(self._folder / "tokens"))

    def start_stack(self, token: str) -> Server:
        known = {"LOCKSTEP_SERVER": f"http://127.0.0.1:{self.port}", "LOCKSTEP_TOKEN": token}
        return start_stack("remote", self._folder / "stack", self._stack_port, **known)


def test_a_service_elsewhere_down_at_first_and_back_later(tmp_path, tiny_model):
    remote = Remote(tmp_path, tiny_model)
    with ending(remote.start_stack(remote.tokens["stack"])) as stack:
        user = User(stack.url, remote.model)
        user.register("chat", CHAT)
        user.register("pairs", PAIRS)
        for _ in range(2):
            with pytest.raises(APIStatusError, match="does not answer") as refused:
                user.fine_tune("sft")
            assert refused.value.status_code == 504

        with ending(remote.start_service()):
            user.fine_tune("sft")
            assert user.wait("sft").status == "completed"
            assert load_artifact(user, "sft", remote.data_dir)["format"] == "adapter"
            user.endless("long")
        with pytest.raises(APIStatusError, match="does not answer"):
            user.jobs.status(job_uuid="long")

        with ending(remote.start_service()):
            assert user.jobs.status(job_uuid="long").status == "in_progress"
            user.jobs.cancel(job_uuid="long")
            assert user.wait("long").status == "cancelled"
            user.prefer("dpo", {"beta": 0.2}, lora={"rank": 4})
            status = user.wait("dpo")
            assert status.status == "completed", status.error
            assert load_artifact(user, "dpo", remote.data_dir)["format"] == "adapter"
            assert {job.job_uuid for job in user.jobs.list()} == {"sft", "long", "dpo"}
            with pytest.raises(BadRequestError, match="another content"):
                user.fine_tune("sft", training_config=training("chat", n_epochs=3))
            _see_as_stranger(remote, stack)


def _see_as_stranger(remote: Remote, stack: Server) -> None:
    """Another stack on the same service, with a token of its own, and with none."""
    stack.end()
    with ending(remote.start_stack(remote.tokens["stranger"])) as other:
        stranger = User(other.url, remote.model)
        assert stranger.jobs.list() == []
        with pytest.raises(BadRequestError, match="there is no job sft"):
            stranger.jobs.status(job_uuid="sft")
    with ending(remote.start_stack("wrong")) as wrong, pytest.raises(PermissionDeniedError, match="wants a token"):
        User(wrong.url, remote.model).jobs.list()


# --- the service itself -----------------------------------------------------------------------------------------------


def test_the_client_speaks_with_the_service_itself(tmp_path, tiny_model):
    model = put_model(tiny_model, tmp_path / "service")
    token, line = make_token("ann", "submit")
    (tmp_path / "tokens").write_text(line)
    options = ("--token-file", str(tmp_path / "tokens"))
    with ending(start_service(tmp_path / "service", free_port(), *options)) as service:
        rows = "".join(json.dumps(row) + "\n" for row in CHAT)
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.post(f"{service.url}/api/datasets/chat", content=rows, headers=headers).status_code == 201
        user = User(service.url, model, api_key=token)
        user.fine_tune("direct", "dataset:chat")
        assert user.wait("direct").status == "completed"
        assert load_artifact(user, "direct", tmp_path / "service")["format"] == "adapter"
        assert [job.job_uuid for job in user.jobs.list()] == ["direct"]
        with pytest.raises(AuthenticationError, match="wants a token"):
            User(service.url, model).jobs.list()
