"""What run.yaml says about jobs inside the stack."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class InlineConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    data_dir: str = "~/.lockstep/stack"
    """Jobs, data sets and their state. What is here is found again when the stack starts again."""
    max_jobs: Annotated[int, Field(ge=1)] = 1
    """How many jobs run at a time; the others wait."""
    allow_paths: list[str] = []
    """Folders besides data_dir/models whose models a request may name. Names of the Hub need none."""
    settings: dict[str, Any] = Field(default={})
    """Lockstep's own configuration, under every job: a request's provider_config wins over it."""

    @classmethod
    def sample_run_config(cls, **_: Any) -> dict[str, Any]:
        return {"data_dir": "${env.LOCKSTEP_DATA_DIR:~/.lockstep/stack}"}
