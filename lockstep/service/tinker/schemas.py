"""What clients of the Tinker API send as JSON, as far as it is read. Fields of later clients are let through."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.service.errors import ServiceError

Request = TypeVar("Request", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Metadata = dict[str, Any]
_MAX_TTL_S = 10 * 366 * 86400


class FromClient(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), strict=True)


class CreateSession(FromClient):
    user_metadata: Metadata | None = None
    display_name: str | None = None


class AdapterChoice(FromClient):
    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(FromClient):
    type: str = "adamw"


class CreateModel(FromClient):
    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: AdapterChoice | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class AdamParams(FromClient):
    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Finite = 0.0


class OptimizerStep(FromClient):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerChoice | None = None


class SaveWeights(FromClient):
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    overwrite: bool = False
    ttl_seconds: Annotated[int, Field(ge=1, le=_MAX_TTL_S)] | None = None
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(FromClient):
    path: str
    optimizer: bool
    weights_access_token: str | None = None
    optimizer_config: OptimizerChoice | None = None


class CheckpointLife(FromClient):
    ttl_seconds: Annotated[int, Field(ge=1, le=_MAX_TTL_S)] | None = None


class CreateSampler(FromClient):
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(FromClient):
    type: str = "encoded_text"
    tokens: list[Token] = []


class Prompt(FromClient):
    chunks: list[PromptChunk]


class AskedSampling(FromClient):
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: Seed | None = None
    stop: str | list[Any] | None = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class AskedSample(FromClient):
    sampling_session_id: str
    seq_id: Count
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: Prompt
    sampling_params: AskedSampling
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=4096)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=4096)] = 0
    target_prompt_logprobs: Metadata | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class ModelAddress(FromClient):
    model_id: str


class RequestAddress(FromClient):
    request_id: str


class SessionAddress(FromClient):
    session_id: str


class PathAddress(FromClient):
    tinker_path: str


def read(kind: type[Request], payload: object) -> Request:
    """What does not fit is named, one sentence for all of it."""
    try:
        return kind.model_validate(payload)
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False, include_input=False)[:5]:
            place = ".".join(map(str, problem["loc"]))
            problems.append(f"{place}: {problem['msg']}" if place else problem["msg"])
        raise ServiceError("; ".join(problems)) from None
