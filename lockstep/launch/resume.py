"""A stopped run opened again, perhaps on other processes and in another layout.

What may change is how the work is shared out, never what is computed. Must not know checkpoints or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig, check_config, load_config
from lockstep.launch.local import is_running
from lockstep.rundir import RunDir

_MAY_CHANGE = ("parallel.", "launch.", "cluster", "batch.micro_batch_tokens", "rollouts.")
# The settings there that change the numbers, or how old samples may be.
_MAY_NOT = ("parallel.compression", "rollouts.endpoint", "rollouts.kind", "rollouts.max_staleness")


def reopen(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunDir, RunConfig]:
    """The run and the configuration it goes on with: recorded in the run directory where it is another one.

    Not while the run's processes are alive: until they are started again, the caller owns the directory.
    """
    run = RunDir(path, owner=True)
    before = run.config()
    if not overrides:
        return run, check_config(before)
    after = load_config(run.newest_config_path, overrides)
    changes = _changes(before.model_dump(mode="json"), after.model_dump(mode="json"))
    for key, (old, new) in changes.items():
        if key in _MAY_NOT or not key.startswith(_MAY_CHANGE):
            raise ConfigError(
                f"--resume cannot change {key} from {old} to {new}: only parallel.*, launch.*, cluster, "
                "batch.micro_batch_tokens and the engines of rollouts can change within a run, because they do not "
                "change its numbers"
            )
    check_config(after)
    if "launch.device" in changes:
        after = _keep_precision(run, after)
    if changes:
        if is_running(run.path):
            raise ConfigError(f"{run.path} is still running: stop it before you change it")
        _record(run, after, changes)
    return run, after


def _keep_precision(run: RunDir, config: RunConfig) -> RunConfig:
    """Another device must not make `auto` choose again."""
    chosen = run.status().get("precision")
    if config.model.precision != "auto" or chosen is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"precision": chosen})})


def _record(run: RunDir, config: RunConfig, changes: Mapping[str, tuple[Any, Any]]) -> None:
    file = run.add_config(config)
    run.log_event("reconfigured", file=file.name, changes={key: list(pair) for key, pair in changes.items()})
    shares_otherwise = any(key == "launch.procs" or not key.startswith(("launch.", "rollouts.")) for key in changes)
    if shares_otherwise and config.lora is not None and config.lora.dropout:
        run.log_event(
            "warning",
            message="lora.dropout draws other numbers from here on: they depend on how the work is shared out, "
            "so this run will not equal one that was never stopped",
        )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Every key whose value is another: (old, new)."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            found[prefix + key] = (old, new)
    return found
