"""`remote::lockstep`: jobs on a Lockstep service elsewhere. The stack starts and works on while the service is down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.service.llama_stack.providers.remote.service import RemoteConfig

__all__ = ["RemoteConfig", "get_adapter_impl"]


async def get_adapter_impl(config: RemoteConfig, deps: Mapping[Any, Any]) -> Any:
    from lockstep.service.llama_stack.providers.construction import build_provider
    from lockstep.service.llama_stack.providers.remote.service import RemoteService

    return build_provider(RemoteService(config), deps, config.settings)
