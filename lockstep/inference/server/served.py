"""What a server serves under which name: the base model and adapters of it, each with its own chat template."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.text import find_invisible
from lockstep.inference.engine import LocalEngine, end_of_turn_id
from lockstep.inference.server.errors import ApiError
from lockstep.inference.server.tool_calls import why_no_tools
from lockstep.model.adapters import load_adapter
from lockstep.model.load import load_run_tokenizer
from lockstep.rundir import RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """`template`: where it is not the base model's; `end_tokens`: those of that template."""

    name: str
    adapter: str | None = None
    template: str | None = None
    end_tokens: tuple[int, ...] = ()


class ServedModels:
    def __init__(self, engine: LocalEngine, name: str) -> None:
        _check_name(name)
        self.engine, self.base = engine, name
        self.started_at = int(time.time())
        self._models = {name: ServedModel(name)}

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def add_adapter(self, name: str, source: str | Path) -> None:
        """`source`: a run that was trained with LoRA, or an adapter folder."""
        _check_name(name)
        if name in self._models:
            raise ValueError(f"two models are called {name!r}: give every adapter a name of its own")
        adapter = load_adapter(source)
        try:
            self.engine.hold_adapters().add(name, adapter)
        except ValueError as error:
            raise ValueError(f"the adapter {name}={source} does not fit: {error}") from error
        self._warn_of_base(name, adapter.base)
        template = _own_template(Path(source))
        if template is None or template == self.engine.tokenizer.chat_template:
            self._models[name] = ServedModel(name, name)
        else:
            end = end_of_turn_id(self.engine.tokenizer, template)
            self._models[name] = ServedModel(name, name, template, () if end is None else (end,))

    def _warn_of_base(self, name: str, said: str) -> None:
        """Weights of another model with the same shapes fit, and mean nothing."""
        own = str(getattr(self.engine.model, "name_or_path", ""))
        if said and own and Path(said).name != Path(own).name:
            log.warning("the adapter %s says that it was trained on %s, and this model is %s", name, said, own)

    def find(self, name: str) -> ServedModel:
        if name not in self._models:
            known = ", ".join(self._models)
            raise ApiError(
                404, f"there is no model {name[:200]!r}: there is {known}", param="model", code="model_not_found"
            )
        return self._models[name]

    def encode(self, model: ServedModel, messages: list[Any], tools: list[Any] | None) -> list[int]:
        if model.template is None and not self.engine.has_template:
            raise ValueError("this model has no chat template: use /v1/completions")
        template = model.template or self.engine.tokenizer.chat_template
        if tools and (problem := why_no_tools(str(template), self.engine.tokenizer)) is not None:
            raise ValueError(f"tools cannot be used: {problem}")
        return self.engine.encode(messages, tools, model.template)

    def describe(self) -> list[dict[str, Any]]:
        """As /v1/models lists them."""
        about: Mapping[str, object] = {"object": "model", "created": self.started_at, "owned_by": "lockstep"}
        limit = {"max_model_len": self.engine.num_positions}
        return [
            {"id": name, **about, **limit, "root": self.base, "parent": None if name == self.base else self.base}
            for name in self._models
        ]


def _check_name(name: str) -> None:
    if not name or len(name) > 200 or find_invisible(name) is not None:
        raise ValueError(f"{name!r} is no name for a model: use up to 200 visible characters")


def _own_template(source: Path) -> str | None:
    """The chat template that an adapter was trained with, where it says so."""
    if (source / "config.yaml").exists():
        template = load_run_tokenizer(RunDir(source).config()).chat_template
        return template if isinstance(template, str) else None
    file, settings = source / "chat_template.jinja", source / "tokenizer_config.json"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.exists() else None
    return found if isinstance(found, str) else None
