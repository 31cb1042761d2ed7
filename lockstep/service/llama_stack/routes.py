"""Llama Stack's post_training API over HTTP, under the paths of every version that has it.

0.2 calls `/v1/post-training/...`, later ones `/v1alpha/post-training/...`, 0.6 puts the job into the path.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from lockstep.service.access import Manager, Reader, Submitter
from lockstep.service.api.error_responses import documented
from lockstep.service.llama_stack.mapping import RequestError
from lockstep.service.llama_stack.post_training import PostTraining
from lockstep.service.llama_stack.schemas import (
    CancelRequest,
    FineTuneRequest,
    HealthInfo,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceRequest,
)
from lockstep.service.schemas import ID_PATTERN

_VERSIONS = ("/v1", "/v1alpha")


def post_training_of(manager: Manager) -> PostTraining:
    return PostTraining(manager)


Training = Annotated[PostTraining, Depends(post_training_of)]
JobInQuery = Annotated[str, Query(pattern=ID_PATTERN)]
JobInPath = Annotated[str, Path(pattern=ID_PATTERN)]


class NamingRoute(APIRoute):
    """A body that does not fit is answered with 400 and the field's name, as Llama Stack's clients expect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        handle = super().get_route_handler()

        async def handle_named(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise RequestError(_describe(error)) from error

        return handle_named


def _describe(error: RequestValidationError) -> str:
    problems = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
        problems.append(f"{'.'.join(place) or 'the body'}: {problem['msg']}")
    return "; ".join(problems)


# Submissions have a few threads of their own, here as in Lockstep's API: they may not keep others from being answered.
async def supervised_fine_tune(
    request: FineTuneRequest, training: Training, caller: Submitter, http: Request
) -> PostTrainingJob:
    return await to_thread.run_sync(training.submit, request, caller, limiter=http.app.state.submission_threads)


async def preference_optimize(
    request: PreferenceRequest, training: Training, caller: Submitter, http: Request
) -> PostTrainingJob:
    return await to_thread.run_sync(training.submit, request, caller, limiter=http.app.state.submission_threads)


def get_training_jobs(training: Training, caller: Reader) -> JobList:
    return training.jobs(caller)


def get_training_job_status(job_uuid: JobInQuery, training: Training, caller: Reader) -> JobStatusResponse:
    return training.status(job_uuid, caller)


def get_training_job_artifacts(job_uuid: JobInQuery, training: Training, caller: Reader) -> JobArtifactsResponse:
    return training.artifacts(job_uuid, caller)


def cancel_training_job(request: CancelRequest, training: Training, caller: Submitter) -> None:
    training.cancel(request.job_uuid, caller)


def get_status_by_path(job_uuid: JobInPath, training: Training, caller: Reader) -> JobStatusResponse:
    return training.status(job_uuid, caller)


def get_artifacts_by_path(job_uuid: JobInPath, training: Training, caller: Reader) -> JobArtifactsResponse:
    return training.artifacts(job_uuid, caller)


def cancel_by_path(job_uuid: JobInPath, training: Training, caller: Submitter) -> None:
    training.cancel(job_uuid, caller)


async def get_health() -> HealthInfo:
    """Without a token, as Llama Stack's own servers answer it."""
    return HealthInfo()


def build_router() -> APIRouter:
    router = APIRouter(tags=["Llama Stack"], route_class=NamingRoute, responses=documented(400, 408, 409, 413))
    for version in _VERSIONS:
        router.get(f"{version}/health")(get_health)
        start = f"{version}/post-training"
        router.post(f"{start}/supervised-fine-tune")(supervised_fine_tune)
        router.post(f"{start}/preference-optimize")(preference_optimize)
        router.get(f"{start}/jobs")(get_training_jobs)
        router.get(f"{start}/job/status")(get_training_job_status)
        router.get(f"{start}/job/artifacts")(get_training_job_artifacts)
        router.post(f"{start}/job/cancel")(cancel_training_job)
    start = f"{_VERSIONS[-1]}/post-training/jobs/{{job_uuid}}"
    router.get(f"{start}/status")(get_status_by_path)
    router.get(f"{start}/artifacts")(get_artifacts_by_path)
    router.post(f"{start}/cancel")(cancel_by_path)
    return router


router = build_router()
