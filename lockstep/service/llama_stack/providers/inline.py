"""`inline::lockstep`: the job service inside the stack's process, its jobs in child processes, one at a time."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from lockstep.service.access import Caller
from lockstep.service.admission import Allowed
from lockstep.service.errors import Forbidden
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack.post_training import PostTraining
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


class InlineConfig(ProviderConfig):
    """The provider's settings in run.yaml."""

    data_dir: str = "~/.lockstep/stack"
    """Jobs, data sets and their state. What is here is found again when the stack starts again."""
    max_jobs: Annotated[int, Field(ge=1)] = 1
    """How many jobs run at a time; the others wait."""
    allow_paths: list[str] = Field(default=[])
    """Folders besides data_dir/models whose models a request may name. Names of the Hub need none."""
    allow_write: list[str] = Field(default=[])
    """Folders in which checkpoint_dir of a request may name a place for the result."""

    @classmethod
    def sample_run_config(cls, **_: Any) -> dict[str, object]:
        return {"data_dir": "${env.LOCKSTEP_DATA_DIR:~/.lockstep/stack}"}


Result = TypeVar("Result")
_ADMIN = Caller("", "admin")  # the stack has already decided who may call


class EmbeddedService:
    def __init__(self, config: InlineConfig) -> None:
        self._manager = JobManager(
            Path(config.data_dir).expanduser(),
            max_jobs=config.max_jobs,
            allowed=Allowed(
                read=tuple(Path(path).expanduser() for path in config.allow_paths),
                write=tuple(Path(path).expanduser() for path in config.allow_write),
            ),
        )
        self._training = PostTraining(self._manager)
        self._manager.start()

    async def add_rows(self, name: str, lines: bytes) -> None:
        await _in_thread(self._manager.datasets.add_file, name, io.BytesIO(lines))

    async def submit(self, request: FineTuneRequest | PreferenceRequest) -> PostTrainingJob:
        return await _in_thread(self._training.submit, request, _ADMIN)

    async def jobs(self) -> JobList:
        return await _in_thread(self._training.jobs, _ADMIN)

    async def status(self, job_uuid: str) -> JobStatusResponse:
        return await _in_thread(self._training.status, job_uuid, _ADMIN)

    async def artifacts(self, job_uuid: str) -> JobArtifactsResponse:
        return await _in_thread(self._training.artifacts, job_uuid, _ADMIN)

    async def cancel(self, job_uuid: str) -> None:
        await _in_thread(self._training.cancel, job_uuid, _ADMIN)

    async def close(self) -> None:
        await _in_thread(self._manager.close)


async def _in_thread(call: Callable[..., Result], *arguments: object) -> Result:
    """Stacks tell a forbidden request from a wrong one by Python's own exceptions."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except Forbidden as error:
        raise PermissionError(str(error)) from error


async def get_provider_impl(config: InlineConfig, deps: Mapping[object, object]) -> object:
    return build_provider(EmbeddedService(config), deps, config)
