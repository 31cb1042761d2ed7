"""What a provider's `config` in run.yaml may hold: our settings, and those of other providers under their own names.

A key of another provider is taken where Lockstep has the same thing, logged where it changes nothing here, and refused
with a sentence otherwise: a run.yaml that was copied either means what it says or does not start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.config.loading import merge_settings
from lockstep.service.llama_stack.schemas import PreferenceRequest

log = logging.getLogger(__name__)
Tree = dict[str, Any]
_LOCAL = (None, "localhost", "127.0.0.1")
_STRATEGIES = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "NO_SHARD": "none", "HYBRID_SHARD": "hybrid"}


class ProviderConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    settings: dict[str, Any] = Field(default={})
    """Lockstep's own configuration, under every job: a request's provider_config wins over it."""
    request_defaults: dict[str, Any] = Field(default={})
    """Fields of Llama Stack's requests, where a request leaves them out. algorithm_config is for DPO only."""

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        return translate(given, known=set(cls.model_fields)) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check_defaults(self) -> ProviderConfig:
        """Now, not with the first request."""
        data = {"dataset_id": "any", "batch_size": 1}
        least: Tree = {"job_uuid": "any", "finetuned_model": "any", "algorithm_config": {}}
        PreferenceRequest(
            **_under(self.request_defaults, {**least, "training_config": {"n_epochs": 1, "data_config": data}})
        )
        return self


def fill_in(request: Any, defaults: Mapping[str, object]) -> Any:
    """The request with the operator's defaults for what its sender left out."""
    if not defaults:
        return request
    given = request.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    usable = {name: value for name, value in defaults.items() if name != "algorithm_config" or _is_dpo(request)}
    training = given["training_config"]
    optimizer = training.get("optimizer_config", {})
    merged = _under(usable, given)
    filled = merged["training_config"].get("optimizer_config", {})
    # Defaults that would contradict what was written, or that packed rows have no number of steps for.
    if optimizer.get("optimizer_type") == "adam" and "weight_decay" not in optimizer:
        filled.pop("weight_decay", None)
    packed = training.get("data_config", {}).get("packed")
    if {"warmup_ratio", "warmup_steps", "num_warmup_steps"} & optimizer.keys() or packed:
        for name in {"warmup_ratio", "warmup_steps", "num_warmup_steps"} - optimizer.keys():
            filled.pop(name, None)
    return type(request)(**merged)


def _is_dpo(request: object) -> bool:
    return isinstance(request, PreferenceRequest) and request.algorithm_config.type == "DPO"


def _under(defaults: Mapping[str, object], given: Mapping[str, object]) -> Tree:
    merged: Tree = {}
    merge_settings(merged, defaults)
    merge_settings(merged, given)
    return merged


# --- keys of other providers -----------------------------------------------------------------------------------------


@dataclass
class _Translated:
    settings: Tree = field(default_factory=dict)
    defaults: Tree = field(default_factory=dict)
    own: Tree = field(default_factory=dict)
    """Keys of ours."""

    def put(self, target: Tree, path: str, value: object) -> None:
        *sections, name = path.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value


Take = Callable[[_Translated, Any, str], None]


def translate(given: Mapping[str, object], known: set[str]) -> Tree:
    """`given` in our own keys alone; `known` are those of the class that reads them."""
    made = _Translated()
    for name, value in given.items():
        if name in known:
            made.own[name] = value
        else:
            _take(made, name, value, known)
    result = dict(made.own)
    for name, found in (("settings", made.settings), ("request_defaults", made.defaults)):
        if found:
            own = result.get(name)
            result[name] = _under(found, own if isinstance(own, Mapping) else {})
    return result


def _take(made: _Translated, name: str, value: Any, known: set[str], place: str = "") -> None:
    shown = place + name
    if name == "training_config" and not place:  # TRL's remote provider nests those of the inline one
        for key, setting in _mapping(value, shown).items():
            _take(made, key, setting, known, f"{shown}.")
    elif name in _TAKEN:
        if value is not None:  # what a variable of the environment left empty
            _TAKEN[name](made, value, shown)
    elif name in _WITHOUT_EFFECT:
        log.warning("%s in run.yaml is not used: %s", shown, _WITHOUT_EFFECT[name])
    elif name in _OURS and _OURS[name] in known:
        log.warning("%s in run.yaml is taken as %s", shown, _OURS[name])
        made.own.setdefault(_OURS[name], value)
    else:
        raise ValueError(f"{shown}: {_REFUSED.get(name, 'there is no such setting')}: {_ADVICE}")


def _mapping(value: Any, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {value!r} holds no settings: write some below it, or leave it out")
    return value


def _setting(path: str) -> Take:
    """The same thing in Lockstep's configuration."""
    return lambda made, value, name: made.put(made.settings, path, value)


def _default(path: str) -> Take:
    """The same thing in a request, whose sender may say otherwise."""
    return lambda made, value, name: made.put(made.defaults, path, value)


def _one_of(values: Mapping[Any, Any], take: Take | None = None) -> Take:
    """Only these values; None as a result: what Lockstep does anyway."""

    def check(made: _Translated, value: Any, name: str) -> None:
        if isinstance(value, (list, dict)) or value not in values:
            raise ValueError(f"{name}: {value!r} is not available here: use {' or '.join(map(str, values))}")
        if take is not None and values[value] is not None:
            take(made, values[value], name)

    return check


def _below(keys: Mapping[str, Take | str]) -> Take:
    """A section: each of its keys taken, or (a text) not used, and why."""

    def take(made: _Translated, value: Any, name: str) -> None:
        for key, setting in _mapping(value, name).items():
            known = keys.get(key)
            if known is None:
                raise ValueError(f"{name}.{key}: there is no such setting: {_ADVICE}")
            if isinstance(known, str):
                log.warning("%s.%s in run.yaml is not used: %s", name, key, known)
            else:
                known(made, setting, f"{name}.{key}")

    return take


_ADVICE = "see docs/llama-stack.md for what can stand in run.yaml"
_SCHEDULED = "collectives are ordered by the layers themselves"
_TAKEN: dict[str, Take] = {
    "device": _one_of({"cuda": "cuda", "cpu": "cpu", "auto": "auto"}, _setting("launch.device")),
    "torch_seed": _setting("seed"),
    "max_seq_length": _setting("data.max_length"),
    "gradient_checkpointing": _one_of({True: "full", False: "none"}, _setting("model.activation_checkpointing")),
    "activation_checkpointing": _setting("model.activation_checkpointing"),
    "logging_steps": _setting("logging.every_steps"),
    "save_total_limit": _setting("checkpoint.keep_last"),
    "distributed_backend": _one_of({None: None, "fsdp": None, "deepspeed": "deepspeed"}, _setting("parallel.backend")),
    "checkpoint_format": _one_of({"huggingface": None, None: None}),
    "weight_decay": _default("training_config.optimizer_config.weight_decay"),
    "warmup_ratio": _default("training_config.optimizer_config.warmup_ratio"),
    "dpo_beta": _default("algorithm_config.beta"),
    "dpo_loss_type": _default("algorithm_config.loss_type"),
    # Without one of its own, TRL compares with the model as it began: that is what is always done here.
    "use_reference_model": _one_of({True: None, False: None}),
    "label_smoothing": _one_of({0: None}),
    "model_specific_config": _below(
        {
            "trust_remote_code": _one_of({False: None}),
            "attn_implementation": "the attention is chosen by what the model and the device can do",
        }
    ),
    "fsdp_config": _below(
        {
            "sharding_strategy": _one_of(_STRATEGIES, _setting("parallel.shard")),
            "mixed_precision_policy": _one_of(
                {"bf16": "bf16", "fp16": "fp16", None: None}, _default("training_config.dtype")
            ),
            "cpu_offload": _setting("parallel.offload"),
            "limit_all_gathers": _SCHEDULED,
            "forward_prefetch": _SCHEDULED,
            "backward_prefetch": _SCHEDULED,
            "use_orig_params": "FSDP2 has no other way",
            "sync_module_states": "weights are read once and sent to every process anyway",
        }
    ),
    "torch_run_config": _below(
        {
            "nproc_per_node": _setting("launch.procs"),
            "nnodes": _one_of({1: None}),
            "node_rank": _one_of({0: None}),
            "master_addr": _one_of(dict.fromkeys(_LOCAL)),
            "master_port": "every job gets a port that is free",
            "max_restarts": _setting("launch.max_restarts"),
            "rdzv_timeout": "launch.timeout_s in settings bounds how long processes wait for each other",
        }
    ),
}
_WITHOUT_EFFECT = {
    "dataloader_num_workers": "rows are tokenised once and mapped into memory, without loader processes",
    "dataloader_pin_memory": "rows are tokenised once and mapped into memory, without loader processes",
    "normalize_rewards": "DPO has no reward to normalise",
    "connect_timeout": "timeout_s bounds each request as a whole",
    "max_retries": "stacks and their clients ask again by themselves",
    "retry_delay": "stacks and their clients ask again by themselves",
}
_OURS = {"base_url": "url", "timeout": "timeout_s"}
_REFUSED = {
    "chat_template": "the model's own template is used; another one is settings.data.chat_template",
    "dpo_output_dir": "results are below data_dir, and checkpoint_dir of a request names a place for them",
    "service_config": "where the service answers is url",
    "batch_size": "every request says its own",
}
