"""What commands share: the application, common options, and finding the configuration."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from lockstep.config import RunConfig

DEFAULT_CONFIG = Path("lockstep.yaml")
_for_json: ContextVar[TextIO] = ContextVar("_for_json")

app = typer.Typer(
    name="lockstep",
    help="Post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _reserve_stdout(context: typer.Context, as_json: bool) -> bool:
    """With --json, stdout is for `echo_json` alone: libraries print there too, and so do the processes we start."""
    if as_json:
        context.with_resource(_only_stderr())
    return as_json


@contextlib.contextmanager
def _only_stderr() -> Iterator[None]:
    """Whatever is written to stdout goes to stderr; what leads to the real one is in `_for_json`."""
    with contextlib.ExitStack() as stack:
        kept = sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a test's stdout is no file
            if sys.stdout.fileno() == 1:
                sys.stdout.flush()
                kept = stack.enter_context(open(os.dup(1), "w", encoding="utf-8"))
                os.dup2(2, 1)
                stack.callback(os.dup2, kept.fileno(), 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.callback(_for_json.reset, _for_json.set(kept))
        yield


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_reserve_stdout,
        help="Machine-readable output on stdout; everything else goes to stderr.",
    ),
]
Config = Annotated[str | None, typer.Argument(metavar="CONFIG", help="The YAML file. Default: lockstep.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings that override the file.")
]
Source = Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, a model folder or a Hub id.")]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Convert checkpoints of versions up to 0.1: their index is a pickle."),
]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.", min=0.0)]


def echo(text: object, *, err: bool = False, nl: bool = True, keep: str = "", to: TextIO | None = None) -> None:
    """What was written by others is no command to the terminal; a file or a pipe gets it as it is."""
    stream = to or (sys.stderr if err else sys.stdout)
    if stream.isatty():
        from lockstep.config.text import write_out

        text = write_out(str(text), keep)
    typer.echo(text, file=stream, nl=nl)


def echo_json(text: str) -> None:
    """The answer to --json."""
    echo(text, to=_for_json.get(sys.stdout))


def load_settings(
    config: str | None, overrides: Sequence[str] | None, procs: int | None = None, *, starts: bool = True
) -> RunConfig:
    """Without CONFIG it is lockstep.yaml, and `config` may hold the first override.

    `starts`: whether the run can be started here; otherwise only what it is is checked.
    """
    from lockstep.config import ConfigError, check_config, load_config
    from lockstep.config.data import PARTS

    path, changes = DEFAULT_CONFIG, list(overrides or ())
    if config is not None and ("=" not in config or Path(config).is_file()):
        path = Path(config)
    elif config is not None:
        changes.insert(0, config)
    if path is DEFAULT_CONFIG and not path.is_file():
        raise ConfigError(f"no configuration: name a YAML file, or write {DEFAULT_CONFIG} with 'lockstep init'")
    if procs is not None:
        changes.append(f"launch.procs={procs}")
    settings = load_config(path, changes)
    if not starts:
        return settings
    check_config(settings)
    for part in PARTS if settings.launch.kind != "kubernetes" else ():  # there the paths are those of the pods
        for source in getattr(settings.data, part):
            if source.path.startswith("/") and "*" not in source.path and not Path(source.path).exists():
                raise ConfigError(f"data.{part}: there is no file {source.path}")
    return settings


def settle_layout(settings: RunConfig, num_ranks: int) -> RunConfig:
    """`parallel: auto` as it would be chosen here for so many ranks, and why."""
    if not settings.parallel.auto or settings.parallel.chosen_for(num_ranks):
        return settings
    from lockstep.plan.from_config import this_machine
    from lockstep.train.foresee import choose

    found = choose(settings, cluster=this_machine(settings, num_ranks))
    echo(found.why, err=True)
    return found.config


def convert_checkpoints(path: Path) -> None:
    """For --allow-pickle. Not while the run's processes write checkpoints of their own."""
    from lockstep.launch.start import is_running
    from lockstep.model.pickled_checkpoints import convert_pickled
    from lockstep.rundir import RunDir

    run = RunDir(path, owner=True)
    run.config()  # raises where this is not a run directory
    if is_running(run.path):
        raise ValueError(f"{run.path} is still running: stop it before you convert its checkpoints")
    steps = convert_pickled(run)
    shown = f"of step {', '.join(map(str, steps))}" if steps else "none was left to convert"
    echo(f"converted checkpoints: {shown}", err=True)
