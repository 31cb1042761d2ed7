"""The provider as each version of Llama Stack calls it.

Up to 0.4 methods take keyword arguments, and the server makes its HTTP schema from their annotations: these signatures
are the wire format, so there is no `from __future__ import annotations` here. From 0.5 on methods take one request.
"""

from typing import Any

from lockstep.service.llama_stack.providers.training import StackTraining
from lockstep.service.llama_stack.schemas import (
    AlgorithmConfig,
    DPOAlignmentConfig,
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceRequest,
    Settings,
    TrainingConfig,
)


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
    ) -> PostTrainingJob:
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
        finetuned_model: str,
        algorithm_config: DPOAlignmentConfig,
        training_config: TrainingConfig,
        hyperparam_search_config: Settings | None = None,
        logger_config: Settings | None = None,
        provider_config: Settings | None = None,
    ) -> PostTrainingJob:
        request = PreferenceRequest(
            job_uuid=job_uuid,
            finetuned_model=finetuned_model,
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

    async def supervised_fine_tune(self, request: Any) -> Any:
        return await self._training.submit(FineTuneRequest(**_given(request)))

    async def preference_optimize(self, request: Any) -> Any:
        return await self._training.submit(PreferenceRequest(**_given(request)))

    async def get_training_jobs(self) -> Any:
        return await self._training.service.jobs()

    async def get_training_job_status(self, request: Any) -> Any:
        answer = _fit((await self._training.service.status(request.job_uuid)).model_dump(mode="json"))
        more = {name: answer.pop(name) for name in _WITHOUT_A_PLACE}
        answer["resources_allocated"] = {**(answer["resources_allocated"] or {}), "lockstep": more}
        return answer

    async def cancel_training_job(self, request: Any) -> None:
        await self._training.service.cancel(request.job_uuid)

    async def get_training_job_artifacts(self, request: Any) -> Any:
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
