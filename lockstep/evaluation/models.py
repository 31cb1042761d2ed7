"""The models of an evaluation: runs, model folders, Hub ids and endpoints, with unique names and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.rundir import RunDir


@dataclass(frozen=True, slots=True)
class EvalModel:
    """`source` is a run directory, a model folder, a Hub id, or the address of an endpoint.

    `base_of` is the run that started from this model, and whose settings say how it is loaded.
    """

    name: str
    source: str
    is_endpoint: bool = False
    base_of: str | None = None

    @property
    def is_run(self) -> bool:
        return not self.is_endpoint and (Path(self.source) / "config.yaml").exists()

    def run_config(self) -> RunConfig | None:
        return RunDir(self.source).config() if self.is_run else None

    def fingerprint(self) -> str:
        """Changes when the weights do. A Hub id or an endpoint has only its name."""
        path = Path(self.source)
        if self.is_endpoint or not path.exists():
            return self.source
        folder = path
        if self.is_run:
            checkpoint = RunDir(path).latest_checkpoint()
            folder = checkpoint.path if checkpoint is not None else path
        files = [folder] if folder.is_file() else sorted(f for f in folder.rglob("*") if f.is_file())
        seen = [(str(f.relative_to(path.parent)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, object]:
        kind = "endpoint" if self.is_endpoint else "run" if self.is_run else "model"
        return {"name": self.name, "source": self.source, "kind": kind}


def find_models(sources: Sequence[str | Path], *, with_base: bool) -> list[EvalModel]:
    """`with_base` puts the model that the first run started from in front."""
    models = [_find_model(str(source)) for source in sources]
    if with_base:
        run = next((model for model in models if model.is_run), None)
        if run is None:
            raise ValueError("--base compares a run with the model it started from: name a run")
        config = run.run_config()
        assert config is not None
        models.insert(0, base_of(run, config))
    return unique_names(models)


def _find_model(source: str) -> EvalModel:
    path = Path(source).expanduser()
    if path.exists():
        return EvalModel(path.resolve().name, str(path))
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or ("/" in source and path.parent.is_dir()):
        # Rather than wait for the Hub to say so.
        raise ValueError(f"there is no run or model {source}: give a run directory, a model folder or a Hub id")
    return EvalModel(source, source)


def base_of(run: EvalModel, config: RunConfig) -> EvalModel:
    return EvalModel(f"{Path(config.model.path).name} (base)", config.model.path, base_of=run.source)


def unique_names(models: Sequence[EvalModel]) -> list[EvalModel]:
    """Models that share a name are named by their whole path."""
    names = [model.name for model in models]
    renamed = [replace(model, name=model.source) if names.count(model.name) > 1 else model for model in models]
    if len({model.name for model in renamed}) < len(renamed):
        raise ValueError(f"{', '.join(model.name for model in renamed)}: each model can be named only once")
    return renamed
