"""Rows from the stack's own datasetio, in whichever way its version wants to be asked.

Must not know what the rows are for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from lockstep.service.llama_stack.providers.training import ReadRows
from lockstep.service.llama_stack.rows import RequestError

_ALL = -1


def find_datasetio(deps: Mapping[Any, Any]) -> Any:
    """`deps` is keyed by the stack's Api enumeration, which lies elsewhere in every second version."""
    for api, implementation in deps.items():
        if getattr(api, "value", api) == "datasetio":
            return implementation
    raise ValueError("lockstep needs the stack's datasetio: add datasetio to the apis and providers of run.yaml")


def rows_of(datasetio: Any) -> ReadRows:
    async def read_rows(dataset_id: str) -> list[Mapping[str, Any]]:
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
