"""What Llama Stack's post_training API sends and expects, from 0.2.3 to 0.6.1, in one set of classes.

A field that was left out stays None, so that what the caller wrote is distinct from Llama Stack's defaults.
No `from __future__ import annotations`: stack servers read these annotations at run time.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from lockstep.service.schemas import Identifier

Count = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Settings = dict[str, Any]


class _Wire(BaseModel):
    # A misspelt field is refused rather than ignored.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class DataConfig(_Wire):
    dataset_id: Name
    batch_size: Count
    shuffle: bool | None = None
    data_format: Literal["instruct", "dialog"] | None = None
    validation_dataset_id: str | None = None
    packed: bool | None = None
    train_on_input: bool | None = None
    train_split_percentage: Annotated[
        float | None,
        Field(gt=0, le=1, description="The share of the rows to train on; the rest is held out. Of TRL's providers."),
    ] = None


class OptimizerConfig(_Wire):
    """`lr_min` is of versions before 0.2, the last three are of TRL's providers."""

    optimizer_type: Literal["adam", "adamw", "sgd"] | None = None
    lr: Rate | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    num_warmup_steps: Steps | None = None
    lr_min: Annotated[float, Field(ge=0)] | None = None
    warmup_steps: Steps | None = None
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] | None = None


class EfficiencyConfig(_Wire):
    enable_activation_checkpointing: bool | None = None
    enable_activation_offloading: bool | None = None
    memory_efficient_fsdp_wrap: bool | None = None
    fsdp_cpu_offload: bool | None = None


class TrainingConfig(_Wire):
    n_epochs: Count
    max_steps_per_epoch: Annotated[Steps | None, Field(description="0 is no limit.")] = None
    gradient_accumulation_steps: Count | None = None
    max_validation_steps: Count | None = None
    data_config: DataConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    efficiency_config: EfficiencyConfig | None = None
    dtype: str | None = None
    learning_rate: Annotated[Rate | None, Field(description="Another name of optimizer_config.lr.")] = None


_TYPES = {"lora": "LoRA", "qat": "QAT", "dpo": "DPO"}


def _spell(name: Any) -> object:
    """Documents write `dpo` and `lora` where the API has `LoRA`."""
    return _TYPES.get(name.lower(), name) if isinstance(name, str) else name


class LoraFinetuningConfig(_Wire):
    """`adapter_dim` is what NVIDIA's provider calls the rank."""

    type: Annotated[Literal["LoRA"], BeforeValidator(_spell)] = "LoRA"
    lora_attn_modules: list[str] | None = None
    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    rank: Count | None = None
    adapter_dim: Count | None = None
    alpha: Count | None = None
    use_dora: bool | None = None
    quantize_base: bool | None = None


class QATFinetuningConfig(_Wire):
    type: Annotated[Literal["QAT"], BeforeValidator(_spell)] = "QAT"
    quantizer_name: str
    group_size: int


class DPOAlignmentConfig(_Wire):
    """Both shapes: `beta` and `loss_type` since 0.2.16, the other four before."""

    type: Annotated[Literal["DPO"], BeforeValidator(_spell)] = "DPO"
    beta: Annotated[float, Field(gt=0)] | None = None
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] | None = None
    reward_scale: float | None = None
    reward_clip: float | None = None
    epsilon: float | None = None
    gamma: float | None = None


def _kind_of(value: Any, otherwise: str) -> str:
    """Which of the classes a body means: the one that its type names, in any spelling."""
    kind = _spell(value.get("type") if isinstance(value, dict) else getattr(value, "type", None))
    return otherwise if kind is None else str(kind)


AlgorithmConfig = Annotated[
    Annotated[LoraFinetuningConfig, Tag("LoRA")] | Annotated[QATFinetuningConfig, Tag("QAT")],
    Discriminator(lambda value: _kind_of(value, "LoRA")),
]
PreferenceConfig = Annotated[
    Annotated[DPOAlignmentConfig, Tag("DPO")] | Annotated[LoraFinetuningConfig, Tag("LoRA")],
    Discriminator(lambda value: _kind_of(value, "DPO")),
]


class _Submission(_Wire):
    job_uuid: Identifier
    training_config: TrainingConfig
    model: Name | None = None
    checkpoint_dir: str | None = None
    hyperparam_search_config: Settings | None = None
    logger_config: Settings | None = None
    provider_config: Annotated[
        Settings | None, Field(description="Settings of Lockstep's own configuration; they win over all others.")
    ] = None


class FineTuneRequest(_Submission):
    algorithm_config: AlgorithmConfig | None = None


class PreferenceRequest(_Submission):
    finetuned_model: Annotated[
        Name | None, Field(description="The model to train; where `model` is given too, a name for the result.")
    ] = None
    algorithm_config: PreferenceConfig


class CancelRequest(_Wire):
    job_uuid: Identifier


class HealthInfo(BaseModel):
    status: Literal["OK"] = "OK"


JobStatus = Literal["completed", "in_progress", "failed", "scheduled", "cancelled"]


class TrainingMetrics(BaseModel):
    """After a number of whole epochs. Perplexity is of the validation rows where there are some; not for DPO."""

    epoch: int
    train_loss: float | None
    validation_loss: float | None = None
    perplexity: float | None = None


class Checkpoint(BaseModel):
    """`path` of an adapter loads in peft, of a model in transformers; a training state only in Lockstep."""

    identifier: str
    created_at: datetime
    epoch: int
    post_training_job_id: str
    path: str
    training_metrics: TrainingMetrics | None = None
    format: Literal["adapter", "model", "training_state"]
    step: int


class PostTrainingJob(BaseModel):
    job_uuid: str


class ListedJob(PostTrainingJob):
    status: JobStatus


class JobList(BaseModel):
    data: list[ListedJob]


class JobProgress(BaseModel):
    phase: str | None = None
    step: int | None = None
    total_steps: int | None = None
    fraction: float | None = None
    eta_s: float | None = None
    queue_position: int | None = None


class JobStatusResponse(PostTrainingJob):
    status: JobStatus
    scheduled_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    resources_allocated: Settings | None = None
    checkpoints: list[Checkpoint] = []
    error: str | None = None
    warnings: Annotated[list[str], Field(description="What of the request was understood in another way.")] = []
    progress: JobProgress | None = None
    metrics: Settings | None = None


class JobArtifactsResponse(PostTrainingJob):
    checkpoints: list[Checkpoint] = []
