"""A JobManager inside the stack's process. It schedules in a thread of its own, so no event loop owns it.

Its jobs outlive the stack: the next one on the same data directory finds them. Must not know llama-stack.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lockstep.providers.inline.settings import InlineConfig
from lockstep.service.access import Caller
from lockstep.service.errors import Forbidden
from lockstep.service.jobs import JobManager
from lockstep.service.llama_stack.post_training import PostTraining
from lockstep.service.llama_stack.schemas import (
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceRequest,
)

Answer = TypeVar("Answer")
_ANYBODY = Caller("", "admin")  # the stack decides who may come in


class EmbeddedService:
    def __init__(self, config: InlineConfig) -> None:
        self._manager = JobManager(
            Path(config.data_dir).expanduser(),
            max_jobs=config.max_jobs,
            allow_paths=[Path(path).expanduser() for path in config.allow_paths],
        )
        self._training = PostTraining(self._manager)
        self._manager.start()

    async def add_rows(self, name: str, lines: bytes) -> None:
        await _in_thread(self._manager.datasets.add_file, name, io.BytesIO(lines))

    async def submit(self, request: FineTuneRequest | PreferenceRequest) -> PostTrainingJob:
        return await _in_thread(self._training.submit, request, _ANYBODY)

    async def jobs(self) -> JobList:
        return await _in_thread(self._training.jobs, _ANYBODY)

    async def status(self, job_uuid: str) -> JobStatusResponse:
        return await _in_thread(self._training.status, job_uuid, _ANYBODY)

    async def artifacts(self, job_uuid: str) -> JobArtifactsResponse:
        return await _in_thread(self._training.artifacts, job_uuid, _ANYBODY)

    async def cancel(self, job_uuid: str) -> None:
        await _in_thread(self._training.cancel, job_uuid, _ANYBODY)

    async def close(self) -> None:
        await _in_thread(self._manager.close)


async def _in_thread(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """The stack tells what is forbidden from what is wrong by Python's own classes."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except Forbidden as error:
        raise PermissionError(str(error)) from error
