"""The entry of every rank: `python -m lockstep.launch.worker RUN_DIR`, alone or under torchrun.

Sends this rank's output to its own log file, and turns whatever goes wrong into one recorded sentence.
The only part of launch that calls up, into train.run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from pathlib import Path

from lockstep.config import ConfigError
from lockstep.rundir import RunDir


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m lockstep.launch.worker RUN_DIR", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    run = RunDir(Path(arguments[0]), owner=rank == 0)
    if not run.config_path.exists():
        print(f"error: {run.path} is not a run directory: it has no config.yaml", file=sys.stderr)
        return 2
    terminal = _redirect_output(run.logs / f"rank-{rank}.log")
    if rank == 0:
        run.clear_failures()
    try:
        from lockstep.train.run import run as train_run

        train_run(run.path)
    except BaseException as error:
        traceback.print_exc()
        code = 2 if isinstance(error, ConfigError) else 1
        message = _sentence(error)
        run.record_failure(rank, message, code)
        with contextlib.suppress(OSError):
            run.write_status(state="failed", error=message)
        print(f"error: rank {rank}: {message}", file=terminal, flush=True)
        _leave_now(code)
    return 0


def _redirect_output(path: Path) -> object:
    """Everything this process writes, also from C++, goes to its log. Returns what was standard error before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return terminal


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"


def _leave_now(code: int) -> None:
    """Without waiting for threads or collectives: the others must learn at once that this rank is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
