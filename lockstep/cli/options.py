"""What commands have in common: the application, their options, how a configuration is found.

Imported by every command module: nothing heavy at module level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lockstep.config import RunConfig

DEFAULT_CONFIG = Path("lockstep.yaml")

app = typer.Typer(
    name="lockstep",
    help="Post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout; all else goes to stderr.")]
Config = Annotated[str | None, typer.Argument(metavar="CONFIG", help="The YAML file; lockstep.yaml if none is named.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings that win over the file.")
]
Source = Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, a model folder or a Hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0.0)]


def load_settings(given: Sequence[str], procs: int | None) -> RunConfig:
    from lockstep.config import ConfigError, check_config, load_config
    from lockstep.config.data import PARTS

    named = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    path, overrides = (Path(given[0]), list(given[1:])) if named else (DEFAULT_CONFIG, list(given))
    if not named and not path.is_file():
        raise ConfigError(f"no configuration: name a YAML file, or write {DEFAULT_CONFIG} with 'lockstep init'")
    if procs is not None:
        overrides.append(f"launch.procs={procs}")
    settings = check_config(load_config(path, overrides))
    for part in PARTS:
        for source in getattr(settings.data, part):
            if source.path.startswith("/") and "*" not in source.path and not Path(source.path).exists():
                raise ConfigError(f"data.{part}: there is no file {source.path}")
    return settings
