"""The provider as each version of Llama Stack calls it.

Up to 0.4 methods take keyword arguments, and the server makes its HTTP schema from their annotations: these signatures
are the wire format, so there is no `from __future__ import annotations` here. From 0.5 on methods take one request.
"""

from typing import Annotated, Any

from fastapi import Depends, Request

from lockstep.service.llama_stack.mapping import RequestError
from lockstep.service.llama_stack.providers.training import StackTraining
from lockstep.service.llama_stack.schemas import (
    AlgorithmConfig,
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceConfig,
    PreferenceRequest,
    Settings,
    TrainingConfig,
)


async def _unknown_fields(request: Request) -> tuple[str, ...]:
    """Stacks drop fields of a body that no parameter has. A misspelt one would then be ignored without a word."""
    try:
        body = await request.json()
    except ValueError:
        return ()  # said better by who validates it
    if not isinstance(body, dict):
        return ()
    kind = PreferenceRequest if request.url.path.endswith("preference-optimize") else FineTuneRequest
    return tuple(name for name in body if name not in kind.model_fields)


Unknown = Annotated[tuple[str, ...], Depends(_unknown_fields)]


def _refuse(unknown: tuple[str, ...]) -> None:
    if unknown:
        raise RequestError(f"{', '.join(map(repr, unknown))}: there is no such field: see docs/llama-stack.md")


class PostTrainingByKeywords:
    def __init__(self, training: StackTraining) -> None:
        self._training = training

    async def supervised_fine_tune(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        hyperparam_search_config: Settings | None = None,
        logger_config: Settings | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
        algorithm_config: AlgorithmConfig | None = None,
        provider_config: Settings | None = None,
        unknown: Unknown = (),
    ) -> PostTrainingJob:
        _refuse(unknown)
        request = FineTuneRequest(
            job_uuid=job_uuid,
            training_config=training_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            model=model,
            checkpoint_dir=checkpoint_dir,
            algorithm_config=algorithm_config,
            provider_config=provider_config,
        )
        return await self._training.submit(request)

    async def preference_optimize(
        self,
        job_uuid: str,
        algorithm_config: PreferenceConfig,
        training_config: TrainingConfig,
        finetuned_model: str | None = None,
        hyperparam_search_config: Settings | None = None,
        logger_config: Settings | None = None,
        model: str | None = None,
        checkpoint_dir: str | None = None,
        provider_config: Settings | None = None,
        unknown: Unknown = (),
    ) -> PostTrainingJob:
        _refuse(unknown)
        request = PreferenceRequest(
            job_uuid=job_uuid,
            model=model,
            finetuned_model=finetuned_model,
            checkpoint_dir=checkpoint_dir,
            algorithm_config=algorithm_config,
            training_config=training_config,
            hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config,
            provider_config=provider_config,
        )
        return await self._training.submit(request)

    async def get_training_jobs(self) -> JobList:
        return await self._training.service.jobs()

    async def get_training_job_status(self, job_uuid: str) -> JobStatusResponse:
        return await self._training.service.status(job_uuid)

    async def cancel_training_job(self, job_uuid: str) -> None:
        await self._training.service.cancel(job_uuid)

    async def get_training_job_artifacts(self, job_uuid: str) -> JobArtifactsResponse:
        return await self._training.service.artifacts(job_uuid)

    async def shutdown(self) -> None:
        await self._training.service.close()


_WITHOUT_A_PLACE = ("error", "warnings", "progress", "metrics")
_REQUIRED_METRICS = ("epoch", "train_loss", "validation_loss", "perplexity")


class PostTrainingByRequest:
    def __init__(self, training: StackTraining) -> None:
        self._training = training

    async def supervised_fine_tune(self, request: object) -> object:
        return await self._training.submit(FineTuneRequest(**_given(request)))

    async def preference_optimize(self, request: object) -> object:
        return await self._training.submit(PreferenceRequest(**_given(request)))

    async def get_training_jobs(self) -> object:
        return await self._training.service.jobs()

    async def get_training_job_status(self, request: Any) -> Any:
        answer = _fit((await self._training.service.status(request.job_uuid)).model_dump(mode="json"))
        more = {name: answer.pop(name) for name in _WITHOUT_A_PLACE}
        answer["resources_allocated"] = {**(answer["resources_allocated"] or {}), "lockstep": more}
        return answer

    async def cancel_training_job(self, request: Any) -> None:
        await self._training.service.cancel(request.job_uuid)

    async def get_training_job_artifacts(self, request: Any) -> object:
        answer = await self._training.service.artifacts(request.job_uuid)
        return _fit(answer.model_dump(mode="json"))

    async def shutdown(self) -> None:
        await self._training.service.close()


def _given(request: Any) -> dict[str, Any]:
    """What the caller wrote, without the defaults that the stack filled in."""
    given = request.model_dump(mode="json", exclude_unset=True)
    settings = (given.get("logger_config") or {}).pop("lockstep", None)
    return {**given, "provider_config": settings} if settings is not None else given


def _fit(answer: dict[str, Any]) -> dict[str, Any]:
    """These versions refuse metrics with a gap, and the whole answer with them."""
    for checkpoint in answer["checkpoints"]:
        metrics = checkpoint["training_metrics"]
        if metrics is not None and any(metrics[name] is None for name in _REQUIRED_METRICS):
            checkpoint["training_metrics"] = None
    return answer
