"""`inline::lockstep`: the job service inside the stack's process, its jobs in child processes, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.service.llama_stack.providers.inline.service import InlineConfig

__all__ = ["InlineConfig", "get_provider_impl"]


async def get_provider_impl(config: InlineConfig, deps: Mapping[Any, Any]) -> Any:
    from lockstep.service.llama_stack.providers.construction import build_provider
    from lockstep.service.llama_stack.providers.inline.service import EmbeddedService

    return build_provider(EmbeddedService(config), deps, config.settings)
