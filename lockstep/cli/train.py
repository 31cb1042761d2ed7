"""`lockstep train`, `attach` and `init`: start a run, go on with one or take it over, and follow it; write a first
configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.display import LITERAL, RunDisplay, make_console, print_facts, print_header, print_summary
from lockstep.cli.options import (
    DEFAULT_CONFIG,
    AllowPickle,
    Config,
    Json,
    Overrides,
    app,
    convert_checkpoints,
    echo,
    echo_json,
    load_settings,
)

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.launch.start import RestartingRun
    from lockstep.rundir import RunDir


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept. Default: runs/<name>-<date>-<time>.")
    ] = None,
    procs: Annotated[int | None, typer.Option(help="Processes on this machine; same as launch.procs=N.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue a run from its last checkpoint.")] = None,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="With --resume: begin at step 0; checkpoints are kept aside.")
    ] = False,
    allow_pickle: AllowPickle = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be trained, and stop.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="On a cluster: submit the run, and do not follow it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model, and follow the run until it ends."""
    if resume is None and (start_over or allow_pickle):
        raise ValueError("--start-over and --allow-pickle are about the checkpoints of a run: name it with --resume")
    if resume is not None:
        changes = [a for a in (config, *(overrides or ())) if a is not None]
        _refuse_with_resume(changes, run_dir, dry_run)
        if procs is not None:
            changes.append(f"launch.procs={procs}")
        if allow_pickle:
            convert_checkpoints(resume)
        raise typer.Exit(_resume(resume, changes, start_over, as_json, detach))
    settings = load_settings(config, overrides, procs)
    if dry_run and settings.launch.kind == "slurm":
        _print_batch_script(settings, config, overrides, run_dir)
        return
    if dry_run:
        _describe(settings, as_json)
        return
    from lockstep.launch.start import new_run_dir
    from lockstep.rundir import RunDir

    _refuse_to_detach(settings, detach)
    run = RunDir.create(run_dir or new_run_dir(settings.name), settings)
    raise typer.Exit(_follow(run, settings, as_json, resumed=False, detach=detach))


def _refuse_with_resume(arguments: Sequence[str], run_dir: Path | None, dry_run: bool) -> None:
    if run_dir or dry_run or any("=" not in argument for argument in arguments):
        raise ValueError(
            "--resume continues a run as it was configured: give no CONFIG, --run-dir or --dry-run; of its settings, "
            "parallel.*, launch.*, cluster and batch.micro_batch_tokens can be changed with KEY.PATH=VALUE"
        )


def _refuse_to_detach(settings: RunConfig, detach: bool) -> None:
    if detach and settings.launch.kind in ("local", "ray"):
        raise ValueError(
            f"--detach is for runs of a cluster, and launch.kind is {settings.launch.kind}, whose processes end with "
            "this command: leave it out, or use the job service (lockstep serve)"
        )


def _print_batch_script(
    settings: RunConfig, config: str | None, overrides: Sequence[str] | None, run_dir: Path | None
) -> None:
    """As it would be submitted; it can also be kept and submitted by hand, as it makes its own run directory."""
    from lockstep.launch.slurm_script import batch_script
    from lockstep.launch.start import new_run_dir

    path = (run_dir or new_run_dir(settings.name)).resolve()
    file = Path(config) if config is not None and "=" not in config else DEFAULT_CONFIG
    changed = [*(overrides or ()), *([config] if config is not None and "=" in config else [])]
    if changed:
        echo(
            f"# by hand it would train what is in {file}, without {' '.join(changed)}: write that into the file",
            err=True,
        )
    echo(batch_script(settings, path, "by-hand", file.resolve()), nl=False)


def _resume(path: Path, overrides: Sequence[str], start_over: bool, as_json: bool, detach: bool) -> int:
    from lockstep.launch.start import reopen
    from lockstep.rundir import RunDir

    run = RunDir(path)
    if run.status().get("state") != "completed":
        run, settings = reopen(path, overrides, start_over=start_over)
        _refuse_to_detach(settings, detach)
        return _follow(run, settings, as_json, resumed=True, detach=detach)
    console = make_console(stderr=as_json)
    console.print("This run is already complete: there is nothing to resume.", highlight=False)
    print_summary(console, run)
    _print_result(run, as_json)
    return 0


def _follow(run: RunDir, settings: RunConfig, as_json: bool, resumed: bool, detach: bool) -> int:
    """Start the processes of a run, show what they write, and end with them: none is left when this returns, but for
    those of a cluster."""
    from lockstep.launch.start import start
    from lockstep.processes.tree import catch_signals

    console = make_console(stderr=as_json)
    print_header(console, run, settings, resumed)
    display = RunDisplay(run, console)
    with catch_signals() as received:
        handle = start(run, settings, lambda line: console.print(line, **LITERAL))
        if detach:
            handle.leave()
            console.print(f"submitted: lockstep attach {shlex.quote(str(run.path))} follows it", **LITERAL)
            _print_result(run, as_json)
            return 0
        return _supervise(run, handle, display, received, as_json)


def _supervise(run: RunDir, handle: RestartingRun, display: RunDisplay, received: list[int], as_json: bool) -> int:
    """Until the run ends, or a signal (`received`) ends it."""
    console = display.console
    try:
        display.follow(lambda: not received and handle.poll().state == "running")
    except BaseException:
        handle.give_up()
        raise
    if received and handle.outlives_us:
        handle.leave()
        path = shlex.quote(str(run.path))
        console.print(f"The run goes on: lockstep attach {path} follows it, lockstep stop {path} ends it.", **LITERAL)
        return 128 + received[0]
    if received:
        console.print("stopping the run (Ctrl-C again ends it at once)", highlight=False)
        handle.stop(hurry=lambda: len(received) > 1)
    ended = handle.poll()
    print_summary(console, run)
    _print_result(run, as_json)
    if ended.state == "cancelled":
        return 128 + received[0] if received else 1
    if ended.state == "failed":
        _print_failure(run, ended.reason)
    return ended.exit_code


@app.command()
def attach(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    watch: Annotated[bool, typer.Option("--watch", help="Only follow it: never supervise or stop it.")] = False,
    as_json: Json = False,
) -> None:
    """Follow a run, and take the place of its launcher where that was killed: restart it, and stop it with Ctrl-C."""
    from lockstep.launch import start
    from lockstep.processes.tree import catch_signals
    from lockstep.rundir import RunDir

    run = RunDir(run_dir)
    run.config()  # raises where this is not a run directory
    console = make_console(stderr=as_json)
    display = RunDisplay(run, console)
    with catch_signals() as received:
        while not start.has_ended(run):
            taken = None if watch else start.attach(run.path, lambda line: console.print(line, **LITERAL))
            if taken is not None:
                ends = "leaves it running" if taken.outlives_us else "stops the run"
                console.print(f"Nobody supervised this run; now this command does. Ctrl-C {ends}.", **LITERAL)
                raise typer.Exit(_supervise(run, taken, display, received, as_json))
            _watch(run, display, received, forever=watch)
            if received:
                console.print("The run goes on.", **LITERAL)
                raise typer.Exit(128 + received[0])
            if not (start.has_ended(run) or start.is_supervised(run.path) or start.is_running(run.path)):
                resume = f"lockstep train --resume {shlex.quote(str(run_dir))}"
                raise ValueError(f"no process of {run_dir} is left: go on with {resume}")
    print_summary(console, run)
    _print_result(run, as_json)
    status = run.status()
    if status.get("state") == "failed":
        _print_failure(run, str(status.get("error")))
    raise typer.Exit(0 if status.get("state") == "completed" else 1)


def _watch(run: RunDir, display: RunDisplay, received: list[int], *, forever: bool) -> None:
    """Show a run that others supervise, until it ends, a signal comes or, unless `forever`, nobody supervises it."""
    from lockstep.launch import start

    display.console.print("Only following this run: Ctrl-C leaves it running.", **LITERAL)
    was_supervised = start.is_supervised(run.path)  # not so a job of the service, which watches it by other means

    def goes_on() -> bool:
        if received or start.has_ended(run):
            return False
        return start.is_supervised(run.path) or (start.is_running(run.path) and (forever or not was_supervised))

    display.follow(goes_on)


def _print_failure(run: RunDir, reason: str) -> None:
    failures = run.failures()
    log = run.logs / f"rank-{failures[0]['rank']}.log" if failures else run.logs
    where = log if log.exists() else run.logs
    echo(f"error: {reason}\n       more in {where}", err=True)


def _print_result(run: RunDir, as_json: bool) -> None:
    from lockstep.launch.start import result_of

    if as_json:
        echo_json(json.dumps(result_of(run)))


def _describe(settings: RunConfig, as_json: bool) -> None:
    if settings.launch.kind == "kubernetes":
        raise ValueError("--dry-run reads model and data, which are where the pods are: see lockstep manifest instead")
    from lockstep.train.describe import describe

    facts = describe(settings)
    if as_json:
        echo_json(json.dumps({"config": settings.model_dump(mode="json"), "plan": facts}, default=str))
        return
    console = make_console()
    console.print("[bold]configuration[/]")
    echo("".join(f"  {line}\n" for line in settings.to_yaml().splitlines()))
    console.print("[bold]what would be trained[/]")
    print_facts(console, facts)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = DEFAULT_CONFIG,
    algorithm: Annotated[
        str, typer.Option(help="The algorithm: sft, dpo, kto, simpo, orpo, cpo, grpo, dapo, ...")
    ] = "sft",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented starter configuration."""
    from lockstep.config.template import ALGORITHMS, starter_yaml

    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if file.exists() and not force:
        raise ValueError(f"{file} already exists: name another file, or overwrite it with --force")
    try:
        file.write_text(starter_yaml(algorithm, str(file)), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from error
    echo(f"wrote {file}: set model.path and data.train, then: lockstep train {file}")
