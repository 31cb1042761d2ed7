"""What the operator decides when the service is started."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lockstep.config import ConfigError
from lockstep.service.admission import NOTHING_MORE, Allowed
from lockstep.service.job_environment import check_names
from lockstep.service.limits import DEFAULT_LIMITS, UserLimits
from lockstep.service.placement import JobPlacement
from lockstep.service.scheduler import RESTART_DELAY_S
from lockstep.service.tinker.settings import TinkerSettings

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
    cluster: JobPlacement | None = None
    """Where jobs run instead of on this machine."""
    gpu: str | None = None
    """What device jobs have, by its name in `lockstep plan --on`; None: what is found here."""
    token_file: Path | None = None
    allowed: Allowed = NOTHING_MORE
    job_env: tuple[str, ...] = ()
    """Variables of the service's environment that jobs get, besides what every program needs."""
    max_upload_mb: int = 1024
    max_datasets: int = 1000
    max_helpers: int | None = None
    user_limits: UserLimits = DEFAULT_LIMITS
    restart_delay_s: float = RESTART_DELAY_S
    rebuild: bool = False
    max_body_bytes: int = 1 << 20
    body_timeout_s: float = 30.0
    """For a request to arrive in full; uploads have `upload_timeout_s`."""
    upload_timeout_s: float = 900.0
    idle_timeout_s: float = 30.0
    """For the next bytes of an upload to arrive."""
    plan_timeout_s: float = 120.0
    max_connections: int = 1000
    max_connections_per_address: int = 250
    header_timeout_s: float = 10.0
    """For the headers of a request, and for a TLS handshake."""
    stall_timeout_s: float = 60.0
    """For a client to take the next piece of an answer."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    proxies: tuple[str, ...] = ()
    """Addresses of reverse proxies: their X-Forwarded headers are believed."""
    tinker: TinkerSettings | None = None
    """None: there is no Tinker API."""

    def __post_init__(self) -> None:
        if not self.is_loopback and self.token_file is None:
            raise ConfigError(
                f"--host {self.host} lets other machines in, and without --token-file everybody who reaches the port "
                "could train, read and delete: give a token file (see lockstep token), or bind to 127.0.0.1"
            )
        check_names(self.job_env)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.proxies and self.token_file is None:
            raise ConfigError("--proxy lets others in through the proxy: give a token file too (see lockstep token)")
        for proxy in self.proxies:
            try:
                ipaddress.ip_address(proxy)
            except ValueError:
                raise ConfigError(
                    f"--proxy {proxy}: give the address that the proxy connects from, as 127.0.0.1"
                ) from None

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK
