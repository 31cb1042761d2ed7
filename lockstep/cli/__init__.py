"""Every command. What a command needs is imported inside it: `--help` must not wait for torch.

Exit codes: 0 done, 1 failed, 2 bad configuration or usage, 128 + N stopped by signal N.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.cli.options import app

# isort: off
# In the order in which --help lists the commands.
from lockstep.cli import training, data, verification, evaluation, generation, runs, samples, scaling, service
# isort: on

__all__ = [
    "app",
    "data",
    "evaluation",
    "generation",
    "main",
    "runs",
    "samples",
    "scaling",
    "service",
    "training",
    "verification",
]


def main() -> None:
    """The entry point: what a user got wrong is one sentence, what we got wrong is a traceback."""
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
        raise typer.Exit
