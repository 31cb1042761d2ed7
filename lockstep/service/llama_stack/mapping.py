"""From a Llama Stack request and its rows to a Lockstep configuration and its rows, field by field.

What cannot be done is an error with the field's name; what is done in another way is said in a warning.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from lockstep.config.loading import merge_settings
from lockstep.config.parallel import expand_parallel
from lockstep.service.errors import ServiceError
from lockstep.service.llama_stack.schemas import (
    DPOAlignmentConfig,
    EfficiencyConfig,
    FineTuneRequest,
    LoraFinetuningConfig,
    OptimizerConfig,
    PreferenceRequest,
    QATFinetuningConfig,
    TrainingConfig,
)
from lockstep.service.schemas import JobRequest

Row = dict[str, Any]
_TURNS = ("messages", "conversations", "conversation")
_PAIR = ("chosen", "rejected")
Tree = dict[str, Any]
Number = TypeVar("Number", int, float)
MAX_LENGTH = 2048  # tokens in a row, as Lockstep's own default
_MICRO_BATCH_TOKENS = 4096
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32"), "fp32"),
    **dict.fromkeys(("fp64", "float64"), "fp64"),
}
# What torchtune calls a module, and what Hugging Face models call it.
_MODULE_NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OPTIMIZER = "training_config.optimizer_config"
_MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
_LOGGING_NAMES = {"log_every_n_steps": "every_steps", "every_steps": "every_steps", "tensorboard": "tensorboard"}
_JOB_SETTINGS = ("priority", "max_restarts")
JOB = "job:"  # begins the name of what an earlier job made


class RequestError(ServiceError):
    """A request that cannot be done. The message begins with the field or the row."""

    status = 400  # what Llama Stack answers, where the rest of the service says 422


# --- rows ------------------------------------------------------------------------------------------------------------


def is_foreign(row: Mapping[str, object]) -> bool:
    """Whether a row has columns that only Llama Stack knows."""
    return "dialog" in row or ("expected_answer" in row and ("chat_completion_input" in row or "input_query" in row))


def convert_rows(rows: Iterable[Mapping[str, object]], name: str) -> Iterator[Row]:
    """The rows of the data set `name`, in Lockstep's formats where Llama Stack has its own; one at a time, for all of
    them need not fit into memory."""
    return (_convert(row, f"row {number} of data set {name}") for number, row in enumerate(rows, start=1))


def check_format(row: Mapping[str, object], data_format: str | None, name: str) -> None:
    """Refuse `dialog` for rows that hold no conversation; `row` is the first one, converted."""
    if data_format == "dialog" and not any(key in row for key in (*_TURNS, *_PAIR)):
        found = ", ".join(sorted(row)) or "none"
        raise RequestError(
            f"training_config.data_config.data_format: dialog needs rows with messages or dialog, and row 1 of data "
            f"set {name} has the columns {found}: say instruct, or register conversations"
        )


def _convert(row: Mapping[str, object], place: str) -> Row:
    if not isinstance(row, Mapping):
        raise RequestError(f"{place}: it is {type(row).__name__}: a row must be an object")
    known = {key: value for key, value in row.items() if not _is_gap(value)}
    if "dialog" in known:
        return {"messages": _read_turns(known, "dialog", place), **_rest(known, "dialog")}
    if "expected_answer" in known and "chat_completion_input" in known:
        turns = _read_turns(known, "chat_completion_input", place)
        answer = {"role": "assistant", "content": known["expected_answer"]}
        rest = _rest(known, "chat_completion_input", "expected_answer", "input_query")
        return {"messages": [*turns, answer], **rest}
    if "expected_answer" in known and "input_query" in known:
        named = {"prompt": known["input_query"], "completion": known["expected_answer"]}
        return {**named, **_rest(known, "input_query", "expected_answer")}
    if isinstance(known.get("messages"), str):
        known["messages"] = _read_turns(known, "messages", place)
    return known


def _is_gap(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _rest(row: Row, *used: str) -> Row:
    return {key: value for key, value in row.items() if key not in used}


def _read_turns(row: Row, column: str, place: str) -> list[object]:
    value = row[column]
    try:
        turns = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RequestError(f"{place}: {column!r} is not JSON ({error}): write a list of messages") from error
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{place}: {column!r} must be a list of messages with role and content")
    return turns


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingData:
    """Data sets as a configuration names them, and how many rows they have."""

    train: str
    num_train: int
    validation: str | None = None


@dataclass(frozen=True)
class MappedJob:
    """`epoch_steps` is the number of optimizer steps that Llama Stack calls an epoch; None where rows are packed."""

    config: Tree
    warnings: tuple[str, ...]
    epoch_steps: int | None
    priority: int = 0
    max_restarts: int = 0


@dataclass
class _Draft:
    """A configuration being written."""

    overrides: Tree
    """The caller's provider_config: it wins in the end, and what depends on its lengths must know them before."""
    tree: Tree = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def overridden(self, section: str) -> Mapping[str, object]:
        settings = self.overrides.get(section)
        return settings if isinstance(settings, Mapping) else {}

    @property
    def max_length(self) -> int:
        length = self.overridden("data").get("max_length", MAX_LENGTH)
        return length if isinstance(length, int) else MAX_LENGTH  # what is no number is refused with the configuration

    def put(self, section: str, **settings: object) -> None:
        self.tree.setdefault(section, {}).update(settings)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def map_fine_tune(request: FineTuneRequest, model: str, data: TrainingData) -> MappedJob:
    draft = _begin(request, model)
    draft.put("algorithm", kind="sft")
    _map_adapter(draft, request.algorithm_config)
    return _finish(draft, request, data, pairs=False)


def map_preference(request: PreferenceRequest, model: str, data: TrainingData) -> MappedJob:
    draft = _begin(request, model)
    if request.model and request.finetuned_model not in (None, request.model):
        draft.warn(
            f"finetuned_model {request.finetuned_model} is taken as a name for the result: model {request.model} is "
            "what is trained"
        )
    if isinstance(request.algorithm_config, LoraFinetuningConfig):
        draft.tree["algorithm"] = {"kind": "dpo"}
        draft.warn("algorithm_config is LoRA's: DPO trains adapters, with Lockstep's own beta and loss")
        _map_adapter(draft, request.algorithm_config)
    else:
        _map_dpo(draft, request.algorithm_config)
    return _finish(draft, request, data, pairs=True)


def base_model(request: FineTuneRequest | PreferenceRequest) -> tuple[str, str | None]:
    """The field that names the model to train, and what it says."""
    if isinstance(request, FineTuneRequest):
        return "model", request.model
    if request.model is None:
        return "finetuned_model", request.finetuned_model
    if request.finetuned_model and request.finetuned_model.startswith(JOB):
        raise RequestError(
            f"finetuned_model: {request.finetuned_model} is a model to train, and so is model {request.model}: give one"
        )
    return "model", request.model


def _begin(request: FineTuneRequest | PreferenceRequest, model: str) -> _Draft:
    if request.hyperparam_search_config:
        keys = ", ".join(request.hyperparam_search_config)
        raise RequestError(
            f"hyperparam_search_config: there is no search here, and {keys} was given: submit one job for each "
            "setting and leave this empty"
        )
    draft = _Draft(copy.deepcopy(request.provider_config or {}))
    draft.tree["name"] = request.job_uuid
    draft.put("model", path=model)
    return draft


def _finish(
    draft: _Draft, request: FineTuneRequest | PreferenceRequest, data: TrainingData, *, pairs: bool
) -> MappedJob:
    config = request.training_config
    _map_precision(draft, config.dtype)
    _map_data(draft, config, data, pairs=pairs)
    _map_batch(draft, config, pairs=pairs)
    epoch_steps = _map_steps(draft, config, data)
    _map_optimizer(draft, config, data)
    _map_efficiency(draft, config.efficiency_config)
    _map_logging(draft, request.logger_config or {})
    job = _read_job_settings(draft.overrides.pop("job", {}))
    if "parallel" in draft.overrides:  # a word for a section must not replace what the request says in it
        draft.overrides["parallel"] = expand_parallel(draft.overrides["parallel"])
    merge_settings(draft.tree, draft.overrides)
    return MappedJob(draft.tree, tuple(draft.warnings), epoch_steps, **job)


def _map_adapter(draft: _Draft, lora: LoraFinetuningConfig | QATFinetuningConfig | None) -> None:
    if lora is None:
        return
    if isinstance(lora, QATFinetuningConfig):
        raise RequestError("algorithm_config.type: QAT is not available: use LoRA, or leave algorithm_config out")
    if lora.quantize_base:
        raise RequestError("algorithm_config.quantize_base: a quantised base is not available: set it to false")
    if lora.apply_lora_to_output:
        raise RequestError(
            "algorithm_config.apply_lora_to_output: the output layer gets no adapter here: set it to false"
        )
    if None not in (lora.rank, lora.adapter_dim) and lora.rank != lora.adapter_dim:
        raise RequestError(
            f"algorithm_config.adapter_dim: it is {lora.adapter_dim}, and rank, which is the same, is {lora.rank}: "
            "give one"
        )
    settings = {"rank": lora.rank or lora.adapter_dim, "alpha": lora.alpha, "targets": _adapter_targets(draft, lora)}
    missing = [name for name, value in settings.items() if value is None and name != "targets"]
    if missing:
        draft.warn(f"algorithm_config says no {' and no '.join(missing)}: Lockstep's own is used")
    given = {name: value for name, value in settings.items() if value is not None}
    draft.tree["lora"] = {**given, "dora": bool(lora.use_dora)}


def _adapter_targets(draft: _Draft, lora: LoraFinetuningConfig) -> list[str] | None:
    """None: every linear layer, where the request does not say."""
    if lora.lora_attn_modules is None:
        if lora.apply_lora_to_mlp is not None:
            raise RequestError(
                "algorithm_config.lora_attn_modules: it is missing beside apply_lora_to_mlp: name modules of the "
                "attention, or give an empty list for none"
            )
        draft.warn("algorithm_config.lora_attn_modules was not given: every linear layer gets an adapter")
        return None
    targets = [_MODULE_NAMES.get(name, name) for name in lora.lora_attn_modules]
    targets += [name for name in _MLP_MODULES if lora.apply_lora_to_mlp]
    if not targets:
        raise RequestError(
            "algorithm_config.lora_attn_modules: no module gets an adapter: name some, or set apply_lora_to_mlp"
        )
    return list(dict.fromkeys(targets))


def _map_dpo(draft: _Draft, dpo: DPOAlignmentConfig) -> None:
    if dpo.loss_type == "kto_pair":
        raise RequestError("algorithm_config.loss_type: kto_pair is not available for pairs: use sigmoid, hinge or ipo")
    settings: Tree = {"kind": "dpo", "loss": dpo.loss_type or "sigmoid"}
    beta = draft.overridden("algorithm").get("beta", dpo.beta)
    if beta is not None:
        settings["beta"] = beta
        if dpo.reward_scale not in (None, beta):
            draft.warn(f"algorithm_config.reward_scale {dpo.reward_scale} is not used: beta {beta} says it")
    elif dpo.reward_scale is not None:
        if dpo.reward_scale <= 0:
            raise RequestError(
                f"algorithm_config.reward_scale: {dpo.reward_scale} is used as DPO's beta and must be above 0: "
                "0.1 is usual"
            )
        settings["beta"] = dpo.reward_scale
        draft.warn(f"algorithm_config.reward_scale {dpo.reward_scale} is used as DPO's beta")
    for name in ("reward_clip", "epsilon", "gamma"):
        if getattr(dpo, name) is not None:
            draft.warn(f"algorithm_config.{name} {getattr(dpo, name)} is not used: DPO has no such setting")
    draft.tree["algorithm"] = settings


def _map_precision(draft: _Draft, dtype: str | None) -> None:
    if dtype is None:
        return
    if dtype not in _PRECISIONS:
        raise RequestError(f"training_config.dtype: {dtype!r} is not one of {', '.join(_PRECISIONS)}")
    draft.put("model", precision=_PRECISIONS[dtype])


def _map_data(draft: _Draft, config: TrainingConfig, data: TrainingData, *, pairs: bool) -> None:
    data_config = config.data_config
    assert data_config is not None, "without it there is no TrainingData"
    draft.put("data", train=data.train, max_length=draft.max_length)
    if data_config.shuffle is None:
        draft.warn("training_config.data_config.shuffle was not given: rows are shuffled")
    else:
        draft.put("data", shuffle=data_config.shuffle)
    if data.validation is not None:
        draft.put("data", validation=data.validation)
    _map_held_out(draft, data_config.train_split_percentage, data)
    if pairs:
        if data_config.train_on_input:
            raise RequestError(
                "training_config.data_config.train_on_input: DPO compares answers and learns no prompts: set it false"
            )
        return
    # An instruction has one answer, the last; in a dialogue every answer is learned. Where the request does not say
    # which it is, the rows do: what is no conversation has one answer.
    answers = "last" if data_config.data_format == "instruct" else "assistant"
    draft.put("data", train_on="all" if data_config.train_on_input else answers)


def _map_held_out(draft: _Draft, share: float | None, data: TrainingData) -> None:
    if share is None or share == 1:
        return
    if data.validation is not None:
        raise RequestError(
            "training_config.data_config.train_split_percentage: rows are held out by validation_dataset_id already: "
            "give one of the two"
        )
    draft.put("data", validation_fraction=round(1 - share, 9))


def _map_batch(draft: _Draft, config: TrainingConfig, *, pairs: bool) -> None:
    data_config = config.data_config
    assert data_config is not None
    rows = data_config.batch_size * (config.gradient_accumulation_steps or 1)
    if data_config.packed and pairs:
        draft.warn(
            f"training_config.data_config.packed: pairs are always computed without padding, and a step takes {rows}"
        )
    if data_config.packed and not pairs:
        draft.put("batch", tokens=rows * draft.max_length)
    else:
        draft.put("batch", samples=rows)
    # batch_size is what the caller's memory holds at once; here that never changes the numbers.
    at_once = data_config.batch_size * draft.max_length * (2 if pairs else 1)
    draft.put("batch", micro_batch_tokens=max(draft.max_length, min(at_once, _MICRO_BATCH_TOKENS)))
    for size, other in (("samples", "tokens"), ("tokens", "samples")):
        if draft.overridden("batch").get(size) is not None:
            draft.tree["batch"].pop(other, None)
    merge_settings(draft.tree["batch"], draft.overridden("batch"))


def _num_train(draft: _Draft, data: TrainingData) -> int:
    held_out = draft.tree["data"].get("validation_fraction", 0)
    return data.num_train - (max(round(data.num_train * held_out), 1) if held_out else 0)


def _map_steps(draft: _Draft, config: TrainingConfig, data: TrainingData) -> int | None:
    limit = config.max_steps_per_epoch or None  # documents write 0 for no limit
    samples = draft.tree["batch"].get("samples")
    whole = math.ceil(_num_train(draft, data) / samples) if isinstance(samples, int) and samples > 0 else None
    draft.put("optim", epochs=config.n_epochs)
    if config.max_steps_per_epoch is None:
        draft.warn("training_config.max_steps_per_epoch was not given: every epoch goes through all rows")
    elif limit is not None and (whole is None or limit < whole):
        draft.put("optim", max_steps=config.n_epochs * limit)
        if config.n_epochs > 1:
            draft.warn(
                f"training_config.max_steps_per_epoch {limit}: the run has at most {config.n_epochs * limit} steps, "
                "and each goes on in the rows where the last one stopped"
            )
    epoch_steps = min(limit or whole, whole) if whole else None
    if epoch_steps:
        draft.put("checkpoint", every_steps=epoch_steps)
        draft.put("evaluation", every_steps=epoch_steps)
    return epoch_steps


def _map_optimizer(draft: _Draft, config: TrainingConfig, data: TrainingData) -> None:
    optimizer = config.optimizer_config or OptimizerConfig()
    if optimizer.optimizer_type == "sgd":
        raise RequestError(f"{_OPTIMIZER}.optimizer_type: sgd is not available: use adamw")
    if optimizer.optimizer_type == "adam" and optimizer.weight_decay:
        raise RequestError(
            f"{_OPTIMIZER}.optimizer_type: adam would add weight_decay {optimizer.weight_decay} to the gradient; here "
            "it shrinks the weights: use adamw, or set weight_decay to 0"
        )
    rate = _same(f"{_OPTIMIZER}.lr", optimizer.lr, "training_config.learning_rate", config.learning_rate)
    schedule = optimizer.lr_scheduler_type
    settings: Tree = {
        "learning_rate": rate,
        "weight_decay": optimizer.weight_decay,
        "warmup_steps": _warmup_steps(draft, config, optimizer, data),
        "schedule": "constant" if schedule == "constant_with_warmup" else schedule,
    }
    if optimizer.lr_min is not None:
        if rate is None or optimizer.lr_min > rate:
            raise RequestError(f"{_OPTIMIZER}.lr_min: it must lie below lr, which is {rate or 'not given'}")
        settings["min_learning_rate_ratio"] = optimizer.lr_min / rate
    draft.put("optim", **{name: value for name, value in settings.items() if value is not None})


def _warmup_steps(draft: _Draft, config: TrainingConfig, optimizer: OptimizerConfig, data: TrainingData) -> int | None:
    steps = _same(
        f"{_OPTIMIZER}.num_warmup_steps",
        optimizer.num_warmup_steps,
        f"{_OPTIMIZER}.warmup_steps",
        optimizer.warmup_steps,
    )
    if not optimizer.warmup_ratio:
        return steps
    if steps:
        draft.warn(f"{_OPTIMIZER}.warmup_ratio {optimizer.warmup_ratio} is not used: num_warmup_steps {steps} says it")
        return steps
    samples = draft.tree["batch"].get("samples")
    if not isinstance(samples, int) or samples < 1:
        raise RequestError(
            f"{_OPTIMIZER}.warmup_ratio: how many steps packed rows take is not known yet: say num_warmup_steps"
        )
    whole = -(-config.n_epochs * _num_train(draft, data) // samples)
    return math.ceil(optimizer.warmup_ratio * min(whole, draft.tree["optim"].get("max_steps", whole)))


def _same(name: str, value: Number | None, other_name: str, other: Number | None) -> Number | None:
    """What either of two names for one setting says."""
    if value is not None and other is not None and value != other:
        raise RequestError(f"{other_name}: it is {other}, and {name}, which means the same, is {value}: give one")
    return other if value is None else value


def _map_efficiency(draft: _Draft, efficiency: EfficiencyConfig | None) -> None:
    if efficiency is None:
        return
    if efficiency.enable_activation_checkpointing:
        draft.put("model", activation_checkpointing="full")
    if efficiency.enable_activation_offloading:
        draft.put("model", activation_offload=True)
    place = "training_config.efficiency_config"
    if efficiency.fsdp_cpu_offload:
        draft.put("parallel", offload=True)
        if draft.overridden("launch").get("procs", 1) == 1:
            draft.warn(f"{place}.fsdp_cpu_offload does nothing with one process: raise launch.procs in provider_config")
    if efficiency.memory_efficient_fsdp_wrap:
        draft.warn(
            f"{place}.memory_efficient_fsdp_wrap is not used: layers are split one by one, embedding and head together"
        )


def _map_logging(draft: _Draft, settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        if name in _LOGGING_NAMES:
            draft.put("logging", **{_LOGGING_NAMES[name]: value})
        else:
            draft.warn(f"logger_config.{name} is not used: known are {', '.join(_LOGGING_NAMES)}")


def _read_job_settings(settings: object) -> dict[str, int]:
    if not isinstance(settings, Mapping) or settings.keys() - set(_JOB_SETTINGS):
        raise RequestError(f"provider_config.job: give a mapping with {' or '.join(_JOB_SETTINGS)}")
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(f"provider_config.job.{name}: {value!r} is not a whole number")
    try:
        JobRequest(config={}, **settings)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RequestError(f"provider_config.job.{problem['loc'][0]}: {problem['msg']}") from error
    return dict(settings)
