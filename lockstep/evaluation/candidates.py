"""Who is evaluated: runs, model folders, Hub ids and endpoints, each under a name of its own.

A name heads a column of the results; a fingerprint says whether it is still the same model. Loads no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        """Changes when the weights do. Of a Hub id or an endpoint nothing more is known than its name."""
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

    def facts(self) -> dict[str, Any]:
        kind = "endpoint" if self.is_endpoint else "run" if self.is_run else "model"
        return {"name": self.name, "source": self.source, "kind": kind}


def find_candidates(sources: Sequence[str | Path], *, with_base: bool) -> list[EvalModel]:
    """`with_base` puts the model that the first run started from in front."""
    found = [_candidate(str(source)) for source in sources]
    if with_base:
        run = next((c for c in found if c.is_run), None)
        if run is None:
            raise ValueError("--base compares a run with the model it started from: name a run")
        config = run.run_config()
        assert config is not None
        found.insert(0, base_of(run, config))
    return distinguish(found)


def _candidate(source: str) -> EvalModel:
    path = Path(source).expanduser()
    if path.exists():
        return EvalModel(path.resolve().name, str(path))
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or ("/" in source and path.parent.is_dir()):
        raise ValueError(f"there is no run or model {source}")  # sooner than the Hub would say so
    return EvalModel(source, source)


def base_of(run: EvalModel, config: RunConfig) -> EvalModel:
    return EvalModel(f"{Path(config.model.path).name} (base)", config.model.path, base_of=run.source)


def distinguish(candidates: Sequence[EvalModel]) -> list[EvalModel]:
    """Two of one name are called by their whole path."""
    names = [c.name for c in candidates]
    found = [replace(c, name=c.source) if names.count(c.name) > 1 else c for c in candidates]
    if len({c.name for c in found}) < len(found):
        raise ValueError(f"{', '.join(c.name for c in found)}: each model can be named only once")
    return found
