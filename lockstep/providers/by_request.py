"""Llama Stack from 0.5 on: methods take one request of the stack's own classes, and answers must fit its classes.

What these classes have no place for travels in their free dictionaries: provider_config as logger_config.lockstep,
and error, warnings, progress and metrics as resources_allocated.lockstep.
"""

from __future__ import annotations

from typing import Any

from lockstep.providers.training import StackTraining
from lockstep.service.llama_stack.schemas import FineTuneRequest, PreferenceRequest

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
