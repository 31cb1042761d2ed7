"""What the service refuses, each with the code and the status that the API answers with."""

from __future__ import annotations

from typing import ClassVar


class ServiceError(ValueError):
    """A request that cannot be done. The message says what to do."""

    code: ClassVar[str] = "invalid"
    status: ClassVar[int] = 422


class Unauthorised(ServiceError):
    code, status = "unauthorised", 401


class Forbidden(ServiceError):
    code, status = "forbidden", 403


class NotFound(ServiceError):
    code, status = "not_found", 404


class Conflict(ServiceError):
    code, status = "conflict", 409


class JobConflict(Conflict):
    """The id is taken by a job with other content, or by another owner's."""


class TooLarge(ServiceError):
    code, status = "too_large", 413


class TooMany(ServiceError):
    """A limit of the operator for each user."""

    code, status = "too_many", 429


class NoSpace(ServiceError):
    code, status = "no_space", 507


class Busy(ServiceError):
    code, status = "busy", 503


class Misdirected(ServiceError):
    code, status = "misdirected", 421
