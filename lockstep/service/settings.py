"""What the operator decides when the service is started."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lockstep.config import ConfigError

VERSION = version("lockstep")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORT = 8322


@dataclass(frozen=True)
class ServiceSettings:
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    database: str | None = None
    procs: int | None = None
    max_jobs: int | None = None
    token_file: Path | None = None
    allow_paths: tuple[Path, ...] = ()
    allow_code: bool = False
    max_upload_mb: int = 1024
    max_datasets: int = 1000
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    """For a request to arrive in full; uploads have `upload_timeout_s`."""
    upload_timeout_s: float = 900.0
    idle_timeout_s: float = 30.0
    """For the next bytes of an upload to arrive."""
    plan_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.is_loopback and self.token_file is None:
            raise ConfigError(
                f"--host {self.host} lets other machines in, and without --token-file everybody who reaches the port "
                "could train, read and delete: give a token file (see lockstep token), or bind to 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK
