"""Every command. What a command needs is imported inside it: `--help` must not wait for torch.

Exit codes: 0 done, 1 failed, 2 bad configuration or usage, 3 training must not continue,
75 asked to stop with a checkpoint (try again later), 128 + N stopped by signal N.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.cli.options import app, echo

# isort: off
# In the order in which --help lists the commands.
from lockstep.cli import (
    train,
    plan,
    manifest,
    demo,
    data,
    verify,
    eval,
    generate,
    runs,
    scale,
    serve,
    service,
    sagemaker,
)
# isort: on

__all__ = [
    "app",
    "data",
    "demo",
    "eval",
    "generate",
    "main",
    "manifest",
    "plan",
    "runs",
    "sagemaker",
    "scale",
    "serve",
    "service",
    "train",
    "verify",
]


def main() -> None:
    """The entry point. A user's mistake is reported in one sentence, a fault of ours with a traceback."""
    try:
        app()
    except ValueError as error:
        echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        echo(f"error: {error}", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
        raise typer.Exit
