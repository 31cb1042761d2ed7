"""A whole run from Python: the same path as the command, without its display."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig, check_config, load_config, resolve_config
from lockstep.launch.launcher import Resources
from lockstep.launch.local import LocalLauncher
from lockstep.launch.ray_driver import RayLauncher
from lockstep.launch.restarts import RestartingRun
from lockstep.launch.resume import reopen
from lockstep.rundir import RunDir


class RunFailed(RuntimeError):
    """The run ended without completing. The message is the first failing rank's sentence."""


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> dict[str, Any]:
    """Train in `launch.procs` worker processes and wait. Returns what `lockstep train --json` prints.

    `resume` goes on with a run from its last checkpoint; `overrides` may then say how the work is shared out.
    """
    if (config is None) == (resume is None):
        raise ValueError("give either a configuration or a run to resume")
    if resume is not None:
        if run_dir is not None:
            raise ValueError(f"a resumed run stays where it is, in {resume}: give no run_dir")
        run, settings = reopen(resume, overrides)
    else:
        assert config is not None
        settings = _settle(config, overrides)
        run = RunDir.create(run_dir or new_run_dir(settings.name), settings)
    lasting = start(run, settings)
    try:
        while (outcome := lasting.poll()).state == "running":
            time.sleep(0.2)
    except BaseException:
        lasting.stop()
        raise
    if outcome.state != "completed":
        raise RunFailed(f"{outcome.reason} (logs in {run.logs})")
    return result_of(run)


def start(run: RunDir, settings: RunConfig, say: Callable[[str], None] = lambda line: None) -> RestartingRun:
    """The processes of the run, where launch.kind puts them."""
    launch = settings.launch
    launcher = RayLauncher() if launch.kind == "ray" else LocalLauncher()
    return RestartingRun(launcher, run, Resources(launch.procs, launch.device), launch.max_restarts, say)


def new_run_dir(name: str) -> Path:
    stem = f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


def result_of(run: RunDir) -> dict[str, Any]:
    """How a run stands, in the words of the public interface."""
    status = run.status()
    renamed = {"step": "steps", "loss": "final_loss", "validation_loss": "final_validation_loss"}
    same = ("best_validation_loss", "best_step", "tokens", "tokens_per_s", "export", "error")
    result: dict[str, Any] = {"run_dir": str(run.path), "state": status.get("state")}
    return result | {new: status.get(old) for old, new in renamed.items()} | {key: status.get(key) for key in same}


def _settle(config: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, (str, Path)):
        settings = load_config(config, overrides)
    else:
        tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else dict(config)
        settings = resolve_config(tree, overrides=overrides)
    return check_config(settings)
