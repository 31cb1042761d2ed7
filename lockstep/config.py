"""The run configuration: one YAML file, frozen, validated once at the door.

Defaults < YAML < `key.path=value`. Relative paths in the file are relative to the file, those in overrides
to the working directory. Must not know torch, nor what the settings do.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lockstep.yamltree import ConfigError, apply_override, lines_of_keys, merge, place_of, refuse_repeated_keys


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Degree = PositiveInt | Literal["auto"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        str_min_length=1,
    )


class ModelConfig(Section):
    path: str
    """Hub id, local folder, or a .gguf file."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    precision: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """What the model computes in. auto: bf16 where this device is fast at it, otherwise fp32."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full recomputes every decoder layer in the backward pass: less memory, about a third more time."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile of decoder layers and head. auto: on CUDA."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


class LoraConfig(Section):
    rank: PositiveInt = 16
    """Width of the adapters: more can learn more."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters count alpha / rank times."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs left out at random. Needs fixed layouts to be repeatable."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """all-linear: every linear layer inside the decoder layers, found from the model. Or module name endings."""
    dora: bool = False
    """Weight-decomposed LoRA: also learns the magnitude of each output."""


class DataConfig(Section):
    train: Paths
    """One or several JSONL files."""
    validation: Paths = ()
    """Files with held-out rows."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training rows held out when no validation file is given."""
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text"] = "auto"
    """auto: recognised from the first row of each file."""
    max_length: PositiveInt = 2048
    """Tokens in one row. Longer prompts are cut from the left; an answer that does not fit alone loses its end."""
    chat_template: Literal["auto", "none"] | str = "auto"
    """auto: the tokenizer's own, if it has one. none: plain text. Otherwise a Jinja file."""
    shuffle: bool = True
    """A new order in every epoch, from seed alone. Without it: the order of the files."""

    @model_validator(mode="after")
    def _one_validation(self) -> DataConfig:
        if self.validation and self.validation_fraction:
            raise ValueError("give either validation files or validation_fraction, not both")
        if not self.train:
            raise ValueError("train names no file")
        return self


class AlgorithmConfig(Section):
    kind: Literal["sft"] = "sft"
    """sft: supervised fine-tuning."""


class BatchConfig(Section):
    samples: PositiveInt | None = None
    """Rows in one optimizer step, over all ranks. Default 16, unless tokens is given."""
    tokens: PositiveInt | None = None
    """Instead of samples: as many rows as fit into this many tokens, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens one rank computes at once: the dial for memory. It never changes the numbers."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchConfig:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("give either samples or tokens, not both")
        return self

    @property
    def samples_per_step(self) -> int | None:
        return self.samples if self.samples or self.tokens else 16


class OptimConfig(Section):
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """auto: 2e-4 for LoRA, 2e-5 for full fine-tuning."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Default: 3 % of all steps."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the schedule ends, as a share of learning_rate."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Times through the training rows; fractions are allowed."""
    max_steps: PositiveInt | None = None
    """Stop here even if epochs would go on."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: memory of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW: memory of the gradient's square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Not applied to norms and biases."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients longer than this are shortened to it. null: never."""


class ParallelConfig(Section):
    replicate: Degree = 1
    """Copies of the whole model that share each batch (DDP)."""
    shard: Degree = "auto"
    """Ranks over which one copy's parameters, gradients and optimizer are split (FSDP2). auto: all that are left."""

    @model_validator(mode="after")
    def _one_auto(self) -> ParallelConfig:
        if self.replicate == "auto" and self.shard == "auto":
            raise ValueError("replicate and shard cannot both be auto: give one of them a number")
        return self

    def degrees(self, num_ranks: int) -> tuple[int, int]:
        """(replicate, shard), or an error that shows the arithmetic."""
        replicate = self.replicate if self.replicate != "auto" else max(num_ranks // int(self.shard), 1)
        shard = self.shard if self.shard != "auto" else max(num_ranks // replicate, 1)
        if replicate * shard != num_ranks:
            raise ConfigError(
                f"parallel: replicate {replicate} x shard {shard} = {replicate * shard} ranks, but the run has "
                f"{num_ranks}: change launch.procs (--procs) or one of the degrees"
            )
        return replicate, shard


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 100
    """0: only at the end."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    keep_last: PositiveInt = 2
    """The newest checkpoints, kept whatever their loss."""
    keep_best: NonNegativeInt = 1
    """Checkpoints with the lowest validation loss that are kept as well."""
    export: Literal["auto", "adapter", "merged", "none"] = "auto"
    """What to export at the end. auto: the adapter for LoRA, the model otherwise."""


class EvaluationConfig(Section):
    every_steps: NonNegativeInt = 50
    """0: only at the end."""
    at_start: bool = True
    """Also before the first step."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations without improvement. Default: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An improvement smaller than this does not count."""


class LaunchConfig(Section):
    procs: PositiveInt = 1
    """Processes on this machine (one per GPU on CUDA)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees it."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of every collective: a rank that waits longer fails and says so."""


class LoggingConfig(Section):
    every_steps: PositiveInt = 1
    """Steps between records of training metrics."""
    tensorboard: bool = True
    """Also write TensorBoard files."""


class RunConfig(Section):
    """Everything a run depends on. The resolved copy in the run directory is all that workers read."""

    name: str = "run"
    """Begins the name of the run directory."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    """Order of rows, new adapters, dropout, the validation split."""
    model: ModelConfig
    lora: LoraConfig | None = None
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        longest = self.batch.tokens or self.batch.micro_batch_tokens
        if self.data.max_length > min(longest, self.batch.micro_batch_tokens):
            raise ValueError(
                f"data.max_length {self.data.max_length} does not fit into batch.micro_batch_tokens "
                f"{self.batch.micro_batch_tokens}"
                + (f" / batch.tokens {longest}" if self.batch.tokens else "")
                + ": raise the budget or lower max_length"
            )
        if self.checkpoint.export in ("adapter", "merged") and self.lora is None:
            raise ValueError(
                f"checkpoint.export {self.checkpoint.export} needs a lora section; full runs export the model"
            )
        if self.evaluation.patience and not (self.data.validation or self.data.validation_fraction):
            raise ValueError(
                "evaluation.patience needs validation data: set data.validation or data.validation_fraction"
            )
        return self

    @property
    def learning_rate(self) -> float:
        if self.optim.learning_rate != "auto":
            return float(self.optim.learning_rate)
        return 2e-4 if self.lora else 2e-5

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, resolve paths, validate. Raises ConfigError with file:line where there is one."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    return parse_config(text, source=str(path), directory=path.resolve().parent, overrides=overrides)


def parse_config(
    text: str, *, source: str = "<config>", directory: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    try:
        refuse_repeated_keys(yaml.compose(text), source)
        tree = yaml.safe_load(text)
        places = {key: f"{source}:{line}" for key, line in lines_of_keys(yaml.compose(text)).items()}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if tree is None:
        raise ConfigError(f"{source} is empty: it needs at least model and data.train")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected sections (model:, data:, ...), found {type(tree).__name__}")
    return settle_config(tree, source=source, places=places, directory=directory, overrides=overrides)


def settle_config(
    tree: dict[str, Any],
    *,
    source: str = "<config>",
    places: Mapping[str, str] | None = None,
    directory: Path | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Shorthands, paths, overrides, validation. `places` says where each key was written."""
    tree = copy.deepcopy(tree)
    places = dict(places or {})
    for key in [key for key, value in tree.items() if value is None and key != "lora"]:
        raise ConfigError(f"{place_of(source, places, key)}: {key} is empty: give it a value, or leave it out")
    _expand_model(tree)
    _resolve_paths(tree, directory or Path.cwd())
    changes: dict[str, Any] = {}
    for override in overrides:
        apply_override(changes, override)
    _expand_model(changes)
    _resolve_paths(changes, Path.cwd())
    merge(tree, changes)
    for override in overrides:
        parts = override.partition("=")[0].split(".")
        for depth in range(len(parts), 0, -1):
            places.setdefault(".".join(parts[:depth]), f"override {override!r}")
        places[".".join(parts)] = f"override {override!r}"
    return validate_config(tree, source=source, places=places)


def validate_config(
    tree: Mapping[str, Any], *, source: str = "<config>", places: Mapping[str, str] | None = None
) -> RunConfig:
    places = places or {}
    _refuse_unknown_keys(tree, RunConfig, "", source, places)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, places)) from error


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key, sections included."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        child = _section_of(info.annotation)
        if child is not None:
            keys += known_keys(child, f"{prefix}{name}.")
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _refuse_unknown_keys(
    tree: Mapping[str, Any], section: type[BaseModel], prefix: str, source: str, places: Mapping[str, str]
) -> None:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        info = section.model_fields.get(str(key))
        if info is None:
            raise ConfigError(
                f"{place_of(source, places, dotted)}: unknown key {dotted!r}; {_suggest(dotted, section, prefix)}"
            )
        child = _section_of(info.annotation)
        if child is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, child, dotted + ".", source, places)


def _suggest(dotted: str, section: type[BaseModel], prefix: str) -> str:
    leaf = dotted.rsplit(".", 1)[-1]
    siblings = list(section.model_fields)
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = [k for k in known_keys() if k.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"{prefix.rstrip('.') or 'the top level'} knows {', '.join(siblings)}"


def _explain(error: ValidationError, source: str, places: Mapping[str, str]) -> str:
    """One sentence per problem; union members that did not match are folded into one."""
    seen: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        parts = [str(p) for p in problem["loc"]]
        known = set(known_keys())
        while parts and ".".join(parts) not in known:
            parts.pop()
        dotted = ".".join(parts)
        if problem["type"] == "missing":
            missing = ".".join(str(p) for p in problem["loc"])
            seen.setdefault(missing, f"{place_of(source, places, dotted)}: {missing} is missing")
            continue
        message = problem["msg"].removeprefix("Value error, ")
        given = problem.get("input")
        shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) else ""
        text = f"{dotted or 'configuration'}: {message}{shown}"
        if dotted in seen:
            seen[dotted] = seen[dotted].replace(shown, "") + f", or: {message}{shown}"
        else:
            seen[dotted] = f"{place_of(source, places, dotted)}: {text}"
    return "; ".join(seen.values())


def _expand_model(tree: dict[str, Any]) -> None:
    """`model: NAME` is short for `model: {path: NAME}`, `lora: true` for `lora: {}`."""
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    if tree.get("lora") is True:
        tree["lora"] = {}
    elif tree.get("lora") is False:
        tree["lora"] = None


def _resolve_paths(tree: dict[str, Any], directory: Path) -> None:
    """Make file paths absolute. A model path that names nothing on disk is a Hub id."""
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        local = directory / Path(model["path"]).expanduser()
        if local.exists() or model["path"].startswith((".", "/", "~")) or model["path"].endswith(".gguf"):
            model["path"] = str(local.resolve())
    data = tree.get("data")
    if isinstance(data, dict):
        for key in ("train", "validation"):
            files = _as_list(data.get(key))
            if isinstance(files, list):
                data[key] = [str((directory / Path(str(f)).expanduser()).resolve()) for f in files]
        template = data.get("chat_template")
        if isinstance(template, str) and template not in ("auto", "none"):
            data["chat_template"] = str((directory / Path(template).expanduser()).resolve())
