"""Llama Stack up to 0.4: methods take keyword arguments, and the server makes its HTTP schema from them.

So these signatures are the wire: both shapes of DPO, and provider_config, pass because they are written here.
No annotations from the future: the server reads them as classes.
"""

from lockstep.providers.training import StackTraining
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
