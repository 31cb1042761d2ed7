"""What the Tinker API refuses beyond the service's own errors, and whose fault it is, in its client's words.

The client sends a request again, for minutes, after 408, 409, 429 and 5xx: a mistake is none of these.
"""

from __future__ import annotations

from lockstep.service.errors import ServiceError


class Gone(ServiceError):
    """A session, model or result that was there and is not any more."""

    code, status = "gone", 410


class ProcessFailed(ServiceError):
    """The process of a base model could not do what it was asked. It goes on."""

    code, status = "failed", 500


class ProcessLost(ProcessFailed):
    """The process of a base model has ended, with all models in it."""

    code, status = "lost", 500


def category_of(error: ServiceError) -> str:
    return "server" if isinstance(error, Gone) or error.status >= 500 else "user"
