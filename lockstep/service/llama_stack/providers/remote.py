"""`remote::lockstep`: jobs on a Lockstep service elsewhere. The stack starts and works on while the service is down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
from pydantic import Field

from lockstep.service.llama_stack.providers.settings import ProviderConfig
from lockstep.service.llama_stack.providers.training import build_provider
from lockstep.service.llama_stack.schemas import (
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceRequest,
)


class RemoteConfig(ProviderConfig):
    """The provider's settings in run.yaml."""

    url: str = "http://127.0.0.1:8322"
    """Where `lockstep serve` answers."""
    api_token: str | None = Field(default=None, repr=False)
    """Default: the environment's LOCKSTEP_TOKEN. Stacks hide a setting of this name when they print run.yaml."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long one request may take. A job may of course take longer."""

    @classmethod
    def sample_run_config(cls, **_: Any) -> dict[str, object]:
        return {"url": "${env.LOCKSTEP_SERVER:http://127.0.0.1:8322}"}


TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
_ROUTES = "/v1alpha/post-training"


class ServiceUnavailable(TimeoutError):
    """The service gave no answer. Stacks turn a TimeoutError into a 504 with its text, and clients try again."""


class RemoteService:
    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._url = config.url.rstrip("/")

    async def add_rows(self, name: str, lines: bytes) -> None:
        await self._call("POST", f"/api/datasets/{name}", content=lines)

    async def submit(self, request: FineTuneRequest | PreferenceRequest) -> PostTrainingJob:
        route = "supervised-fine-tune" if isinstance(request, FineTuneRequest) else "preference-optimize"
        body = request.model_dump(mode="json", exclude_unset=True)
        return PostTrainingJob(**await self._call("POST", f"{_ROUTES}/{route}", json=body))

    async def jobs(self) -> JobList:
        return JobList(**await self._call("GET", f"{_ROUTES}/jobs"))

    async def status(self, job_uuid: str) -> JobStatusResponse:
        return JobStatusResponse(**await self._call("GET", f"{_ROUTES}/job/status", params={"job_uuid": job_uuid}))

    async def artifacts(self, job_uuid: str) -> JobArtifactsResponse:
        answer = await self._call("GET", f"{_ROUTES}/job/artifacts", params={"job_uuid": job_uuid})
        return JobArtifactsResponse(**answer)

    async def cancel(self, job_uuid: str) -> None:
        await self._call("POST", f"{_ROUTES}/job/cancel", json={"job_uuid": job_uuid})

    async def close(self) -> None:
        """Nothing is open between requests."""

    async def _call(self, method: str, path: str, **content: Any) -> Any:
        token = self._config.api_token or os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with httpx.AsyncClient(timeout=self._config.timeout_s, follow_redirects=False) as client:
                answer = await client.request(method, self._url + path, headers=headers, **content)
        except httpx.HTTPError as error:
            raise ServiceUnavailable(
                f"the Lockstep service at {self._url} does not answer ({_reason(error)}): start it with lockstep "
                "serve, or correct url in the provider's configuration"
            ) from error
        except httpx.InvalidURL as error:
            raise ValueError(f"url {self._url!r} in the provider's configuration is no URL: {error}") from error
        if answer.is_success:
            return _read(answer, self._url)
        raise _refusal(answer, self._url)


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _read(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise ServiceUnavailable(f"what answers at {url} is not a Lockstep service: it sent no JSON") from error


def _refusal(answer: httpx.Response, url: str) -> Exception:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered {answer.status_code} without a reason: is it a Lockstep service?"
    if answer.status_code in (401, 403):
        return PermissionError(message)
    if answer.status_code >= 500:
        return ServiceUnavailable(f"the Lockstep service at {url} is in trouble: {message}")
    return ValueError(message)


async def get_adapter_impl(config: RemoteConfig, deps: Mapping[object, object]) -> object:
    return build_provider(RemoteService(config), deps, config)
