"""What run.yaml says about the service."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class RemoteConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str = "http://127.0.0.1:8322"
    """Where `lockstep serve` answers."""
    api_token: str | None = Field(default=None, repr=False)
    """Default: the environment's LOCKSTEP_TOKEN. Stacks hide a setting of this name when they print run.yaml."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long one request may take. A job may of course take longer."""
    settings: dict[str, Any] = Field(default={})
    """Lockstep's own configuration, under every job: a request's provider_config wins over it."""

    @classmethod
    def sample_run_config(cls, **_: Any) -> dict[str, Any]:
        return {"url": "${env.LOCKSTEP_SERVER:http://127.0.0.1:8322}"}
