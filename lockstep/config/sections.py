"""RunConfig and its plain sections, frozen: names, types, defaults, and what does not go together.

The text under each field is its description in `lockstep init` and docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from lockstep.config.algorithm import AlgorithmConfig, SftConfig
from lockstep.config.data import DataConfig
from lockstep.config.grpo import GrpoConfig, RolloutsConfig, check_rollouts, with_importance_weighting
from lockstep.config.launch import LaunchConfig, LocalLaunch, PoolConfig, check_pools
from lockstep.config.parallel import ParallelConfig
from lockstep.config.schema import ConfigError, NonNegativeInt, PositiveInt, Section


class ModelConfig(Section):
    path: str
    """Hub id, local folder, or a .gguf file."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64", "fp8_base"] = "auto"
    """Precision of computation. auto: bf16 where this device is fast at it, otherwise fp32. fp16 scales its loss.
    fp8_base: as auto, with lora's frozen matrices in FP8, half the memory of bf16; where a GPU multiplies FP8, what
    they are multiplied with is rounded to FP8 too."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: lora's frozen matrices in 4.13 bits each (NF4 with double quantisation), a quarter of the memory of bf16.
    They are dequantised for each product. Exports are made from the model's own weights."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full recomputes every decoder layer in the backward pass: less memory, about a third more time. selective keeps
    the results of matrix products and attention, and recomputes the rest."""
    activation_offload: bool = False
    """Keep what the backward pass needs in the CPU's memory. Slower, and saves GPU memory."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile of decoder layers. auto: on CUDA."""
    logits_gib: Annotated[float, Field(gt=0)] = 2.5
    """Upper bound of the memory for logits. With less, the output head works on smaller pieces, and for preference and
    policy losses computes them twice: slower, with the same numbers."""
    router_aux_loss: Annotated[float, Field(ge=0)] | Literal["off", "auto"] = "off"
    """For mixtures of experts: coefficient of the load-balancing loss, over the whole batch. auto: the model's own
    (router_aux_loss_coef). A batch of several micro-batches takes one more forward pass."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """The same of the mean squared log-sum-exp of router logits, which keeps them small."""
    router_bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Balancing without a loss, for routers with a bias (DeepSeek-V3): after each step an expert's bias moves by this
    much, up if it had fewer tokens than the mean, down if more. Not with lora."""
    vision: Literal["auto", "frozen", "connector", "trained"] = "auto"
    """Of a vision-language model: frozen trains the language model alone, connector also the layers between its tower
    and the language model, trained the tower too. With lora, adapters go there. auto: frozen; families that also exist
    without a tower are then loaded without it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    @property
    def base_format(self) -> Literal["nf4", "fp8"] | None:
        """How lora's frozen matrices are held, if not in the precision of computation."""
        if self.quantization == "nf4":
            return "nf4"
        return "fp8" if self.precision == "fp8_base" else None

    @field_validator("router_aux_loss", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """YAML reads the word off as false."""
        if value is True:
            raise ValueError("router_aux_loss on is not enough: write auto, or a coefficient")
        return "off" if value is False else value


class LoraConfig(Section):
    rank: PositiveInt = 16
    """Rank of the adapters: a higher one can learn more."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The output of an adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs set to 0 at random. Repeatable only in the same layout. Not on experts."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """all-linear: every linear layer inside the decoder layers and the matrices of experts, found from the model. Or
    name endings of modules, or of experts' matrices (experts.down_proj)."""
    dora: bool = False
    """Weight-decomposed LoRA: also learns the magnitude of each output. Not on experts."""
    rslora: bool = False
    """Rank-stabilised LoRA: the output of an adapter is scaled by alpha / sqrt(rank) instead."""
    init: Literal["default", "pissa"] = "default"
    """pissa: adapters begin as the principal part of each matrix, and the base as the rest of it. Exported adapters are
    twice as wide, for the base as it was. Not on experts."""
    b_learning_rate_ratio: Annotated[float, Field(gt=0)] = 1.0
    """LoRA+: the learning rate of each adapter's second matrix, as a multiple of optim.learning_rate. Its paper
    recommends 16."""
    modules_to_save: tuple[str, ...] = ()
    """Name endings of modules that are trained whole beside the adapters and saved with them, such as embed_tokens and
    lm_head."""


class BatchConfig(Section):
    samples: PositiveInt | None = None
    """Rows (or pairs) in one optimizer step, over all ranks. Default 16, unless tokens is given."""
    tokens: PositiveInt | None = None
    """Instead of samples: as many rows as fit into this many tokens, over all ranks."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens that one rank computes at once: set it by memory. It never changes the numbers. auto is short for
    fit_memory."""
    fit_memory: bool = False
    """On CUDA, take the largest micro_batch_tokens that fits by the run's plan when it starts, and say which."""
    on_out_of_memory: Literal["stop", "shrink"] = "stop"
    """When a GPU runs out of memory in a step. shrink: on one rank the step is computed again in smaller micro-batches,
    with the same numbers; several ranks end, and start again with smaller ones from the last checkpoint
    (launch.max_restarts). Not for DeepSpeed."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchConfig:
        if self.samples is not None and self.tokens is not None:
            raise ValueError("give either samples or tokens, not both")
        return self

    @property
    def samples_per_step(self) -> int | None:
        return self.samples if self.samples or self.tokens else 16

    def check_ranks(self, num_ranks: int) -> None:
        """`num_ranks`: those with rows of their own."""
        if self.samples_per_step is not None and self.samples_per_step < num_ranks:
            raise ConfigError(
                f"batch.samples {self.samples_per_step} is less than the {num_ranks} ranks: some would never have a row"
            )


class OptimConfig(Section):
    kind: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """adamw holds 8 bytes for each trained parameter. adamw_8bit: its moments in 2. adafactor: next to none, and no
    momentum. muon: 4, for the matrices of layers, whose updates are made orthogonal; adamw for the rest."""
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """auto: 2e-4 for LoRA, 2e-5 for full fine-tuning; for dpo and kto 1e-5 and 1e-6."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: NonNegativeInt | None = None
    """Default: 3 % of all steps."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the schedule ends, as a share of learning_rate."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training rows; fractions are allowed."""
    max_steps: PositiveInt | None = None
    """Stop here even if epochs would go on."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW: decay of the running mean of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the denominator."""
    stochastic_rounding: bool = False
    """Hold what is trained in bf16 instead of float32, and round each step up or down at random, the same on every
    layout. For runs in bf16."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon: decay of the gradient's running mean."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Not applied to norms and biases."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger norm are clipped to it. null: never."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 100
    """0: only at the end."""
    asynchronous: bool = True
    """Write in the background while training goes on. On a GPU they are copied meanwhile, too, into host memory that is
    kept for the next one: three times the trained parameters in fp32, if a fourth of the free memory holds it."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: NonNegativeInt = 1
    """How many of those with the lowest validation loss are kept as well."""
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
    metrics: tuple[Literal["exact_match", "numeric", "rouge", "bertscore"], ...] = ()
    """Also generate answers to validation rows, and score them with these."""
    rows: PositiveInt | None = 64
    """How many validation rows are answered for metrics. null: all of them."""
    max_tokens: PositiveInt = 256
    """Longest answer for metrics."""
    encoder: str | None = None
    """The model that bertscore compares with: a folder or a Hub id."""


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
    deterministic: bool = False
    """On a GPU: every sum in training is taken in a fixed order, so that two runs of the same size, or one that was
    stopped and resumed, have the same bits. Slower. On a CPU that is so in any case."""
    model: ModelConfig
    lora: LoraConfig | None = None
    data: DataConfig
    algorithm: AlgorithmConfig = SftConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LocalLaunch()
    cluster: tuple[PoolConfig, ...] = ()
    """For launch.kind ray: what the processes of each pool need. Default: one CPU each."""
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, tree: object) -> object:
        return _with_fitted_batch(with_importance_weighting(tree))

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        room = self.batch.micro_batch_tokens * self.parallel.context  # context ranks share a micro-batch
        if self.data.max_length > min(self.batch.tokens or room, room):
            raise ValueError(
                f"data.max_length {self.data.max_length} does not fit into batch.micro_batch_tokens "
                f"{self.batch.micro_batch_tokens}"
                + (f" / batch.tokens {self.batch.tokens}" if self.batch.tokens else "")
                + ": raise the budget or lower max_length"
            )
        if self.deterministic and self.parallel.backend == "deepspeed":
            raise ValueError("deterministic: true is not available with DeepSpeed: use parallel.backend torch")
        if self.checkpoint.export in ("adapter", "merged") and self.lora is None:
            raise ValueError(
                f"checkpoint.export {self.checkpoint.export} needs a lora section; full runs export the model"
            )
        for key in ("patience", "metrics"):
            if getattr(self.evaluation, key) and not (self.data.validation or self.data.validation_fraction):
                raise ValueError(
                    f"evaluation.{key} needs validation data: set data.validation or data.validation_fraction"
                )
        if self.batch.on_out_of_memory == "shrink" and self.parallel.backend == "deepspeed":
            raise ValueError("batch.on_out_of_memory shrink is not for parallel.backend deepspeed: use backend torch")
        _check_routers(self)
        _check_adapters(self)
        _check_optimizer(self)
        _check_quantised(self)
        check_pools(self.launch, self.cluster, self.rollouts.engines)
        check_rollouts(self.rollouts, self.algorithm)
        _check_algorithm(self)
        return self

    @property
    def learning_rate(self) -> float:
        if self.optim.learning_rate != "auto":
            return float(self.optim.learning_rate)
        full, adapters = (2e-5, 2e-4) if self.algorithm.kind == "sft" else (1e-6, 1e-5)
        return adapters if self.lora else full

    @property
    def router_replay(self) -> bool:
        """Whether samplers record which experts they choose, for training to choose the same."""
        return isinstance(self.algorithm, GrpoConfig) and self.algorithm.router_replay

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _check_adapters(config: RunConfig) -> None:
    lora = config.lora
    if lora is None:
        return
    if lora.init == "pissa" and lora.dora:
        raise ValueError("lora.init pissa and lora.dora both take the base's matrices apart: choose one of them")
    if config.parallel.backend == "deepspeed" and lora.b_learning_rate_ratio != 1.0:
        raise ValueError("lora.b_learning_rate_ratio is not for parallel.backend deepspeed: use backend torch")
    reference = getattr(config.algorithm, "reference", None)
    if lora.init == "pissa" and reference == "adapter_off":
        raise ValueError(
            "algorithm.reference adapter_off is not the base model with lora.init pissa, which moves a part of it into "
            "the adapters: set it to copy"
        )


def _check_optimizer(config: RunConfig) -> None:
    kind, parallel = config.optim.kind, config.parallel
    if config.optim.stochastic_rounding:
        if config.model.precision not in ("auto", "bf16", "fp8_base"):
            raise ValueError(f"optim.stochastic_rounding is for bf16, and model.precision is {config.model.precision}")
        if parallel.backend == "deepspeed" or parallel.tensor * parallel.expert > 1:
            raise ValueError("optim.stochastic_rounding is for backend torch, with parallel.tensor and expert 1")
    if kind == "adamw":
        return
    if parallel.backend == "deepspeed":
        raise ValueError(f"optim.kind {kind} is not for parallel.backend deepspeed: use adamw, or backend torch")
    if kind == "muon" and config.lora is not None:
        raise ValueError("optim.kind muon is for whole matrices, not for the factors of lora: use another kind")
    if kind == "adamw_8bit" and parallel.tensor * parallel.expert > 1:
        raise ValueError(
            "optim.kind adamw_8bit needs whole rows on each rank: set parallel.tensor and parallel.expert to 1"
        )


def _check_quantised(config: RunConfig) -> None:
    model = config.model
    if model.base_format is None:
        return
    setting = "model.quantization nf4" if model.quantization == "nf4" else "model.precision fp8_base"
    if model.quantization == "nf4" and model.precision == "fp8_base":
        raise ValueError("model.quantization nf4 and model.precision fp8_base both hold the base: choose one of them")
    if config.lora is None:
        raise ValueError(f"{setting} holds frozen weights, and without lora all are trained: add a lora section")
    if config.parallel.backend == "deepspeed":
        raise ValueError(f"{setting} is not for parallel.backend deepspeed: use backend torch")
    if config.parallel.tensor > 1:
        raise ValueError(f"{setting} does not split matrices: set parallel.tensor to 1, and use shard or pipeline")


def _with_fitted_batch(tree: object) -> object:
    """`batch.micro_batch_tokens: auto`. The number is for devices that no plan is made for."""
    batch = tree.get("batch") if isinstance(tree, Mapping) else None
    if not isinstance(tree, Mapping) or not isinstance(batch, Mapping) or batch.get("micro_batch_tokens") != "auto":
        return tree
    data = tree.get("data")
    length = data.get("max_length", 0) if isinstance(data, Mapping) else 0
    least = BatchConfig.model_fields["micro_batch_tokens"].default
    tokens = max(length, least) if isinstance(length, int) else least
    return {**tree, "batch": {**batch, "micro_batch_tokens": tokens, "fit_memory": True}}


def _check_routers(config: RunConfig) -> None:
    model = config.model
    for key in ("router_aux_loss", "router_z_loss", "router_bias_rate"):
        if getattr(model, key) not in ("off", 0.0) and config.parallel.backend == "deepspeed":
            raise ValueError(f"model.{key} is not for parallel.backend deepspeed: use backend torch")
    if config.router_replay and config.parallel.backend == "deepspeed":
        raise ValueError("algorithm.router_replay is not for parallel.backend deepspeed: use backend torch")
    if model.router_bias_rate and config.lora is not None:
        raise ValueError(
            "model.router_bias_rate changes the base model, which an adapter does not hold: set it to 0, or remove lora"
        )


def _check_algorithm(config: RunConfig) -> None:
    """What an algorithm requires of the other sections."""
    algorithm = config.algorithm
    if isinstance(algorithm, SftConfig):
        return
    if isinstance(algorithm, GrpoConfig):
        _check_sampling(config, algorithm)
    if config.evaluation.metrics and algorithm.kind == "kto":
        raise ValueError("evaluation.metrics compares answers with good ones, and rows of kto may be bad: remove it")
    if algorithm.reference == "adapter_off" and config.lora is None:
        raise ValueError("algorithm.reference adapter_off needs a lora section: set it to auto, or add lora")
    if algorithm.kind == "kto" and algorithm.loss == "kto" and config.batch.samples == 1:
        raise ValueError("batch.samples 1 is too few for loss kto, which mixes the rows of a batch: give at least 2")
    if config.parallel.backend == "deepspeed":
        _check_deepspeed_reference(config)


def _check_sampling(config: RunConfig, algorithm: GrpoConfig) -> None:
    if algorithm.max_tokens >= config.data.max_length:
        raise ValueError(
            f"algorithm.max_tokens {algorithm.max_tokens} leaves no room for a prompt in data.max_length "
            f"{config.data.max_length}, which holds both: raise data.max_length or lower max_tokens"
        )
    if config.batch.tokens is not None:
        raise ValueError("batch.tokens is not for grpo, whose answers are not known before: give batch.samples")
    if algorithm.minibatches > (config.batch.samples_per_step or 1):
        raise ValueError(
            f"algorithm.minibatches {algorithm.minibatches} is more than the prompts of a step "
            f"({config.batch.samples_per_step}): raise batch.samples or lower it"
        )
    if config.evaluation.metrics:
        raise ValueError("evaluation.metrics is not for grpo, which measures its reward on validation rows: remove it")
    if config.parallel.pipeline > 1:
        raise ValueError(
            "parallel.pipeline is not for grpo, which samples from the whole model on each rank: set it to 1"
        )
    if algorithm.needs_reference and config.parallel.backend == "deepspeed" and config.lora is None:
        raise ValueError(
            "algorithm.kl_coefficient without lora needs a copy of the weights: use backend torch, or lora"
        )


def _check_deepspeed_reference(config: RunConfig) -> None:
    algorithm = config.algorithm
    assert not isinstance(algorithm, SftConfig)
    for key in ("reference_sync_steps", "reference_model"):
        if getattr(algorithm, key) is not None:
            raise ValueError(f"algorithm.{key} is not for parallel.backend deepspeed: remove it, or use backend torch")
    mixes_rows = algorithm.kind == "kto" and algorithm.loss == "kto"
    if algorithm.reference == "copy" or (mixes_rows and config.lora is None):
        raise ValueError(
            "algorithm.reference copy is not for parallel.backend deepspeed"
            + (", and kto without lora needs it" if mixes_rows else "")
            + ": use adapter_off, precomputed or none, or backend torch"
        )
