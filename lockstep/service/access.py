"""Who asks, and what they may do: tokens by their hashes, roles, ownership.

read sees every job and changes nothing; submit sees and changes its own; admin everything. Without a token file
every caller is admin: the service is then bound to loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from fastapi import Depends, Request
from starlette.datastructures import Headers

from lockstep.config import ConfigError
from lockstep.config.text import find_invisible
from lockstep.service.errors import Busy, Forbidden, NotFound, Unauthorised
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import Role
from lockstep.service.store import Job

log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,64}")
KEY_PREFIX = "tml-"


@dataclass(frozen=True)
class Caller:
    """`name` is empty where there are no tokens."""

    name: str
    role: Role

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    @property
    def sees_owner(self) -> str | None:
        """The owner whose jobs and data sets this caller sees; None: everybody's."""
        return self.name if self.role == "submit" else None

    def may_see(self, owner: str) -> bool:
        return self.role != "submit" or owner == self.name

    def may_change(self, owner: str) -> bool:
        return self.is_admin or (self.role == "submit" and owner == self.name)


class Tokens:
    """The token file, read again whenever it changes: who is taken out of it is out at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._known: list[tuple[str, Caller]] = []
        self._read()

    def find(self, token: str) -> Caller | None:
        try:
            self._read()
        except ConfigError as error:
            log.error("every token is refused: %s", error)
            raise Busy("the token file cannot be read: the service's log says why") from error
        digest = hash_token(token)
        match = None
        for known, caller in self._known:  # to the end, also after a match: the time it takes tells nothing
            if hmac.compare_digest(known, digest):
                match = caller
        return match

    def _read(self) -> None:
        try:
            stat = self._path.stat()
            if (stamp := (stat.st_mtime_ns, stat.st_size)) == self._stamp:
                return
            self._known = [_parse(line, f"{self._path}:{number}") for number, line in self._lines()]
            self._stamp = stamp
        except OSError as error:
            raise ConfigError(f"cannot read the token file {self._path}: {error.strerror or error}") from error

    def _lines(self) -> list[tuple[int, str]]:
        lines = enumerate(self._path.read_text(encoding="utf-8").splitlines(), start=1)
        return [(number, line) for number, line in lines if line.strip() and not line.startswith("#")]


def _parse(line: str, place: str) -> tuple[str, Caller]:
    match line.split():
        case [name, ("read" | "submit" | "admin") as role, digest] if re.fullmatch(r"[0-9a-f]{64}", digest):
            if (hidden := find_invisible(name)) is not None:
                raise ConfigError(f"{place}: the name holds the letter {hidden!a}, which nobody sees: leave it out")
            return digest, Caller(name, role)
    raise ConfigError(
        f"{place}: expected NAME ROLE HASH, with a role of {', '.join(get_args(Role))}: see lockstep token"
    )


def make_token(name: str, role: str) -> tuple[str, str]:
    """A new token, and its line for the token file."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a token: use letters, digits, '.', '_' and '-'")
    if role not in get_args(Role):
        raise ConfigError(f"there is no role {role!r}: choose one of {', '.join(get_args(Role))}")
    token = secrets.token_urlsafe(32)
    return token, f"{name} {role} {hash_token(token)}"


def hash_token(token: str) -> str:
    """Tokens are 32 random bytes: there is nothing to guess that a slow hash would protect."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- for routes -------------------------------------------------------------------------------------------------------


# Asynchronous, though they wait for nothing: FastAPI would hand others to a thread, each of them for every request.
async def manager_of(request: Request) -> JobManager:
    manager: JobManager = request.app.state.manager
    return manager


async def current_caller(request: Request) -> Caller:
    return identify(request.app.state.tokens, request.headers)


def identify(tokens: Tokens | None, headers: Headers) -> Caller:
    if tokens is None:
        return Caller("", "admin")
    token = _sent_token(headers)
    caller = None if token is None else tokens.find(token)
    if caller is None:
        raise Unauthorised(
            "this service wants a token: send it as Authorization: Bearer TOKEN (as TINKER_API_KEY: tml-TOKEN)"
        )
    return caller


def _sent_token(headers: Headers) -> str | None:
    """Tinker's client sends a key that begins with tml-, which is no part of the token."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    key = headers.get("x-api-key", "")
    return key.removeprefix(KEY_PREFIX) if key.startswith(KEY_PREFIX) else None


async def submitting_caller(request: Request) -> Caller:
    caller = await current_caller(request)
    if caller.role == "read":
        raise Forbidden("this token may only read")
    return caller


Manager = Annotated[JobManager, Depends(manager_of)]
Reader = Annotated[Caller, Depends(current_caller)]
Submitter = Annotated[Caller, Depends(submitting_caller)]


def seen_job(manager: JobManager, caller: Caller, job_id: str) -> Job:
    """Somebody else's job is, to those who may not see it, no job at all."""
    job = manager.store.find(job_id)
    if job is None or not caller.may_see(job.owner):
        raise NotFound(f"there is no job {job_id}")
    return job


def own_job(manager: JobManager, caller: Caller, job_id: str) -> Job:
    job = seen_job(manager, caller, job_id)
    if not caller.may_change(job.owner):
        raise Forbidden(f"job {job_id} belongs to {job.owner or 'nobody'}")
    return job
