"""The entry of every rank: `python -m lockstep.train.worker RUN_DIR [--config FILE]`, alone, under torchrun or MPI.

Redirects this rank's output to its own log file, and records any failure as one sentence. With a configuration, rank 0
makes the run directory.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from lockstep.config import ConfigError, RunConfig, load_config
from lockstep.processes.rank_environment import NodePlace, read_place
from lockstep.processes.stop_notice import StopNotice
from lockstep.rundir import EXIT_INTERRUPTED, RunDir, open_log

# What gloo, the rendezvous store and NCCL report when a deadline has passed, and when a peer is gone.
_TIMED_OUT = re.compile(r"[Tt]imed out (?:waiting|after) (\d+) ?ms|ran for (\d+) milliseconds before timing out")
_LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")
# Ranks that wait on one that hangs reach their deadline almost together: time for all of them to record it.
_GRACE_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        run, rank = _open_run(_parse(arguments), arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if run is None:
        return 0
    terminal = _redirect_output(run.logs / f"rank-{rank}.log")
    run.clear_failures(rank)
    try:
        with StopNotice.listening() as notice:
            _import_loop()(run.path, notice.asked)
    except BaseException as error:
        if _exit_code(error) == EXIT_INTERRUPTED:
            print(f"rank {rank}: {error}", file=terminal, flush=True)
        else:
            with contextlib.suppress(OSError):  # the disk may be full
                traceback.print_exc()
            report_failure(run, rank, error, terminal)
        _leave_now(_exit_code(error))
    if int(os.environ["WORLD_SIZE"]) > 1:
        # A thread of a group that is gone can abort the interpreter's own way out (torch 2.13), after all is written.
        _leave_now(0)
    return 0


def _import_loop() -> Callable[[Path, Callable[[], bool]], None]:
    """What imports make stays until the process ends: to look for garbage in it takes a seventh of their time, and some
    of every later look's."""
    gc.disable()
    try:
        from lockstep.train.run import run
    finally:
        gc.freeze()
        gc.enable()
    return run


def _open_run(options: argparse.Namespace, arguments: list[str]) -> tuple[RunDir | None, int]:
    """The run, and which of its ranks this is, from now on by torch's names. None: there is nothing left to train."""
    place = read_place(os.environ)
    if isinstance(place, NodePlace):
        _become_torchrun(place, arguments)
    os.environ.update(place.variables())
    run = RunDir(options.run_dir, owner=place.rank == 0)
    if options.config is not None and not _prepare(run, load_config(options.config)):
        return None, place.rank
    if not run.config_path.exists():
        raise ConfigError(f"{run.path} is not a run directory: it has no config.yaml")
    return run, place.rank


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lockstep.train.worker", description="One rank of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--config", type=Path, help="Make the run directory from this file, or go on with it.")
    return parser.parse_args(arguments)


def _become_torchrun(place: NodePlace, arguments: list[str]) -> NoReturn:
    command = [sys.executable, "-m", "torch.distributed.run", *place.torchrun_options()]
    os.execv(sys.executable, [*command, "-m", "lockstep.train.worker", *arguments])


def _prepare(run: RunDir, config: RunConfig) -> bool:
    """Rank 0 makes the directory, the others wait for it. False: the run is there and complete."""
    if run.owner and not run.config_path.exists():
        RunDir.create(run.path, config)
    deadline = time.monotonic() + config.launch.timeout_s
    while not run.config_path.exists() or not is_of(run.config(), config):
        if run.owner or (run.config_path.exists() and time.monotonic() > deadline):
            raise ConfigError(
                f"{run.path} holds a run with other settings than the configuration: choose another folder, or go on "
                "with that run without --config"
            )
        if time.monotonic() > deadline:
            raise ConfigError(
                f"rank 0 has not made {run.path} in {config.launch.timeout_s:g} s: every rank must see the same folder"
            )
        time.sleep(0.1)
    return run.status().get("state") != "completed"


def is_of(kept: RunConfig, asked: RunConfig) -> bool:
    """Whether a run has this configuration. Of `parallel: auto` it has the layout that was chosen, and after it ran out
    of memory smaller micro-batches, where that is allowed."""
    if kept.parallel.auto and asked.parallel.auto:
        kept = kept.model_copy(update={"parallel": asked.parallel})
    if kept.batch.on_out_of_memory == asked.batch.on_out_of_memory == "shrink":
        sizes = {key: getattr(asked.batch, key) for key in ("micro_batch_tokens", "fit_memory")}
        kept = kept.model_copy(update={"batch": kept.batch.model_copy(update=sizes)})
    return kept == asked


def report_failure(run: RunDir, rank: int, error: BaseException, terminal: TextIO) -> None:
    """One sentence into this rank's failure file, the status (rank 0), its log and what was standard error."""
    code, failed_at = _exit_code(error), time.time()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    waited_s = _waited_s(error) if num_ranks > 1 else None
    message = _sentence(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        run.sweep()  # space for the status below
        message += "; " + run.describe_last_checkpoint()
    tokens = getattr(error, "micro_batch_tokens", None)  # of one that was too large, where smaller ones are allowed
    if tokens is not None:
        run.record_too_large(rank, tokens)
        message += (
            f"; a micro-batch of {tokens:,} tokens was too large: from the last checkpoint on, half of that is tried"
        )
    elif type(error).__name__ == "OutOfMemoryError":  # torch's, by name: the message must not wait for an import
        message = message.partition(" If reserved but unallocated")[0].removesuffix(".") + _explain_out_of_memory(run)
    if waited_s is not None:
        message = f"rank {rank} waited {waited_s:.0f} s on the other ranks"
    elif num_ranks > 1 and any(text in str(error) for text in _LOST):
        peer = f"rank {1 - rank}" if num_ranks == 2 else "another rank"
        message = f"rank {rank} lost its connection to {peer}, which ended first"
    run.record_failure(rank, message, code, at=failed_at)
    if waited_s is not None:
        message += _describe_silent(run, set(range(num_ranks)) - {rank})
        run.record_failure(rank, message, code, at=failed_at)
    with contextlib.suppress(OSError):
        run.write_status(state="failed", error=message)
    for where in (sys.stderr, terminal):  # the log, below the traceback, and the command's own
        with contextlib.suppress(OSError):
            print(f"error: rank {rank}: {message}", file=where, flush=True)


def _explain_out_of_memory(run: RunDir) -> str:
    """What a run that ended out of memory is told besides: what was expected, and what to change."""
    planned = run.status().get("planned")
    expected = ""
    if planned:
        held = ", ".join(f"{name} {size:.3g}" for name, size in planned.get("largest_gib", {}).items())
        expected = f"; the plan was {planned['memory_gib']:.3g} GiB ± {planned['memory_error']:.0%}"
        expected += f", most of it for {held}" if held else ""
    return (
        f"{expected}. Lower batch.micro_batch_tokens, which does not change the numbers (batch.on_out_of_memory shrink "
        "does it by itself), or see what 'lockstep plan' advises; --resume goes on from the last checkpoint"
    )


def _exit_code(error: BaseException) -> int:
    """2 for what the user can fix, which is always a ValueError. Some errors have their own."""
    return getattr(error, "exit_code", 2 if isinstance(error, ValueError) else 1)


def _redirect_output(path: Path) -> TextIO:
    """Sends everything this process writes, also from C++, to its log. Returns the former standard error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w")
    with open_log(path) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return terminal


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip().split("\n")[0]
    speaks_for_itself = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("lockstep.")
    return text if speaks_for_itself and text else f"{type(error).__name__}: {text}"


def _waited_s(error: BaseException) -> float | None:
    """How long, if the error is that a deadline passed."""
    match = _TIMED_OUT.search(str(error))
    return float(next(filter(None, match.groups()))) / 1000 if match else None


def _describe_silent(run: RunDir, others: set[int]) -> str:
    """The ranks that were waited on: one that waits has a failure file, one that hangs does not."""
    deadline = time.monotonic() + _GRACE_S
    while (silent := others - {failure["rank"] for failure in run.failures()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not silent:
        return " and they on it: they are no longer in step"
    names = ", ".join(str(rank) for rank in sorted(silent))
    remedy = "see what blocks it, or raise launch.timeout_s if it is only slow"
    return f", and got no sign of life from rank {names}: {remedy}"


def _leave_now(code: int) -> None:
    """Without waiting for threads or collectives: the others must notice at once that this rank is gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # All is written. The interpreter's own way out takes seconds after a GPU run, to free what the system frees anyway.
    _leave_now(main())
