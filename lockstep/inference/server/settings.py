"""What the operator decides when a model is served."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerSettings:
    """`max_tokens` and `temperature`: of requests that name none. `timeout_s`: of one request, waiting included."""

    host: str = "127.0.0.1"
    max_tokens: int = 512
    temperature: float = 1.0
    timeout_s: float = 600.0
    max_waiting: int = 256
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    grace_s: float = 5.0
    """For answers in progress to end when the server is stopped."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is None and self.host not in LOOPBACK:
            raise ValueError(
                f"--serve on {self.host} lets other machines in, and without a key everybody who reaches the port "
                "could use the model: give --api-key-file or $LOCKSTEP_API_KEY, or bind to 127.0.0.1"
            )
