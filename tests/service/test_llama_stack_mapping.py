"""Every field of a Llama Stack request: honoured, refused by name, or said in a warning."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config import resolve_config
from lockstep.service.llama_stack.mapping import (
    MappedJob,
    RequestError,
    TrainingData,
    check_format,
    convert_rows,
    is_foreign,
    map_fine_tune,
    map_preference,
)
from lockstep.service.llama_stack.schemas import FineTuneRequest, PreferenceRequest

DATA = TrainingData("/data/train.jsonl", 10)
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "output_proj"],
    "apply_lora_to_mlp": False,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}
ADAMW = {"optimizer_type": "adamw", "lr": 0.001, "weight_decay": 0.1, "num_warmup_steps": 3}


def training(data: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    rows = {"dataset_id": "rows", "batch_size": 2, "shuffle": True, "data_format": "instruct", **(data or {})}
    return {"n_epochs": 2, "max_steps_per_epoch": 100, "data_config": rows, **changes}


def fine_tune(training_config: dict[str, Any] | None = None, data: TrainingData = DATA, **changes: Any) -> MappedJob:
    body = {"job_uuid": "one", "training_config": training_config or training(), **changes}
    return map_fine_tune(FineTuneRequest(**body), "/models/small", data)


def prefer(algorithm: dict[str, Any], training_config: dict[str, Any] | None = None, **changes: Any) -> MappedJob:
    body = {"job_uuid": "one", "finetuned_model": "m", "algorithm_config": algorithm}
    request = PreferenceRequest(**body, training_config=training_config or training(), **changes)
    return map_preference(request, "/models/small", DATA)


def settled(job: MappedJob) -> Any:
    """What Lockstep itself makes of it: every mapping must be a valid configuration."""
    return resolve_config(job.config)


# --- steps and batches ------------------------------------------------------------------------------------------------


def test_a_step_takes_batch_size_times_accumulation_rows_whatever_the_layout():
    config = settled(fine_tune(training({"batch_size": 3}, gradient_accumulation_steps=4)))
    assert config.batch.samples == 12
    assert config.optim.epochs == 2


def test_a_small_batch_size_keeps_memory_small():
    assert settled(fine_tune(training({"batch_size": 1}))).batch.micro_batch_tokens == 2048
    assert settled(fine_tune(training({"batch_size": 64}))).batch.micro_batch_tokens == 4096


@pytest.mark.parametrize(
    ("limit", "max_steps", "epoch_steps"),
    [(2, 4, 2), (5, None, 5), (50, None, 5), (None, None, 5)],
    ids=["cuts", "exactly an epoch", "longer than an epoch", "not given"],
)
def test_steps_of_an_epoch(limit, max_steps, epoch_steps):
    job = fine_tune(training(max_steps_per_epoch=limit))
    config = settled(job)
    assert config.optim.max_steps == max_steps
    assert job.epoch_steps == config.checkpoint.every_steps == config.evaluation.every_steps == epoch_steps
    said = any("max_steps_per_epoch" in warning for warning in job.warnings)
    assert said == (limit in (2, None))


def test_packed_rows_fill_batches_of_the_same_number_of_tokens():
    job = fine_tune(training({"packed": True}, gradient_accumulation_steps=3))
    config = settled(job)
    assert config.batch.samples is None
    assert config.batch.tokens == 2 * 3 * 2048
    assert config.optim.max_steps == 200  # how many steps an epoch has is not known before rows are packed
    assert job.epoch_steps is None


def test_packed_pairs_are_said_to_change_nothing():
    job = prefer({"beta": 0.1}, training({"packed": True}))
    assert settled(job).batch.samples == 2
    assert "packed" in " ".join(job.warnings)


# --- data, model, optimizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "train_on"),
    [
        ({"data_format": "instruct"}, "last"),
        ({"data_format": "dialog"}, "assistant"),
        ({"data_format": "dialog", "train_on_input": True}, "all"),
    ],
)
def test_what_is_learned_of_a_row(data, train_on):
    assert settled(fine_tune(training(data))).data.train_on == train_on


def test_shuffle_and_validation():
    job = fine_tune(training({"shuffle": False}), TrainingData("/data/train.jsonl", 10, "/data/held-out.jsonl"))
    config = settled(job)
    assert config.data.shuffle is False
    assert [source.path for source in config.data.validation] == ["/data/held-out.jsonl"]


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bf16", "bf16"), ("float32", "fp32"), ("fp16", "fp16"), (None, "auto")]
)
def test_precision(dtype, precision):
    assert settled(fine_tune(training(dtype=dtype))).model.precision == precision


def test_optimizer():
    config = settled(fine_tune(training(optimizer_config=ADAMW)))
    assert (config.learning_rate, config.optim.weight_decay, config.optim.warmup_steps) == (0.001, 0.1, 3)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"lr": 0.01, "lr_min": 0.001}, {"learning_rate": 0.01, "min_learning_rate_ratio": 0.1}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, {"schedule": "constant", "warmup_steps": 2}),
        ({"warmup_ratio": 0.25}, {"warmup_steps": 3}),  # of 10 steps: 2 epochs of 10 rows, 2 at a time
        ({"warmup_ratio": 0.25, "num_warmup_steps": 7}, {"warmup_steps": 7}),
        ({"warmup_ratio": 0.0}, {}),
    ],
)
def test_optimizers_of_other_documents(optimizer, expected):
    job = fine_tune(training(optimizer_config=optimizer))
    settled(job)
    assert job.config["optim"] == {"epochs": 2, **expected}
    assert ("warmup_ratio" in " ".join(job.warnings)) == ("num_warmup_steps" in optimizer)


def test_efficiency():
    every = dict.fromkeys(
        (
            "enable_activation_checkpointing",
            "enable_activation_offloading",
            "memory_efficient_fsdp_wrap",
            "fsdp_cpu_offload",
        ),
        True,
    )
    job = fine_tune(training(efficiency_config=every))
    config = settled(job)
    assert config.model.activation_checkpointing == "full"
    assert config.model.activation_offload
    assert config.parallel.offload
    said = " ".join(job.warnings)
    assert "memory_efficient_fsdp_wrap" in said
    assert "fsdp_cpu_offload does nothing with one process" in said


def test_offload_with_several_processes_needs_no_warning():
    wanted = training(efficiency_config={"fsdp_cpu_offload": True})
    assert fine_tune(wanted, provider_config={"launch": {"procs": 2}}).warnings == ()


def test_adapter_modules_have_the_names_of_hugging_face():
    config = settled(fine_tune(algorithm_config={**LORA, "apply_lora_to_mlp": True, "use_dora": True}))
    assert config.lora.targets == ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (config.lora.rank, config.lora.alpha, config.lora.dora) == (4, 8, True)


def test_without_an_algorithm_everything_is_trained():
    assert settled(fine_tune()).lora is None


def test_logging():
    job = fine_tune(logger_config={"log_every_n_steps": 5, "tensorboard": False, "wandb": {"project": "x"}})
    config = settled(job)
    assert (config.logging.every_steps, config.logging.tensorboard) == (5, False)
    assert "logger_config.wandb" in " ".join(job.warnings)


# --- preferences ------------------------------------------------------------------------------------------------------


def test_new_shape_of_dpo():
    job = prefer({"beta": 0.3, "loss_type": "ipo"}, training(max_steps_per_epoch=5))
    assert job.config["algorithm"] == {"kind": "dpo", "loss": "ipo", "beta": 0.3}
    assert job.warnings == ()
    assert settled(job).algorithm.kind == "dpo"


def test_legacy_shape_of_dpo():
    job = prefer({"reward_scale": 0.2, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 0.99})
    assert job.config["algorithm"] == {"kind": "dpo", "loss": "sigmoid", "beta": 0.2}
    said = " ".join(job.warnings)
    assert all(f"algorithm_config.{name}" in said for name in ("reward_scale", "reward_clip", "epsilon", "gamma"))


def test_beta_wins_over_reward_scale_and_says_so():
    job = prefer({"beta": 0.3, "reward_scale": 1.0})
    assert job.config["algorithm"]["beta"] == 0.3
    assert "reward_scale" in " ".join(job.warnings)


# --- refused, by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("algorithm_config.type", {"algorithm_config": {"type": "QAT", "quantizer_name": "q", "group_size": 32}}),
        ("algorithm_config.apply_lora_to_output", {"algorithm_config": {**LORA, "apply_lora_to_output": True}}),
        ("algorithm_config.quantize_base", {"algorithm_config": {**LORA, "quantize_base": True}}),
        ("algorithm_config.lora_attn_modules", {"algorithm_config": {**LORA, "lora_attn_modules": []}}),
        ("hyperparam_search_config", {"hyperparam_search_config": {"lr": [1, 2]}}),
        ("training_config.dtype", {"training_config": training(dtype="int8")}),
        (
            "training_config.optimizer_config.optimizer_type",
            {"training_config": training(optimizer_config={**ADAMW, "optimizer_type": "sgd"})},
        ),
        (
            "training_config.optimizer_config.optimizer_type",
            {"training_config": training(optimizer_config={**ADAMW, "optimizer_type": "adam"})},
        ),
        ("algorithm_config.adapter_dim", {"algorithm_config": {**LORA, "adapter_dim": 5}}),
        ("algorithm_config.lora_attn_modules", {"algorithm_config": {"apply_lora_to_mlp": True}}),
        (
            "training_config.optimizer_config.warmup_steps",
            {"training_config": training(optimizer_config={"num_warmup_steps": 1, "warmup_steps": 2})},
        ),
        (
            "training_config.optimizer_config.lr_min",
            {"training_config": training(optimizer_config={"lr": 0.1, "lr_min": 0.2})},
        ),
        (
            "training_config.optimizer_config.warmup_ratio",
            {"training_config": training({"packed": True}, optimizer_config={"warmup_ratio": 0.1})},
        ),
        ("provider_config.job", {"provider_config": {"job": {"prio": 1}}}),
        ("provider_config.job.priority", {"provider_config": {"job": {"priority": "high"}}}),
    ],
)
def test_fine_tuning_that_is_refused(field, changes):
    with pytest.raises(RequestError, match=f"^{field}: "):
        fine_tune(**changes)


@pytest.mark.parametrize(
    ("field", "algorithm", "data"),
    [
        ("algorithm_config.loss_type", {"loss_type": "kto_pair"}, {}),
        ("algorithm_config.reward_scale", {"reward_scale": 0.0}, {}),
        ("training_config.data_config.train_on_input", {"beta": 0.1}, {"train_on_input": True}),
    ],
)
def test_preferences_that_are_refused(field, algorithm, data):
    with pytest.raises(RequestError, match=f"^{field}: "):
        prefer(algorithm, training(data))


@pytest.mark.parametrize(
    "body",
    [
        {"training_config": training(epochs=3)},
        {"training_config": training({"batchsize": 3})},
        {"training_config": training(n_epochs=0)},
        {"job_uuid": "../elsewhere"},
        {"priority": 3},
    ],
)
def test_unknown_fields_and_impossible_values_are_refused(body):
    with pytest.raises(ValidationError):
        FineTuneRequest(**{"job_uuid": "one", "training_config": training(), **body})


def test_adam_without_weight_decay_is_the_same_as_adamw():
    config = settled(fine_tune(training(optimizer_config={**ADAMW, "optimizer_type": "adam", "weight_decay": 0.0})))
    assert config.optim.weight_decay == 0


# --- provider_config --------------------------------------------------------------------------------------------------


def test_settings_of_lockstep_win():
    job = fine_tune(
        training(dtype="bf16"),
        algorithm_config=LORA,
        provider_config={
            "seed": 7,
            "model": {"precision": "fp32"},
            "lora": {"rank": 2},
            "data": {"max_length": 512},
            "batch": {"samples": 5},
            "job": {"priority": 3, "max_restarts": 1},
        },
    )
    config = settled(job)
    assert (config.seed, config.model.precision, config.lora.rank, config.lora.alpha) == (7, "fp32", 2, 8)
    assert config.model.path == "/models/small"
    assert (job.priority, job.max_restarts) == (3, 1)
    assert job.epoch_steps == 2  # of 10 rows, 5 at a time
    assert config.batch.micro_batch_tokens == 1024


def test_a_longer_row_brings_room_for_itself():
    assert settled(fine_tune(provider_config={"data": {"max_length": 8192}})).batch.micro_batch_tokens == 8192


def test_tokens_may_replace_samples():
    config = settled(fine_tune(provider_config={"batch": {"tokens": 8192}}))
    assert (config.batch.samples, config.batch.tokens) == (None, 8192)


def test_a_layout_is_chosen_by_provider_config():
    wanted = training(efficiency_config={"fsdp_cpu_offload": True})
    parallel = settled(fine_tune(wanted, provider_config={"parallel": "auto", "launch": {"procs": 2}})).parallel
    assert (parallel.auto, parallel.offload) == (True, True)


def test_adapters_for_preferences_come_by_provider_config():
    assert settled(prefer({"beta": 0.1}, provider_config={"lora": True})).lora is not None


def test_rows_are_held_out_in_one_way_only():
    config = settled(fine_tune(training({"train_split_percentage": 1.0})))
    assert config.data.validation_fraction == 0
    with pytest.raises(RequestError, match="train_split_percentage: rows are held out by validation_dataset_id"):
        fine_tune(training({"train_split_percentage": 0.9}), TrainingData("/data/train.jsonl", 10, "/data/more.jsonl"))


def test_the_request_is_left_as_it_was():
    given = {"lora": {"rank": 2}, "job": {"priority": 1}}
    fine_tune(provider_config=given)
    assert given == {"lora": {"rank": 2}, "job": {"priority": 1}}


# --- rows -------------------------------------------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"dialog": '[{"role": "user", "content": "2 + 2?"}]', "id": 3}, {"messages": [QUESTION], "id": 3}),
        ({"dialog": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]}),
        (
            {
                "chat_completion_input": '[{"role": "user", "content": "2 + 2?"}]',
                "expected_answer": "4",
                "input_query": "2 + 2?",
            },
            {"messages": [QUESTION, ANSWER]},
        ),
        ({"input_query": "2 + 2?", "expected_answer": "4"}, {"prompt": "2 + 2?", "completion": "4"}),
        ({"messages": '[{"role": "user", "content": "2 + 2?"}]'}, {"messages": [QUESTION]}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ({"prompt": "a", "completion": "b", "system": float("nan")}, {"prompt": "a", "completion": "b"}),
    ],
)
def test_rows_of_llama_stack(row, expected):
    assert list(convert_rows([row], "rows")) == [expected]


@pytest.mark.parametrize("value", ["no JSON", "[]", "{}", 3])
def test_a_bad_row_is_named(value):
    with pytest.raises(RequestError, match=r"^row 2 of data set maths: 'dialog'"):
        list(convert_rows([{"dialog": [QUESTION]}, {"dialog": value}], "maths"))


def test_only_columns_of_llama_stack_are_foreign():
    assert is_foreign({"dialog": "[]"})
    assert is_foreign({"input_query": "a", "expected_answer": "b"})
    assert not is_foreign({"prompt": "a", "expected_answer": "b"})
    assert not is_foreign({"messages": []})


def test_dialog_needs_conversations():
    check_format({"messages": []}, "dialog", "rows")
    check_format({"prompt": "a", "completion": "b"}, "instruct", "rows")
    with pytest.raises(RequestError, match="data_format: dialog needs rows with messages"):
        check_format({"prompt": "a", "completion": "b"}, "dialog", "rows")
