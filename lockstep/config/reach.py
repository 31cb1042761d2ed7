"""What each text of a configuration leads to: code, a file, an address, or nothing. The one list of it.

Whoever admits configurations of others decides by this list. A key that is missing from it is refused there, and a
test walks the schema: who adds a key that takes text also says here what it leads to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from lockstep.config.grpo import ENVIRONMENTS, EVALUATING, REWARDS
from lockstep.config.schema import ConfigError
from lockstep.config.sections import RunConfig

Reach = Literal["text", "code", "model", "rows", "hub", "file", "folder", "address", "cluster"]
"""text: shown, compared or written, and nothing else. code: imported and called. model: a folder or a Hub id. rows: a
file, a folder, a pattern or a Hub id. hub: a branch, split or subset of something on the Hub. file: read as it
is. folder: written to. address: connected to. cluster: takes the resources of a cluster, in somebody's name."""

_OF_A_SOURCE: dict[str, Reach] = {
    "path": "rows",
    "split": "hub",
    "subset": "hub",
    "revision": "hub",
    "options": "text",  # keyword arguments of a task, whose path is code
    "columns": "text",
    "roles": "text",
    "input_template": "text",
    "output_template": "text",
    "converter": "code",
}
# What runs in the pods, or with which rights, is code; so is what can change either.
_OF_KUBERNETES: dict[str, Reach] = {
    **dict.fromkeys(("image", "env", "secrets", "annotations", "service_account", "image_pull_secrets"), "code"),
    **dict.fromkeys(("runtime", "gpu_resource", "node_selector", "priority_class"), "code"),
    "tolerations.key": "code",
    "tolerations.value": "code",
    "context": "address",
    "namespace": "address",
    "run_store": "address",
    "queue": "text",
    "cpus": "text",
    "memory": "text",
    "shm": "text",
    "run_root": "folder",
    "volumes.claim": "folder",
    "volumes.path": "folder",
    "volumes.sub_path": "folder",
}
_OF_SLURM: dict[str, Reach] = {
    **dict.fromkeys(("container", "setup", "extra", "engines.extra"), "code"),
    **dict.fromkeys(("partition", "account", "qos", "time", "engines.partition"), "cluster"),
    "engines.memory": "text",
}
REACHES: dict[str, Reach] = {
    "name": "text",
    "model.path": "model",
    "model.revision": "hub",
    "model.trust_remote_code": "code",
    "lora.targets": "text",
    "lora.modules_to_save": "text",
    **{f"data.{part}.{key}": reach for part in ("train", "validation", "test") for key, reach in _OF_A_SOURCE.items()},
    "data.columns": "text",
    "data.roles": "text",
    "data.input_template": "text",
    "data.output_template": "text",
    "data.converter": "code",
    "data.chat_template": "file",
    "data.template_options": "text",  # variables of a template that runs in jinja's sandbox
    "data.image_folder": "file",
    "data.image_urls": "address",
    "data.cache_dir": "folder",
    "algorithm.reference_model": "model",
    "algorithm.reward.name": "code",
    "algorithm.reward.options": "text",  # keyword arguments of the reward
    "algorithm.environment": "code",
    "algorithm.stop": "text",
    "rollouts.endpoint": "address",
    "parallel.deepspeed_config": "file",
    "evaluation.encoder": "model",
    "launch.address": "address",
    **{f"launch.{key}": reach for key, reach in _OF_KUBERNETES.items()},
    **{f"launch.{key}": reach for key, reach in _OF_SLURM.items()},
    "cluster.resources": "text",
}
# Values that stand for something of Lockstep's own, and lead nowhere else.
_BUILT_IN: dict[str, tuple[str, ...]] = {
    "data.chat_template": ("auto", "none"),
    "algorithm.reward.name": tuple(name for name in REWARDS if name != EVALUATING),
    "algorithm.environment": ENVIRONMENTS,
}


class ReachingText(NamedTuple):
    """A text of one configuration. `key` is dotted, without the places in lists."""

    key: str
    reach: Reach
    value: str


def texts_of(config: RunConfig) -> Iterator[ReachingText]:
    """Every text that a user could choose freely; a switch that is on counts where it is listed."""
    yield from _walk(config.model_dump(mode="json"), "")


def reach_of(key: str) -> Reach | None:
    """Also of a section's short form: `model` stands for model.path, `data.train` for the paths of its sources."""
    return REACHES.get(key) or REACHES.get(f"{key}.path")


@cache
def open_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> frozenset[str]:
    """Every dotted key of the schema that takes text of the user's own, as a value or inside of one."""
    keys: set[str] = set()
    for name, info in section.model_fields.items():
        if _takes_text(info.annotation):
            keys.add(prefix + name)
        for child in _sections_in(info.annotation):
            keys |= open_keys(child, f"{prefix}{name}.")
    return frozenset(keys)


def _walk(value: object, key: str) -> Iterator[ReachingText]:
    if key in REACHES:
        for text in _texts_in(value):
            if text not in _BUILT_IN.get(key, ()):
                is_task = REACHES[key] == "rows" and text.startswith(f"{EVALUATING}:")
                yield ReachingText(key, "code" if is_task else REACHES[key], text)
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _walk(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for child in value:
            yield from _walk(child, key)
    elif isinstance(value, str) and key in open_keys():
        raise ConfigError(f"{key}: it is not known what this text leads to (lockstep.config.reach), so it is refused")


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif value is True:
        yield "true"
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from (str(name), *_texts_in(child))
    elif isinstance(value, list):
        for child in value:
            yield from _texts_in(child)


def _takes_text(annotation: object) -> bool:
    """Literals are choices of ours, not text."""
    if annotation is str or annotation is Any or annotation is object:
        return True
    return get_origin(annotation) is not Literal and any(_takes_text(part) for part in get_args(annotation))


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)
