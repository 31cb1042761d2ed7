"""`lockstep sagemaker`: the entry of a container that trains in a job of Amazon SageMaker."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.display import (
    LITERAL,
    POLL_INTERVAL_S,
    JsonlTail,
    RunDisplay,
    make_console,
    print_header,
    print_summary,
)
from lockstep.cli.options import app, echo

if TYPE_CHECKING:
    from lockstep.launch.sagemaker import SageMakerJob
    from lockstep.launch.start import RestartingRun
    from lockstep.rundir import RunDir

_LINES_OF_LOG = 30  # in the failure file, after the reason


@app.command()
def sagemaker(
    action: Annotated[
        str, typer.Argument(metavar="train", help="What the platform passes to the container.")
    ] = "train",
) -> None:
    """Train in a SageMaker job: configuration and data from /opt/ml, checkpoints and model to it."""
    from lockstep.launch.sagemaker import clear_failure, write_failure

    clear_failure(os.environ)
    try:
        if action != "train":
            raise ValueError(
                f"the container was started with {action!r}, and it only trains: serve the model with one of the "
                "platform's PyTorch containers, for which code/inference.py is part of it"
            )
        code = _train()
    except Exception as error:
        write_failure(os.environ, str(error) or type(error).__name__)
        raise
    raise typer.Exit(code)


def _train() -> int:
    from lockstep.launch import sagemaker as platform
    from lockstep.launch.start import start
    from lockstep.processes.tree import catch_signals

    job = platform.read_job(os.environ)
    platform.prepare(job)
    settings = platform.make_config(job)
    environment = dict(os.environ)
    platform.set_environment(job, environment)
    os.environ.update(environment)
    run, settings, resumed = platform.open_run(job, settings)
    console = make_console()
    echo(f"host {job.host_rank + 1} of {len(job.hosts)}: {job.current_host}")
    print_header(console, run, settings, resumed)
    if run.status().get("state") == "completed":
        return _deliver(job, run)
    with catch_signals() as received:
        platform.wait_for_first_host(job, settings.launch.timeout_s)
        if received:
            return 128 + received[0]
        display = RunDisplay(run, console)
        metrics = JsonlTail(run.path / "metrics.jsonl")
        handle = start(run, settings, lambda line: console.print(line, **LITERAL), platform.launcher_of(job, settings))
        try:
            display.follow(lambda: _goes_on(handle, metrics, received))
        except BaseException:
            handle.stop()
            raise
        _print_metrics(metrics)
        return _end(job, run, handle, received)


def _goes_on(handle: RestartingRun, metrics: JsonlTail, received: list[int]) -> bool:
    _print_metrics(metrics)
    return not received and handle.poll().state == "running"


def _print_metrics(metrics: JsonlTail) -> None:
    from lockstep.launch.sagemaker import metric_line

    for record in metrics.read():
        echo(metric_line(record))


def _end(job: SageMakerJob, run: RunDir, handle: RestartingRun, received: list[int]) -> int:
    from lockstep.launch.sagemaker import deliver_records, write_failure

    if received:
        _save(run, handle, received)
    ended = handle.poll()
    print_summary(make_console(), run)
    deliver_records(job, run)
    if ended.state == "completed":
        return _deliver(job, run)
    if ended.state == "interrupted":
        echo(ended.reason)
        return ended.exit_code
    if ended.state == "cancelled":
        return 128 + received[0] if received else 1
    reason = f"{job.current_host}: {ended.reason}" if len(job.hosts) > 1 else ended.reason
    write_failure(os.environ, reason, _last_lines(run))
    echo(f"error: {reason}", err=True)
    return ended.exit_code


def _save(run: RunDir, handle: RestartingRun, received: list[int]) -> None:
    """After a signal: a checkpoint of this step, or the end without one when the time is up."""
    from lockstep.launch.local import ask_to_stop
    from lockstep.launch.sagemaker import GRACE_S

    echo(f"signal {received[0]}: the platform ends this job; saving")
    deadline = time.monotonic() + GRACE_S
    ask_to_stop(run.path)
    while handle.poll().state == "running":
        if time.monotonic() > deadline or len(received) > 1:
            handle.stop()
            return
        time.sleep(POLL_INTERVAL_S)


def _deliver(job: SageMakerJob, run: RunDir) -> int:
    from lockstep.launch.sagemaker import deliver_model

    if job.is_first:
        echo(f"model and the code that serves it: {deliver_model(job, run)}")
    return 0


def _last_lines(run: RunDir) -> list[str]:
    """Of the log of the rank that failed first."""
    failures = run.failures()
    log = run.logs / f"rank-{failures[0]['rank']}.log" if failures else run.logs / "launcher.log"
    if not log.exists():
        return []
    return ["", f"{log.name}:", *log.read_text(errors="replace").splitlines()[-_LINES_OF_LOG:]]
