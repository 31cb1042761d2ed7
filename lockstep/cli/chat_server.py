"""`lockstep chat --serve`: a model and its adapters behind OpenAI's API."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.display import make_console
from lockstep.cli.options import echo

if TYPE_CHECKING:
    from lockstep.inference.server.served import ServedModels
    from lockstep.inference.server.settings import ServerSettings

_KEY_VARIABLE = "LOCKSTEP_API_KEY"
_MIN_KEY = 8  # characters


@dataclass(frozen=True)
class ServeOptions:
    source: str
    address: str
    adapters: tuple[str, ...]
    name: str | None
    api_key_file: Path | None
    batch: int | None
    max_tokens: int
    temperature: float | None
    max_waiting: int
    timeout_s: float


def serve_model(options: ServeOptions) -> None:
    """Until a signal ends it. Everything that can be wrong with the options is said before the model is loaded."""
    from lockstep.inference.server.settings import ServerSettings

    host, port = parse_address(options.address)
    settings = ServerSettings(
        host=host,
        max_tokens=options.max_tokens,
        temperature=1.0 if options.temperature is None else options.temperature,
        timeout_s=options.timeout_s,
        max_waiting=options.max_waiting,
        api_key=read_key(options.api_key_file),
    )
    adapters = [_parse_adapter(given) for given in options.adapters]
    _run(options, settings, port, adapters)


def _run(options: ServeOptions, settings: ServerSettings, port: int, adapters: list[tuple[str, Path]]) -> None:
    from lockstep.inference.server.app import ModelServer
    from lockstep.service.connections import ConnectionLimits, GuardedServer, guarded_config

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    slow: list[str] = []
    models = _load(options, adapters, slow)
    server = ModelServer(models, settings, slow)
    limits = ConnectionLimits(total=512, per_address=256, header_s=10.0, stall_s=60.0)
    config = guarded_config(server.app(), settings.host, port, limits)
    GuardedServer(config, "OpenAI's API is under /v1; Ctrl+C ends it", server.drain).run()


def _load(options: ServeOptions, adapters: list[tuple[str, Path]], slow: list[str]) -> ServedModels:
    from lockstep.cli.generate import load_engine
    from lockstep.inference.server.served import ServedModels

    def report(problem: str) -> None:
        slow.append(problem)
        logging.warning("%s", problem)

    engine = load_engine(options.source, options.batch, report)
    models = ServedModels(engine, options.name or Path(options.source).resolve().name)
    with make_console(stderr=True).status("preparing the engine"):
        for name, source in adapters:
            models.add_adapter(name, source)
        engine.find_decoder()
    adapted = f" with the adapters {', '.join(name for name, _ in adapters)}" if adapters else ""
    echo(f"{models.base}{adapted}: {engine.batch_size} answers at once on {engine.model.device}", err=True)
    return models


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--serve {address}: give a port, as 8000, or host and port, as 127.0.0.1:8000")
    return host.strip("[]") or "127.0.0.1", int(port)


def _parse_adapter(given: str) -> tuple[str, Path]:
    name, equals, source = given.partition("=")
    if not equals or not name or not source:
        raise ValueError(f"--adapter {given}: give a name and a run or adapter folder, as poet=runs/poet")
    path = Path(source).expanduser()
    if not path.is_dir():
        raise ValueError(f"--adapter {given}: there is no folder {path}")
    return name, path


def read_key(file: Path | None) -> str | None:
    """From the file, otherwise from the environment."""
    key = os.environ.pop(_KEY_VARIABLE, None)
    place = f"${_KEY_VARIABLE}"
    if file is not None:
        place = f"--api-key-file {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{place} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if key is not None and (len(key) < _MIN_KEY or not key.isascii() or any(letter.isspace() for letter in key)):
        raise ValueError(f"{place}: a key has at least {_MIN_KEY} visible ASCII characters, and no spaces")
    return key
