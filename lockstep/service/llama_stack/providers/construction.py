"""Puts a provider together for the version of the stack that asks. Must not know where the jobs run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.service.llama_stack.providers.stack_rows import find_datasetio, request_class, rows_of
from lockstep.service.llama_stack.providers.training import PostTrainingService, StackTraining


def build_provider(service: PostTrainingService, deps: Mapping[Any, Any], settings: Mapping[str, Any]) -> Any:
    training = StackTraining(service, rows_of(find_datasetio(deps)), settings)
    if request_class("SupervisedFineTuneRequest") is not None:
        from lockstep.service.llama_stack.providers.versions import PostTrainingByRequest

        return PostTrainingByRequest(training)
    from lockstep.service.llama_stack.providers.versions import PostTrainingByKeywords

    return PostTrainingByKeywords(training)
