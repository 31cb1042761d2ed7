"""How a stack from 0.3 on finds the providers: `module: lockstep.service.llama_stack.providers` in its run.yaml."""

from __future__ import annotations

import importlib
from typing import Any

_DEPENDENCIES = ("datasetio",)


def get_provider_spec() -> list[Any]:
    """The inline and the remote one; the stack takes the one whose type its run.yaml names."""
    datatypes = _datatypes()
    api = datatypes.Api
    needs = [api(name) for name in _DEPENDENCIES]
    return [
        datatypes.InlineProviderSpec(
            api=api.post_training,
            provider_type="inline::lockstep",
            pip_packages=["lockstep"],
            module="lockstep.service.llama_stack.providers.inline",
            config_class="lockstep.service.llama_stack.providers.inline.InlineConfig",
            api_dependencies=needs,
        ),
        datatypes.RemoteProviderSpec(
            api=api.post_training,
            provider_type="remote::lockstep",
            adapter_type="lockstep",
            pip_packages=["lockstep"],
            module="lockstep.service.llama_stack.providers.remote",
            config_class="lockstep.service.llama_stack.providers.remote.RemoteConfig",
            api_dependencies=needs,
        ),
    ]


def _datatypes() -> Any:
    """Since 0.4 the classes have a package of their own."""
    try:
        return importlib.import_module("llama_stack_api")
    except ImportError:
        return importlib.import_module("llama_stack.providers.datatypes")
