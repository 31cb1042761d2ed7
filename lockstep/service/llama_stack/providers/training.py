"""What both providers do with a request, whatever the version of the stack: fetch its rows, name them, pass it on."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from lockstep.config.loading import merge_settings
from lockstep.service.llama_stack.mapping import RequestError, check_format, convert_rows
from lockstep.service.llama_stack.providers.settings import ProviderConfig, fill_in
from lockstep.service.llama_stack.schemas import (
    FineTuneRequest,
    JobArtifactsResponse,
    JobList,
    JobStatusResponse,
    PostTrainingJob,
    PreferenceRequest,
)

ReadRows = Callable[[str], Awaitable[list[Mapping[str, Any]]]]
Request = FineTuneRequest | PreferenceRequest
_ALL = -1


class PostTrainingService(Protocol):
    """A job service, here or elsewhere. ValueError and PermissionError are the caller's, TimeoutError the service's."""

    async def add_rows(self, name: str, lines: bytes) -> None:
        """JSONL under a name that says what is in it: the same name is always the same rows."""
        ...

    async def submit(self, request: Request) -> PostTrainingJob: ...

    async def jobs(self) -> JobList: ...

    async def status(self, job_uuid: str) -> JobStatusResponse: ...

    async def artifacts(self, job_uuid: str) -> JobArtifactsResponse: ...

    async def cancel(self, job_uuid: str) -> None: ...

    async def close(self) -> None: ...


class StackTraining:
    """`config` is the operator's: settings under every request's own provider_config, and defaults of its fields."""

    def __init__(self, service: PostTrainingService, read_rows: ReadRows, config: ProviderConfig) -> None:
        self.service = service
        self._read_rows = read_rows
        self._settings = config.settings
        self._defaults = config.request_defaults

    async def submit(self, request: Request) -> PostTrainingJob:
        filled = self._with_settings(fill_in(request, self._defaults))
        return await self.service.submit(await self._with_rows(filled))

    def _with_settings(self, request: Request) -> Request:
        merged: dict[str, object] = {}
        merge_settings(merged, self._settings)
        merge_settings(merged, request.provider_config or {})
        return request.model_copy(update={"provider_config": merged or None})

    async def _with_rows(self, request: Request) -> Request:
        """The same request on data sets of the service. Sent twice, it names the same ones."""
        data = request.training_config.data_config
        if data is None:
            raise RequestError("training_config.data_config is missing: it names the rows to train on")
        names = {"dataset_id": await self._pass_on(data.dataset_id, data.data_format)}
        if data.validation_dataset_id:
            names["validation_dataset_id"] = await self._pass_on(data.validation_dataset_id, data.data_format)
        training = request.training_config.model_copy(update={"data_config": data.model_copy(update=names)})
        return request.model_copy(update={"training_config": training})

    async def _pass_on(self, dataset_id: str, data_format: str | None) -> str:
        rows = list(convert_rows(await self._read_rows(dataset_id), dataset_id))
        if not rows:
            raise RequestError(f"data set {dataset_id} has no rows: register some")
        check_format(rows[0], data_format, dataset_id)
        lines = b"".join(_line_of(row, number, dataset_id) for number, row in enumerate(rows, start=1))
        name = name_by_content(dataset_id, lines)
        await self.service.add_rows(name, lines)
        return name


def name_by_content(dataset_id: str, lines: bytes) -> str:
    """Fits the service's rule for names, and changes whenever the rows do."""
    readable = re.sub(r"[^a-zA-Z0-9_.-]+", "-", dataset_id).strip("-.")[:40] or "rows"
    return f"{readable}-{hashlib.sha256(lines).hexdigest()[:16]}"


def _line_of(row: Mapping[str, object], number: int, dataset_id: str) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise RequestError(f"row {number} of data set {dataset_id} cannot be sent as JSON: {error}") from error


# --- rows of the stack's own datasetio -------------------------------------------------------------------------------


def find_datasetio(deps: Mapping[object, object]) -> object:
    """`deps` is keyed by the stack's Api enumeration, which lies elsewhere in every second version."""
    for api, implementation in deps.items():
        if getattr(api, "value", api) == "datasetio":
            return implementation
    raise ValueError("lockstep needs the stack's datasetio: add datasetio to the apis and providers of run.yaml")


def rows_of(datasetio: object) -> ReadRows:
    async def read_rows(dataset_id: str) -> list[Mapping[str, object]]:
        try:
            answer = await _iterate(datasetio, dataset_id)
        except (KeyError, ValueError) as error:
            raise RequestError(f"data set {dataset_id} cannot be read from the stack: {error}") from error
        return list(answer.data)

    return read_rows


async def _iterate(datasetio: Any, dataset_id: str) -> Any:
    request = request_class("IterRowsRequest")
    if request is not None:
        return await datasetio.iterrows(request(dataset_id=dataset_id, limit=_ALL))
    return await datasetio.iterrows(dataset_id=dataset_id, limit=_ALL)


def request_class(name: str) -> Any | None:
    """A class of the stack's API since 0.5, where methods take one request; None in versions before."""
    try:
        return getattr(importlib.import_module("llama_stack_api"), name, None)
    except ImportError:
        return None


def build_provider(service: PostTrainingService, deps: Mapping[object, object], config: ProviderConfig) -> object:
    training = StackTraining(service, rows_of(find_datasetio(deps)), config)
    if request_class("SupervisedFineTuneRequest") is not None:
        from lockstep.service.llama_stack.providers.versions import PostTrainingByRequest

        return PostTrainingByRequest(training)
    from lockstep.service.llama_stack.providers.versions import PostTrainingByKeywords

    return PostTrainingByKeywords(training)
